"""A running sandbox is written to a snapshot, or forked, and runs on; what is made of it goes on from there by itself."""

import json
import subprocess
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from conftest import pages
from e2b import NotFoundException, Sandbox, SandboxException
from e2b.exceptions import RateLimitException, ServiceBusyException
from faults import configured, crash
from support import until

# Memory and disk grow together: should they be of two moments anywhere, a number is missing or is there twice.
COUNTER = r"""
import os, time
disk = os.open("/home/user/counted", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
n = 0
while True:
    n += 1
    os.write(disk, b"%d\n" % n)
    time.sleep(0.001)
"""

# A process with a populated structure, as an agent would have its data loaded: asked and changed over HTTP.
FRAME = r"""
import json
from http.server import BaseHTTPRequestHandler, HTTPServer

frame = {f"row {n}": {"n": n, "square": n * n} for n in range(100_000)}

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        said = json.dumps({"rows": len(frame), "last": frame[f"row {99_999}"], "mine": frame.get("mine")})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(said.encode())

    def do_POST(self):
        frame["mine"] = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.do_GET()

HTTPServer(("", 8000), Handler).serve_forever()
"""

# Sends something, and then nothing for ever.
STUCK = r"""
import socket
listener = socket.create_server(("", 9000))
kept = []
while True:
    client, _ = listener.accept()
    kept.append(client)
    client.recv(65536)
    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nbegun")
"""


def call(server, method: str, path: str, **options) -> httpx.Response:
    options = {"headers": server.headers, "timeout": 120} | options
    return httpx.request(method, server.url + path, **options)


def port(server, sandbox, port: int, method: str = "GET", **options) -> httpx.Response:
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}
    return httpx.request(method, server.url, headers=headers, timeout=60, **options)


def start(sandbox, name: str, program: str):
    sandbox.files.write(f"/home/user/{name}.py", program)
    return sandbox.commands.run(f"python3 -u {name}.py", background=True, timeout=0)


def images(server) -> list[str]:
    return [entry.name for entry in (server.data_dir / "host" / "images").iterdir()]


# Images that are none of a test's: sandboxes of other files may be paused.
OTHERS = set()


@pytest.fixture(autouse=True)
def others(server):
    OTHERS.clear()
    OTHERS.update(images(server))


def no_image(server):
    """What is being removed is given the time for it."""
    until(lambda: set(images(server)) <= OTHERS, within=60, what="no image to be left")


def listed(server, **filters) -> list[str]:
    found = [snapshot for page in pages(Sandbox.list_snapshots(limit=2, **server.opts, **filters)) for snapshot in page]
    return [snapshot.snapshot_id for snapshot in found]


@pytest.fixture
def made(server):
    """Sandboxes that end with the test, and snapshots as well."""
    ids: list = []
    yield lambda made: ids.append(made) or made
    for one in ids:
        if isinstance(one, Sandbox):
            Sandbox.kill(one.sandbox_id)
        else:
            Sandbox.delete_snapshot(one.snapshot_id)


@pytest.fixture
def sandbox(server, made):
    return made(Sandbox.create(timeout=300, metadata={"of": "source"}, envs={"WHOSE": "source"}))


def test_what_is_made_of_a_snapshot_goes_on_from_there_and_so_does_the_sandbox(server, made, sandbox):
    counter = start(sandbox, "counter", COUNTER)
    read = lambda box: [int(line) for line in box.files.read("/home/user/counted").split()]  # noqa: E731
    until(lambda: sandbox.files.exists("/home/user/counted") and len(read(sandbox)) > 20, what="a count")
    end = sandbox.get_info().end_at
    snapshot = made(sandbox.create_snapshot())
    assert snapshot.names == []
    at = len(read(sandbox))
    children = [made(Sandbox.create(snapshot.snapshot_id, timeout=120)) for _ in range(3)]
    for box in [sandbox, *children]:
        before = len(read(box))
        until(lambda: len(read(box)) > before, what="the count to go on")
        numbers = read(box)
        assert numbers == list(range(1, len(numbers) + 1)), "memory and disk are of two moments"
        assert [process.pid for process in box.commands.list() if process.pid == counter.pid]
    # The source lost nothing, and lives as long as it was to live.
    assert len(read(sandbox)) > at
    assert sandbox.get_info().end_at == end
    # What one of them does is its own.
    assert children[0].commands.kill(counter.pid)
    children[0].files.write("/home/user/counted", "mine")
    for box in [sandbox, *children[1:]]:
        assert [process.pid for process in box.commands.list() if process.pid == counter.pid]
        assert len(read(box)) > 20


