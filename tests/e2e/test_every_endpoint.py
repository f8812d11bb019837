"""Every endpoint of the document: without a key, with another team's key, and with a body that makes no sense.

What can't be put to one of these questions is in `openapi/uncovered.txt`, which stays empty.
"""

import json
import re

import httpx
import pytest
from e2b import Sandbox, Secret, Volume
from support import ROOT

DOCUMENT = json.loads((ROOT / "openapi/sandglass.json").read_text())
UNCOVERED = ROOT / "openapi/uncovered.txt"
METHODS = ("get", "post", "put", "patch", "delete")

ENDPOINTS = [
    (method, path) for path, item in DOCUMENT["paths"].items() for method in METHODS if method in item
]
# They tell nothing that is anybody's.
PUBLIC = {("get", "/health")}
# They need a key, and are about the server itself.
NOBODY_S = {("get", "/v1/info")}
# What a volume's own token opens, and no key: see test_volume_content.py.
WITH_TOKEN = {(method, path) for method, path in ENDPOINTS if path.startswith("/volumecontent/")}
# Templates are for all teams, and operators alone see what they are made of and what is counted, and delete for others.
FOR_OPERATORS = {
    ("get", "/metrics"),
    ("delete", "/v1/snapshots/{id}"),
    ("get", "/v1/templates"),
    ("get", "/v1/templates/{name}"),
    ("delete", "/v1/templates/{name}"),
    ("post", "/v1/templates"),
    ("post", "/v1/templates/builds"),
}

CONNECTION = {"target": "https://api.test", "methods": ["GET"], "paths": ["/"], "credential": "bearer"}

MALFORMED = ["{", "[]", '"text"', "7", '{"a":', "\x00", "[" * 2000, '{"timeout": "soon"}', '{"timeout": -1}']


