"""A provider of models that says what a test wrote down, in the words of Anthropic and of OpenAI.

    upstream.script(
        Turn(uses=(Use("shell", {"command": "date"}),)),
        lambda asked: Turn(f"you said {asked.results()[-1]}"),
        Status(429, retry_after=1),
    )
    …
    assert [asked.dialect for asked in upstream.asked] == ["messages"] * 3

It speaks Messages, Chat Completions, Responses and image generation, over plain HTTP on this machine's loopback, or over TLS if
it is given a folder for its certificate. What a turn can do wrong is in `Turn` (dialects.py), and below: `Status`, `Raw`,
`Gone`. A request that nothing was written down for fails the test.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import select
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from dialects import ROUTES, Picture, Turn, Usage, Use, error_body, error_event, events_of, image_whole, whole_of

__all__ = ["GARBAGE", "HALF", "Asked", "Gone", "Picture", "Raw", "Status", "Turn", "Upstream", "Usage", "Use"]

COUNT = "/v1/messages/count_tokens"


@dataclass(frozen=True)
class Status:
    """An error of the provider, before anything else."""

    status: int
    kind: str = "api_error"
    message: str = "the provider says no"
    retry_after: int | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Raw:
    """Bytes as they are."""

    body: bytes
    content_type: str = "application/json"
    status: int = 200


@dataclass(frozen=True)
class Gone:
    """The connection ends without an answer."""


# A whole answer that is none, and a stream that is none.
HALF = Raw(b'{"id": "msg_1", "content": [{"type": "te')
GARBAGE = Raw(b"event: \xff\xfe\ndata: {not json\n\ndata\n\n:\n\n\0\0", "text/event-stream")

Said = Turn | Picture | Status | Raw | Gone


@dataclass
class Asked:
    """A request, and what became of it."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    raw: bytes
    at: float
    # Set when nothing more is sent; then also whether the client left before.
    done: threading.Event = field(default_factory=threading.Event)
    left: bool = False

    @property
    def dialect(self) -> str:
        return ROUTES.get(self.path, self.path)

    @property
    def body(self) -> dict:
        return json.loads(self.raw)

    @property
    def key(self) -> str:
        """The key that it came with, wherever it was."""
        return self.headers.get("x-api-key") or self.headers.get("authorization", "").removeprefix("Bearer ")

    def results(self) -> list[str]:
        """What tools answered, in the order of the conversation."""
        body = self.body
        if self.dialect == "messages":
            parts = [
                part
                for message in body["messages"]
                if isinstance(message["content"], list)
                for part in message["content"]
                if part["type"] == "tool_result"
            ]
            return [text_of(part.get("content", "")) for part in parts]
        if self.dialect == "chat":
            return [text_of(said["content"]) for said in body["messages"] if said["role"] == "tool"]
        items = body["input"] if isinstance(body["input"], list) else []
        return [text_of(item["output"]) for item in items if item.get("type") == "function_call_output"]

    def prompts(self) -> list[str]:
        """What the user said, in the order of the conversation."""
        body = self.body
        if self.dialect == "images":
            return [body["prompt"]]
        said = body.get("messages", body.get("input", []))
        if isinstance(said, str):
            return [said]
        return [text_of(one["content"]) for one in said if one.get("role") == "user" and "content" in one]

    def tools(self) -> list[str]:
        """The names of the tools that the model may use."""
        return [tool.get("function", tool).get("name", "") for tool in self.body.get("tools", [])]


def text_of(content: str | list) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


