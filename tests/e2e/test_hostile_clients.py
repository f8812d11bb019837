"""Clients that do not want an answer but the server: it stays small, and others are served."""

import resource
import socket
import struct
import threading
import time

import httpx
import pytest
from guest import routing
from support import PeakMemory, until
from wire import Wire

BOUND_MIB = 96

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4


@pytest.fixture(scope="module", autouse=True)
def descriptors():
    """Hundreds of connections come from this one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(autouse=True)
def unharmed(server, sandbox):
    """Whatever a test does: memory stays bounded, and others are served."""
    memory = PeakMemory(*server.halves)
    yield
    assert httpx.get(f"{server.url}/v1/info", headers=server.headers, timeout=60).status_code == 200
    assert sandbox.commands.run("echo fine").stdout == "fine\n"
    assert memory.rise() < BOUND_MIB


def send_until_refused(wire: Wire, chunks) -> bool:
    """Sends until the other side has closed (true), takes nothing more for a while, or all is sent."""
    wire.settimeout(3)
    try:
        for chunk in chunks:
            wire.sendall(chunk)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    finally:
        wire.settimeout(60)
    return False


def test_requests_byte_by_byte_are_dropped_while_others_are_served(server):
    """However many come, and however steadily: the head has to be there in time."""
    starts = [b"", b"P", PREFACE[:20], b"GET /v2/sandboxes HTTP/1.1\r\nHost: localhost\r\nX-Slow: "]
    wires = [Wire(server) for _ in range(400)]
    for n, wire in enumerate(wires):
        wire.sendall(starts[n % len(starts)])
        wire.setblocking(False)
    trickling = threading.Event()

    def trickle():
        # A byte for each of them, again and again, as long as they live.
        while not trickling.wait(0.5):
            for n, wire in enumerate(wires):
                if n % len(starts) == 3:
                    try:
                        wire.send(b"a")
                    except OSError:
                        pass

    thread = threading.Thread(target=trickle)
    thread.start()

    def is_open(wire):
        try:
            return wire.recv(1024) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    try:
        with httpx.Client(base_url=server.url, headers=server.headers, timeout=60) as client:
            for _ in range(20):
                assert client.get("/v2/sandboxes").status_code == 200
        until(lambda: not any(is_open(wire) for wire in wires), within=100, what="the end of slow connections")
    finally:
        trickling.set()
        thread.join()
        for wire in wires:
            wire.close()


def test_idle_connections_cost_little(server):
    """They are within their rights: a client may keep one. A thousand of them are no burden."""
    wires = [Wire(server) for _ in range(1000)]
    for wire in wires:
        assert wire.ask("GET", "/health").status == 204
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 204
    for wire in wires:
        wire.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /?" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"G" * 200_000,
        b"GET / HTTP/1.1\r\nHost: " + b"h" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"n" * 200_000 + b": x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 129 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 100_000 + b"\r\n",
    ],
    ids=["path", "query", "method", "host", "value", "name", "headers", "very many headers"],
)
def test_heads_that_are_too_large(server, head):
    with Wire(server) as wire:
        closed = send_until_refused(wire, [head])
        # The answer may be lost with a connection that was reset under what was still being sent.
        answer = wire.until(b"\r\n")
        assert closed or not answer or answer.split()[1] in (b"400", b"414", b"431"), answer
        assert b"HTTP/1.1 2" not in wire.rest()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 1000,
        b"\r\n" * 100_000,
        bytes(range(256)) * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 512,
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET  /  HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\x00\n\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n",
        b"GET http://user@example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=lambda garbage: repr(garbage[:12]),
)
def test_garbage(server, garbage):
    """Alone, and pipelined behind a request, which is answered all the same."""
    with Wire(server) as wire:
        send_until_refused(wire, [garbage])
        wire.shutdown_writing()
        answer = wire.rest()
        assert not answer or answer.startswith(b"HTTP/1.1 4") or garbage.startswith(b"OPTIONS *"), answer[:200]
    with Wire(server) as wire:
        send_until_refused(wire, [b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + garbage])
        wire.shutdown_writing()
        assert wire.answer().status == 204
        assert b"HTTP/1.1 2" not in wire.rest() or garbage.startswith(b"OPTIONS *")


def test_pipelined_requests_are_answered_in_their_order(server):
    asked = [f"/sandboxes/{'x' * (n + 1)}" for n in range(200)]
    with Wire(server) as wire:
        lines = "".join(f"{name}: {value}\r\n" for name, value in server.headers.items())
        heads = (f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n" for path in asked)
        wire.sendall("".join(heads).encode())
        for path in asked:
            # An id is repeated up to its 64th character.
            assert f"'{path.rsplit('/', 1)[1][:64]}'" in wire.answer().error(404)


def test_pipelining_without_reading_stops_by_itself(server):
    """Nobody may make the server keep answers: it stops reading once they are not fetched."""
    head = f"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {server.api_key}\r\n\r\n".encode()
    with Wire(server, 4096) as wire:
        # 32 MiB of requests would be answered with more than 100 MiB.
        assert not send_until_refused(wire, (head * 1000 for _ in range(300)))


@pytest.mark.parametrize(
    "chunks",
    [
        b"ffffffffffffffff\r\n",
        b"-1\r\n",
        b"zz\r\n",
        b"5;" + b"e" * 100_000 + b"\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\r\n0\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"2\r\n{}XX0\r\n\r\n",
    ],
    ids=lambda chunks: repr(chunks[:8]),
)
def test_chunks_that_are_none(server, chunks):
    with Wire(server) as wire:
        head = f"POST /v2/sandboxes HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {server.api_key}\r\n"
        send_until_refused(wire, [f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks])
        wire.shutdown_writing()
        answer = wire.rest()
        assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:200]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame of HTTP/2 (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header field that is written out and not remembered (RFC 7541, 6.2.2); both shorter than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


# GET http://localhost/health
ASK = b"\x82\x86" + b"\x04\x07/health" + b"\x01\x09localhost"


class Http2(Wire):
    """A connection that has begun with HTTP/2."""

    def __init__(self, server):
        super().__init__(server)
        self.sendall(PREFACE + frame(SETTINGS, 0, 0))

    def frames(self):
        """What the server says, until it closes."""
        while True:
            try:
                head = self.exactly(9)
                payload = self.exactly(int.from_bytes(head[:3], "big"))
                yield head[3], struct.unpack(">I", head[5:])[0], payload
            except EOFError:
                return

    def is_given_up(self, attack) -> bool:
        """Whether the server closes under the attack, with or without a word; what it says is read meanwhile."""
        said = []
        reader = threading.Thread(target=lambda: said.extend(kind for kind, *_ in self.frames()))
        reader.start()
        closed = send_until_refused(self, attack)
        self.shutdown_writing()
        reader.join(60)
        assert not reader.is_alive(), "the server keeps the connection"
        return closed or GOAWAY in said


def test_http_2_is_served(server):
    """The attacks below are on something that works."""
    with Http2(server) as wire:
        wire.sendall(frame(HEADERS, END_STREAM | END_HEADERS, 1, ASK))
        # 0x89 is ":status: 204".
        assert any(kind == HEADERS and payload[:1] == b"\x89" for kind, _, payload in wire.frames())


def rapid_resets():
    for stream in range(1, 200_001, 2):
        yield frame(HEADERS, END_STREAM | END_HEADERS, stream, ASK) + frame(RST_STREAM, 0, stream, b"\0\0\0\x08")


def endless_headers():
    yield frame(HEADERS, END_STREAM, 1, ASK)
    part = b"".join(literal(b"x-header", b"y" * 100) for _ in range(100))
    for _ in range(10_000):
        yield frame(CONTINUATION, 0, 1, part)


def empty_continuations():
    yield frame(HEADERS, END_STREAM, 1, ASK)
    for _ in range(1000):
        yield frame(CONTINUATION, 0, 1) * 1000


def table_bomb():
    """One long header that is remembered, and then named by its number again and again."""
    value = b"v" * 4000
    bomb = b"\x40\x01x\x7f" + bytes([0x80 | (3873 & 0x7F), 3873 >> 7]) + value
    for stream in range(1, 2001, 2):
        yield frame(HEADERS, END_STREAM | END_HEADERS, stream, ASK + (bomb if stream == 1 else b"") + b"\xbe" * 10_000)


def pushes():
    yield frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\x02" + ASK)


def wild_windows():
    for _ in range(10):
        yield frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff")


def too_long_frames():
    yield b"\xff\xff\xff" + bytes([DATA, 0]) + b"\0\0\0\x01" + b"x" * 100_000


def garbage_frames():
    yield frame(HEADERS, END_HEADERS, 1, b"\xff" * 100)


def unasked_data():
    for _ in range(100):
        yield frame(DATA, 0, 99, b"x" * 1000)


@pytest.mark.parametrize(
    "attack",
    [rapid_resets, endless_headers, empty_continuations, pushes, wild_windows]
    + [too_long_frames, garbage_frames, unasked_data],
    ids=lambda attack: attack.__name__,
)
def test_attacks_on_http_2_end_their_connection(server, attack):
    with Http2(server) as wire:
        assert wire.is_given_up(attack())


@pytest.mark.parametrize(
    ("kind", "payload"),
    [(PING, b"12345678"), (SETTINGS, b""), (SETTINGS, b"\0\x04\0\0\xff\xff" * 100)],
    ids=["ping", "settings", "many settings"],
)
def test_http_2_frames_that_want_an_answer_do_not_pile_up(server, kind, payload):
    """Hundreds of thousands of them from a client that reads nothing."""
    with Http2(server) as wire:
        send_until_refused(wire, (frame(kind, 0, 0, payload) * 1000 for _ in range(300)))


def test_compressed_headers_do_not_unfold_without_bound(server):
    """10,000 times 4 KB in one head of 10 KB: refused, and not kept."""
    with Http2(server) as wire:
        send_until_refused(wire, table_bomb())
        wire.shutdown_writing()
        statuses = {payload[:1] for kind, _, payload in wire.frames() if kind == HEADERS}
        # 0x88 is ":status: 200", 0x89 is 204.
        assert not {b"\x88", b"\x89"} & statuses


# Accepts upgrades on one port, and takes nothing in afterwards.
DEAF = r"""
import socket
listener = socket.create_server(("0.0.0.0", 8030), backlog=256)
kept = []
while True:
    stream, _ = listener.accept()
    head = b""
    while b"\r\n\r\n" not in head:
        head += stream.recv(1)
    stream.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
    kept.append(stream)
