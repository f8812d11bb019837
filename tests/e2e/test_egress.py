"""What leaves a sandbox: what both its policy and the operator's ceiling allow, and nothing else.

Every refusal stands beside the same thing being allowed, and a witness outside says that nothing arrived.
"""

import json
import time

import httpx
import pytest
from e2b import CommandExitException, Sandbox
from estate import FORBIDDEN, SERVER, UPSTREAM, Estate, Outpost, inside, outpost_in
from support import until

CONFIG = """
[egress]
open_private = ["198.51.100.0/24"]

[[egress.ceiling]]
id = "hosts"
allow = "*.allowed.example"

[[egress.ceiling]]
id = "echo"
allow = "198.51.100.2"
ports = [5432]

[[egress.ceiling]]
id = "everywhere"
allow = "169.254.0.0/16"
"""

POLICY = {
    "allowOut": ["www.allowed.example", "rebound.allowed.example", UPSTREAM, "169.254.169.254"],
    "denyOut": ["0.0.0.0/0"],
}

PAGE = "the upstream's page\n"


@pytest.fixture(scope="module")
def estate(work_folder):
    # A name that is allowed, and leads where nothing may go.
    estate = Estate(work_folder, {"rebound.allowed.example": "169.254.169.254"})
    yield estate
    estate.close()


@pytest.fixture(scope="module")
def outpost(server, estate, work_folder):
    """A server in the estate. The one that all tests share has prepared the template."""
    with outpost_in(estate, work_folder, "egress", CONFIG) as outpost:
        yield outpost


@pytest.fixture
def frugal_outpost(server, estate, work_folder):
    """One whose sandboxes may carry 1 MiB each."""
    with outpost_in(estate, work_folder, "frugal", CONFIG.replace("[egress]", "[egress]\nmax_mib = 1")) as outpost:
        yield outpost


def ask(outpost: Outpost, method: str, path: str, **more) -> httpx.Response:
    return outpost.ask(method, path, **more)


def make(outpost: Outpost, **options) -> tuple[Sandbox, httpx.Response]:
    answer = ask(outpost, "POST", "/v2/sandboxes", json={"templateID": "base", "timeout": 600} | options)
    return Sandbox.connect(answer.json()["sandboxID"], **outpost.opts), answer


@pytest.fixture(scope="module")
def box(outpost):
    box, _ = make(outpost, network=POLICY)
    yield box
    box.kill()


def code_of(box: Sandbox, command: str) -> tuple[int, str]:
    try:
        done = box.commands.run(command, timeout=30)
    except CommandExitException as failed:
        return failed.exit_code, failed.stdout
    return done.exit_code, done.stdout


def receipts(outpost: Outpost, box: Sandbox) -> list[dict]:
    lines = ask(outpost, "GET", f"/v1/sandboxes/{box.sandbox_id}/egress?limit=1000").json()
    return [line["receipt"] for line in lines]


@pytest.mark.parametrize("url", ["http://www.allowed.example/", "https://www.allowed.example/"])
def test_an_allowed_host_is_reached(outpost, box, url):
    started = len(receipts(outpost, box))
    assert code_of(box, f"curl -sSk -m 8 {url}") == (0, PAGE)
    new = until(lambda: [line for line in receipts(outpost, box)[started:] if line["kind"] != "dns"])
    assert any(
        line["outcome"] == "allowed" and line["address"] == UPSTREAM and "request/allow-out-1" in line["rule"]
        for line in new
    ), new


SAY = f"import socket; s = socket.create_connection(('{UPSTREAM}', 5432)); s.sendall(b'hi'); print(s.recv(2))"
CONNECT = f'python3 -c "{SAY}"'


def test_an_allowed_address_is_reached_on_its_port(box):
    assert code_of(box, CONNECT) == (0, "b'hi'\n")


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/",
        "https://api.allowed.example/",
        "https://www.allowed.example.other.example/",
        "https://allowed.example/",
    ],
)
def test_other_hosts_have_no_address_and_are_asked_of_nobody(box, estate, url):
    name = url.split("/")[2]
    assert code_of(box, f"curl -sSk -m 8 {url}") == (6, "")
    assert name not in estate.asked()
    # The same name is known where the server is.
    assert "www.allowed.example" in estate.asked() or code_of(box, "getent hosts www.allowed.example")[0] == 0


