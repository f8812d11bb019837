"""Bad input to the REST faces: each is refused with the error body, says what to do, and changes nothing."""

import json
import re
import uuid
from pathlib import Path

import pytest
from conftest import pages
from e2b import Sandbox
from support import ROOT
from wire import Wire

JSON = {"Content-Type": "application/json"}

# Method, path, and whether this version does it.
ENDPOINTS = [
    (method, path, state == "built")
    for path, method, _, state in (
        line.split() for line in Path(ROOT, "openapi/endpoints.txt").read_text().splitlines()
    )
]
WITH_ID = [endpoint for endpoint in ENDPOINTS if "sandboxes/{id}" in endpoint[1]]


def message_of(response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body["code"] == status and body["message"], body
    return body["message"]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_made(server):
    """None of this makes a sandbox."""

    def all_ids():
        return {info.sandbox_id for page in pages(Sandbox.list(limit=100)) for info in page}

    before = all_ids()
    yield
    assert all_ids() <= before


def admin(server, *args: str) -> str:
    return server.cli(*args[:2], "--data-dir", str(server.data_dir), *args[2:]).stdout


@pytest.fixture(scope="module")
def strangers(server):
    """Another team."""
    name = f"strangers-{uuid.uuid4().hex}"
    admin(server, "team", "create", name)
    return name


@pytest.fixture(scope="module")
def stranger(server, strangers):
    """A key of another team."""
    return admin(server, "key", "create", "--team", strangers).strip()


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        # Arrays would otherwise be read as the fields in their order.
        (b'["base", 60]', "JSON object"),
        (b'["base"]', "JSON object"),
        (b"null", "JSON object"),
        (b'"base"', "JSON object"),
        (b"5", "JSON object"),
        (b"true", "JSON object"),
        (b'{"templateID":"base"} {}', "trailing"),
        (b'{"templateID":"base",}', "trailing comma"),
        (b"{'templateID':'base'}", "key must be a string"),
        (b'{"templateID":"base","templateID":"base"}', "duplicate field"),
        (b'{"templateID":"base","timeout":5,"timeout":6}', "duplicate field"),
        (b'{"templateID":"\xff"}', "invalid"),
        (b'{"templateID":"\\ud800"}', "invalid"),
        (b'\xff\xfe{\x00}\x00', "expected value"),
        (b'{"templateID":"base","metadata":["a","b"]}', "metadata"),
        (b'{"templateID":"base","metadata":{"a":1}}', "metadata.a"),
        (b'{"templateID":"base","envVars":{"A=B":""}}', "A=B"),
        (b'{"templateID":"base","envVars":{"A":"\\u0000"}}', "envVars.A"),
        (b'{"templateID":"base","network":[true]}', "network"),
        (b'{"templateID":"base","autoResume":[true]}', "autoResume"),
        (b'{"templateID":"base","iam":[{}]}', "iam"),
        (b'{"templateID":"base","mcp":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion limit"),
        (b'{"templateID":"base","mcp":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", "recursion limit"),
        (b"[" * 1_000_000, "JSON object"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize("path", ["/v2/sandboxes", "/sandboxes"])
def test_bodies_that_are_no_request(api, path, body, hint):
    assert hint in message_of(api.post(path, content=body, headers=JSON))


def test_what_is_ignored_may_be_nested_as_deeply_as_it_likes(api):
    body = b'{"x":' + b"[" * 500_000 + b"]" * 500_000 + b',"templateID":"no-such-template"}'
    message_of(api.post("/v2/sandboxes", content=body, headers=JSON), 404)


@pytest.mark.parametrize(
    ("timeout", "hint"),
    [
        ("0", "greater than 0"),
        ("-1", "greater than 0"),
        ("-9223372036854775808", "greater than 0"),
        ("86401", "24 hours"),
        ("9223372036854775807", "24 hours"),
        # These are beyond what 64 bits hold.
        ("9223372036854775808", "24 hours"),
        ("18446744073709551615", "24 hours"),
        ("18446744073709551616", "whole number of seconds"),
        ("-9223372036854775809", "whole number of seconds"),
        ("1e400", "out of range"),
        ("1.5", "whole number of seconds"),
        ("60.0", "whole number of seconds"),
        ("6e1", "whole number of seconds"),
        ('"60"', "whole number of seconds"),
        ("true", "whole number of seconds"),
        ("[60]", "whole number of seconds"),
        ("NaN", "expected value"),
    ],
)
def test_timeouts_that_can_not_be(api, timeout, hint):
    for path in ["/v2/sandboxes", "/sandboxes"]:
        content = f'{{"templateID":"base","timeout":{timeout}}}'
        assert hint in message_of(api.post(path, content=content, headers=JSON))


def test_timeouts_of_a_running_sandbox(api, sandbox):
    """They are judged in the same way wherever they are, and a refused one changes nothing."""
    end = sandbox.get_info().end_at
    for verb, field in [("connect", "timeout"), ("timeout", "timeout"), ("refreshes", "duration")]:
        for value in ["-1", "9223372036854775808", "1.5", '"60"']:
            answer = api.post(
                f"/sandboxes/{sandbox.sandbox_id}/{verb}", content=f'{{"{field}":{value}}}', headers=JSON
            )
            message_of(answer)
        for body in ["[60]", "60", "["]:
            message_of(api.post(f"/sandboxes/{sandbox.sandbox_id}/{verb}", content=body, headers=JSON))
    message_of(api.post(f"/sandboxes/{sandbox.sandbox_id}/timeout", content="", headers=JSON))
    message_of(api.post(f"/v2/sandboxes/{sandbox.sandbox_id}/connect", json={"timeout": 0}))
    assert sandbox.get_info().end_at == end


@pytest.mark.parametrize(
    ("template", "status"),
    [
        ("no-such-template", 404),
        ("base:no-such-tag", 404),
        ("someone/base", 404),
        ("", 400),
        ("../base", 400),
        ("base/../base", 400),
        ("/etc/passwd", 400),
        ("base\0", 400),
        ("base\n", 400),
        ("bäse", 400),
        ("a" * 10_000, 400),
    ],
)
def test_templates_that_are_not_there(api, template, status):
    message_of(api.post("/v2/sandboxes", json={"templateID": template, "timeout": 30}), status)


def test_bodies_without_end_are_refused_before_they_are_read(server):
    """A body of 8 GiB, announced or not: the answer comes after 1 MiB."""
    with Wire(server) as wire:
        head = f"POST /v2/sandboxes HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {server.api_key}\r\n"
        wire.sendall(f"{head}Content-Length: {8 << 30}\r\n\r\n".encode())
        assert "1 MiB" in wire_message(wire, b" " * (64 << 10), 413)
    with Wire(server) as wire:
        wire.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        assert "1 MiB" in wire_message(wire, b"10000\r\n" + b" " * (64 << 10) + b"\r\n", 413)


def wire_message(wire: Wire, chunk: bytes, status: int) -> str:
    """Sends a chunk again and again until there is an answer."""
    wire.setblocking(False)
    for _ in range(1000):
        try:
            wire.sendall(chunk)
        except BlockingIOError:
            break
        except ConnectionError:
            break
    wire.settimeout(60)
    return wire.answer().error(status)


def test_the_content_type_does_not_decide(api):
    """Old clients send none; what counts is whether the body is a request."""
    for kind in ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", "\xff"]:
        headers = {b"Content-Type": kind.encode("latin-1")}
        message_of(api.post("/v2/sandboxes", content=b"templateID=base", headers=headers))
    missing = api.post("/v2/sandboxes", content=b'{"templateID":"no-such-template"}')
    message_of(missing, 404)


@pytest.mark.parametrize(
    "query",
    [f"limit={limit}" for limit in ["0", "101", "-1", "1.5", "99999999999999999999", "%ff", "%zz"]]
    + ["nextToken=x", "nextToken=" + "A" * 9000, "order=up", "state=asleep", "startedAfter=yesterday"]
    + ["metadata=a", "metadata=%25zz", "a&" * 65],
    ids=lambda query: query[:20],
)
def test_queries(server, query):
    with Wire(server) as wire:
        wire.ask("GET", f"/v2/sandboxes?{query}", server.headers).error(400)


@pytest.mark.parametrize("key", ["e2b_" + "g" * 40, "e2b_" + "0" * 10_000, "e2b_\xff", "e2b_'; drop table keys;--"])
def test_keys_that_can_not_be(server, key):
    with Wire(server) as wire:
        head = f"GET /v2/sandboxes HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n\r\n"
        wire.sendall(head.encode("latin-1"))
        wire.answer().error(401)


def test_two_keys_are_none(server):
    with Wire(server) as wire:
        head = f"GET /v2/sandboxes HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {server.api_key}\r\n"
        wire.sendall(f"{head}X-API-Key: e2b_{'0' * 40}\r\n\r\n".encode())
        wire.answer().error(401)


def test_a_revoked_key_opens_nothing_any_more(server, strangers, anonymous):
    before = {key["id"] for key in json.loads(admin(server, "key", "list", "--team", strangers, "--json"))}
    secret = admin(server, "key", "create", "--team", strangers).strip()
    after = {key["id"] for key in json.loads(admin(server, "key", "list", "--team", strangers, "--json"))}
    assert anonymous.get("/v2/sandboxes", headers={"X-API-Key": secret}).status_code == 200
    admin(server, "key", "revoke", *(after - before))
    message_of(anonymous.get("/v2/sandboxes", headers={"X-API-Key": secret}), 401)


def filled(path: str, id: str) -> str:
    return re.sub(r"\{\w+\}", "x", path.replace("{id}", id, 1).replace("{port}", "8000"))


# What is asked of each route: right but for the team.
BODIES = {
    "timeout": {"timeout": 60},
    "refreshes": {"duration": 60},
    "connect": {"timeout": 60},
    "network": {"allowOut": []},
    "models": {"max_cost_micros": 1000},
}
QUERIES = {"explain": {"host": "example.com"}, "archive": {"path": "/workspace"}}


@pytest.mark.parametrize(("method", "path", "built"), WITH_ID, ids=lambda value: str(value))
def test_another_teams_sandbox_is_one_that_is_not_there(anonymous, sandbox, stranger, method, path, built):
    """404 and never 403, and word for word what an unknown id gets: nothing can be found out by trying."""
    unknown = "0" * 20
    answers = []
    for id in [sandbox.sandbox_id, unknown]:
        last, key = path.rsplit("/", 1)[1], {"X-API-Key": stranger}
        answer = anonymous.request(
            method, filled(path, id), headers=key, json=BODIES.get(last), params=QUERIES.get(last)
        )
        message = message_of(answer, 404 if built else 501)
        answers.append(message.replace(id, "ID"))
    assert answers[0] == answers[1]
    assert sandbox.is_running()


# As they are in a path; what a client library would never send.
BAD_IDS = [
    "..",
    "%2e%2e",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e%2fsandboxes",
    "a%2fb",
    "%00",
    "0000000000000000000%00",
    "%ff",
    "%c3%28",
    "%",
    "%zz",
    "UPPERCASE",
    "a_b",
    "a b".replace(" ", "%20"),
    "é".encode().decode("latin-1"),
    "'or'1'='1",
    "a" * 10_000,
    "%61" * 10_000,
]


@pytest.mark.parametrize("id", BAD_IDS, ids=lambda id: id[:12])
def test_ids_that_can_not_be(server, id):
    for method, path, built in WITH_ID:
        with Wire(server) as wire:
            body = json.dumps(BODIES.get(path.rsplit("/", 1)[1], {})).encode()
            target = filled(path, id).encode("latin-1")
            answer = wire.ask(method, target, server.headers, body)
        # An id that is too long is a good one of another server, and what is not built looks at none. A path with
        # dots is not resolved by anyone: it is no route.
        assert answer.status in ((400, 404) if built else (400, 404, 501)), (method, path, answer)
        answer.error(answer.status)
    for name in ["..", "UPPER", "a" * 10_000]:
        with Wire(server) as wire:
            answer = wire.ask("GET", "/", {"E2b-Sandbox-Id": name, "E2b-Sandbox-Port": "80"})
            answer.error(400)


def test_what_can_not_be_routed_is_said_in_the_error_body(server, api):
    """Half of the routing headers, or ones that can't be: it may have been meant for either side."""
    for headers in [
        {"E2b-Sandbox-Id": "0" * 20},
        {"E2b-Sandbox-Port": "80"},
        {"E2b-Sandbox-Id": "0" * 20, "E2b-Sandbox-Port": "65536"},
        {"E2b-Sandbox-Id": "", "E2b-Sandbox-Port": "80"},
    ]:
        assert "E2b-Sandbox" in (message := message_of(api.get("/", headers=headers))) or "sandbox" in message
    with Wire(server) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
        assert "host" in wire.answer().error(400).lower()


def test_methods_and_routes_that_are_not_there(api):
    message_of(api.get("/v2/nothing"), 404)
    message_of(api.request("PATCH", "/v2/sandboxes"), 405)
    message_of(api.request("BREW", "/v2/sandboxes"), 405)
    # What the guest API answers is named, because whoever asks here has lost a header on the way.
    assert "E2b-Sandbox-Id" in message_of(api.get("/files", params={"path": "/etc/passwd"}), 404)


@pytest.mark.parametrize("key", ["", "a b", "ä", "a" * 256, "../x"])
def test_idempotency_keys_that_can_not_be(server, key):
    with Wire(server) as wire:
        body = json.dumps({"templateID": "base"}).encode()
        headers = server.headers | {"Idempotency-Key": key}
        assert "Idempotency-Key" in wire.ask("POST", "/v2/sandboxes", headers, body).error(400)
