#!/bin/sh
# Two copies of one process would draw the same numbers, so the process takes new ones from the kernel before anybody
# reaches the copy. One that can't be told within 5 s keeps it from coming back.
pid=$(pgrep -o -x -f 'node /usr/local/lib/node-live/server.js') || exit 0
rm -f /dev/shm/node-live.reseeded
kill -USR2 "$pid"
for _ in $(seq 100); do
  [ -e /dev/shm/node-live.reseeded ] && exit 0
  sleep 0.05
done
echo "the process is too busy to take new random numbers"
exit 1
