"""Requests that are one to some and two to others. Inside waits a program that believes whatever it reads, and is fooled when
it is asked directly: through the server it never sees the second one, and neither does the REST face."""

from __future__ import annotations

import base64

import pytest
from e2b import Sandbox
from guest import routing
from support import until
from test_hostile_clients import DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, RST_STREAM, Http2, frame, literal
from wire import Wire

# Reads requests as its first argument says: by `length`, or by `chunks`. It tells of each, and of nothing else.
BELIEVER = r"""
import socketserver, sys
by, port = sys.argv[1], int(sys.argv[2])

class Connection(socketserver.StreamRequestHandler):
    timeout = 3

    def handle(self):
        while line := self.rfile.readline():
            if not line.strip():
                continue
            headers = {}
            while h := self.rfile.readline().rstrip(b"\r\n"):
                name, _, value = h.partition(b":")
                headers[name.strip().lower()] = value.strip()
            if by == "chunks" and b"transfer-encoding" in headers:
                while size := int(self.rfile.readline().split(b";")[0].strip() or b"0", 16):
                    self.rfile.read(size + 2)
                self.rfile.readline()
            else:
                self.rfile.read(int(headers.get(b"content-length", b"0").split(b",")[0]))
            with open(f"/tmp/seen-{port}", "ab") as seen:
                seen.write(line.split()[1] + b"\n")
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer(("0.0.0.0", port), Connection).serve_forever()
"""

ASK = r"""
import base64, socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5) as wire:
    wire.sendall(base64.b64decode(sys.argv[2]))
    wire.shutdown(socket.SHUT_WR)
    while wire.recv(65536):
        pass
"""

BELIEVERS = {"length": 8031, "chunks": 8032}

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
LENGTH = str(len(SMUGGLED)).encode()
CHUNKED = b"Transfer-Encoding: chunked\r\n"
ONE_CHUNK = f"{len(SMUGGLED):x}\r\n".encode() + SMUGGLED + b"\r\n0\r\n\r\n"

# Whom it fools, what is in the head besides, and what follows it.
TRICKS = {
    "length, then chunks": ("chunks", b"Content-Length: %d\r\n" % (5 + len(SMUGGLED)) + CHUNKED, b"0\r\n\r\n" + SMUGGLED),
    "chunks, then length": ("chunks", CHUNKED + b"Content-Length: %d\r\n" % (5 + len(SMUGGLED)), b"0\r\n\r\n" + SMUGGLED),
    "chunks by another": ("length", CHUNKED + b"Content-Length: 4\r\n", ONE_CHUNK),
    "two lengths": ("length", b"Content-Length: " + LENGTH + b"\r\nContent-Length: 0\r\n", SMUGGLED),
    "a list of lengths": ("length", b"Content-Length: 0, " + LENGTH + b"\r\n", SMUGGLED),
    "a folded length": ("length", b"Content-Length: " + LENGTH + b"\r\nX: y\r\n Content-Length: 0\r\n", SMUGGLED),
    "a blank before the colon": ("length", b"Content-Length : 0\r\nContent-Length: " + LENGTH + b"\r\nContent-Length : 0\r\n", SMUGGLED),
    "other chunks": ("chunks", b"Transfer-Encoding: xchunked\r\n", b"0\r\n\r\n" + SMUGGLED),
    "bare line feeds": ("length", b"X: y\nContent-Length: 0\nY: z\r\n", SMUGGLED),
    "an extension with a line feed": ("chunks", CHUNKED, b"0;a=b\n\r\n" + SMUGGLED),
    "a chunk that is shorter than it says": ("chunks", CHUNKED, b"0\n\n" + SMUGGLED),
}


@pytest.fixture(scope="module")
def box(server):
    sandbox = Sandbox.create(timeout=300)
    sandbox.files.write("/tmp/believer.py", BELIEVER)
    sandbox.files.write("/tmp/ask.py", ASK)
    for by, port in BELIEVERS.items():
        sandbox.commands.run(f"python3 /tmp/believer.py {by} {port}", background=True, timeout=0).disconnect()
        until(lambda: sandbox.commands.run(f"ss -Hltn sport = :{port}").stdout, what="a believer")
    yield sandbox
    sandbox.kill()


def seen(box, port: int) -> list[str]:
    """What the program was asked for since the last time."""
    return box.commands.run(f"touch /tmp/seen-{port}; cat /tmp/seen-{port}; rm /tmp/seen-{port}").stdout.split()


def request(headers: dict[str, str], more: bytes, body: bytes) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return b"POST /first HTTP/1.1\r\nHost: localhost\r\n" + lines.encode() + more + b"\r\n" + body


@pytest.mark.parametrize("trick", TRICKS)
def test_the_program_is_fooled_and_the_server_is_not(server, box, trick):
    by, more, body = TRICKS[trick]
    port = BELIEVERS[by]
    whole = base64.b64encode(request({}, more, body)).decode()
    box.commands.run(f"python3 /tmp/ask.py {port} {whole}")
    assert seen(box, port) == ["/first", "/smuggled"], "the trick is none"
    with Wire(server) as wire:
        wire.sendall(request(routing(box, port), more, body))
        wire.shutdown_writing()
        wire.rest()
    assert seen(box, port) in ([], ["/first"])