def test_a_stream_of_a_client_goes_on_over_snapshots(server, made, sandbox):
    lines = []
    counting = "for n in $(seq 1 400); do echo $n; sleep 0.01; done"
    running = sandbox.commands.run(counting, background=True, timeout=0)
    ended = threading.Thread(target=lambda: running.wait(on_stdout=lines.append))
    ended.start()
    until(lambda: lines, what="the first line")
    for _ in range(3):
        made(sandbox.create_snapshot())
    ended.join(120)
    assert not ended.is_alive(), "the command's end never came"
    assert "".join(lines).split() == [str(n) for n in range(1, 401)]


def test_connections_to_ports_end_at_once_and_new_ones_are_made(server, made, sandbox):
    start(sandbox, "stuck", STUCK)
    start(sandbox, "frame", FRAME)
    until(lambda: port(server, sandbox, 8000).status_code == 200, within=60, what="a server inside")
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "9000"}
    # Longer than anybody would wait; what is here ends it.
    with httpx.stream("GET", server.url, headers=headers, timeout=600) as response:
        body = response.iter_raw()
        assert next(body) == b"begun"
        made(sandbox.create_snapshot())
        with pytest.raises(httpx.RemoteProtocolError):
            next(body)
    assert port(server, sandbox, 8000).json()["rows"] == 100_000


def test_five_forks_of_a_loaded_process_are_changed_each_on_its_own(server, made, sandbox):
    start(sandbox, "frame", FRAME)
    until(lambda: port(server, sandbox, 8000).status_code == 200, within=60, what="a server inside")
    forks = sandbox.fork(count=5, timeout=120)
    assert all(isinstance(fork, Sandbox) for fork in forks), forks
    for fork in forks:
        made(fork)
    assert len({fork.sandbox_id for fork in [sandbox, *forks]}) == 6
    for fork in forks:
        assert port(server, fork, 8000, "POST", content=fork.sandbox_id).status_code == 200
    assert port(server, sandbox, 8000).json()["mine"] is None
    for fork in forks:
        said = port(server, fork, 8000).json()
        assert said == {"rows": 100_001, "last": {"n": 99_999, "square": 99_999**2}, "mine": fork.sandbox_id}
    # One image served all of them, and is not needed any more.
    no_image(server)
    assert listed(server, sandbox_id=sandbox.sandbox_id) == []


def test_a_fork_inherits_what_its_source_is_and_nothing_that_it_holds(server, made, sandbox):
    [fork] = sandbox.fork(timeout=120)
    made(fork)
    info = call(server, "GET", f"/v1/sandboxes/{fork.sandbox_id}").json()
    assert (info["origin"], info["made_from"]) == ("fork", sandbox.sandbox_id)
    assert (info["generation"], info["metadata"]) == (2, {"of": "source"})
    said = fork.commands.run("echo $WHOSE $E2B_SANDBOX_ID $(hostname) $(cat /etc/hostname /run/e2b/.E2B_SANDBOX_ID)")
    assert said.stdout == f"source{f' {fork.sandbox_id}' * 4}\n"
    assert sandbox.commands.run("hostname").stdout == f"{sandbox.sandbox_id}\n"
    # The token of the one opens nothing of the other.
    token = sandbox._envd_access_token
    assert token and fork._envd_access_token not in (None, token)
    headers = {"E2b-Sandbox-Id": fork.sandbox_id, "E2b-Sandbox-Port": "49983", "X-Access-Token": token}
    assert httpx.get(f"{server.url}/files?path=/etc/hostname", headers=headers).status_code == 401
    # Its end is its own, and its own end is no end of the other.
    assert fork.kill()
    assert sandbox.commands.run("echo on").stdout == "on\n"


def test_a_sandbox_of_a_snapshot_is_as_its_client_wants(server, made, sandbox):
    sandbox.commands.run("echo kept > /dev/shm/state")
    snapshot = made(sandbox.create_snapshot("as-wanted:v1"))
    body = {"templateID": "as-wanted:v1", "metadata": {"of": "child"}, "envVars": {"OWN": "child"}, "timeout": 60}
    response = call(server, "POST", "/v2/sandboxes", json=body)
    assert (response.status_code, response.headers["sandglass-origin"]) == (201, "snapshot"), response.text
    child = made(Sandbox.connect(response.json()["sandboxID"]))
    info = call(server, "GET", f"/v1/sandboxes/{child.sandbox_id}").json()
    assert (info["origin"], info["made_from"]) == ("snapshot", snapshot.snapshot_id.removesuffix(":default"))
    assert (info["metadata"], info["generation"], info["template"]) == ({"of": "child"}, 2, "base")
    assert child.commands.run("echo [$WHOSE] $OWN $(cat /dev/shm/state)").stdout == "[] child kept\n"
    # And a child is a source like any other.
    again = made(made(Sandbox.create(child.create_snapshot("grandchild").snapshot_id)).create_snapshot())
    grandchild = made(Sandbox.create(again.snapshot_id))
    assert grandchild.commands.run("cat /dev/shm/state").stdout == "kept\n"
    assert call(server, "GET", f"/v1/sandboxes/{grandchild.sandbox_id}").json()["generation"] == 4
    assert Sandbox.delete_snapshot("grandchild")
    cold = call(server, "POST", "/v2/sandboxes", json={"templateID": "base"})
    assert cold.headers["sandglass-origin"] == "template; path=cold"
    assert Sandbox.kill(cold.json()["sandboxID"])