class Upstream(http.server.ThreadingHTTPServer):
    """It listens from the start, until `close`."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, tls: Path | None = None):
        self.asked: list[Asked] = []
        # Requests that nothing was written down for.
        self.unexpected: list[Asked] = []
        self.closing = threading.Event()
        # What it trusts who trusts this provider.
        self.authority: Path | None = None
        self._lock = threading.Lock()
        self._script: list[Said | Callable[[Asked], Said]] = []
        self._always: Said | Callable[[Asked], Said] | None = None
        super().__init__(("127.0.0.1", 0), Conversation)
        if tls is not None:
            self.authority, context = certified(tls)
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"{'https' if self.authority else 'http'}://127.0.0.1:{self.server_address[1]}"

    def script(self, *said: Said | Callable[[Asked], Said]):
        """What it answers from here on, one after the other; what was written down before is forgotten."""
        with self._lock:
            self._script, self._always = list(said), None

    def always(self, said: Said | Callable[[Asked], Said]):
        """What it answers from here on when the script is over."""
        with self._lock:
            self._always = said

    def calls(self) -> list[Asked]:
        """Requests that a model had to answer."""
        return [asked for asked in self.asked if asked.path in ROUTES]

    def take(self, asked: Asked) -> tuple[int, Said]:
        """The number of this request, and its answer."""
        with self._lock:
            self.asked.append(asked)
            number = len(self.asked)
            if asked.path not in ROUTES:
                return number, Status(404, "not_found_error", f"there is no {asked.path}")
            said = self._script.pop(0) if self._script else self._always
            if said is None:
                self.unexpected.append(asked)
                said = Status(500, message="the script is over")
        return number, said(asked) if callable(said) else said

    def handle_error(self, request, client_address):
        """A client that breaks off is what some tests are about."""

    def close(self):
        self.closing.set()
        self.shutdown()
        self.server_close()


class Conversation(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    # Events leave when they are written.
    disable_nagle_algorithm = True
    server: Upstream

    def do_GET(self):
        self.serve(b"")

    do_HEAD = do_GET

    def do_POST(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            raw = b""
            while size := int(self.rfile.readline(), 16):
                raw += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.serve(raw)

    def serve(self, raw: bytes):
        url = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, url.path, url.query, headers, raw, time.monotonic())
        number, said = self.server.take(asked)
        try:
            if asked.path == COUNT:
                self.whole(json.dumps({"input_tokens": len(raw) // 4}).encode())
            else:
                self.answer(asked, number, said)
        except OSError:
            asked.left, self.close_connection = True, True
        finally:
            asked.done.set()

    def answer(self, asked: Asked, number: int, said: Said):
        match said:
            case Gone():
                self.end()
            case Raw():
                self.whole(said.body, said.status, {"Content-Type": said.content_type})
            case Status():
                more = {} if said.retry_after is None else {"Retry-After": str(said.retry_after)}
                body = error_body(asked.dialect, said.kind, said.message)
                self.whole(json.dumps(body).encode(), said.status, said.headers | more)
            case Picture():
                self.whole(json.dumps(image_whole(said)).encode())
            case Turn() if asked.body.get("stream"):
                self.stream(asked, number, said)
            case Turn():
                self.wait(asked, said.before)
                body = json.dumps(whole_of(said, asked.dialect, asked.body["model"], number)).encode()
                if said.cut is None and said.hang is None:
                    self.whole(body)
                    return
                self.head(200, {"Content-Length": str(len(body))})
                self.wfile.write(body[: len(body) // 2])
                if said.hang is not None:
                    self.wait(asked, None)
                self.end()

    def stream(self, asked: Asked, number: int, turn: Turn):
        self.wait(asked, turn.before)
        self.head(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})
        for at, event in enumerate(events_of(turn, asked.dialect, asked.body["model"], number, asked.body)):
            if at == turn.hang:
                self.wait(asked, None)
            if at in (turn.hang, turn.cut):
                self.end()
                return
            if at == turn.fail:
                self.chunk(error_event(asked.dialect))
                break
            if at:
                self.wait(asked, turn.pause)
            self.chunk(event)
        self.chunk(b"")

    def head(self, status: int, headers: dict[str, str]):
        self.send_response(status)
        # What providers say of the account, which is nobody's business.
        own = {"Request-Id": "req_upstream", "Set-Cookie": "account=secret", "OpenAI-Organization": "org-secret"}
        for name, value in ({"Content-Type": "application/json"} | own | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def whole(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None):
        self.head(status, {"Content-Length": str(len(body))} | (headers or {}))
        if self.command != "HEAD":
            self.wfile.write(body)

    def chunk(self, data: bytes):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def wait(self, asked: Asked, seconds: float | None):
        """So long, or for ever; less if the client leaves or the provider closes."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self.server.closing.is_set():
            left = 0.05 if deadline is None else min(0.05, deadline - time.monotonic())
            if left <= 0:
                return
            readable, _, _ = select.select([self.connection], [], [], left)
            if readable and self.is_left():
                raise ConnectionResetError
        raise ConnectionAbortedError

    def is_left(self) -> bool:
        """Whether the client closed its side. What TLS has for us then is its goodbye; a client says nothing else here."""
        if isinstance(self.connection, ssl.SSLSocket):
            return True
        return self.connection.recv(1, socket.MSG_PEEK) == b""

    def end(self):
        """Ends the connection here, whatever was promised."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_):
        pass


def certified(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate for this machine's loopback, and what serves it."""
    certificate, key = folder / "provider.pem", folder / "provider.key"
    subprocess.run(
        [
            *["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"],
            *["-subj", "/CN=provider", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-days", "1"],
            *["-keyout", str(key), "-out", str(certificate)],
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context
