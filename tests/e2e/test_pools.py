"""Unused copies of a template that are ready before anybody asks: each is one sandbox's, and nobody's before."""

import json
import re
import struct
import time

import httpx
import pytest
from conftest import empty
from e2b import Sandbox
from faults import PATIENCE, Attempt, all_at_once, configured, crash, log_size, reached
from support import ROOMY, cgroups_named, until
from test_templates import DEFINITION, build, call, counted, create, folder

SIZE = 3


def unused(server) -> list[str]:
    """Those that are made for nobody, whether they are ready or not."""
    return [mark.parent.name for mark in (server.data_dir / "host" / "sandboxes").glob("*/unused")]


def ready(server) -> int:
    text = httpx.get(f"{server.url}/metrics", headers=server.headers, timeout=60).text
    return int(re.search(r"^sandglass_pool_sandboxes (\d+)$", text, re.MULTILINE)[1])


def filled(server, size: int = SIZE):
    until(lambda: ready(server) == size, within=PATIENCE, what=f"a pool of {size}")


@pytest.fixture(scope="module")
def pooled(servers, work_folder, tmp_path_factory):
    """A server with a pool of a template of its own."""
    server = configured(servers, work_folder, ROOMY + f"[templates.counter]\npool = {SIZE}\n")
    build(server, folder(tmp_path_factory.mktemp("counter") / "counter", DEFINITION | {"pool": 1}))
    yield server
    call(server, "DELETE", "/v1/templates/counter")
    empty(server)


IDENTITY = "cat /etc/machine-id /proc/sys/kernel/random/boot_id; head -c 16 /dev/urandom | od -An -tx1; hostname"


def test_each_is_a_sandbox_of_its_own_that_went_on_from_the_template(pooled):
    filled(pooled)
    first, second = [create(pooled, "counter") for _ in range(2)]
    assert [origin for _, origin in (first, second)] == ["template; path=pool"] * 2
    first, second = first[0], second[0]
    assert first.sandbox_id != second.sandbox_id and first._envd_access_token != second._envd_access_token
    said = [one.commands.run(IDENTITY).stdout.split("\n") for one in (first, second)]
    for of_first, of_second in zip(*said):
        assert of_first == of_second == "" or of_first != of_second, said
    assert [counted(one)[0] for one in (first, second)] == [counted(first)[0]] * 2, "it is the same process"
    before = counted(first)[1]
    until(lambda: counted(first)[1] > before, what="it counts on")
    info = call(pooled, "GET", f"/v1/sandboxes/{first.sandbox_id}").json()
    assert (info["origin"], info["start_path"], info["generation"]) == ("template", "pool", 3)
    first.files.write("/home/user/mine", "of the first")
    assert not second.files.exists("/home/user/mine")
    # It comes back as any other.
    first.pause()
    first = Sandbox.connect(first.sandbox_id, **pooled.opts)
    assert first.files.read("/home/user/mine") == "of the first"
    for one in (first, second):
        one.kill()


def test_what_a_client_asks_for_is_in_force(pooled):
    filled(pooled)
    body = {"templateID": "counter", "timeout": 300, "envVars": {"MINE": "yes"}, "secure": True, "allowInternetAccess": False}
    made = call(pooled, "POST", "/v2/sandboxes", json=body)
    assert (made.status_code, made.headers["sandglass-origin"]) == (201, "template; path=pool")
    sandbox = Sandbox.connect(made.json()["sandboxID"], **pooled.opts)
    assert sandbox.commands.run("echo $MINE $COLOUR").stdout == "yes a b'c\n"
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    without = httpx.get(f"{pooled.url}/files?path=/etc/hostname", headers=headers, timeout=60)
    assert without.status_code == 401
    # Asked of, the network answers: the server's sockets are in its airlock.
    refused = sandbox.commands.run("timeout 20 getent hosts example.com; echo $?").stdout
    assert refused == "2\n"
    explained = call(pooled, "GET", f"/v1/sandboxes/{sandbox.sandbox_id}/egress?limit=10").json()
    assert explained, "nothing was decided about it"
    sandbox.kill()