def test_no_two_children_have_the_same_randomness(server, made, sandbox):
    forks = [made(fork) for fork in sandbox.fork(count=4, timeout=120)]
    draw = "python3 -c 'import os, random, uuid; print(os.urandom(16).hex(), uuid.uuid4(), random.random())'"
    drawn = [box.commands.run(draw).stdout.split() for box in [sandbox, *forks]]
    assert len({value for values in drawn for value in values}) == 15, drawn


def test_snapshots_are_found_by_id_and_by_name_until_they_are_deleted(server, made, sandbox):
    other = made(Sandbox.create(timeout=120))
    name = uuid.uuid4().hex
    first, second = (made(box.create_snapshot(name)) for box in (sandbox, other))
    tagged = made(sandbox.create_snapshot(f"{name}:v2"))
    assert first.names == second.names == [f"default/{name}:default"] and tagged.names == [f"default/{name}:v2"]
    assert set(listed(server)) >= {first.snapshot_id, second.snapshot_id, tagged.snapshot_id}
    assert listed(server, sandbox_id=sandbox.sandbox_id) == [tagged.snapshot_id, first.snapshot_id]
    # The name is that of the newest; the one before is there by its id.
    assert listed(server, name=name) == [tagged.snapshot_id, second.snapshot_id]
    assert listed(server, name=f"default/{name}:v2") == [tagged.snapshot_id]
    assert listed(server, name=f"elsewhere/{name}") == listed(server, name="no-such-name") == []
    assert listed(server, name=first.snapshot_id) == [first.snapshot_id]
    child = made(Sandbox.create(f"default/{name}"))
    assert call(server, "GET", f"/v1/sandboxes/{child.sandbox_id}").json()["made_from"] in second.snapshot_id
    assert Sandbox.delete_snapshot(f"default/{name}:v2")
    assert not Sandbox.delete_snapshot(f"default/{name}:v2")
    assert Sandbox.delete_snapshot(first.snapshot_id)
    with pytest.raises((NotFoundException, SandboxException)):
        Sandbox.create(first.snapshot_id)
    assert listed(server, sandbox_id=sandbox.sandbox_id) == []
    # What was made from it has all that it needs.
    assert Sandbox.delete_snapshot(second.snapshot_id)
    no_image(server)
    assert child.commands.run("echo on").stdout == "on\n"


def test_what_is_no_name(server, sandbox):
    path = f"/sandboxes/{sandbox.sandbox_id}/snapshots"
    refused = [("base", 409, "template"), ("other-team/x", 400, "default/"), ("a b", 400, "expected a name"), ("", 400, "name")]
    for name, status, word in refused:
        response = call(server, "POST", path, json={"name": name})
        assert response.status_code == status and word in response.json()["message"], response.text
    response = call(server, "POST", path, json={"memory": False})
    assert (response.status_code, response.json()["error_code"]) == (400, "snapshot_filesystem_only_disabled")
    assert call(server, "DELETE", "/templates/base").status_code == 403
    no_image(server)


def test_another_teams_snapshot_is_one_that_is_not_there(server, made, sandbox):
    name = uuid.uuid4().hex
    snapshot = made(sandbox.create_snapshot(name))
    admin = lambda *words: server.cli(*words, "--data-dir", str(server.data_dir)).stdout  # noqa: E731
    team = f"team {name}"
    admin("team", "create", team)
    key = admin("key", "create", "--team", team).strip()
    stranger = {"headers": {"X-API-Key": key}}
    for reference in (snapshot.snapshot_id, name, f"default/{name}"):
        assert call(server, "POST", "/v2/sandboxes", json={"templateID": reference}, **stranger).status_code == 404
        quoted = reference.replace("/", "%2F").replace(":", "%3A")
        assert call(server, "DELETE", f"/templates/{quoted}", **stranger).status_code == 404
    assert call(server, "GET", f"/snapshots?name={name}", **stranger).json() == []
    assert call(server, "GET", "/v1/snapshots", **stranger).json() == []
    path = f"/sandboxes/{sandbox.sandbox_id}"
    for verb in ("snapshots", "fork"):
        assert call(server, "POST", f"{path}/{verb}", **stranger).status_code == 404
    assert made(Sandbox.create(snapshot.snapshot_id)).is_running()


