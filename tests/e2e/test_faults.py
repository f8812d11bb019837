"""Every step of a sandbox's life fails, or is the last thing that a half of the server does.

Here all points of a kind hang in one server, a request at each, and then it dies: as in real life. `SANDGLASS_FAULTS=each`
(`make faults`) gives every pair of point and victim a server of its own.
"""

import os

import httpx
import pytest
from conftest import empty
from faults import (
    NAMES,
    PATIENCE,
    Attempt,
    all_at_once,
    answers,
    configured,
    crash,
    create,
    delete,
    fork,
    images,
    kill,
    log_size,
    new_tag,
    pause,
    reached,
    resume,
    rows,
    settled,
    snapshot,
    snapshots,
    state,
)
from support import ROOMY, STOP_WITHIN, until

VICTIMS = ["serve", "host", "both"]

# Which of them a request to create a sandbox passes, one to end it, and a start of the server.
CREATE = ("control.create.", "control.store.running", "engine.create.", "engine.start.", "network.slot.", "network.assign.")
KILL = ("control.kill.", "control.store.end", "control.end.", "engine.remove.", "network.release.")
START = ("control.reconcile.",)
# One to pause it, and one to let it run again.
PAUSE = ("control.store.paus", "control.pause.freeze", "control.pause.host", "control.pause.image", "engine.image.")
RESUME = ("control.resume.store", "control.resume.host", "engine.restore.")
# What is done for its resume before anybody asks for one.
AHEAD = ("control.prepare.", "engine.prepare.")
# The same with its files alone, which has no memory to write, and starts anew.
MEMORY_ALONE = ("engine.image.checkpoint", "control.resume.host", "engine.restore.")
FILES_ALONE = ("control.resume.boot",)
# One to make a snapshot or a fork of it, one to make a sandbox from that, and one to delete it.
COPY = ("control.snapshot.", "control.fork.", "control.copy.", "engine.flush.")
# What is done with a snapshot that nobody has used for long, and for who wants it then.
COLD = ("control.compress.", "engine.compress.", "control.expand.", "engine.expand.")
# Which none of them does: see the tests of the watchdog, those of runs, those of templates, and the engine's of the cache folder.
ELSEWHERE = ("control.pool.", "engine.pool.", "engine.cache.", "engine.volume.", "engine.worker.", "engine.collect.", "control.collect.", "control.volume.", "control.run.", "control.deadline.", "control.template.", "watchdog.", "gateway.call.")

EACH = os.environ.get("SANDGLASS_FAULTS") == "each"


def of(*prefixes: str) -> list[str]:
    return [name for name in NAMES if name.startswith(prefixes)]


def groups(*prefixes: str) -> list:
    """The points of one run: all, or each alone."""
    if EACH:
        return [pytest.param([name], id=name) for name in of(*prefixes)]
    return [pytest.param(of(*prefixes), id="all")]


def armed(points: list[str], action: str) -> str:
    """Each acts once, so that the next request gets one step further."""
    return ";".join(f"{point}={action}*1" for point in points)


def test_every_point_is_driven_by_something():
    assert len(NAMES) > 50
    for name in NAMES:
        kinds = (CREATE, KILL, PAUSE, AHEAD, RESUME, FILES_ALONE, COPY, COLD, START, ELSEWHERE)
        assert sum(name in of(*kind) for kind in kinds) == 1, name


@pytest.fixture
def stopped_server(lone_server):
    lone_server.stop()
    return lone_server


@pytest.fixture
def unhurried_server(servers, tmp_path):
    """One that makes nothing ahead: what it does is done for who asked last."""
    server = configured(servers, tmp_path, ROOMY + "ahead = 0\n")
    server.stop()
    yield server
    empty(server)