@pytest.mark.parametrize(
    "url",
    [
        "http://www.allowed.example:8080/",
        "https://www.allowed.example:8443/",
        f"http://{UPSTREAM}/",
        f"https://{UPSTREAM}/",
        f"http://{UPSTREAM}:8080/",
        f"http://{SERVER}/",
        "http://rebound.allowed.example/",
        "http://10.11.12.1/",
    ],
)
def test_other_ports_and_addresses_are_refused(box, estate, url):
    seen = len(estate.http.seen) + len(estate.https.seen) + len(estate.other_port.seen)
    started = time.monotonic()
    code, said = code_of(box, f"curl -sSk -m 20 {url}")
    assert PAGE not in said and (code != 0 or "egress_denied" in said), (code, said)
    assert time.monotonic() - started < 10, "it is told at once"
    assert len(estate.http.seen) + len(estate.https.seen) + len(estate.other_port.seen) == seen


@pytest.mark.parametrize(
    "host",
    [
        *FORBIDDEN,
        "2852039166",
        "0xa9fea9fe",
        "0251.0376.0251.0376",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::a9fe:a9fe]",
        "[fd00:ec2::254]",
        "169.254.43518",
    ],
)
def test_metadata_and_private_addresses_are_never_reached_however_they_are_written(box, estate, host):
    # Control: they are there, and the server's own programs reach them.
    for witness, address in zip(estate.forbidden, FORBIDDEN, strict=True):
        if address == host:
            with inside(estate.home):
                assert httpx.get(f"http://{address}/", timeout=10).text == PAGE
            assert len(witness.seen) == 1
    before = [len(witness.seen) for witness in estate.forbidden]
    code, said = code_of(box, f"curl -sS -g -m 8 http://{host}/latest/meta-data/")
    assert code != 0 and said == "", (code, said)
    assert [len(witness.seen) for witness in estate.forbidden] == before


def test_what_a_connection_shows_must_be_what_was_resolved(box, estate):
    seen = len(estate.http.seen)
    code, said = code_of(box, "curl -sS -m 8 -H 'Host: other.example' http://www.allowed.example/")
    assert code == 0 and json.loads(said)["error"] == "egress_denied", said
    assert len(estate.http.seen) == seen
    seen = len(estate.https.seen)
    hello = (
        "import socket, ssl, sys; c = ssl._create_unverified_context();"
        "s = c.wrap_socket(socket.create_connection(('www.allowed.example', 443)), server_hostname=sys.argv[1]);"
        "s.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n'); print(s.recv(100)[:12])"
    )
    box.files.write("/tmp/hello.py", hello)
    assert code_of(box, "python3 /tmp/hello.py www.allowed.example") == (0, "b'HTTP/1.0 200'\n")
    for name in ["other.example", "api.allowed.example"]:
        assert code_of(box, f"python3 /tmp/hello.py {name}") == (1, "")
    assert len(estate.https.seen) == seen + 1


def test_nobody_asks_for_more_than_the_ceiling(outpost, estate):
    box, made = make(outpost)
    assert "open internet" in made.headers["x-sandglass-warning"]
    native = ask(outpost, "GET", f"/v1/sandboxes/{box.sandbox_id}").json()
    assert native["network"] == "policy" and native["warnings"], native
    assert code_of(box, "curl -sS -m 8 http://api.allowed.example/") == (0, PAGE)
    assert code_of(box, "curl -sS -m 8 http://other.example/")[0] == 6
    box.kill()
    sealed, made = make(outpost, allow_internet_access=False)
    assert "x-sandglass-warning" not in made.headers
    assert code_of(sealed, "curl -sS -m 8 http://api.allowed.example/")[0] == 6
    assert code_of(sealed, CONNECT)[0] == 1
    sealed.kill()


TALK = f"""
import socket, time
s = socket.create_connection(('{UPSTREAM}', 5432))
try:
    while True:
        s.sendall(b'x')
        if not s.recv(1):
            break
        time.sleep(0.05)
except OSError:
    pass
print('cut')
"""


def test_a_policy_that_tightens_cuts_what_runs_and_one_that_widens_is_in_force_at_once(outpost, estate):
    box, _ = make(outpost, network=POLICY)
    path = f"/sandboxes/{box.sandbox_id}/network"
    box.files.write("/tmp/talk.py", TALK)
    talk = box.commands.run("python3 /tmp/talk.py", background=True)
    until(lambda: estate.echo.open == 1, what="it is connected")
    # A change that still allows it does not touch it.
    ask(outpost, "PUT", path, json={"allowOut": [UPSTREAM], "denyOut": ["0.0.0.0/0"]})
    before = estate.echo.bytes
    until(lambda: estate.echo.bytes > before + 3, what="it goes on")
    assert code_of(box, "curl -sS -m 8 http://www.allowed.example/")[0] == 6
    ask(outpost, "PUT", path, json={"allow_internet_access": False})
    until(lambda: estate.echo.open == 0, what="it is cut")
    assert talk.wait().stdout == "cut\n"
    assert code_of(box, CONNECT)[0] == 1
    ask(outpost, "PUT", path, json=POLICY)
    assert code_of(box, "curl -sS -m 8 http://www.allowed.example/") == (0, PAGE)
    box.kill()


