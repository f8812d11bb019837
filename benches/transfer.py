"""Uploads and downloads with the unmodified E2B SDK, once for each line of standard input.

    transfer.py BYTES

Prints a line of JSON for each: the seconds of both. `sandglass bench transfer` runs it.
"""

import json
import sys
import time

from e2b import Sandbox

PATH = "/home/user/transfer.bin"
TIMEOUT_S = 120

total = int(sys.argv[1])
data = b"Z" * total
with Sandbox.create(timeout=600) as sandbox:
    for _ in sys.stdin:
        started = time.perf_counter()
        sandbox.files.write(PATH, data, request_timeout=TIMEOUT_S)
        written = time.perf_counter()
        read = sandbox.files.read(PATH, format="bytes", request_timeout=TIMEOUT_S)
        done = time.perf_counter()
        if len(read) != total:
            sys.exit(f"{len(read)} of {total} bytes came back")
        print(json.dumps({"up": written - started, "down": done - written}), flush=True)
