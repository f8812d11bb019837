"""Ports of programs inside, by header routing."""

import base64
import os
import socket

import httpx
import pytest
from programs import EVENTS, WEB_SOCKET
from support import until

MISSING = "0" * 20


@pytest.fixture(scope="module")
def web(sandbox):
    """Web servers inside: on all addresses at 8000, on loopback only at 8001. There is no IPv6 inside."""
    sandbox.commands.run("mkdir -p /home/user/www && echo hello > /home/user/www/index.html")
    for port, bind in [(8000, "0.0.0.0"), (8001, "127.0.0.1")]:
        sandbox.commands.run(
            f"python3 -m http.server {port} --bind {bind} -d /home/user/www", background=True, timeout=0
        ).disconnect()
    for port in (8000, 8001):
        until(lambda: get(sandbox, port).status_code == 200, what=f"port {port}")
    return sandbox


def headers(id: str, port) -> dict:
    return {"E2b-Sandbox-Id": id, "E2b-Sandbox-Port": str(port)}


def get(sandbox, port, path="/", **more) -> httpx.Response:
    return httpx.get(
        sandbox.envd_api_url + path, headers=headers(sandbox.sandbox_id, port), timeout=20, **more
    )


@pytest.mark.parametrize("port", [8000, 8001])
def test_a_web_server_is_reached_wherever_it_is_bound(web, port):
    answer = get(web, port)
    assert (answer.status_code, answer.text) == (200, "hello\n")
    assert get(web, port, "/none").status_code == 404


def test_a_large_download_is_whole(web):
    web.commands.run("head -c 20000000 /dev/zero > /home/user/www/big")
    for port in (8000, 8001):
        assert len(get(web, port, "/big").content) == 20_000_000


def test_closed_port(web):
    answer = get(web, 9)
    assert answer.status_code == 502
    body = answer.json()
    assert body["message"] == "The sandbox is running but port is not open"
    assert (body["sandboxId"], body["code"], body["port"]) == (web.sandbox_id, 502, 9)


def test_unknown_sandbox(server):
    answer = httpx.get(server.url, headers=headers(MISSING, 80))
    assert answer.status_code == 502
    body = answer.json()
    assert (body["message"], body["sandboxId"], body["code"]) == ("The sandbox was not found", MISSING, 502)


@pytest.mark.parametrize(
    "bad",
    [
        {"E2b-Sandbox-Id": MISSING},
        {"E2b-Sandbox-Port": "80"},
        {"E2b-Sandbox-Id": MISSING, "E2b-Sandbox-Port": "http"},
        {"E2b-Sandbox-Id": MISSING, "E2b-Sandbox-Port": "0"},
        {"E2b-Sandbox-Id": MISSING, "E2b-Sandbox-Port": "65536"},
        {"E2b-Sandbox-Id": "UPPER/../case", "E2b-Sandbox-Port": "80"},
    ],
)
def test_bad_headers(server, bad):
    assert httpx.get(server.url, headers=bad).status_code == 400


def test_the_guest_cannot_be_used_to_reach_others(server, web):
    """A port of the sandbox is only ever the sandbox's: the server's own ports are not among them."""
    port = server.address.rsplit(":", 1)[1]
    assert get(web, port).status_code == 502
    assert get(web, 22).status_code == 502


def test_web_socket_upgrade(web):
    """A hand-made web socket server inside, and raw bytes both ways after the upgrade."""
    web.files.write("/tmp/ws.py", WEB_SOCKET)
    web.commands.run("python3 /tmp/ws.py", background=True, timeout=0).disconnect()
    until(
        lambda: web.commands.run("ss -ltn 'sport = :8010' | grep -c LISTEN || true").stdout.strip() == "1",
        what="the web socket server",
    )
    host, port = web.envd_api_url.removeprefix("http://").split(":")
    key = base64.b64encode(os.urandom(16)).decode()
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(
            (
                f"GET /chat HTTP/1.1\r\nHost: {host}:{port}\r\nE2b-Sandbox-Id: {web.sandbox_id}\r\n"
                f"E2b-Sandbox-Port: 8010\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
            ).encode()
        )
        head = b""
        while b"\r\n\r\n" not in head:
            part = raw.recv(4096)
            assert part, head
            head += part
        assert head.startswith(b"HTTP/1.1 101 "), head
        for message in (b"abc", b"\x00\x81\xff" * 100):
            raw.sendall(message)
            echoed = b""
            while len(echoed) < len(message):
                part = raw.recv(4096)
                assert part
                echoed += part
            assert sorted(echoed) == sorted(message)


def test_streaming_is_not_buffered(web):
    """The first event arrives while the answer is still being made."""
    web.files.write("/tmp/sse.py", EVENTS)
    web.commands.run("python3 /tmp/sse.py", background=True, timeout=0).disconnect()
    until(
        lambda: web.commands.run("ss -ltn 'sport = :8020' | grep -c LISTEN || true").stdout.strip() == "1",
        what="the event server",
    )
    request = httpx.stream(
        "GET", web.envd_api_url + "/events", headers=headers(web.sandbox_id, 8020), timeout=20
    )
    with request as answer:
        parts = answer.iter_raw()
        assert next(parts) == b"data: 1\n\n"
        get(web, 8020, "/open")
        assert b"".join(parts) == b"data: 2\n\n"
