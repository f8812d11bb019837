"""Clients that stop reading: what they asked for ends all the same."""

import socket

import pytest
from e2b import Sandbox
from support import until

SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(50_000_000))
        self.end_headers()
        self.wfile.write(bytes(50_000_000))
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""


@pytest.mark.parametrize("end", ["kill", "pause"])
def test_nothing_of_a_sandbox_is_kept_by_who_does_not_read(lone_server, end):
    server = lone_server
    sandbox = Sandbox.create(timeout=120, **server.opts)
    sandbox.files.write("/tmp/server.py", SERVER)
    sandbox.commands.run("python3 /tmp/server.py", background=True)
    sandbox.commands.run("until curl -sI localhost:8000 >/dev/null; do sleep 0.05; done")
    host, port = server.address.rsplit(":", 1)
    readers = []
    for _ in range(5):
        reader = socket.create_connection((host, int(port)))
        head = f"E2b-Sandbox-Id: {sandbox.sandbox_id}\r\nE2b-Sandbox-Port: 8000\r\n"
        reader.sendall(f"GET / HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
        assert reader.recv(12) == b"HTTP/1.1 200"
        readers.append(reader)
    if end == "kill":
        sandbox.kill()
        # The ledger finds a namespace that a socket keeps.
        until(lambda: server.ledger()[0] == 0, within=20, what="nothing is left")
    else:
        sandbox.pause()
        Sandbox.connect(sandbox.sandbox_id, **server.opts).kill()
        until(lambda: server.ledger()[0] == 0, within=20, what="nothing is left")
    for reader in readers:
        reader.close()
