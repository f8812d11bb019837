"""What an operator sees: metrics, logs and the audit."""

import json
import re

import httpx
import pytest
from e2b import Sandbox
from support import until


@pytest.fixture(scope="module")
def watched(servers):
    """A server of its own, whose log is JSON."""
    return servers.make("--log-format", "json")


def metrics(server, key: str | None = None) -> httpx.Response:
    return httpx.get(f"{server.url}/metrics", headers={"X-API-Key": key or server.api_key}, timeout=20)


def value(server, name: str) -> float:
    text = metrics(server).text
    lines = [line for line in text.splitlines() if line.startswith(name + " ")]
    assert len(lines) == 1, f"{name}: {lines}\n{text}"
    return float(lines[0].rsplit(" ", 1)[1])


def audit(server) -> list[dict]:
    return json.loads(server.cli("audit", "--data-dir", str(server.data_dir), "--json").stdout)


def lines_of(server, request: str) -> list[dict]:
    """The log's lines in the span of a request."""
    log = [json.loads(line) for line in server.log_path.read_text().splitlines()]
    return [line for line in log if line.get("span", {}).get("request") == request]


def test_metrics_follow_what_happens(watched):
    created = 'sandglass_sandbox_creations_total{outcome="created"}'
    running = 'sandglass_sandboxes{state="running"}'
    killed = 'sandglass_sandbox_ends_total{reason="killed"}'
    sandbox = Sandbox.create(timeout=60, **watched.opts)
    assert (value(watched, created), value(watched, running)) == (1, 1)
    assert value(watched, "sandglass_sandbox_creation_seconds_count") == 1
    sandbox.commands.run("getent hosts denied.example || true")
    denied = 'sandglass_egress_verdicts_total{kind="dns",outcome="denied"}'
    until(lambda: value(watched, denied) >= 1, what="the refusal is counted")
    sandbox.kill()
    assert value(watched, killed) == 1
    until(lambda: value(watched, "sandglass_sandbox_removal_seconds_count") == 1, what="the removal is counted")
    until(lambda: value(watched, running) == 0, what="none runs")
    with pytest.raises(Exception, match="404"):
        Sandbox.create("no-such-template", **watched.opts)
    assert value(watched, 'sandglass_sandbox_creations_total{outcome="not_found"}') == 1
    answer = metrics(watched)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    assert sandbox.sandbox_id not in answer.text
    # The half without privilege sees no file of the machine, and tells its memory all the same.
    for process in ("serve", "host"):
        assert value(watched, f'sandglass_resident_memory_bytes{{process="{process}"}}') > 1 << 20
    assert value(watched, "sandglass_machine_memory_bytes") > value(watched, "sandglass_machine_memory_available_bytes")


def test_metrics_are_for_operators(watched):
    def make(*options: str) -> str:
        return watched.cli("key", "create", "--data-dir", str(watched.data_dir), *options).stdout.strip()

    assert metrics(watched, make("--name", "plain")).status_code == 403
    assert metrics(watched, make("--name", "watcher", "--operator")).status_code == 200
    assert httpx.get(f"{watched.url}/metrics").status_code == 401


def test_every_line_of_a_request_says_whose_it_is(watched):
    headers = watched.headers | {"X-Request-Id": "creation.of-mine_1"}
    body = {"templateID": "base", "timeout": 60}
    answer = httpx.post(f"{watched.url}/v2/sandboxes", headers=headers, json=body, timeout=60)
    assert answer.status_code == 201 and answer.headers["x-request-id"] == "creation.of-mine_1"
    id = answer.json()["sandboxID"]
    lines = lines_of(watched, "creation.of-mine_1")
    messages = {line["message"] for line in lines}
    # Also what the sandbox's own task does for the request.
    assert {"moved", "answered"} <= messages, lines
    for line in lines:
        assert line["span"]["sandbox"] == id and line["span"]["team"], line
    killing = watched.headers | {"X-Request-Id": "kill-1"}
    assert httpx.delete(f"{watched.url}/sandboxes/{id}", headers=killing, timeout=20).status_code == 204
    assert {"moved", "answered"} <= {line["message"] for line in lines_of(watched, "kill-1")}
    # What is not plain is not repeated, neither here nor there.
    odd = httpx.get(f"{watched.url}/health", headers={"X-Request-Id": 'a"}b'})
    assert re.fullmatch(r"[0-9a-f-]{36}", odd.headers["x-request-id"])


def test_no_secret_is_in_the_log(watched):
    sandbox = Sandbox.create(timeout=60, envs={"SECRET": "hunter2"}, network={"allow_public_traffic": False}, **watched.opts)
    sandbox.commands.run("true")
    sandbox.kill()
    log = watched.log_path.read_text()
    for secret in (watched.api_key, sandbox.traffic_access_token, "hunter2", sandbox._envd_access_token):
        assert secret and secret not in log


def test_changes_are_audited_and_so_are_refused_ones(watched):
    sandbox = Sandbox.create(timeout=60, **watched.opts)
    path = f"{watched.url}/sandboxes/{sandbox.sandbox_id}"
    named = {"X-Request-Id": "audited-1"}
    refused = httpx.put(f"{path}/network", headers=watched.headers | named, json={"egressProxy": {"address": "a:1"}})
    assert refused.status_code == 400
    assert httpx.delete(path, headers={"X-API-Key": "e2b_" + "0" * 40}).status_code == 401
    httpx.get(path, headers=watched.headers)
    sandbox.kill()
    rows = [row for row in audit(watched) if row["target"] == sandbox.sandbox_id]
    assert [(row["action"], row["status"]) for row in rows] == [
        ("POST /v2/sandboxes", 201),
        ("PUT /sandboxes/{id}/network", 400),
        ("DELETE /sandboxes/{id}", 401),
        ("DELETE /sandboxes/{id}", 204),
    ]
    keys = json.loads(watched.cli("key", "list", "--data-dir", str(watched.data_dir), "--json").stdout)
    first = next(key for key in keys if key["name"] == "first")
    for row in rows:
        known = row["status"] != 401
        assert (row["key"], row["team"]) == ((first["id"], first["team"]) if known else (None, None))
    assert rows[1]["request"] == "audited-1" and "egressProxy" in rows[1]["detail"]
    # What is done on the machine itself is there as well, and no secret.
    secret = watched.cli("key", "create", "--data-dir", str(watched.data_dir), "--name", "audited").stdout.strip()
    last = audit(watched)[-1]
    assert (last["action"], last["target"], last["status"], last["key"]) == ("key create", "audited", 200, None)
    text = watched.cli("audit", "--data-dir", str(watched.data_dir)).stdout
    assert "PUT /sandboxes/{id}/network" in text
    for hidden in (secret, watched.api_key):
        assert hidden not in text and hidden not in json.dumps(audit(watched))
