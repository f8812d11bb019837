"""A team's keys and numbers over HTTP."""

import json
import socket
import time

import httpx
import pytest
from e2b import Sandbox
from support import until


def client(server, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"X-API-Key": key}, timeout=60)


def local(server, *args: str, **more) -> str:
    noun, verb, *rest = args
    return server.cli(noun, verb, "--data-dir", str(server.data_dir), *rest, **more).stdout


@pytest.fixture(scope="module")
def team(server) -> str:
    """A team of this file's own, and a key of it that is no operator's."""
    local(server, "team", "create", "accounts")
    return json.loads(local(server, "key", "create", "--team", "accounts", "--name", "first", "--json"))["secret"]


@pytest.fixture
def own(server, team):
    with client(server, team) as one:
        yield one


def made(client: httpx.Client, name: str) -> dict:
    answer = client.post("/api-keys", json={"name": name})
    assert answer.status_code == 201, answer.text
    return answer.json()


def works(server, key: str) -> bool:
    with client(server, key) as one:
        answer = one.get("/v2/sandboxes")
        assert answer.status_code in (200, 401), answer.text
        return answer.status_code == 200


def test_a_key_works_from_its_making_to_its_end(server, own):
    key = made(own, "ci")
    assert works(server, key["key"])
    listed = own.get("/api-keys")
    assert [one["name"] for one in listed.json()] == ["first", "ci"]
    assert key["key"][4:] not in listed.text
    assert own.patch(f"/api-keys/{key['id']}", json={"name": "laptop"}).json()["name"] == "laptop"
    assert "laptop" in local(server, "key", "list", "--team", "accounts")
    assert own.delete(f"/api-keys/{key['id']}").status_code == 204
    assert not works(server, key["key"])
    assert own.delete(f"/api-keys/{key['id']}").status_code == 404
    audit = [row for row in json.loads(local(server, "audit", "--json")) if row["target"] == key["id"]]
    assert [row["action"] for row in audit if row["status"] < 300] == [
        "POST /api-keys",
        "PATCH /api-keys/{id}",
        "DELETE /api-keys/{id}",
    ]


def test_its_end_leaves_what_it_made(server, own):
    """Whatever goes by the sandbox's own tokens goes on: a key is asked for at the API alone."""
    key = made(own, "maker")
    sandbox = Sandbox.create(timeout=60, api_key=key["key"])
    command = sandbox.commands.run("sleep 2; echo done", background=True)
    assert own.delete(f"/api-keys/{key['id']}").status_code == 204
    assert command.wait().stdout == "done\n"
    with pytest.raises(Exception, match="401"):
        sandbox.kill()
    assert own.delete(f"/sandboxes/{sandbox.sandbox_id}").status_code == 204


def test_a_key_makes_none_that_is_stronger(server, own):
    """Nor does it end or rename one that is; the control is an operator's that does both."""
    operator = json.loads(local(server, "key", "create", "--team", "accounts", "--operator", "--json"))
    with client(server, operator["secret"]) as strong:
        weak = made(strong, "of an operator")
        with client(server, weak["key"]) as one:
            assert one.get("/metrics").status_code == 403
        assert strong.get("/metrics").status_code == 200
        path = f"/api-keys/{operator['id']}"
        for answer in (own.delete(path), own.patch(path, json={"name": "taken"})):
            assert answer.status_code == 403, answer.text
            assert "operator" in answer.json()["message"]
        assert works(server, operator["secret"])
        assert strong.patch(path, json={"name": "renamed"}).status_code == 200
        assert strong.delete(f"/api-keys/{weak['id']}").status_code == 204
        assert strong.delete(path).status_code == 204
    assert not works(server, operator["secret"])


def test_keys_of_another_team_are_not_there(server, own):
    with client(server, server.api_key) as operator:
        theirs = operator.get("/api-keys").json()[0]["id"]
    for answer in (own.delete(f"/api-keys/{theirs}"), own.patch(f"/api-keys/{theirs}", json={"name": "x"})):
        assert answer.status_code == 404, answer.text
    assert works(server, server.api_key)