def cpu(id: str) -> int:
    """CPU time of a sandbox, in nanoseconds or microseconds: enough to see whether it grows."""
    for group in cgroups_named(id):
        for file, field in (("cpuacct.usage", 0), ("cpu.stat", 1)):
            if (group / file).exists() and (words := (group / file).read_text().split()):
                if file == "cpuacct.usage" or words[0] == "usage_usec":
                    return int(words[field])
    raise AssertionError(f"{id} has no control group that counts")


def stands_still(ids: list[str]) -> bool:
    before = [cpu(id) for id in ids]
    time.sleep(0.5)
    return before == [cpu(id) for id in ids]


def test_they_take_no_cpu_and_the_ledger_knows_them(pooled):
    filled(pooled)
    # Those that were made last may be being stopped yet.
    until(lambda: stands_still(unused(pooled)), within=PATIENCE, what="them to stand still")
    code, ledger = pooled.ledger(wait=0)
    assert (code, ledger["left_over"], ledger["missing"]) == (0, [], [])
    assert ledger["counts"]["process"]["spare"] >= SIZE


def test_one_that_computes_stands_still_too_and_goes_on(pooled, tmp_path):
    spin = "i=0; while :; do i=$((i + 1)); echo $i > /dev/shm/spun; done"
    definition = {"name": "spinner", "start": spin, "ready": "test -s /dev/shm/spun", "pool": 1}
    build(pooled, folder(tmp_path / "spinner", definition, setup="true"))
    filled(pooled, SIZE + 1)
    until(lambda: stands_still(unused(pooled)), within=PATIENCE, what="them to stand still")
    taken, origin = create(pooled, "spinner")
    assert origin == "template; path=pool"
    # It is somebody's by now, also for the ledger.
    assert taken.sandbox_id not in unused(pooled)
    spun = lambda: taken.commands.run("cat /dev/shm/spun").stdout.strip()  # noqa: E731
    before = spun()
    until(lambda: spun() not in ("", before), within=PATIENCE, what="it computes on")
    taken.kill()
    pooled.cli("template", "delete", "spinner")
    filled(pooled)


LIMIT = 30

LIMITED = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[s]leep 4321' || true"


@pytest.mark.timeout(240)
def test_time_limits_stand_still_with_it(pooled):
    definition = {"name": "limited", "pool": 1}
    built = call(pooled, "POST", "/v1/templates/builds", json=definition).json()
    message = json.dumps({"process": {"cmd": "/bin/sleep", "args": ["4321"]}, "stdin": False}).encode()
    headers = {
        "E2b-Sandbox-Id": built["sandboxID"],
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": built["envdAccessToken"],
        "Content-Type": "application/connect+json",
        "Connect-Protocol-Version": "1",
        "Connect-Timeout-Ms": str(LIMIT * 1000),
    }
    began = time.monotonic()
    body = struct.pack(">BI", 0, len(message)) + message
    with httpx.stream("POST", f"{pooled.url}/process.Process/Start", headers=headers, content=body, timeout=60) as stream:
        assert b'"pid"' in next(stream.iter_raw())
    made = call(pooled, "POST", "/v1/templates", json={"sandbox": built["sandboxID"], "template": definition})
    assert made.status_code == 201, made.text
    call(pooled, "DELETE", f"/sandboxes/{built['sandboxID']}")
    filled(pooled, SIZE + 1)
    time.sleep(max(0, began + LIMIT + 1 - time.monotonic()))
    taken, origin = create(pooled, "limited")
    assert origin == "template; path=pool"
    limited = lambda: taken.commands.run(LIMITED).stdout.strip()  # noqa: E731
    assert limited() == "1", "its time ran out while it stood still"
    until(lambda: limited() == "0", within=PATIENCE, what="its time to be up")
    taken.kill()
    pooled.cli("template", "delete", "limited")
    filled(pooled)