def test_what_is_legal_when(server, made, sandbox):
    path = f"/sandboxes/{sandbox.sandbox_id}"
    sandbox.pause()
    for verb, status in (("snapshots", 404), ("fork", 409)):
        response = call(server, "POST", f"{path}/{verb}")
        assert (response.status_code, response.json()["message"]) == (status, "the sandbox is paused: resume it first")
    Sandbox.connect(sandbox.sandbox_id, timeout=120)
    # With what it remembers of its pause, in its next generation.
    made(sandbox.create_snapshot())
    for body in ({"count": 0}, {"count": 101}, {"timeout": 0}, {"timeout": 10**9}):
        assert call(server, "POST", f"{path}/fork", json=body).status_code == 400, body
    # Whatever comes first of many, it is one or the other, and nothing is left half done.
    with ThreadPoolExecutor(8) as pool:
        both = [pool.submit(call, server, "POST", f"{path}/{verb}") for verb in ["pause", "snapshots", "fork"] * 2]
        statuses = [response.result().status_code for response in both]
    assert set(statuses) <= {201, 204, 404, 409}, statuses
    for page in pages(Sandbox.list_snapshots(sandbox_id=sandbox.sandbox_id)):
        for snapshot in page:
            made(snapshot)
    assert Sandbox.kill(sandbox.sandbox_id)
    for verb in ("snapshots", "fork"):
        assert call(server, "POST", f"{path}/{verb}").status_code in (404, 409)


def test_what_can_not_be_written_runs_on(server, sandbox):
    holding = "exec 3> gone; rm gone; echo kept >&3; touch held; exec sleep 1000"
    held = sandbox.commands.run(holding, background=True, timeout=0)
    until(lambda: sandbox.files.exists("/home/user/held"), what="the file to be deleted")
    for verb in ("snapshots", "fork"):
        response = call(server, "POST", f"/sandboxes/{sandbox.sandbox_id}/{verb}")
        assert response.status_code == 409 and "runs on" in response.json()["message"], response.text
    assert [process for process in sandbox.commands.list() if process.pid == held.pid]
    no_image(server)


def test_deleted_while_sandboxes_are_made_of_it(server, made, sandbox):
    snapshot = sandbox.create_snapshot()
    body = {"templateID": snapshot.snapshot_id, "timeout": 120}
    with ThreadPoolExecutor(8) as pool:
        creating = [pool.submit(call, server, "POST", "/v2/sandboxes", json=body) for _ in range(6)]
        assert Sandbox.delete_snapshot(snapshot.snapshot_id)
        responses = [response.result() for response in creating]
    for response in responses:
        assert response.status_code in (201, 404), response.text
        if response.status_code == 201:
            child = made(Sandbox.connect(response.json()["sandboxID"]))
            assert child.commands.run("echo on").stdout == "on\n"
    no_image(server)


def test_a_fork_is_admitted_as_a_whole_or_not_at_all(servers, work_folder):
    server = configured(servers, work_folder, "[quota]\nsandboxes = 3\n[host]\nmemory_mib = 1000000\ndisk_mib = 30000\n")
    sandbox = Sandbox.create(timeout=300, **server.opts)
    opts = server.opts
    with pytest.raises(RateLimitException, match="3 sandboxes"):
        Sandbox.fork(sandbox.sandbox_id, count=3, **opts)
    running = lambda: [info.sandbox_id for page in pages(Sandbox.list(**opts)) for info in page]  # noqa: E731
    assert running() == [sandbox.sandbox_id]
    no_image(server)
    forks = Sandbox.fork(sandbox.sandbox_id, count=2, timeout=120, **opts)
    assert len(running()) == 3, forks
    # Three disks of 4096 MiB, and images of 4096 + 1024: three more fit.
    made = [sandbox.create_snapshot() for _ in range(3)]
    with pytest.raises(ServiceBusyException, match="MiB of disk"):
        sandbox.create_snapshot()
    assert Sandbox.delete_snapshot(made.pop().snapshot_id, **opts)
    made.append(sandbox.create_snapshot())
    # They are room that is taken, whoever asks for it, also after a crash.
    crash(server, "both")
    server.start()
    with pytest.raises(ServiceBusyException, match="MiB of disk"):
        sandbox.create_snapshot()
    for snapshot in made:
        assert Sandbox.delete_snapshot(snapshot.snapshot_id, **opts)
    for id in running():
        assert Sandbox.kill(id, **opts)
    server.assert_nothing_left()
    no_image(server)
    server.stop()