def hang_creates(server, points: list[str]) -> dict[str, Attempt]:
    """Starts a server, and requests until something hangs at each point. By tag."""
    log_from, attempts = log_size(server), {}
    server.start(armed(points, "hang"))
    while not attempts or set(reached(server, log_from)) != set(points):
        before, tag = len(reached(server, log_from)), new_tag()
        attempt = attempts[tag] = Attempt(create, server, tag)
        # The pool of network slots may get to a point before any request.
        further = lambda: len(reached(server, log_from)) > before  # noqa: E731
        until(lambda: further() or not attempt.is_alive(), within=PATIENCE, what="a hanging request")
        missing = set(points) - set(reached(server, log_from))
        assert further() or not missing, f"no request gets to {missing}: {attempt.response and attempt.response.text}"
    return attempts


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("points", groups(*CREATE))
def test_killed_while_creating(stopped_server, points, victim):
    server = stopped_server
    attempts = hang_creates(server, points)
    crash(server, victim)
    for attempt in attempts.values():
        attempt.join(PATIENCE)
        assert not attempt.is_alive(), "a request has outlived its server"
    server.start()

    found = {row.tag: row for row in settled(server)}
    for tag, attempt in attempts.items():
        row = found.get(tag)
        if row is None or row.state == "ended":
            assert not attempt.succeeded, "a sandbox that was handed out is gone"
        if row is not None and row.state == "ended":
            # Running already when the last step hung, and the half that noticed the crash lived on.
            assert row.end_reason in ("create_failed", "crashed"), row
            truths = ("its creation was interrupted", "the privileged half is gone")
            assert any(truth in detail for detail in row.details for truth in truths), row
    # The client asks again, as its SDK would: there is one sandbox for each request, the old one or a new one.
    again = dict(zip(attempts, all_at_once(lambda tag: create(server, tag), list(attempts))))
    running = [row for row in rows(server) if row.state == "running"]
    assert sorted(row.tag for row in running) == sorted(attempts)
    for row in running:
        assert again[row.tag].status_code == 201, again[row.tag].text
        assert again[row.tag].json()["sandboxID"] == row.id
        before = found.get(row.tag)
        assert before is None or before.state == "ended" or before.id == row.id, "a second sandbox was made"
    assert all(all_at_once(lambda row: answers(server, row.id), running))
    all_at_once(lambda row: kill(server, row.id), running)
    assert all(row.state == "ended" for row in settled(server))
    server.assert_nothing_left()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("points", groups(*KILL))
def test_killed_while_ending(stopped_server, points, victim):
    server = stopped_server
    log_from = log_size(server)
    server.start(armed(points, "hang"))
    tags = [new_tag() for _ in range(len(points) + 1)]
    created = {response.json()["sandboxID"]: None for response in all_at_once(lambda tag: create(server, tag), tags)}
    for id in list(created)[1:]:
        missing = set(points) - set(reached(server, log_from))
        if not missing:
            break
        attempt = created[id] = Attempt(kill, server, id)
        further = lambda: not missing <= set(points) - set(reached(server, log_from))  # noqa: E731
        ended = lambda: any(row.id == id and row.state == "ended" for row in rows(server))  # noqa: E731
        until(lambda: further() or ended(), within=PATIENCE, what="a removal that hangs")
        assert further(), f"no removal gets to {missing}: {attempt.response}"
    assert set(reached(server, log_from)) == set(points)
    crash(server, victim)
    server.start()

    for row in settled(server):
        attempt = created[row.id]
        if attempt is not None:
            attempt.join(PATIENCE)
        if row.state == "running":
            assert attempt is None or not attempt.succeeded, "a sandbox that was killed is back"
            assert answers(server, row.id)
            assert kill(server, row.id).status_code == 204
        else:
            assert attempt is not None, "a sandbox that nobody killed is gone"
            assert row.end_reason == "killed" and "a client asked for it" in row.details, row
    assert all(row.state == "ended" for row in settled(server))
    server.assert_nothing_left()


def remember(server, id: str):
    """Puts something into its memory and onto its disk: /dev/shm is memory."""
    server.cli("sandbox", "exec", id, "--", "sh", "-c", "echo kept > /dev/shm/memory; echo kept > /home/user/disk")


def remembers(server, id: str, memory: bool = True) -> bool:
    """Whether its disk has it still, and its memory where that was to be kept."""
    places = ["/dev/shm/memory", "/home/user/disk"] if memory else ["/home/user/disk"]
    return server.cli("sandbox", "exec", id, "--", "cat", *places).stdout == "kept\n" * len(places)


