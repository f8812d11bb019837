"""What a sandbox asks through a connection: the service sees the credential, and the sandbox never does."""

from __future__ import annotations

import base64
import json
import subprocess
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

import pytest
from e2b import Sandbox
from support import ROOMY, until

CANARY = f"canary+{uuid.uuid4().hex}=/x"
# What a service may make of what it was sent, and a sandbox must not hear.
FORMS = [CANARY, quote(CANARY, safe=""), json.dumps(CANARY), base64.b64encode(CANARY.encode()).decode().rstrip("=")]


class Service(ThreadingHTTPServer):
    """Tells whoever asks all that it was sent, in every form."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Echo)
        self.heard: list[tuple[str, str, dict[str, str], bytes]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.heard.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        if self.path.startswith("/elsewhere"):
            self.send_response(302)
            self.send_header("Location", f"http://other.test/?key={CANARY}")
            self.send_header("Set-Cookie", "account=1")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        said = f"{self.headers}\n{chr(10).join(FORMS)}\n{len(body)} bytes\n".encode()
        self.send_response(200)
        self.send_header("X-Echo", self.headers.get("authorization", ""))
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_POST = do_DELETE = answer

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def service():
    service = Service()
    yield service
    service.shutdown()


@pytest.fixture(scope="module")
def broker(servers, service, work_folder):
    """A server whose operator lets sandboxes use the service."""
    folder = work_folder / f"broker-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    (folder / "credential").write_text(CANARY + "\n")
    config = folder / "config.toml"
    config.write_text(
        ROOMY
        + f"""
[[connections]]
name = "echo"
target = "http://localhost:{service.server_port}"
methods = ["GET", "POST"]
paths = ["/allowed", "/elsewhere"]
credential = "bearer"
credential_file = "{folder / "credential"}"
"""
    )
    return servers.make("--config", str(config))


def create(broker, **body) -> Sandbox:
    """A sandbox that may use what the body says, which the SDK has no word for."""
    import httpx

    answer = httpx.post(
        f"{broker.url}/v2/sandboxes",
        headers=broker.headers,
        json={"templateID": "base", "timeout": 300, **body},
        timeout=60,
    )
    assert answer.status_code == 201, answer.text
    return Sandbox.connect(answer.json()["sandboxID"], **broker.opts)


@pytest.fixture
def granted(broker, service):
    service.heard.clear()
    sandbox = create(broker, connections=["echo"])
    yield sandbox
    sandbox.kill()


def curl(sandbox: Sandbox, path: str, *options: str) -> str:
    command = f"curl -sS -m 20 -D - {' '.join(options)} 'http://echo.broker.internal{path}'"
    return sandbox.commands.run(command + " 2>&1 || true").stdout


def status(answer: str) -> int:
    return int(answer.split()[1])


def test_the_service_sees_the_credential_and_the_sandbox_never_does(granted, service):
    answer = curl(granted, "/allowed/x?a=b", "-H 'Authorization: Bearer mine'", "-H 'Cookie: a=b'", "-d data")
    assert status(answer) == 200 and "4 bytes" in answer, answer
    [(method, path, headers, body)] = service.heard
    assert (method, path, body) == ("POST", "/allowed/x?a=b", b"data")
    assert headers["authorization"] == f"Bearer {CANARY}" and "cookie" not in headers
    assert headers["host"] == f"localhost:{service.server_port}"
    for form in FORMS:
        assert form not in answer, answer
    assert "*" * len(CANARY) in answer


def test_what_was_not_granted_is_not_there(broker, granted, service):
    for path, options in [("/other", []), ("/allowed/../other", ["--path-as-is"]), ("/allowed", ["-X DELETE"])]:
        answer = curl(granted, path, *options)
        assert status(answer) == 403 and "connection_denied" in answer, answer
    other = granted.commands.run("curl -sS -m 20 -w '%{http_code}' http://none.broker.internal/ || true").stdout
    assert other.endswith("403"), other
    with create(broker) as without:
        assert "resolve host" in curl(without, "/allowed")
    assert service.heard == []
    assert status(curl(granted, "/allowed")) == 200, "the control"


def test_a_redirect_carries_nothing_elsewhere(granted, service):
    answer = curl(granted, "/elsewhere")
    assert status(answer) == 302 and CANARY not in answer and "set-cookie" not in answer.lower(), answer
    assert "location: http://other.test/?key=****" in answer.lower(), answer
    assert len(service.heard) == 1


def test_each_use_has_its_receipt(broker, granted):
    curl(granted, "/allowed", "-d data")
    curl(granted, "/other")

    def uses():
        shown = broker.cli("egress", "log", granted.sandbox_id, "--json").stdout
        assert CANARY not in shown
        found = [one["receipt"] for one in json.loads(shown) if one["receipt"]["kind"] == "use"]
        return found if len(found) == 2 else None

    first, second = until(uses, what="both receipts are there")
    assert (first["rule"], first["method"], first["name"]) == ("connection/echo", "POST", "localhost")
    assert (first["status"], first["outcome"], first["sent"]) == (200, "allowed", 4)
    assert (second["status"], second["outcome"], second["received"]) == (403, "denied", 0)


def test_forks_and_resumed_ones_keep_it_and_copies_do_not(broker, granted):
    granted.pause()
    granted = Sandbox.connect(granted.sandbox_id, **broker.opts)
    assert status(curl(granted, "/allowed")) == 200
    [fork] = granted.fork(timeout=60)
    with fork:
        assert status(curl(fork, "/allowed")) == 200
    snapshot = granted.create_snapshot()
    with Sandbox.create(snapshot.snapshot_id, timeout=60, **broker.opts) as copy:
        assert "resolve host" in curl(copy, "/allowed")
    Sandbox.delete_snapshot(snapshot.snapshot_id, **broker.opts)
    broker.stop()
    broker.start()
    assert status(curl(granted, "/allowed")) == 200


def test_the_credential_is_nowhere_in_a_sandbox(broker, granted):
    marker = f"marker-{uuid.uuid4().hex}"
    granted.commands.run(f"sh -c 'MARKER={marker} exec sleep 300'", background=True)
    granted.files.write("/home/user/marker", marker)
    assert status(curl(granted, "/allowed", "-o /home/user/answer")) == 200
    found = granted.commands.run(f"cat /proc/[0-9]*/environ /home/user/* 2>/dev/null | grep -ac {marker}", user="root")
    assert int(found.stdout) > 0, "the control"
    inside = granted.commands.run(
        f"cat /proc/[0-9]*/environ /home/user/* 2>/dev/null | grep -acF '{CANARY[:20]}' || true", user="root"
    )
    # The command itself has it in its words, and nothing else.
    assert int(inside.stdout or 0) == 0
    granted.pause()
    places = ["--", str(broker.data_dir), str(broker.log_path)]

    def with_it(text: str) -> list[str]:
        found = subprocess.run(["grep", "-rlaF", "-e", text, *places], capture_output=True, text=True, timeout=100)
        return found.stdout.splitlines()

    assert with_it(marker), "the control"
    assert with_it(CANARY) == []