@pytest.fixture(scope="module")
def outsider(server) -> httpx.Client:
    """Somebody with a valid key of another team, which may do all that a team may."""
    where = ("--data-dir", str(server.data_dir))
    server.cli("team", "create", *where, "outsiders")
    key = re.search(r"e2b_[0-9a-f]{40}", server.cli("key", "create", *where, "--team", "outsiders").stdout)[0]
    with httpx.Client(base_url=server.url, headers={"X-API-Key": key}, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def owned(server):
    """What there is of the first team: itself, a key, a sandbox, a snapshot, and a user's sandbox."""
    [team] = httpx.get(f"{server.url}/teams", headers=server.headers).json()
    [key, *_] = httpx.get(f"{server.url}/api-keys", headers=server.headers).json()
    with Sandbox.create(timeout=900, metadata={"of": "the first team"}) as sandbox:
        snapshot = sandbox.create_snapshot(name="owned")
        volume = Volume.create("owned")
        secret = Secret.create("owned", "of the first team")
        connection = httpx.put(
            f"{server.url}/v1/connections/owned", headers=server.headers, json=CONNECTION | {"value": "of the first team"}
        )
        assert connection.status_code == 201, connection.text
        user = httpx.put(
            f"{server.url}/v1/assignments/somebody",
            headers=server.headers,
            json={"templateID": "base", "timeout": 900},
            timeout=60,
        ).json()
        body = {"prompt": "say", "agent": {"command": "echo said"}, "hold": True, "timeout_seconds": 600}
        run = httpx.post(f"{server.url}/v1/runs", headers=server.headers, json=body, timeout=60).json()["id"]
        yield {
            "run": run,
            "team": team["teamID"],
            "key": key["id"],
            "sandbox": sandbox.sandbox_id,
            "snapshot": snapshot.snapshot_id,
            "assigned": user["sandbox"]["id"],
            "volume": volume.volume_id,
            "secret": secret.secret_id,
            "connection": "owned",
        }
        assert Secret.destroy(secret.secret_id)
        httpx.delete(f"{server.url}/v1/connections/owned", headers=server.headers).raise_for_status()
        assert httpx.post(f"{server.url}/v1/runs/{run}/cancel", headers=server.headers, timeout=60).is_success
        assert Volume.destroy(volume.volume_id)
        Sandbox.delete_snapshot(snapshot.snapshot_id)
        Sandbox.kill(user["sandbox"]["id"])


def filled(path: str, owned: dict[str, str]) -> str:
    """The path with what is the first team's in it."""
    kinds = {"secrets": "secret", "connections": "connection", "volumes": "volume", "volumecontent": "volume", "snapshots": "snapshot", "templates": "snapshot", "teams": "team", "api-keys": "key", "runs": "run"}
    what = next((kind for noun, kind in kinds.items() if f"{noun}/{{id}}" in path), "sandbox")
    return path.format(id=owned[what], user="somebody", port="8000", name="base", alias="owned", path="a%2Fb")


def body_for(method: str, path: str, owned: dict[str, str]):
    """A body that would be fine if it were the owner's."""
    if (method, path) in {("post", "/sandboxes"), ("post", "/v2/sandboxes")}:
        return {"templateID": owned["snapshot"], "timeout": 60}
    if "secrets" in path:
        return {"value": "of another team"}
    if path.endswith("/models"):
        return {"max_cost_micros": 1}
    if "connections" in path:
        return CONNECTION | {"value": "of another team"}
    if path.endswith("/turns"):
        return {"prompt": "theirs"}
    if "api-keys" in path:
        return {"name": "theirs"} if "{" in path else {}
    return {"timeout": 60} if "requestBody" in DOCUMENT["paths"][path][method] else None


def owner_sees_all(server, owned) -> bool:
    states = [Sandbox.get_info(owned[what]).state.value for what in ("sandbox", "assigned")]
    snapshot = httpx.get(f"{server.url}/v1/snapshots/{owned['snapshot']}", headers=server.headers)
    run = httpx.get(f"{server.url}/v1/runs/{owned['run']}", headers=server.headers).json()
    keys = httpx.get(f"{server.url}/api-keys", headers=server.headers).json()
    secret = httpx.get(f"{server.url}/secrets/{owned['secret']}", headers=server.headers).json()
    connection = httpx.get(f"{server.url}/v1/connections/owned", headers=server.headers).json()
    if secret["currentVersion"] != 1 or connection["created_at"] != connection["updated_at"]:
        return False
    # It is as it was, whoever asked it to end or to go on.
    if run["cancel_requested_at"] or run["turns"] > 1 or run["status"] in ("completed", "failed", "cancelled"):
        return False
    return states == ["running", "running"] and snapshot.status_code == 200 and owned["key"] in [key["id"] for key in keys]


@pytest.mark.parametrize("method, path", ENDPOINTS)
def test_without_a_key_nothing_is_told(anonymous, owned, method, path):
    answer = anonymous.request(method, filled(path, owned), json=body_for(method, path, owned))
    assert (answer.status_code == 401) != ((method, path) in PUBLIC), answer.text
    if (method, path) in PUBLIC:
        assert answer.text == ""


@pytest.mark.parametrize("method, path", sorted(set(ENDPOINTS) - PUBLIC - NOBODY_S))
def test_another_team_s_key_opens_nothing(server, outsider, owned, method, path):
    asked = {"explain": {"host": "example.com"}, "archive": {"path": "/etc"}}
    query = asked.get(path.rsplit("/", 1)[1], {})
    answer = outsider.request(method, filled(path, owned), params=query, json=body_for(method, path, owned))
    if (method, path) in FOR_OPERATORS:
        assert answer.status_code == 403, answer.text
    elif (method, path) in WITH_TOKEN:
        assert answer.status_code == 401, answer.text
    elif (method, path) == ("put", "/v1/connections/{id}"):
        # So is the name of a connection: this one is the other team's own.
        assert answer.status_code in (200, 201), answer.text
        outsider.delete(filled(path, owned)).raise_for_status()
    elif "{user}" in path:
        # A user's name is the team's own: another team has nobody of that name.
        assert owned["assigned"] not in answer.text
    elif "{" in path or method != "get":
        assert answer.status_code in (400, 404), answer.text
        if answer.status_code == 400:
            # Nothing was asked of a sandbox: the request itself can't be right.
            assert method == "post" and "{" not in path
    else:
        query = {"sandbox_ids": owned["sandbox"]} if path == "/sandboxes/metrics" else {}
        answer = outsider.get(path, params=query)
        assert answer.status_code == 200, answer.text
        assert not any(id in answer.text for id in owned.values())
    assert owner_sees_all(server, owned)


@pytest.mark.parametrize(
    "method, path",
    [one for one in ENDPOINTS if "requestBody" in DOCUMENT["paths"][one[1]][one[0]] and one not in WITH_TOKEN],
)
def test_a_body_that_makes_no_sense_is_refused_and_changes_nothing(server, api, owned, method, path):
    target = filled(path, owned)
    for body in MALFORMED:
        # What has no timeout has nothing to be wrong in one.
        if "timeout" in body and '"timeout"' not in json.dumps(schema_of(method, path)):
            continue
        answer = api.request(method, target, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, f"{body[:40]}: {answer.status_code} {answer.text}"
        assert answer.json()["code"] == 400 and answer.json()["message"]
    assert owner_sees_all(server, owned)


def schema_of(method: str, path: str) -> dict:
    schema = DOCUMENT["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
    for one in [schema, *schema.get("oneOf", [])]:
        if name := one.get("$ref"):
            return DOCUMENT["components"]["schemas"][name.rsplit("/", 1)[1]]
    return schema


def test_every_endpoint_is_asked():
    """Of all that the server has; what is in the list of endpoints and not built is refused whoever asks."""
    lines = (ROOT / "openapi/endpoints.txt").read_text().split("\n")
    built = {(method.lower(), path) for path, method, _, state in map(str.split, filter(None, lines)) if state == "built"}
    uncovered = sorted(f"{path} {method.upper()}" for method, path in built - set(ENDPOINTS))
    assert UNCOVERED.read_text().split("\n")[:-1] == uncovered