def files_alone() -> list[str]:
    """The points on the way to an image without memory and back."""
    points = of(*PAUSE, *RESUME, *FILES_ALONE, "engine.create.made", "engine.start.")
    return [name for name in points if not name.startswith(MEMORY_ALONE)]


def pause_and_resume() -> list:
    """The points of one run, and whether memory is kept."""
    whole = groups(*PAUSE, *RESUME, "engine.create.made")
    files = [[name] for name in files_alone()] if EACH else [files_alone()]
    of_memory = [pytest.param(*param.values, True, id=f"{param.id}-whole") for param in whole]
    return of_memory + [pytest.param(points, False, id=f"{points[0] if EACH else 'all'}-files") for points in files]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [*VICTIMS, "term"])
@pytest.mark.parametrize(("points", "memory"), pause_and_resume())
def test_killed_while_pausing_or_resuming(unhurried_server, points, memory, victim):
    """The server dies at each step on the way to an image and back: the sandbox is one or the other, with all it had."""
    server, log_from = unhurried_server, log_size(unhurried_server)
    # Points that a creation passes too are armed for a server that finds all sandboxes made.
    server.start()
    ids = [create(server, new_tag()).json()["sandboxID"] for _ in range(len(points) + 1)]
    all_at_once(lambda id: remember(server, id), ids)
    resumed = of(*RESUME, *FILES_ALONE, "engine.create.made", "engine.start.")
    for id in ids[: len(set(points) & set(resumed))]:
        assert pause(server, id, memory).status_code == 204
    server.stop()
    server.start(armed(points, "hang"))
    attempts = {}
    for id in ids:
        missing = set(points) - set(reached(server, log_from))
        if not missing:
            break
        verb = (resume, server, id) if state(server, id) == "paused" else (pause, server, id, memory)
        attempt = attempts[id] = Attempt(*verb)
        further = lambda: not missing <= set(points) - set(reached(server, log_from))  # noqa: E731
        until(lambda: further() or not attempt.is_alive(), within=PATIENCE, what="a hanging request")
        assert further(), f"no request gets to {missing}: {attempt.response and attempt.response.text}"
    assert set(reached(server, log_from)) == set(points)
    crash(server, victim)
    server.start()

    for row in settled(server):
        attempt = attempts.get(row.id)
        if attempt is not None:
            attempt.join(PATIENCE)
            assert not attempt.succeeded, "an answer came from a dead server"
        if row.state == "paused":
            assert resume(server, row.id).status_code == 201
        assert row.state in ("running", "paused"), row
        assert remembers(server, row.id, memory)
    # Each can still be paused and resumed: nothing of the last try is in the way.
    for id in ids:
        assert pause(server, id).status_code == 204
        assert resume(server, id).status_code == 201
        assert remembers(server, id, memory)
    all_at_once(lambda id: kill(server, id), ids)
    assert all(row.state == "ended" for row in settled(server))
    server.assert_nothing_left()
    assert not list((server.data_dir / "host" / "images").iterdir()), "an image is left"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("memory", [True, False], ids=["whole", "files"])
def test_each_step_of_a_pause_and_of_a_resume_fails_once(unhurried_server, memory):
    server, log_from = unhurried_server, log_size(unhurried_server)
    server.start()
    id = create(server, new_tag()).json()["sandboxID"]
    remember(server, id)
    server.stop()
    up = of(*RESUME, *FILES_ALONE, "engine.create.made", "engine.create.save")
    down = of(*PAUSE)
    left_out = FILES_ALONE if memory else MEMORY_ALONE
    down, up = ([name for name in points if not name.startswith(left_out)] for points in (down, up))
    server.start(armed(down + up, "error"))
    once_more = lambda before: pause(server, id, memory) if before == "running" else resume(server, id)  # noqa: E731
    for points, before in ((down, "running"), (up, "paused")):
        failures = 0
        while not (response := once_more(before)).is_success:
            failures += 1
            assert failures <= len(points), "more failures than were told"
            assert response.status_code in (409, 500) and response.json()["message"], response.text
            assert state(server, id) == before
            assert before == "paused" or remembers(server, id)
        assert failures > len(points) - 2, "some failures were not noticed"
    with server.log_path.open("rb") as log:
        log.seek(log_from)
        text = log.read().decode()
    for point in down + up:
        assert f"the failpoint {point} made" in text, f"{point} was never reached"
    assert remembers(server, id, memory)
    assert kill(server, id).status_code == 204
    server.assert_nothing_left()


