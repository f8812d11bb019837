"""Spawns what the SDKs send for the command `true`, and prints how long each took in nanoseconds, as a JSON list.

    spawn.py COUNT

`sandglass bench exec` runs it inside a sandbox. The first spawn is not counted.
"""

import json
import os
import sys
import time

ARGV = ["/bin/bash", "-l", "-c", "true"]


def spawn() -> int:
    started = time.perf_counter_ns()
    pid = os.posix_spawn(ARGV[0], ARGV, os.environ)
    _, status = os.waitpid(pid, 0)
    took = time.perf_counter_ns() - started
    if status != 0:
        sys.exit(f"the command ended with status {status}")
    return took


spawn()
print(json.dumps([spawn() for _ in range(int(sys.argv[1]))]))
