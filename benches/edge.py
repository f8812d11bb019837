"""A small HTTP server that answers as quickly as Python can: what is measured is the way to it."""

import socket
import sys
import threading

TOTAL = int(sys.argv[1])
PIECE = b"\x5a" * (1 << 20)


def serve(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    heads = b""
    while True:
        while b"\r\n\r\n" not in heads:
            data = connection.recv(65536)
            if not data:
                return
            heads += data
        head, heads = heads.split(b"\r\n\r\n", 1)
        if not head.startswith(b"GET /large "):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            continue
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % TOTAL)
        left = TOTAL
        while left:
            connection.sendall(PIECE[:left])
            left -= min(left, len(PIECE))


listener = socket.create_server(("0.0.0.0", 8000), backlog=64)
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
