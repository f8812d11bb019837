"""Time is up also where no half of the server is left to notice it."""

import json
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox
from faults import answers, crash, groups_of, has_ended, log_size, processes_of, reached
from support import cgroups_named, loop_files, until


def watchdogs(server) -> dict[int, list[str]]:
    """Those of this server, with their arguments."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                arguments = (folder / "cmdline").read_text().split("\0")[:-1]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if arguments[1:4] == ["watchdog", "--data-dir", str(server.data_dir)]:
                found[int(folder.name)] = arguments
    return found


def the_watchdog(server) -> int:
    return until(lambda: list(watchdogs(server)), what="a watchdog")[0]


def record(server, id: str) -> dict:
    answer = httpx.get(f"{server.url}/v1/sandboxes/{id}", headers=server.headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def is_gone(server, id: str) -> bool:
    """Whether nothing of a sandbox is on the machine."""
    host = server.data_dir / "host"
    places = [host / "sandboxes" / id, host / "slots" / id]
    files = any(place.exists() for place in places) or any(id in file for file in loop_files())
    return not files and not cgroups_named(id)


def test_time_is_up_with_a_dead_server_and_for_nobody_else(lone_server):
    server = lone_server
    brief = Sandbox.create(timeout=8, **server.opts)
    longer = Sandbox.create(timeout=600, **server.opts)
    extended = Sandbox.create(timeout=8, **server.opts)
    extended.set_timeout(600)
    shortened = Sandbox.create(timeout=600, **server.opts)
    shortened.set_timeout(8)
    engine = processes_of(brief.sandbox_id)
    slots = [(server.data_dir / "host/slots" / box.sandbox_id).read_text() for box in (brief, shortened)]
    assert engine and all(slots)
    crash(server, "both")
    for box in (brief, shortened):
        until(lambda box=box: is_gone(server, box.sandbox_id), within=60, what="a sandbox whose time is up")
    assert all(has_ended(pid) for pid in engine)

    # What the store does not know yet is missing; of it nothing is left over, and the others are whole. What has ended may
    # wait for the first process of the machine, which takes its time; spare slots of the network wait for the next server.
    looked = lambda: [server.ledger(wait=0)]  # noqa: E731
    spare = lambda it: it["sandbox"] is None and it["kind"] in ("mount", "namespace", "link", "file")  # noqa: E731
    clean = lambda ledger: all(map(spare, ledger["left_over"])) and not ledger["unreadable"]  # noqa: E731
    pins = [pin.name for pin in (server.data_dir / "host/ns").iterdir()]
    assert pins and not [pin for pin in pins if pin.startswith(tuple(slots))]
    ledger = until(lambda: [it for _, it in looked() if clean(it)], within=60, what="nothing left over")[0]
    assert {lack["sandbox"] for lack in ledger["missing"]} == {brief.sandbox_id, shortened.sandbox_id}
    assert groups_of(longer.sandbox_id) and groups_of(extended.sandbox_id)
    assert len(watchdogs(server)) == 1

    server.start()
    for box in (brief, shortened):
        ended = until(lambda box=box: [it for it in [record(server, box.sandbox_id)] if it["end_reason"]], what="an end")[0]
        assert ended["end_reason"] == "timeout"
        assert "its time was up while no server ran" in [event["detail"] for event in ended["events"]]
    for box in (longer, extended):
        assert answers(server, box.sandbox_id)
        assert box.kill()
    # The one of the dead host leaves the place to the one of the new host.
    until(lambda: len(watchdogs(server)) == 1, within=15, what="one watchdog")
    server.assert_nothing_left()
    server.stop()
    assert not watchdogs(server)
    server.assert_nothing_left()


def test_a_watchdog_that_is_killed_is_replaced(lone_server):
    server = lone_server
    first = the_watchdog(server)
    os.kill(first, signal.SIGKILL)
    second = until(lambda: [pid for pid in watchdogs(server) if pid != first], what="another one")[0]
    box = Sandbox.create(timeout=6, **server.opts)
    crash(server, "both")
    until(lambda: is_gone(server, box.sandbox_id), within=60, what="the end of the sandbox")
    # Nothing is left to wait for.
    until(lambda: has_ended(second), within=15, what="the end of the watchdog")
    server.start()
    assert until(lambda: record(server, box.sandbox_id)["end_reason"], what="an end") == "timeout"


@pytest.mark.parametrize("ending", ["killed", "out of time"])
def test_a_server_that_starts_while_sandboxes_are_ended_waits_for_that(lone_server, ending):
    server = lone_server
    server.stop()
    log_from = log_size(server)
    server.start("watchdog.end=hang")
    box = Sandbox.create(timeout=5, **server.opts)
    crash(server, "both")
    until(lambda: reached(server, log_from) == ["watchdog.end"], within=60, what="a watchdog that ends it")
    announced, settings = server.launch()
    [round] = [pid for pid, arguments in watchdogs(server).items() if arguments[-1] == "--round"]
    # Its process is there, and has no children yet: it waits for the lock.
    assert not announced.is_set() and server.process.poll() is None
    if ending == "killed":
        os.kill(round, signal.SIGKILL)
    assert announced.wait(60), server.log_tail()
    assert has_ended(round)
    assert f"http://{server.address}" == settings["E2B_API_URL"]
    assert until(lambda: record(server, box.sandbox_id)["end_reason"], what="an end") == "timeout"
    server.assert_nothing_left()


@pytest.mark.parametrize("half", ["serve", "host"])
def test_a_half_alone_is_no_server(lone_server, half):
    server = lone_server
    box = Sandbox.create(timeout=6, **server.opts)
    crash(server, half)
    until(lambda: is_gone(server, box.sandbox_id), within=60, what="the end of the sandbox")


@pytest.mark.parametrize("timeout", [1, 600])
def test_a_deadline_that_fires_without_a_server_is_never_earlier_than_the_stored_one(lone_server, timeout):
    """The server dies between the two places: the later one of the old and the new end is the host's."""
    server = lone_server
    server.stop()
    log_from = log_size(server)
    server.start("control.deadline.store=hang")
    box = Sandbox.create(timeout=300, **server.opts)
    kept = lambda: json.loads((server.data_dir / "host/sandboxes" / box.sandbox_id / "deadline").read_text())["at"]  # noqa: E731
    first = kept()
    with pytest.raises(Exception):
        box.set_timeout(timeout, request_timeout=3)
    assert reached(server, log_from) == ["control.deadline.store"]
    assert kept() - first == pytest.approx(max(timeout - 300, 0) * 1000, abs=60_000)
    crash(server, "both")
    server.start()
    # Nobody was told of the other end.
    assert kept() == first
    assert answers(server, box.sandbox_id)
    assert box.kill()