def is_prepared(server, id: str) -> bool:
    """Whether the next computer of a paused sandbox is there."""
    record = server.data_dir / "host" / "sandboxes" / id / "state.json"
    return record.exists() and '"waits"' in record.read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("points", groups(*AHEAD, "engine.restore."))
def test_killed_while_the_next_computer_is_made_or_taken(stopped_server, points, victim):
    """Whatever there is of it when the server dies: the sandbox is paused, with all that it had."""
    server, log_from = stopped_server, log_size(stopped_server)
    server.start()
    ids = [create(server, new_tag()).json()["sandboxID"] for _ in range(len(points) + 1)]
    all_at_once(lambda id: remember(server, id), ids)
    server.stop()
    server.start(armed(points, "hang"))
    attempts = {}
    for id in ids:
        missing = set(points) - set(reached(server, log_from))
        if not missing:
            break
        further = lambda: not missing <= set(points) - set(reached(server, log_from))  # noqa: E731
        assert pause(server, id).status_code == 204
        until(lambda: further() or is_prepared(server, id), within=PATIENCE, what="its next computer")
        if not further():
            attempt = attempts[id] = Attempt(resume, server, id)
            until(lambda: further() or not attempt.is_alive(), within=PATIENCE, what="a hanging request")
            assert further(), f"no request gets to {missing}: {attempt.response and attempt.response.text}"
    assert set(reached(server, log_from)) == set(points)
    crash(server, victim)
    server.start()

    found = {row.id: row.state for row in settled(server)}
    for id, attempt in attempts.items():
        attempt.join(PATIENCE)
        assert not attempt.succeeded, "an answer came from a dead server"
    for id in ids:
        assert found[id] in ("running", "paused")
        assert found[id] == "running" or resume(server, id).status_code == 201
        assert remembers(server, id)
        assert pause(server, id).status_code == 204
    all_at_once(lambda id: kill(server, id), ids)
    assert all(row.state == "ended" for row in settled(server))
    server.assert_nothing_left()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", of(*AHEAD))
def test_without_a_next_computer_it_is_resumed_all_the_same(stopped_server, point):
    server, log_from = stopped_server, log_size(stopped_server)
    server.start(armed([point], "error"))
    id = create(server, new_tag()).json()["sandboxID"]
    remember(server, id)
    for _ in range(2):
        assert pause(server, id).status_code == 204
        assert resume(server, id).status_code == 201
        assert remembers(server, id)
    with server.log_path.open("rb") as log:
        log.seek(log_from)
        assert f"the failpoint {point} made" in log.read().decode()
    assert kill(server, id).status_code == 204
    server.assert_nothing_left()


