#!/usr/bin/python3
"""Runs code in the interpreter that runs on, and prints what it prints: python-data [--wait] CODE, or code on standard input.

Exit code 1 is that of code that failed, 2 that there is no interpreter."""

import socket
import struct
import sys
import time

PATH = "/dev/shm/python-data.sock"


def receive(server: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = server.recv(count - len(data))
        if not more:
            sys.exit("python-data: the interpreter went away")
        data += more
    return bytes(data)


def main():
    words = sys.argv[1:]
    wait = words[:1] == ["--wait"]
    words = words[1:] if wait else words
    code = " ".join(words).encode() if words else sys.stdin.buffer.read()
    while True:
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(PATH)
            break
        except OSError as error:
            if not wait:
                print(f"python-data: no interpreter at {PATH}: {error}", file=sys.stderr)
                sys.exit(2)
            time.sleep(0.1)
    server.sendall(struct.pack(">I", len(code)) + code)
    good, length = struct.unpack(">?I", receive(server, 5))
    sys.stdout.buffer.write(receive(server, length))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