def test_a_disk_that_is_full_costs_the_snapshot_alone(cramped_server):
    server = cramped_server
    sandbox = Sandbox.create(timeout=300, **server.opts)
    sandbox.commands.run("echo kept > /dev/shm/memory")
    # No room for a copy of the disk at first, and none for the memory then.
    for size in ("130M", "95M"):
        sandbox.commands.run(f"head -c {size} /dev/urandom > of-{size}; sha256sum of-{size} >> sums; sync")
        for verb in ("snapshots", "fork"):
            response = call(server, "POST", f"/sandboxes/{sandbox.sandbox_id}/{verb}")
            assert (response.status_code, response.json().get("error_code")) == (503, "sandbox_capacity_unavailable")
            assert "out of disk space" in response.json()["message"]
            no_image(server)
    said = sandbox.commands.run("sha256sum -c sums; cat /dev/shm/memory")
    assert said.stdout == "of-130M: OK\nof-95M: OK\nkept\n"
    assert listed(server) == []
    # Where there is room, there is a snapshot.
    assert sandbox.kill()
    small = Sandbox.create(timeout=300, **server.opts)
    snapshot = small.create_snapshot()
    child = Sandbox.create(snapshot.snapshot_id, timeout=120, **server.opts)
    assert child.commands.run("echo on").stdout == "on\n"
    assert child.kill() and small.kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.opts)
    server.assert_nothing_left()


def test_a_new_server_has_the_snapshots_of_the_last_one(lone_server):
    server = lone_server
    sandbox = Sandbox.create(timeout=300, **server.opts)
    sandbox.commands.run("echo kept > /dev/shm/state")
    snapshot = sandbox.create_snapshot("lasting")
    assert sandbox.kill()
    crash(server, "both")
    server.start()
    assert listed(server, name="lasting") == [snapshot.snapshot_id]
    child = Sandbox.create("lasting", timeout=120, **server.opts)
    assert child.commands.run("cat /dev/shm/state").stdout == "kept\n"
    assert child.kill()
    _, ledger = server.ledger()
    assert not ledger["left_over"] and not ledger["missing"], ledger
    assert Sandbox.delete_snapshot("lasting", **server.opts)
    no_image(server)


def test_the_command_line(server, sandbox):
    snapshot = server.cli("sandbox", "snapshot", sandbox.sandbox_id, "--name", "cli:v1").stdout.strip()
    rows = server.cli("snapshot", "list").stdout.splitlines()
    [row] = [row for row in rows if snapshot in row]
    assert "default/cli:v1" in row and sandbox.sandbox_id in row
    [told] = [one for one in json.loads(server.cli("snapshot", "list", "--json").stdout) if one["id"] == snapshot]
    assert told["sandbox"] == sandbox.sandbox_id and told["disk"]["bytes"] > 1 << 20
    assert json.loads(server.cli("snapshot", "show", "default/cli:v1").stdout)["id"] == snapshot
    assert server.cli("run", "--template", snapshot, "--", "echo", "on").stdout == "on\n"
    forks = server.cli("sandbox", "fork", sandbox.sandbox_id, "--count", "2", "--timeout", "120").stdout.split()
    assert len(forks) == 2
    for fork in forks:
        assert server.cli("sandbox", "exec", fork, "--", "hostname").stdout == f"{fork}\n"
    server.cli("sandbox", "kill", *forks)
    server.cli("snapshot", "delete", "default/cli:v1")
    failed = server.cli("snapshot", "delete", snapshot, check=False)
    assert failed.returncode != 0 and "not found" in failed.stderr
    failed = server.cli("sandbox", "fork", "0" * 20, check=False)
    assert failed.returncode != 0 and "not found" in failed.stderr


def test_the_source_lists_no_file_of_the_host(server, made, sandbox):
    """What a snapshot is made of is root's alone: in it is the memory of the sandbox, with what secrets that holds."""
    snapshot = made(sandbox.create_snapshot())
    folder = server.data_dir / "host" / "images" / snapshot.snapshot_id.removesuffix(":default")
    listing = subprocess.run(["setpriv", "--reuid=65534", "--clear-groups", "ls", folder], capture_output=True)
    assert listing.returncode != 0