def test_nobody_need_read_the_log(lone_server):
    server = lone_server
    server.stop()
    closed = "import os, sys; read, write = os.pipe(); os.dup2(write, 2); os.close(read); os.execvp(sys.argv[1], sys.argv[1:])"
    server.wrap = [sys.executable, "-c", closed]
    server.start()
    boxes = [Sandbox.create(timeout=6, **server.opts) for _ in range(2)]
    crash(server, "both")
    for box in boxes:
        until(lambda box=box: is_gone(server, box.sandbox_id), within=60, what="the end of the sandbox")
    server.wrap = []


def start_with_log_pipe(server, folder: Path) -> tuple[Path, int]:
    """Starts it again with a pipe as its log; that, and its end for reading."""
    server.stop()
    log = folder / f"log-{server.data_dir.name}"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    server.wrap = ["sh", "-c", f'exec "$@" 2> "{log}"', "sh"]
    server.start()
    return log, reader


def test_a_full_log_pipe_holds_nothing_up(lone_server, work_folder):
    server = lone_server
    log, reader = start_with_log_pipe(server, work_folder)
    boxes = [Sandbox.create(timeout=6, **server.opts) for _ in range(2)]
    watchdog = the_watchdog(server)
    # From now on there is no room in it, and nobody makes any.
    crash(server, "both")
    filler = os.open(log, os.O_WRONLY | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(filler, b"x")
    for box in boxes:
        until(lambda box=box: is_gone(server, box.sandbox_id), within=60, what="the end of the sandbox")
    until(lambda: has_ended(watchdog), within=30, what="the end of the watchdog")
    for end in (reader, filler):
        os.close(end)
    server.wrap = []


def test_who_reads_the_log_hears_its_end_before_the_last_deadline(lone_server, work_folder):
    server = lone_server
    _, reader = start_with_log_pipe(server, work_folder)
    box = Sandbox.create(timeout=600, **server.opts)
    crash(server, "both")

    def at_end() -> bool:
        try:
            return not os.read(reader, 1 << 16)
        except BlockingIOError:
            return False

    until(at_end, within=15, what="the end of the log")
    assert the_watchdog(server)
    os.close(reader)
    server.wrap = []
    server.start()
    assert answers(server, box.sandbox_id)
    assert box.kill()
