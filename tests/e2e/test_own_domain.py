"""Ports of sandboxes by their names, from inside other sandboxes: the server answers itself, to whom a rule allows it."""

import json

import httpx
import pytest
from e2b import CommandExitException, Sandbox
from estate import Outpost, outpost_in
from support import until

DOMAIN = "boxes.example"
GATEWAY = "10.11.12.1"

CONFIG = f"""
domain = "{DOMAIN}"

[[egress.ceiling]]
id = "own"
allow = "*.{DOMAIN}"

[[egress.ceiling]]
id = "everywhere"
allow = "0.0.0.0/0"
"""

# Tells what it was asked, by whom it is reached, and echoes on a connection that was upgraded.
PROGRAM = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.headers.get("Upgrade"):
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.end_headers()
            while data := self.rfile.read1(100):
                self.wfile.write(data)
            self.close_connection = True
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = json.dumps({"me": sys.argv[1], "path": self.path, "headers": headers}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def outpost(server, estate, work_folder):
    """A server in the estate. The one that all tests share has prepared the template."""
    with outpost_in(estate, work_folder, "own-domain", CONFIG) as outpost:
        yield outpost


def serving(outpost: Outpost, name: str, **options) -> Sandbox:
    box = outpost.make(**options)
    box.files.write("/tmp/program.py", PROGRAM)
    box.commands.run(f"python3 /tmp/program.py {name}", background=True, timeout=0)

    def answers():
        try:
            return box.commands.run("curl -sf -m 5 http://127.0.0.1:8000/").stdout
        except CommandExitException:
            return None

    until(answers, what="the program inside")
    return box


@pytest.fixture(scope="module")
def peer(outpost):
    box = serving(outpost, "peer")
    yield box
    box.kill()


@pytest.fixture(scope="module")
def stranger(outpost):
    """Not of the policy of `box`."""
    box = serving(outpost, "stranger")
    yield box
    box.kill()


def name_of(box: Sandbox, port: int = 8000) -> str:
    return f"{port}-{box.sandbox_id}.{DOMAIN}"


@pytest.fixture(scope="module")
def box(outpost, peer):
    box = outpost.make(network={"allowOut": [name_of(peer)], "denyOut": ["0.0.0.0/0"]})
    yield box
    box.kill()


def receipts(outpost: Outpost, box: Sandbox) -> list[dict]:
    lines = outpost.ask("GET", f"/v1/sandboxes/{box.sandbox_id}/egress?limit=1000").json()
    return [line["receipt"] for line in lines]


def curl(box: Sandbox, *arguments: str) -> tuple[int, str]:
    quoted = " ".join(f"'{argument}'" for argument in arguments)
    try:
        return 0, box.commands.run(f"curl -sS -m 10 {quoted}", timeout=30).stdout
    except CommandExitException as failed:
        return failed.exit_code, failed.stdout


SAY = """
import socket, sys
s = socket.create_connection(("{gateway}", 80), timeout=10)
s.sendall({request!r})
answer = b""
try:
    while data := s.recv(4096):
        answer += data
except OSError:
    pass
sys.stdout.buffer.write(answer)
"""


def say(box: Sandbox, request: str) -> str:
    """What comes back on one connection to the gateway."""
    box.files.write("/tmp/say.py", SAY.format(gateway=GATEWAY, request=request.encode()))
    return box.commands.run("python3 /tmp/say.py", timeout=30).stdout


def test_an_allowed_port_is_reached_by_name_and_nobody_is_asked_for_it(outpost, estate, box, peer):
    name = name_of(peer)
    assert peer.get_host(8000) == name, "as the SDK names it"
    code, answer = curl(box, f"http://{name}/some/path?x=1")
    assert code == 0
    told = json.loads(answer)
    assert (told["me"], told["path"], told["headers"]["host"]) == ("peer", "/some/path?x=1", name)
    assert not any(DOMAIN in asked for asked in estate.asked())

    def written():
        return [
            (line["kind"], line["rule"], line["outcome"], line.get("answer"), line.get("shown"))
            for line in receipts(outpost, box)
            if line.get("name") == name and line.get("record") != "AAAA"
        ]

    rule = "request/allow-out-1 within ceiling/own"
    wanted = [("dns", rule, "allowed", [GATEWAY], None), ("connection", rule, "allowed", None, name)]
    until(lambda: written()[:2] == wanted, what=f"both receipts, not {written()}")


def test_without_a_rule_for_the_host_the_name_is_refused(outpost, peer):
    # The open internet is not the way to other sandboxes.
    for network in ({}, {"allowOut": ["0.0.0.0/0"]}):
        lone = outpost.make(network=network)
        assert curl(lone, f"http://{name_of(peer)}/")[0] == 6
        told = say(lone, f"GET / HTTP/1.1\r\nHost: {name_of(peer)}\r\n\r\n")
        assert "403 Forbidden" in told
        assert json.loads(told.split("\r\n\r\n")[1])["rule"] == "request/default"
        lone.kill()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", GATEWAY, DOMAIN, f"sandbox.{DOMAIN}", f"api.{DOMAIN}"])
def test_nothing_else_of_the_server_is_reached(outpost, box, host):
    for path in ("/v1/info", "/health", "/metrics", "/v2/sandboxes"):
        key = f"X-API-Key: {outpost.api_key}"
        told = say(box, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{key}\r\n\r\n")
        assert told.startswith("HTTP/1.1 403 Forbidden\r\n"), told


def test_a_host_that_is_allowed_leads_to_no_other(outpost, box, peer, stranger):
    name, other, key = name_of(peer), name_of(stranger), f"X-API-Key: {outpost.api_key}"
    # The control: the other one is there, and whoever may reach it does.
    through = httpx.get(f"{outpost.url}/", headers={"Host": other}, timeout=20)
    assert through.json()["me"] == "stranger"
    assert "403 Forbidden" in say(box, f"GET / HTTP/1.1\r\nHost: {other}\r\n\r\n")
    assert "403 Forbidden" in say(box, f"GET http://{other}/ HTTP/1.1\r\nHost: {name}\r\n\r\n")
    assert "403 Forbidden" in say(box, f"GET http://localhost/v1/info HTTP/1.1\r\nHost: {name}\r\n{key}\r\n\r\n")
    assert "403 Forbidden" in say(box, f"CONNECT {other}:80 HTTP/1.1\r\nHost: {other}:80\r\n\r\n")
    assert "403 Forbidden" in say(box, f"GET / HTTP/1.1\r\nHost: {name}\r\nHost: {other}\r\n\r\n")
    # Headers that lead elsewhere from outside.
    headers = f"E2b-Sandbox-Id: {stranger.sandbox_id}\r\nE2b-Sandbox-Port: 8000\r\n{key}\r\n"
    answer = say(box, f"GET /v1/info HTTP/1.1\r\nHost: {name}\r\n{headers}\r\n")
    told = json.loads(answer.split("\r\n\r\n", 1)[1])
    assert (told["me"], told["path"]) == ("peer", "/v1/info")
    assert not {"e2b-sandbox-id", "e2b-sandbox-port", "x-api-key"} & told["headers"].keys()
    # A second request on the connection.
    second = f"GET /second HTTP/1.1\r\nHost: {other}\r\n\r\n"
    answer = say(box, f"GET /first HTTP/1.1\r\nHost: {name}\r\n\r\n{second}")
    assert (answer.count("HTTP/1.1 "), "/first" in answer, "stranger" in answer) == (1, True, False)


def test_no_guest_api_is_reached_not_even_one_without_a_token(outpost, peer):
    # Only the first interface makes one without a token.
    bare = outpost.ask("POST", "/sandboxes", json={"templateID": "base", "timeout": 600}).json()["sandboxID"]
    guest = outpost.make(network={"allowOut": [f"*.{DOMAIN}"], "denyOut": ["0.0.0.0/0"]})
    # The control: from outside, that one wants nothing, and the way from inside to another port is open.
    files, without = "/files?path=/etc/passwd&username=root", f"49983-{bare}.{DOMAIN}"
    assert httpx.get(f"{outpost.url}{files}", headers={"Host": without}, timeout=20).status_code == 200
    assert curl(guest, f"http://{name_of(peer)}/")[0] == 0
    for host in (without, name_of(peer, 49983), name_of(guest, 49983)):
        assert curl(guest, f"http://{host}{files}")[0] == 6, "it has no address"
        for header in ("", f"X-Access-Token: {peer._envd_access_token}\r\n"):
            told = say(guest, f"GET {files} HTTP/1.1\r\nHost: {host}\r\n{header}\r\n")
            assert told.startswith("HTTP/1.1 403 "), told
            body = json.loads(told.split("\r\n\r\n", 1)[1])
            assert (body["rule"], bool(body["remedy"])) == ("always/guest-api", True)
    outpost.ask("DELETE", f"/sandboxes/{bare}")
    guest.kill()


HOLD = """
import socket, sys
held = []
for _ in range({count}):
    s = socket.create_connection(("{gateway}", 80), timeout=10)
    s.sendall(b"GET / HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n\\r\\n")
    try:
        if s.recv(12) == b"HTTP/1.1 101":
            held.append(s)
    except ConnectionResetError:
        pass
print(len(held), flush=True)
sys.stdin.read()
"""


def test_a_sandbox_holds_so_many_connections_to_others_and_no_more(outpost, peer):
    name = name_of(peer)
    guest = outpost.make(network={"allowOut": [name], "denyOut": ["0.0.0.0/0"]})
    guest.files.write("/tmp/hold.py", HOLD.format(count=60, gateway=GATEWAY, name=name))
    guest.files.write("/tmp/held", "")
    held = guest.commands.run("tail -f /dev/null | python3 /tmp/hold.py > /tmp/held", background=True, timeout=0)
    until(lambda: guest.files.read("/tmp/held"), what="all attempts")
    count = int(guest.files.read("/tmp/held"))
    assert 1 <= count <= 32
    # Who else wants to reach it does: a client, and another sandbox.
    assert httpx.get(f"{outpost.url}/", headers={"Host": name}, timeout=20).status_code == 200
    other = outpost.make(network={"allowOut": [name], "denyOut": ["0.0.0.0/0"]})
    assert curl(other, f"http://{name}/")[0] == 0
    other.kill()

    def refused():
        lines = [line for line in receipts(outpost, guest) if line["rule"] == "limit/edge"]
        assert all((line["outcome"], line["shown"]) == ("denied", name) for line in lines)
        return len(lines) + sum(line.get("lost", 0) for line in receipts(outpost, guest))

    until(lambda: refused() > 0, what="a receipt that says refused")
    # Their places are free again when they end.
    held.kill()
    until(lambda: curl(guest, f"http://{name}/")[0] == 0, what="a place")
    guest.kill()


def test_private_ports_want_the_traffic_token(outpost):
    shut = serving(outpost, "shut", network={"allowPublicTraffic": False})
    guest = outpost.make(network={"allowOut": [name_of(shut)], "denyOut": ["0.0.0.0/0"]})
    url = f"http://{name_of(shut)}/"
    told = guest.commands.run(f"curl -s -o /dev/null -w '%{{http_code}}' {url}").stdout
    assert told == "403"
    code, answer = curl(guest, "-H", f"e2b-traffic-access-token: {shut.traffic_access_token}", url)
    assert (code, json.loads(answer)["me"]) == (0, "shut")
    guest.kill()
    shut.kill()


UPGRADE = """
import socket
s = socket.create_connection(("{name}", 80), timeout=10)
s.sendall(b"GET / HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n\\r\\n")
head = b""
while not head.endswith(b"\\r\\n\\r\\n"):
    head += s.recv(1)
print(head.split(b"\\r\\n")[0].decode(), flush=True)
s.sendall(b"over the tunnel")
print(s.recv(100).decode(), flush=True)
s.settimeout(60)
try:
    print("closed" if s.recv(1) == b"" else "data", flush=True)
except ConnectionResetError:
    print("reset", flush=True)
"""


def test_an_upgraded_connection_carries_and_is_cut_when_the_policy_tightens(outpost, peer):
    name = name_of(peer)
    guest = outpost.make(network={"allowOut": [name], "denyOut": ["0.0.0.0/0"]})
    guest.files.write("/tmp/upgrade.py", UPGRADE.format(name=name))
    guest.files.write("/tmp/told", "")
    guest.commands.run("python3 /tmp/upgrade.py > /tmp/told 2>&1", background=True, timeout=0)
    told = lambda: guest.files.read("/tmp/told").splitlines()  # noqa: E731
    until(lambda: told() == ["HTTP/1.1 101 Switching Protocols", "over the tunnel"], what="the tunnel")
    outpost.ask("PUT", f"/sandboxes/{guest.sandbox_id}/network", json={"denyOut": ["0.0.0.0/0"]})
    until(lambda: told()[2:] in (["reset"], ["closed"]), what="its end")
    assert curl(guest, f"http://{name}/")[0] == 6
    guest.kill()


def test_over_tls_it_is_refused_and_the_receipt_says_why(outpost, box, peer):
    assert curl(box, f"https://{name_of(peer)}/")[0] == 7

    def written():
        lines = receipts(outpost, box)
        return [line["rule"] for line in lines if line.get("address") == GATEWAY and line.get("port") == 443]

    until(lambda: "always/edge" in written(), what=f"the receipt, not {written()}")
    path = f"/v1/sandboxes/{box.sandbox_id}/egress/explain?host={name_of(peer)}"
    told = outpost.ask("GET", path).json()
    assert (told["allowed"], told["rule"]) == (False, "always/edge")
    assert "port 80" in told["remedy"]
    assert outpost.ask("GET", f"{path}&port=80").json()["allowed"]


def test_it_is_reached_again_after_a_crash_of_the_server(outpost, box, peer):
    outpost.kill()
    outpost.start()
    code, answer = curl(box, f"http://{name_of(peer)}/")
    assert (code, json.loads(answer)["me"]) == (0, "peer")
