#!/bin/sh
# Two copies of one process would draw the same numbers, so the process takes new ones from the kernel before anybody
# reaches the copy. One that is busy for longer takes them as soon as it does anything else.
pid=$(pgrep -o -x -f 'node /usr/local/lib/node-live/server.js') || exit 0
rm -f /dev/shm/node-live.reseeded
kill -USR2 "$pid"
for _ in $(seq 100); do
  [ -e /dev/shm/node-live.reseeded ] && exit 0
  sleep 0.05
done
echo "the process is busy, and takes new random numbers when it is not any more"