def test_the_same_policy_holds_after_a_crash_of_the_server(outpost, estate):
    box, _ = make(outpost, network=POLICY)
    assert code_of(box, "curl -sS -m 8 http://www.allowed.example/") == (0, PAGE)
    before = len(until(lambda: receipts(outpost, box)))
    outpost.kill()
    outpost.start()
    assert code_of(box, "curl -sS -m 8 http://www.allowed.example/") == (0, PAGE)
    assert code_of(box, "curl -sS -m 8 http://other.example/")[0] == 6
    assert code_of(box, f"curl -sS -m 8 http://{UPSTREAM}:8080/")[0] != 0
    lines = until(lambda: (now := receipts(outpost, box)) and len(now) > before and now)
    assert lines[0]["kind"] == "dns" and lines[0]["outcome"] == "allowed"
    box.kill()
    # What it did is known for longer than it lives.
    assert receipts(outpost, box)[: len(lines)] == lines


def test_a_name_that_was_resolved_before_a_crash_needs_no_second_question(outpost, estate):
    box, _ = make(outpost, network=POLICY)
    # Programs keep what they resolved, and ask nobody when they connect again.
    again = f"curl -sS -m 8 --resolve www.allowed.example:80:{UPSTREAM} http://www.allowed.example/"
    assert PAGE not in code_of(box, again)[1], "it was not resolved yet"
    assert code_of(box, "curl -sS -m 8 http://www.allowed.example/") == (0, PAGE)
    kept = outpost.data_dir / "serve/receipts" / box.sandbox_id / "egress.json"
    until(lambda: kept.exists() and "www.allowed.example" in kept.read_text(), what="it is remembered")
    outpost.kill()
    outpost.start()
    assert code_of(box, again) == (0, PAGE)
    # What the policy of the day does not allow is forgotten.
    ask(outpost, "PUT", f"/sandboxes/{box.sandbox_id}/network", json={"allow_internet_access": False})
    assert PAGE not in code_of(box, again)[1]
    box.kill()


def test_the_command_line_explains(outpost, box):
    allowed = outpost.cli("egress", "explain", box.sandbox_id, "www.allowed.example")
    assert allowed.stdout.startswith("allowed: www.allowed.example port 443\nby       request/allow-out-1 within ceiling/hosts\n")
    denied = outpost.cli("egress", "explain", box.sandbox_id, "api.allowed.example:80", check=False)
    assert denied.returncode == 1
    assert "denied: api.allowed.example port 80" in denied.stdout and "remedy" in denied.stdout
    metadata = outpost.cli("egress", "explain", box.sandbox_id, "169.254.169.254:80", check=False)
    assert "always/metadata" in metadata.stdout and "remedy" not in metadata.stdout
    assert code_of(box, "curl -sS -m 8 http://other.example/")[0] == 6
    log = until(lambda: (text := outpost.cli("egress", "log", box.sandbox_id).stdout) and "other.example" in text and text)
    assert "denied" in log


ECHO = f"""
import socket
total = 0
try:
    with socket.create_connection(("{UPSTREAM}", 5432)) as line:
        while True:
            line.sendall(b"x" * 4096)
            left = 4096
            while left:
                got = len(line.recv(left))
                if not got:
                    raise ConnectionResetError
                left -= got
            total += 8192
except ConnectionResetError:
    print(total)
"""


def test_a_sandbox_carries_so_many_bytes_and_no_more_also_after_a_crash(frugal_outpost):
    outpost = frugal_outpost
    box, _ = make(outpost, network=POLICY)
    box.files.write("echo.py", ECHO)
    carried = int(box.commands.run("python3 echo.py", timeout=60).stdout)
    assert (1 << 20) - (64 << 10) <= carried <= 1 << 20
    # Nothing goes any more, and the receipts say why.
    assert box.commands.run("python3 echo.py", timeout=60).stdout == "0\n"
    refused = until(lambda: [line for line in receipts(outpost, box) if line["rule"] == "limit/bytes"])
    assert all(line["outcome"] == "denied" for line in refused)
    # Another sandbox has its own.
    other, _ = make(outpost, network=POLICY)
    assert code_of(other, CONNECT) == (0, "b'hi'\n")
    # The next server knows, once it is written down, which takes up to half a minute.
    kept = outpost.data_dir / "serve/receipts" / box.sandbox_id / "egress.json"
    until(lambda: kept.exists() and sum(json.loads(kept.read_text())["carried"].values()) >= carried, within=60)
    outpost.kill()
    outpost.start()
    assert box.commands.run("python3 echo.py", timeout=60).stdout == "0\n"
