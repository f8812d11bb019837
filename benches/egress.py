"""The guest's side of `sandglass bench egress`. Arguments: what to do, the upstream's name, a port, a count.

Each connection begins with the first message of TLS, made by the TLS library, and goes on with bytes that nobody reads
but the upstream. That answers the first bytes with one, and the end of the stream with another.
"""

import json
import os
import resource
import socket
import ssl
import sys
import time

CHUNK = 1 << 20

# Made by the bench when connections need not be held any more.
RELEASE = "/tmp/release"


def hello(name: str) -> bytes:
    said = ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), said, server_hostname=name)
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return said.read()


def answered(connection: socket.socket):
    if not connection.recv(1):
        raise ConnectionError("the connection ended without an answer")


def opened(address: str, port: int, first: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(first)
    answered(connection)
    return connection


def transfer(address: str, port: int, first: bytes, total: int):
    """Seconds for so many bytes."""
    piece = memoryview(bytes(CHUNK))
    with opened(address, port, first) as connection:
        began = time.perf_counter()
        while total > 0:
            connection.sendall(piece[:total])
            total -= CHUNK
        connection.shutdown(socket.SHUT_WR)
        answered(connection)
        return time.perf_counter() - began


def connect(address: str, port: int, first: bytes, count: int):
    """Seconds from nothing to the first answer, for each of so many connections."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        with opened(address, port, first):
            took.append(time.perf_counter() - began)
    return took


def hold(address: str, port: int, first: bytes, count: int):
    """How many of so many connections at a time were open, and how many of these worked to their end."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, count + 100))
    held, failures = [], []
    for _ in range(count):
        try:
            held.append(opened(address, port, first))
        except OSError as error:
            failures.append(str(error))
    print(json.dumps(len(held)), flush=True)
    while not os.path.exists(RELEASE):
        time.sleep(0.05)
    whole = 0
    for connection in held:
        try:
            connection.shutdown(socket.SHUT_WR)
            answered(connection)
            whole += 1
        except OSError as error:
            failures.append(str(error))
    return {"whole": whole, "failures": failures[:10]}


what, name, port, count = sys.argv[1:]
act = {"transfer": transfer, "connect": connect, "hold": hold}[what]
print(json.dumps(act(socket.gethostbyname(name), int(port), hello(name), int(count))), flush=True)