def test_an_empty_pool_is_no_hindrance(pooled):
    filled(pooled)
    made = all_at_once(lambda _: create(pooled, "counter"), list(range(2 * SIZE)))
    paths = sorted(origin for _, origin in made)
    assert paths.count("template; path=pool") >= SIZE
    assert set(paths) <= {"template; path=pool", "template; path=restore"}
    assert len({one.sandbox_id for one, _ in made}) == 2 * SIZE
    all_at_once(lambda one: one[0].kill(), made)
    until(lambda: ready(pooled) >= SIZE, within=PATIENCE, what="a pool that is full again")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", ["serve", "host", "both"])
def test_those_of_a_dead_server_are_removed_and_never_handed_out(pooled, victim):
    until(lambda: ready(pooled) >= SIZE, within=PATIENCE, what="a pool that is full")
    before = set(unused(pooled))
    kept, _ = create(pooled, "counter")
    crash(pooled, victim)
    pooled.start()
    until(lambda: not before & (set(unused(pooled)) - {kept.sandbox_id}), within=PATIENCE, what="the old ones to go")
    filled(pooled)
    assert kept.commands.run("echo on").stdout == "on\n"
    kept.kill()
    one, origin = create(pooled, "counter")
    assert origin == "template; path=pool" and one.sandbox_id not in before
    one.kill()


# Where one is handed out, in either half.
CLAIM = ["control.pool.claim", "engine.pool.used", "engine.pool.signal"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("point", CLAIM)
def test_one_that_can_not_be_handed_out_is_made_again(pooled, point):
    pooled.stop()
    assert unused(pooled) == [], "a server that stops leaves none"
    pooled.start(f"{point}=error*1")
    filled(pooled)
    one, origin = create(pooled, "counter")
    assert origin == "template; path=restore"
    assert one.commands.run("echo on").stdout == "on\n"
    events = call(pooled, "GET", f"/v1/sandboxes/{one.sandbox_id}").json()["events"]
    assert any("could not be handed out" in json.dumps(event) for event in events), events
    one.kill()
    pooled.stop()
    pooled.start()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("point", ["control.pool.host", "control.pool.still"])
def test_one_that_can_not_be_made_is_tried_again(pooled, point):
    pooled.stop()
    pooled.start(f"{point}=error*1")
    filled(pooled)
    pooled.stop()
    assert unused(pooled) == []
    pooled.assert_nothing_left()
    pooled.start()


POINTS = ["control.pool.host", "control.pool.still", *CLAIM, "control.pool.instead"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["serve", "host", "both"])
@pytest.mark.parametrize("point", POINTS)
def test_killed_while_a_pool_is_filled_or_used(pooled, point, victim):
    """Whatever was under way: nobody has a sandbox that is half handed out, and nothing is left of it."""
    pooled.stop()
    log_from = log_size(pooled)
    pooled.start(f"{point}=hang*1" + (";control.pool.claim=error*1" if point == "control.pool.instead" else ""))
    attempt = None
    if point not in ("control.pool.host", "control.pool.still"):
        filled(pooled)
        body = {"templateID": "counter", "timeout": 300}
        attempt = Attempt(lambda: call(pooled, "POST", "/v2/sandboxes", json=body))
    until(lambda: reached(pooled, log_from) == [point], within=PATIENCE, what=f"{point}")
    before = set(unused(pooled))
    crash(pooled, victim)
    if attempt is not None:
        attempt.join(PATIENCE)
        assert not attempt.succeeded, "an answer came from a dead server"
    pooled.start()
    filled(pooled)
    until(lambda: not before & set(unused(pooled)), within=PATIENCE, what="the old ones to go")
    until(lambda: call(pooled, "GET", "/v2/sandboxes").json() == [], within=PATIENCE, what="no sandbox")
    code, ledger = pooled.ledger()
    assert (code, ledger["left_over"], ledger["missing"]) == (0, [], [])
    one, origin = create(pooled, "counter")
    assert origin == "template; path=pool"
    one.kill()
