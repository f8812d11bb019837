#!/bin/sh
# Two copies of one process would draw the same numbers, so the interpreter takes new ones from the kernel before anybody
# reaches the copy. One that is busy for longer takes them as soon as it does anything else: before it draws the next.
pid=$(pgrep -o -x -f 'python3 /usr/local/lib/python-data/server.py') || exit 0
rm -f /dev/shm/python-data.reseeded
kill -USR1 "$pid"
for _ in $(seq 100); do
  [ -e /dev/shm/python-data.reseeded ] && exit 0
  sleep 0.05
done
echo "the interpreter is busy, and takes new random numbers when it is not any more"
