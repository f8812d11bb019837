"""Ports of a sandbox whose traffic is not public: who has the token reaches them, and programs inside never see it."""

import httpx
import pytest
from e2b import Sandbox
from support import until

HEADER = "e2b-traffic-access-token"

SHOW = r"""
import http.server, json, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({k.lower(): v for k, v in self.headers.items()}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), H).serve_forever()
"""


@pytest.fixture(scope="module")
def private(server):
    network = {"allow_public_traffic": False, "mask_request_host": "localhost:${PORT}"}
    sandbox = Sandbox.create(timeout=600, network=network)
    sandbox.files.write("/tmp/show.py", SHOW)
    for port in (8000, 8001):
        sandbox.commands.run(f"python3 /tmp/show.py {port}", background=True, timeout=0).disconnect()
        until(lambda: get(sandbox, port, sandbox.traffic_access_token).status_code == 200, what=f"port {port}")
    yield sandbox
    sandbox.kill()


def get(sandbox: Sandbox, port: int, token: str | None) -> httpx.Response:
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}
    if token is not None:
        headers[HEADER] = token
    return httpx.get(sandbox.envd_api_url, headers=headers, timeout=20)


def test_without_the_token_nothing_is_reached(private):
    missing, wrong = get(private, 8000, None), get(private, 8000, "x" * 64)
    for answer, message in [
        (missing, f"Sandbox is secured with traffic access token. Token header '{HEADER}' is missing"),
        (wrong, f"Sandbox is secured with traffic access token. Provided token in header '{HEADER}' is invalid"),
    ]:
        assert answer.status_code == 403
        assert answer.json() == {"sandboxId": private.sandbox_id, "message": message, "code": 403}
    # Whether something listens is not told either.
    assert get(private, 9, None).status_code == 403
    assert get(private, 9, private.traffic_access_token).status_code == 502


def test_with_it_the_program_is_reached_and_does_not_see_it(private):
    answer = get(private, 8000, private.traffic_access_token)
    assert answer.status_code == 200
    assert HEADER not in answer.json() and private.traffic_access_token not in answer.text
    assert answer.json()["host"] == "localhost:8000"
    assert answer.json()["x-forwarded-host"] in private.envd_api_url
    inside = private.commands.run("env; cat /proc/1/environ 2>/dev/null || true").stdout
    assert private.traffic_access_token not in inside


def test_a_token_of_a_port_opens_no_other(private, api):
    way = api.get(f"/v1/sandboxes/{private.sandbox_id}/ports/8000").json()
    assert not way["public"] and way["traffic_access_token"] != private.traffic_access_token
    assert get(private, 8000, way["traffic_access_token"]).status_code == 200
    assert get(private, 8001, way["traffic_access_token"]).status_code == 403


def test_the_guest_api_has_its_own_token(private):
    assert private.commands.run("echo hello").stdout == "hello\n"
    assert private.is_running()


def test_the_token_is_given_to_who_connects_and_to_no_list(private, api):
    assert Sandbox.connect(private.sandbox_id).traffic_access_token == private.traffic_access_token
    for path in ("/v2/sandboxes", f"/sandboxes/{private.sandbox_id}", f"/v1/sandboxes/{private.sandbox_id}"):
        assert private.traffic_access_token not in api.get(path).text
    network = api.get(f"/sandboxes/{private.sandbox_id}").json()["network"]
    assert network == {"allowPublicTraffic": False, "maskRequestHost": "localhost:${PORT}"}


def test_an_update_does_not_open_them(private, api):
    path = f"/sandboxes/{private.sandbox_id}/network"
    assert api.put(path, json={"denyOut": ["0.0.0.0/0"]}).status_code == 204
    opened = api.put(path, json={"allowPublicTraffic": True})
    assert opened.status_code == 400 and "allowPublicTraffic" in opened.json()["message"]
    assert get(private, 8000, None).status_code == 403


def test_a_sandbox_without_guest_token_cannot_be_private(api):
    body = {"templateID": "base", "secure": False, "network": {"allowPublicTraffic": False}}
    assert api.post("/sandboxes", json=body).status_code == 400


def test_they_stay_closed_after_a_crash_of_the_server(lone_server):
    sandbox = Sandbox.create(timeout=300, network={"allow_public_traffic": False}, **lone_server.opts)
    lone_server.kill()
    lone_server.start()
    assert get(sandbox, 8000, None).status_code == 403
    assert get(sandbox, 8000, sandbox.traffic_access_token).status_code == 502
    sandbox.kill()