def copy(server, id: str):
    """All that makes and removes images of a sandbox that runs on. Stops at what fails."""
    made = snapshot(server, id)
    if not made.is_success:
        return made
    made = made.json()["snapshotID"]
    for step in (lambda: create(server, new_tag(), of=made), lambda: delete(server, made), lambda: fork(server, id, 2)):
        response = step()
        if not response.is_success:
            break
    return response


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [*VICTIMS, "term"])
@pytest.mark.parametrize("points", groups(*COPY, "engine.image.", "engine.create.made"))
def test_killed_while_copying(stopped_server, points, victim):
    """The server dies at each step of a snapshot and of a fork: every source runs on, and every copy is whole or gone."""
    server, log_from = stopped_server, log_size(stopped_server)
    server.start()
    ids = [create(server, new_tag()).json()["sandboxID"] for _ in range(len(points) + 1)]
    all_at_once(lambda id: remember(server, id), ids)
    server.stop()
    server.start(armed(points, "hang"))
    attempts = {}
    for id in ids:
        missing = set(points) - set(reached(server, log_from))
        if not missing:
            break
        attempt = attempts[id] = Attempt(copy, server, id)
        further = lambda: not missing <= set(points) - set(reached(server, log_from))  # noqa: E731
        until(lambda: further() or not attempt.is_alive(), within=PATIENCE, what="a hanging request")
        assert further(), f"no request gets to {missing}: {attempt.response and attempt.response.text}"
    assert set(reached(server, log_from)) == set(points)
    crash(server, victim)
    server.start()

    found = {row.id: row for row in settled(server)}
    for id in ids:
        assert found[id].state == "running" and remembers(server, id), found[id]
    for id, row in found.items():
        assert row.state in ("running", "ended"), row
        assert row.state == "running" or row.end_reason == "create_failed", row
        assert row.state == "ended" or remembers(server, id)
    # What there is of images is what clients know of.
    kept = snapshots(server)
    until(lambda: sorted(images(server)) == sorted(kept), within=PATIENCE, what="no image without a snapshot")
    for one in kept:
        child = create(server, new_tag(), of=one)
        assert child.status_code == 201 and remembers(server, child.json()["sandboxID"]), child.text
        assert delete(server, one).status_code == 204
    # Each can be copied again: nothing of the last try is in the way.
    for id in ids:
        again = copy(server, id)
        assert again.is_success and all("sandbox" in one for one in again.json()), again.text
        assert remembers(server, id)
    all_at_once(lambda row: row.state == "ended" or kill(server, row.id), settled(server))
    assert all(row.state == "ended" for row in settled(server))
    server.assert_nothing_left()
    until(lambda: images(server) == [], within=PATIENCE, what="no image to be left")


@pytest.mark.timeout(300)
def test_each_step_of_a_snapshot_and_of_a_fork_fails_once(stopped_server):
    server, log_from = stopped_server, log_size(stopped_server)
    server.start()
    id = create(server, new_tag()).json()["sandboxID"]
    remember(server, id)
    server.stop()
    points = of(*COPY, "engine.image.", "engine.create.made", "engine.create.save")
    server.start(armed(points, "error"))

    def tried(request):
        failures = 0
        while not (response := request()).is_success:
            failures += 1
            assert failures <= len(points), "more failures than were told"
            assert response.status_code in (409, 500) and response.json()["message"], response.text
            assert state(server, id) == "running" and remembers(server, id)
        return response

    made = tried(lambda: snapshot(server, id)).json()["snapshotID"]
    child = tried(lambda: create(server, new_tag(), of=made)).json()["sandboxID"]
    assert remembers(server, child)
    tried(lambda: delete(server, made))
    copies = tried(lambda: fork(server, id, 2)).json()
    assert all(remembers(server, one["sandbox"]["sandboxID"]) for one in copies), copies
    with server.log_path.open("rb") as log:
        log.seek(log_from)
        text = log.read().decode()
    for point in points:
        assert f"the failpoint {point} made" in text, f"{point} was never reached"
    # What could not be removed at once is removed at the next look, which comes every half minute.
    until(lambda: images(server) == [], within=120, what="no image to be left")
    assert snapshots(server) == []
    all_at_once(lambda row: row.state == "ended" or kill(server, row.id), settled(server))
    server.assert_nothing_left()


@pytest.fixture
def chilly_server(servers, tmp_path):
    """One that compresses snapshots which nobody has used for a second."""
    server = configured(servers, tmp_path, "[snapshots]\ncompress_after_seconds = 1\n")
    server.stop()
    yield server
    empty(server)


def is_compressed(server, snapshot: str) -> bool:
    found = httpx.get(f"{server.url}/v1/snapshots/{snapshot}", headers=server.headers, timeout=PATIENCE)
    return found.json()["disk"]["compressed"]


def changes_of_form() -> list:
    """The points of one run, and who dies there. Alone, the privileged half waits for each of its steps that hangs."""
    few = [name for name in of(*COLD) if name.startswith("control.") or name.endswith(".swap")]
    runs = [(of(*COLD), "host"), (of(*COLD), "both"), (few, "serve")]
    if EACH:
        return [([name], victim) for name in of(*COLD) for victim in VICTIMS]
    return [pytest.param(*run, id=run[1]) for run in runs]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("points", "victim"), changes_of_form())
