"""An interpreter that runs on, with pandas and numpy imported: it runs what is sent to its socket, piece after piece, in
one namespace."""

import ast
import contextlib
import io
import os
import random
import signal
import socket
import struct
import sys
import traceback

import numpy as np
import pandas as pd

# In memory, where every user may make files, and where a deleted one is no hindrance to a pause.
PATH = "/dev/shm/python-data.sock"
RESEEDED = "/dev/shm/python-data.reseeded"
MOST = 64 << 20

namespace = {"__name__": "__main__", "np": np, "pd": pd}


def reseed(*_):
    """What two copies of this process would have in common otherwise. The kernel's randomness is their own."""
    random.seed()
    np.random.seed(np.frombuffer(os.urandom(64), dtype=np.uint32))
    # The hook waits for it.
    with open(RESEEDED, "w"):
        pass


def run(source: str) -> tuple[bool, str]:
    """Runs a piece of code; the value of its last expression is shown, as an interactive interpreter does."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            tree = ast.parse(source, "<python-data>")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<python-data>", "exec"), namespace)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<python-data>", "eval"), namespace)
                if value is not None:
                    print(value)
            return True, output.getvalue()
        except KeyboardInterrupt:
            raise
        except BaseException:
            traceback.print_exc()
            return False, output.getvalue()


def receive(client: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = client.recv(min(count - len(data), 1 << 20))
        if not more:
            raise ConnectionError("the client went away")
        data += more
    return bytes(data)


def answer(client: socket.socket):
    (length,) = struct.unpack(">I", receive(client, 4))
    if length > MOST:
        good, text = False, f"the code has {length} bytes, more than {MOST}\n"
    else:
        good, text = run(receive(client, length).decode())
    text = text.encode()
    client.sendall(struct.pack(">?I", good, len(text)) + text)


def main():
    # Before anything of this process is copied, and again in every copy: see /etc/sandglass/on-restore.d.
    signal.signal(signal.SIGUSR1, reseed)
    reseed()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(PATH)
    listener = socket.socket(socket.AF_UNIX)
    # Whoever runs commands in this computer may use it, and nobody else is here.
    listener.bind(PATH)
    listener.listen(64)
    while True:
        client, _ = listener.accept()
        with client:
            try:
                answer(client)
            except (OSError, UnicodeDecodeError, struct.error) as error:
                print(error, file=sys.stderr)


if __name__ == "__main__":
    main()