@pytest.mark.parametrize("port", BELIEVERS.values(), ids=BELIEVERS)
def test_a_body_that_looks_like_a_request_is_a_body(server, box, port):
    """What is sent as it should be gets there, whole, in either form, and so does what follows it."""
    for more, body in [(b"Content-Length: " + LENGTH + b"\r\n", SMUGGLED), (CHUNKED, ONE_CHUNK)]:
        with Wire(server) as wire:
            wire.sendall(request(routing(box, port), more, body) * 2)
            assert [wire.answer().body, wire.answer().body] == [b"ok", b"ok"]
        assert seen(box, port) == ["/first", "/first"]


@pytest.mark.parametrize("trick", TRICKS)
def test_the_rest_face_carries_out_one_request_or_none(server, trick):
    """A smuggled deletion: the name of what is to be deleted would be in its answer."""
    _, more, body = TRICKS[trick]
    smuggled = b"DELETE /sandboxes/smuggled HTTP/1.1\r\nHost: x\r\nX-API-Key: " + server.api_key.encode() + b"\r\n\r\n"
    # Of the same length as in the trick, so that who reads the one reads the other.
    old, new = LENGTH, str(len(smuggled)).encode()
    more, body = (part.replace(SMUGGLED, smuggled).replace(b": " + old, b": " + new) for part in (more, body))
    with Wire(server) as wire:
        wire.sendall(request(server.headers, more, body).replace(b"/first", b"/v2/first"))
        wire.shutdown_writing()
        answers = wire.rest()
    assert b"'smuggled'" not in answers, answers
    # Two that are two are both answered.
    with Wire(server) as wire:
        wire.sendall(request(server.headers, b"Content-Length: 0\r\n", smuggled).replace(b"/first", b"/v2/first"))
        assert wire.answer().status == 404
        assert "'smuggled'" in wire.answer().error(404)


def ask(port: int, id: str, *more: bytes, path: bytes = b"/first", method: bytes = b"POST") -> bytes:
    """A head of HTTP/2 for a port of a sandbox."""
    head = literal(b":method", method) + b"\x86" + literal(b":path", path) + literal(b":authority", b"localhost")
    routed = literal(b"e2b-sandbox-id", id.encode()) + literal(b"e2b-sandbox-port", str(port).encode())
    return head + routed + b"".join(more)


INJECTED = b"\r\nX: y\r\n\r\n" + b"GET /smuggled HTTP/1.1\r\n\r\n"

# As header fields, path or method of HTTP/2, and what follows as data.
INJECTIONS = {
    "in a value": ({"more": literal(b"x", b"y" + INJECTED)}, b""),
    "in a name": ({"more": literal(b"x" + INJECTED, b"y")}, b""),
    "a name with a colon": ({"more": literal(b"content-length: 0\r\nx", b"y")}, SMUGGLED),
    "in the path": ({"path": b"/first HTTP/1.1" + INJECTED}, b""),
    "a blank in the path": ({"path": b"/first HTTP/1.1\r\nX:"}, b""),
    "in the method": ({"method": b"GET /smuggled HTTP/1.1\r\n\r\nPOST"}, b""),
    "in the authority": ({"more": literal(b":authority", b"x" + INJECTED)}, b""),
    "in the host": ({"more": literal(b"host", b"x" + INJECTED)}, b""),
    "a line feed": ({"more": literal(b"x", b"y\nContent-Length: 0")}, SMUGGLED),
    "a NUL": ({"more": literal(b"x", b"y\0z")}, b""),
    "chunks": ({"more": literal(b"transfer-encoding", b"chunked")}, b"0\r\n\r\n" + SMUGGLED),
    "a connection": ({"more": literal(b"connection", b"content-length")}, SMUGGLED),
    "too short a length": ({"more": literal(b"content-length", b"0")}, SMUGGLED),
    "two lengths": ({"more": literal(b"content-length", b"0") + literal(b"content-length", LENGTH)}, SMUGGLED),
    "too long a length": ({"more": literal(b"content-length", b"99")}, SMUGGLED),
    "upper case": ({"more": literal(b"Transfer-Encoding", b"chunked")}, b"0\r\n\r\n" + SMUGGLED),
}


def carried(server, head: bytes, data: bytes) -> int:
    """Sends one request of HTTP/2, and returns what kind of frame answers it first."""
    with Http2(server) as wire:
        wire.sendall(frame(HEADERS, END_HEADERS | (0 if data else END_STREAM), 1, head))
        if data:
            wire.sendall(frame(DATA, END_STREAM, 1, data))
        answers = {HEADERS, RST_STREAM}
        return next(kind for kind, stream, _ in wire.frames() if kind == GOAWAY or (stream == 1 and kind in answers))


@pytest.mark.parametrize("injection", INJECTIONS)
@pytest.mark.parametrize("port", BELIEVERS.values(), ids=BELIEVERS)
def test_nothing_of_http_2_becomes_a_request_of_its_own(server, box, port, injection):
    parts, data = INJECTIONS[injection]
    parts = dict(parts)
    more = parts.pop("more", b"")
    carried(server, ask(port, box.sandbox_id, more, **parts), data)
    assert seen(box, port) in ([], ["/first"])


def test_what_http_2_may_say_gets_there(server, box):
    """The heads above are well made but for what is injected."""
    for port in BELIEVERS.values():
        for more, data in [(b"", b""), (b"", SMUGGLED), (literal(b"content-length", LENGTH), SMUGGLED)]:
            assert carried(server, ask(port, box.sandbox_id, more), data) == HEADERS
            assert seen(box, port) == ["/first"]
