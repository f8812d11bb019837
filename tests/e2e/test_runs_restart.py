"""The server dies while runs are on their way: the next one ends each of them, once, with nothing left."""

import uuid

import pytest
from faults import NAMES, PATIENCE, Attempt, crash, log_size, reached
from runs import Runs, types
from support import until

POINTS = [name for name in NAMES if name.startswith("control.run.")]
# At these, the run has stopped by itself before the server dies, so it says why.
STOPPED = ("control.run.destroy", "control.run.collect", "control.run.settle", "control.run.end")


@pytest.fixture
def stopped_server(lone_server):
    lone_server.stop()
    return lone_server


def body(text: str) -> dict:
    check = {"command": "true"}
    return {"prompt": "do it", "agent": {"command": text}, "timeout_seconds": 60, "checks": [check]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["serve", "both"])
def test_killed_at_each_step_of_a_run(stopped_server, victim):
    server = stopped_server
    runs = Runs(server)
    for point in POINTS:
        log_from, key = log_size(server), uuid.uuid4().hex
        server.start(f"{point}=hang*1")
        ask = lambda: runs.ask("POST", "", json=body("echo done"), headers={"Idempotency-Key": key})  # noqa: E731, B023
        attempt = Attempt(ask)
        until(lambda: reached(server, log_from) == [point], within=PATIENCE, what=point)  # noqa: B023
        crash(server, victim)
        attempt.join(PATIENCE)
        server.start()
        again = ask()
        assert again.status_code == 202, again.text
        run, events = runs.end(again.json()["id"])
        if point == "control.run.insert":
            assert run["status"] == "completed", "nothing was made, so it is made now"
        else:
            assert again.headers["Idempotent-Replayed"] == "true"
            expected = ("completed", "end_turn") if point in STOPPED else ("failed", "host_restart")
            assert (run["status"], run["stop_reason"]) == expected, (point, run)
        assert types(events).count("budget.released") == 1 and types(events).count("run.stopping") == 1, point
        assert runs.ask("GET", "", params={"status": "queued,provisioning,running,verifying,finalizing"}).json() == []
        server.stop()
    server.start()
    server.assert_nothing_left()


@pytest.mark.timeout(300)
def test_killed_while_an_agent_works_and_while_a_run_waits(stopped_server):
    server = stopped_server
    runs = Runs(server)
    server.start()
    ids = [runs.create("sleep 60"), runs.create("true", hold=True)]
    runs.wait_for(ids[0], "worker.started")
    runs.wait_for(ids[1], "turn.awaited")
    crash(server, "serve")
    server.start()
    for id in ids:
        run, events = runs.end(id)
        assert (run["status"], run["stop_reason"]) == ("failed", "host_restart"), run
        assert "sandbox.destroyed" in types(events)
    server.assert_nothing_left()


@pytest.mark.timeout(300)
def test_each_step_of_a_run_fails_once(stopped_server):
    """A step that fails ends its run, or is done again; nothing is left, and the next run is fine."""
    server = stopped_server
    runs = Runs(server)
    for point in POINTS:
        server.start(f"{point}=error*1")
        answer = runs.ask("POST", "", json=body("echo done"))
        if point == "control.run.insert":
            assert answer.status_code == 500
        else:
            run, _ = runs.end(answer.json()["id"])
            expected = "end_turn" if point in STOPPED else "sandbox_error"
            assert run["stop_reason"] == expected, (point, run)
        assert runs.end(runs.create("echo done"))[0]["status"] == "completed"
        server.stop()
    server.start()
    server.assert_nothing_left()