"""


def upgrade(server, sandbox, port: int, extra: str = "") -> Wire:
    wire = Wire(server)
    lines = "".join(f"{name}: {value}\r\n" for name, value in routing(sandbox, port).items())
    wire.sendall(
        f"GET / HTTP/1.1\r\nHost: localhost\r\n{lines}Connection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n{extra}\r\n".encode()
    )
    return wire


def test_upgraded_connections_that_nobody_reads(server, sandbox):
    """Garbage instead of web socket frames, without end, to a program that takes none: it stays with the client."""
    sandbox.files.write("/tmp/deaf.py", DEAF)
    deaf = sandbox.commands.run("python3 /tmp/deaf.py", background=True, timeout=0)
    url = f"{server.url}/"
    until(
        lambda: "8030" in sandbox.commands.run("ss -Hltn 'sport = :8030' || true").stdout, what="the deaf program"
    )
    wires = [upgrade(server, sandbox, 8030) for _ in range(30)]
    try:
        for wire in wires:
            assert wire.until(b"\r\n\r\n").startswith(b"HTTP/1.1 101 ")
            wire.setblocking(False)
        garbage = bytes(range(256)) * 256
        # All that goes in without anybody taking it.
        taken = 0
        stalled = 0
        while stalled < 20:
            before = taken
            for wire in wires:
                try:
                    taken += wire.send(garbage)
                except BlockingIOError:
                    pass
            stalled = 0 if taken > before else stalled + 1
            if taken == before:
                time.sleep(0.05)
            assert taken < 1 << 30, "the garbage goes somewhere"
        assert httpx.get(url + "health", timeout=60).status_code == 204
    finally:
        for wire in wires:
            wire.close()
        sandbox.commands.kill(deaf.pid)
        deaf.disconnect()


@pytest.mark.parametrize(
    "extra",
    [
        "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
        "Content-Length: 10\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Connection: E2b-Sandbox-Id\r\n",
        "Sec-WebSocket-Extensions: " + "x" * 60_000 + "\r\n",
    ],
    ids=lambda extra: extra[:14],
)
def test_upgrades_of_the_guest_api_are_none(server, sandbox, extra):
    """It has no use for them; what follows is a request like any other, or the end."""
    with upgrade(server, sandbox, 49983, extra) as wire:
        send_until_refused(wire, [bytes(range(256)) * 100])
        wire.shutdown_writing()
        answer = wire.rest()
        assert b"101 Switching" not in answer
        assert answer.count(b"HTTP/1.1 2") == 0, answer[:300]


def test_connections_that_are_reset_at_once(server):
    for n in range(500):
        wire = Wire(server)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if n % 2:
            wire.sendall(b"GET /v2/sandboxes HTTP/1.1\r\nHost: x\r\n")
        wire.close()