def test_killed_while_a_snapshot_changes_its_form(chilly_server, points, victim):
    """The server dies at each step on the way to the other form and back: there is one of both, with all that was in it."""
    server = chilly_server
    server.start()
    id = create(server, new_tag()).json()["sandboxID"]
    remember(server, id)
    for point in points:
        server.stop()
        log_from = log_size(server)
        server.start(armed([point], "hang"))
        made = snapshot(server, id).json()["snapshotID"].split(":")[0]
        attempt = None
        if ".expand." in point:
            until(lambda: is_compressed(server, made), within=PATIENCE, what="it is compressed")
            attempt = Attempt(create, server, new_tag(), PATIENCE, made)
        until(lambda: reached(server, log_from) == [point], within=PATIENCE, what=f"{point} is reached")
        crash(server, victim)
        server.start()

        if attempt is not None:
            attempt.join(PATIENCE)
            assert not attempt.succeeded, "an answer came from a dead server"
        assert images(server) == [made] == snapshots(server), f"something else is left at {point}"
        child = create(server, new_tag(), of=made)
        assert child.status_code == 201 and remembers(server, child.json()["sandboxID"]), (point, child.text)
        assert kill(server, child.json()["sandboxID"]).status_code == 204
        # Nothing of the last try is in the way of the next one.
        until(lambda: is_compressed(server, made), within=PATIENCE, what="it is compressed")
        assert delete(server, made).status_code == 204
        until(lambda: images(server) == [], within=PATIENCE, what="no image to be left")
    assert remembers(server, id)
    assert kill(server, id).status_code == 204
    assert all(row.state in ("running", "ended") for row in settled(server))
    server.assert_nothing_left()


@pytest.mark.timeout(300)
def test_each_step_to_the_other_form_of_a_snapshot_and_back_fails_once(chilly_server):
    server, log_from = chilly_server, log_size(chilly_server)
    server.start()
    id = create(server, new_tag()).json()["sandboxID"]
    remember(server, id)
    for point in of(*COLD):
        server.stop()
        server.start(armed([point], "error"))
        made = snapshot(server, id).json()["snapshotID"].split(":")[0]
        failed = lambda: f"the failpoint {point} made".encode() in server.log_path.read_bytes()[log_from:]  # noqa: E731
        if ".expand." in point:
            until(lambda: is_compressed(server, made), within=PATIENCE, what="it is compressed")
            refused = create(server, new_tag(), of=made)
            assert refused.status_code == 500, refused.text
        until(failed, within=PATIENCE, what=f"{point} fails")
        assert images(server) == [made], f"something is left aside at {point}"
        child = create(server, new_tag(), of=made)
        assert child.status_code == 201 and remembers(server, child.json()["sandboxID"]), (point, child.text)
        assert kill(server, child.json()["sandboxID"]).status_code == 204
        assert delete(server, made).status_code == 204
    assert kill(server, id).status_code == 204
    settled(server)
    server.assert_nothing_left()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["serve", "both"])
def test_killed_while_clearing_up(stopped_server, victim):
    """One sandbox to be taken up, one half made: and the server dies at every step of its start."""
    # Alone, the privileged half waits for each of its steps that hangs before it ends.
    points = of(*START, "control.create.guard", "control.create.attach")
    if victim == "both" or EACH:
        points += of("engine.remove.", "network.release.")
    server = stopped_server
    hanging = "engine.create.made"
    server.start(armed([hanging], "hang"))
    Attempt(create, server, new_tag())
    until(lambda: reached(server, 0) == [hanging], what="a half-made sandbox")
    tag = new_tag()
    kept = create(server, tag).json()["sandboxID"]
    crash(server, "both")
    for point in points:
        log_from = log_size(server)
        server.launch(f"{point}=hang")
        # What was removed before the last death is not removed again.
        begun = until(lambda: reached(server, log_from) or is_up(server), within=PATIENCE, what=f"{point}, or a whole start")
        assert begun == [point] or point.startswith(("engine.", "network.")), point
        crash(server, victim)
    server.start()
    alive = {row.tag: row for row in settled(server) if row.state == "running"}
    assert list(alive) == [tag] and alive[tag].id == kept
    assert answers(server, kept)
    assert kill(server, kept).status_code == 204
    server.assert_nothing_left()


