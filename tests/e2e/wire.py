"""HTTP byte by byte: what no client library would send."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass

# Longer than any answer takes on a busy machine; only a hang gets here.
PATIENCE = 60


@dataclass
class Answer:
    """One HTTP/1.1 answer with a body of known length."""

    status: int
    headers: dict[str, str]
    body: bytes

    def error(self, status: int) -> str:
        """The message, if this is the error body that every client relies on."""
        assert self.status == status, (self.status, self.body)
        assert self.headers["content-type"] == "application/json"
        body = json.loads(self.body)
        assert body["code"] == status and body["message"], body
        return body["message"]


class Wire(socket.socket):
    """A connection to a server."""

    def __init__(self, server, receive_buffer: int | None = None):
        super().__init__()
        self.settimeout(PATIENCE)
        if receive_buffer:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        host, port = server.address.rsplit(":", 1)
        self.connect((host, int(port)))
        self._read = b""

    def ask(self, method: str, target: str | bytes, headers: dict | None = None, body: bytes = b"") -> Answer:
        """Sends a whole request and reads the answer. The target goes out as it is."""
        target = target if isinstance(target, bytes) else target.encode()
        lines = {"Host": "localhost", "Content-Length": str(len(body))} | (headers or {})
        head = b"".join(f"{name}: {value}\r\n".encode() for name, value in lines.items())
        self.sendall(method.encode() + b" " + target + b" HTTP/1.1\r\n" + head + b"\r\n" + body)
        return self.answer()

    def until(self, end: bytes) -> bytes:
        """Reads up to and with `end`; less if the server closes."""
        while end not in self._read:
            if not (more := self._more()):
                taken, self._read = self._read, b""
                return taken
            self._read += more
        taken, _, self._read = self._read.partition(end)
        return taken + end

    def exactly(self, length: int) -> bytes:
        """Reads so many bytes; `EOFError` if the server closes before."""
        parts, missing = [self._read], length - len(self._read)
        while missing > 0:
            if not (more := self._more()):
                raise EOFError("the server closed in the middle")
            parts.append(more)
            missing -= len(more)
        read = b"".join(parts)
        self._read = read[length:]
        return read[:length]

    def answer(self) -> Answer:
        """Reads one answer."""
        head = self.until(b"\r\n\r\n").decode("latin-1").splitlines()
        assert head, "the server closed without an answer"
        pairs = (line.split(":", 1) for line in head[1:] if line)
        headers = {name.lower(): value.strip() for name, value in pairs}
        body = self.exactly(int(headers.get("content-length", 0)))
        return Answer(int(head[0].split()[1]), headers, body)

    def shutdown_writing(self):
        """Says that nothing more will come."""
        try:
            self.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # The server was first.

    def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        parts = [self._read]
        self._read = b""
        while more := self._more():
            parts.append(more)
        return b"".join(parts)

    def _more(self) -> bytes:
        try:
            return self.recv(65536)
        except ConnectionError:
            return b""
