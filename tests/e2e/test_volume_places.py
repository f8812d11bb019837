"""Who may work on the content of volumes at one time, and until when."""

from __future__ import annotations

import json
import socket

import httpx
import pytest
from support import until
from test_volumes import fresh_name

# As many questions about one volume as are answered at one time.
OF_VOLUME = 4
SIZE = 64 << 20


def make(client: httpx.Client) -> dict:
    made = client.post("/volumes", json={"name": fresh_name(), "sizeMB": 128})
    assert made.status_code == 201, made.text
    return made.json()


def asked(server, volume: dict) -> httpx.Response:
    url = f"{server.url}/volumecontent/{volume['volumeID']}/path"
    return httpx.get(url, params={"path": "/"}, headers={"Authorization": f"Bearer {volume['token']}"}, timeout=60)


def slow_reader(server, volume: dict) -> socket.socket:
    """Somebody who asks for a large file, and reads no more than the head of the answer."""
    host, port = server.address.rsplit(":", 1)
    reader = socket.create_connection((host, int(port)))
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.sendall(
        f"GET /volumecontent/{volume['volumeID']}/file?path=/big HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {volume['token']}\r\n\r\n".encode()
    )
    assert reader.recv(12) == b"HTTP/1.1 200"
    return reader


@pytest.fixture
def volume(api, server):
    volume = make(api)
    put = httpx.put(
        f"{server.url}/volumecontent/{volume['volumeID']}/file",
        params={"path": "/big"},
        headers={"Authorization": f"Bearer {volume['token']}"},
        content=bytes(SIZE),
        timeout=60,
    )
    assert put.status_code == 201, put.text
    yield volume
    api.delete(f"/volumes/{volume['volumeID']}")


def test_whoever_is_slow_is_in_the_way_of_their_own_volume(api, server, volume):
    readers = [slow_reader(server, volume) for _ in range(OF_VOLUME)]
    busy = asked(server, volume)
    assert busy.status_code == 503, busy.text
    assert "try again" in busy.json()["message"]
    other = make(api)
    try:
        assert asked(server, other).status_code == 200
    finally:
        api.delete(f"/volumes/{other['volumeID']}")
    readers.pop().close()
    until(lambda: asked(server, volume).status_code == 200, what="there is a place again")
    for reader in readers:
        reader.close()


def test_a_volume_is_deleted_whoever_reads_it(api, server, volume):
    (image,) = server.data_dir.rglob(f"{volume['volumeID']}.img")
    reader = slow_reader(server, volume)
    assert api.delete(f"/volumes/{volume['volumeID']}").status_code == 204
    assert not image.exists()
    assert asked(server, volume).status_code == 401
    reader.close()


def test_a_revoked_team_s_tokens_open_nothing(server):
    data = ["--data-dir", str(server.data_dir)]
    name = fresh_name()
    server.cli("team", "create", *data, name)
    key = json.loads(server.cli("key", "create", *data, "--team", name, "--json").stdout)["secret"]
    with httpx.Client(base_url=server.url, headers={"X-API-Key": key}, timeout=60) as client:
        volume = make(client)
        assert asked(server, volume).status_code == 200
        server.cli("team", "revoke", *data, name)
        assert asked(server, volume).status_code == 401
