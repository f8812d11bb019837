"""Connections: services that sandboxes may be let use with a credential that they never see."""

from __future__ import annotations

import json
import stat
import uuid

import httpx
import pytest

BODY = {"target": "https://api.test", "methods": ["GET"], "paths": ["/"], "credential": "bearer"}


@pytest.fixture
def lonely(lone_server):
    with httpx.Client(base_url=lone_server.url, headers=lone_server.headers, timeout=60) as client:
        yield lone_server, client


def test_the_command_line_makes_lists_and_deletes_them(server, tmp_path):
    canary = f"canary-{uuid.uuid4().hex}"
    file = tmp_path / "credential"
    file.write_text(canary + "\n")
    server.cli("connection", "set", "cli", "https://api.test", "--path", "/v1/", "--credential-file", str(file))
    changed = server.cli(
        "connection", "set", "cli", "https://api.test", "--method", "GET", "--method", "POST", "--header", "x-key"
    )
    assert changed.stdout == "http://cli.broker.internal\n"
    [shown] = [one for one in json.loads(server.cli("connection", "list", "--json").stdout) if one["name"] == "cli"]
    assert (shown["methods"], shown["credential"]) == (["GET", "POST"], {"header": {"name": "x-key", "prefix": ""}})
    assert canary not in json.dumps(shown)
    moved = server.cli("connection", "set", "cli", "https://evil.test", check=False)
    assert moved.returncode != 0 and "wanted again" in moved.stderr
    piped = server.cli("connection", "set", "cli", "https://evil.test", "--credential-file", "-", input=canary)
    assert piped.returncode == 0
    server.cli("connection", "delete", "cli")
    assert server.cli("connection", "delete", "cli", check=False).returncode != 0


def test_a_sandbox_is_granted_what_there_is(api):
    assert api.put("/v1/connections/granted", json=BODY | {"value": "some value"}).status_code == 201
    body = {"templateID": "base", "timeout": 60, "connections": ["granted", "missing"]}
    refused = api.post("/v2/sandboxes", json=body)
    assert refused.status_code == 400 and "PUT /v1/connections/missing" in refused.json()["message"]
    made = api.post("/v2/sandboxes", json=body | {"connections": ["granted"]})
    assert made.status_code == 201, made.text
    assert api.delete(f"/sandboxes/{made.json()['sandboxID']}").status_code == 204
    assert api.delete("/v1/connections/granted").status_code == 204


def test_rules_for_hosts_are_judged_and_those_with_headers_refused(api):
    def asked(rules: dict) -> httpx.Response:
        return api.post("/v2/sandboxes", json={"templateID": "base", "timeout": 60, "network": {"rules": rules}})

    for headers, said in [
        ({"X-Test-Token": "Bearer ${e2b.secrets.a}"}, "network.rules with headers is not supported"),
        ({"X-Test-Token": "${e2b.secrets.}"}, "placeholder"),
        ({"X-Test-Token": "${e2b.identity.tokens.a}"}, "identity"),
        ({"Host": "evil.test"}, "no header that can be set"),
    ]:
        answer = asked({"api.example.com": [{"transform": {"headers": headers}}]})
        assert answer.status_code == 400 and said in answer.json()["message"], answer.text
    answer = asked({f"h{number}.test": [{}] for number in range(11)})
    assert answer.status_code == 400 and "at most 10 hosts" in answer.json()["message"], answer.text
    answer = asked({"api.example.com": [{}], "*.example.com": []})
    assert answer.status_code == 201, answer.text
    assert api.delete(f"/sandboxes/{answer.json()['sandboxID']}").status_code == 204


def test_no_value_is_on_the_disk_or_in_the_log(lonely):
    server, client = lonely
    canaries = [f"canary-{uuid.uuid4().hex}" for _ in range(3)]
    assert client.post("/secrets", json={"name": "kept", "value": canaries[0]}).status_code == 201
    assert client.put("/v1/connections/kept", json=BODY | {"value": canaries[1]}).status_code == 201
    assert client.put("/v1/connections/wrong", json=BODY | {"credential": canaries[2]}).status_code == 400
    server.stop()
    files = [path for path in server.data_dir.rglob("*") if path.is_file()] + [server.log_path]
    found = [path for path in files for canary in canaries if canary.encode() in path.read_bytes()]
    assert found == []
    # The control: what is no value is found like that.
    assert any(b"https://api.test" in path.read_bytes() for path in files)
    server.start()
    assert client.get("/secrets/kept").json()["currentVersion"] == 1


def test_a_server_with_another_master_key_does_not_start(lonely):
    server, client = lonely
    assert client.post("/secrets", json={"name": "kept", "value": "some value"}).status_code == 201
    key = server.data_dir / "master.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and key.stat().st_uid == 0
    server.stop()
    right = key.read_bytes()
    for contents, said in [(bytes(32), b"another master key"), (b"short", b"32 bytes")]:
        key.write_bytes(contents)
        announced, settings = server.launch()
        assert announced.wait(60) and not settings
        assert server.process.wait(60) == 27
        assert said in server.log_path.read_bytes().splitlines()[-1]
    key.chmod(0o640)
    server.launch()
    assert server.process.wait(60) == 27
    key.write_bytes(right)
    key.chmod(0o600)
    server.start()
    assert client.get("/secrets/kept").status_code == 200