def test_the_last_key_of_a_team_stays(server):
    """A team that locked itself out would need who runs the machine; who does, ends it there."""
    local(server, "team", "create", "lonely")
    only = json.loads(local(server, "key", "create", "--team", "lonely", "--json"))
    with client(server, only["secret"]) as one:
        refused = one.delete(f"/api-keys/{only['id']}")
        assert refused.status_code == 409 and "last key" in refused.json()["message"], refused.text
        more = made(one, "another")
        assert one.delete(f"/api-keys/{only['id']}").status_code == 204
        assert not works(server, only["secret"]) and works(server, more["key"])
    said = local(server, "key", "revoke", more["id"])
    assert more["id"] in said and not works(server, more["key"])


def test_a_team_has_so_many_keys(server):
    local(server, "team", "create", "many")
    first = json.loads(local(server, "key", "create", "--team", "many", "--json"))
    with client(server, first["secret"]) as one:
        for number in range(99):
            made(one, f"key {number}")
        refused = one.post("/api-keys", json={"name": "one more"})
        assert refused.status_code == 429 and "100 keys" in refused.json()["message"], refused.text
        assert refused.headers["should-retry"] == "false"
    done = server.cli("key", "create", "--data-dir", str(server.data_dir), "--team", "many", check=False)
    assert done.returncode != 0 and "100 keys" in done.stderr
    local(server, "team", "revoke", "many")


def test_with_a_stolen_key_all_end_that_were_made_with_it(server, own):
    stolen = made(own, "stolen")
    with client(server, stolen["key"]) as thief:
        kept = made(thief, "kept")
        with client(server, kept["key"]) as again:
            deeper = made(again, "deeper")
    assert deeper["createdBy"] == {"id": kept["id"], "email": None}
    said = local(server, "key", "revoke", stolen["id"])
    assert "2 keys" in said and works(server, deeper["key"])
    local(server, "key", "revoke", "--with-made", stolen["id"])
    assert not any(works(server, one["key"]) for one in (stolen, kept, deeper))
    assert own.get("/api-keys").status_code == 200


def test_what_a_team_has_is_counted(server, own, team):
    [told] = own.get("/teams").json()
    assert told["name"] == "accounts" and told["apiKey"] == team and told["isDefault"] is True
    with client(server, team) as one:
        one.headers = {"Authorization": f"Bearer {team}"}
        assert one.get("/teams").json() == [told]
    path = f"/teams/{told['teamID']}/metrics"
    since = int(time.time())
    with Sandbox.create(timeout=120, api_key=team):
        # Minutes begin when the server starts.
        until(lambda: any(one["concurrentSandboxes"] for one in own.get(path).json()), 75, "a sample")
    until(lambda: own.get("/api-keys").json()[0]["lastUsed"], 10, "the use of a key")
    most = {
        metric: own.get(f"{path}/max", params={"metric": metric, "start": since}).json()
        for metric in ("concurrent_sandboxes", "sandbox_start_rate")
    }
    assert most["concurrent_sandboxes"]["value"] >= 1 and 0 < most["sandbox_start_rate"]["value"] < 10
    assert since <= most["concurrent_sandboxes"]["timestampUnix"] <= time.time()
    with client(server, server.api_key) as other:
        assert other.get(path).status_code == 404


def test_a_key_that_ends_during_its_request_makes_nothing(server, own):
    key = made(own, "slow")
    body = b'{"templateID": "base", "timeout": 60}'
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        head = f"X-API-Key: {key['key']}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        slow.sendall(f"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{head}\r\n".encode() + body[:3])
        # It has been let in, and its body is on the way for longer than a moment.
        time.sleep(1)
        assert own.delete(f"/api-keys/{key['id']}").status_code == 204
        slow.sendall(body[3:])
        answer = slow.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 401 "), answer