def is_up(server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=1).is_success
    except httpx.HTTPError:
        return False


# A point of the network's pool acts on the thread that fills it, which a panic ends; the others are verbs.
ACTIONS = [("error", CREATE), ("panic", ("engine.create.", "engine.start."))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("action", "prefixes"), ACTIONS, ids=["error", "panic"])
def test_each_step_of_a_creation_fails_once(stopped_server, action, prefixes):
    server, points = stopped_server, of(*prefixes)
    log_from = log_size(server)
    server.start(armed(points, action))
    responses = []
    while not responses or not responses[-1].is_success:
        assert len(responses) <= len(points), "more failures than were told"
        responses.append(create(server, new_tag()))
    for response in responses[:-1]:
        assert response.status_code == 500, response.text
        assert response.json()["message"], response.text
    with server.log_path.open("rb") as log:
        log.seek(log_from)
        text = log.read().decode()
    for point in points:
        assert f"the failpoint {point} made" in text, f"{point} was never reached"
    id = responses[-1].json()["sandboxID"]
    assert answers(server, id)
    assert kill(server, id).status_code == 204
    for row in settled(server):
        assert row.state == "ended"
        assert row.end_reason == ("killed" if row.id == id else row.end_reason)
        assert row.id == id or row.end_reason in ("create_failed", "crashed"), row
    server.assert_nothing_left()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("action", "prefixes"), [("error", KILL), ("panic", ("engine.remove.", "network.release."))], ids=["error", "panic"]
)
def test_each_step_of_an_end_fails_once(stopped_server, action, prefixes):
    server, points = stopped_server, of(*prefixes)
    log_from = log_size(server)
    server.start(armed(points, action))
    # As many as there are points, because the pauses between failed removals of one grow.
    created = all_at_once(lambda tag: create(server, tag), [new_tag() for _ in points])

    def end(id: str):
        # The failure of a request says nothing of what it has begun.
        while (status := kill(server, id).status_code) == 500:
            pass
        assert status in (204, 404)

    all_at_once(end, [response.json()["sandboxID"] for response in created])
    for row in settled(server):
        assert (row.state, row.end_reason) == ("ended", "killed"), row
    with server.log_path.open("rb") as log:
        log.seek(log_from)
        text = log.read().decode()
    # Of two steps that fail side by side, one is told.
    for point in (point for point in points if not point.startswith("network.")):
        assert f"the failpoint {point} made" in text, f"{point} was never reached"
    server.assert_nothing_left()


@pytest.mark.parametrize("point", of(*START))
def test_a_start_that_fails_says_so_and_the_next_one_works(stopped_server, point):
    server = stopped_server
    server.start()
    id = create(server, new_tag()).json()["sandboxID"]
    server.stop()
    log_from = log_size(server)
    server.launch(f"{point}=error")
    assert server.process.wait(STOP_WITHIN) != 0
    server.process = None
    assert f"the failpoint {point} made" in server.log_path.read_bytes()[log_from:].decode()
    server.start()
    assert answers(server, id)
    assert kill(server, id).status_code == 204


@pytest.mark.parametrize("text", ["no.such.point=hang", "engine.create.disk", "engine.create.disk=explode", ""])
def test_nonsense_is_no_start(stopped_server, text, tmp_path):
    server = stopped_server
    log_from = log_size(server)
    if text:
        server.launch(text)
        assert server.process.wait(STOP_WITHIN) != 0
        server.process = None
        assert "SANDGLASS_FAILPOINTS" in server.log_path.read_bytes()[log_from:].decode()
    else:
        server.start()
        assert b"ON PURPOSE" not in server.log_path.read_bytes()
        server.stop()
        server.start("engine.create.disk=error")
        assert b"ON PURPOSE" in server.log_path.read_bytes()
