"""A run from its prompt to its end, with a program as the agent."""

import json
import time
import uuid

import httpx
import pytest
from e2b import Sandbox
from runs import Runs, output, types
from support import until


@pytest.fixture(scope="module")
def runs(server):
    return Runs(server)


def test_a_run_does_what_it_is_told_and_tells_what_it_does(runs):
    id = runs.create(
        'cat; echo " in $PWD by $(id -un)"; cat given.txt deep/tool.sh; ls -l deep/tool.sh fixed.txt | cut -c1-10; '
        "echo changed > given.txt; (echo no > fixed.txt) 2>/dev/null || echo refused; ./deep/tool.sh",
        prompt="make it",
        files=[
            {"path": "given.txt", "content": "given\n"},
            {"path": "deep/tool.sh", "content": "#!/bin/sh\necho ran\n", "mode": 0o755},
            {"path": "fixed.txt", "content": "fixed\n", "read_only": True},
        ],
        checks=[{"command": "grep changed given.txt"}],
        metadata={"k": "v"},
    )
    run, events = runs.end(id)
    assert (run["status"], run["stop_reason"], run["turns"]) == ("completed", "end_turn", 1), run
    assert run["prompt"] == "make it" and run["metadata"] == {"k": "v"} and run["started_at"] and run["ended_at"]
    said = output(events)
    assert said.startswith("make it in /workspace/project by user\ngiven\n#!/bin/sh"), said
    assert said.endswith("-rwxr-xr-x\n-r--r--r--\nrefused\nran\n"), said
    told = [type for type in types(events, "host", "verifier") if not type.startswith("artifact")]
    assert told == [
        "run.queued", "budget.reserved", "sandbox.booting", "sandbox.ready", "run.started", "turn.started", "worker.started",
        "worker.exited", "turn.ended", "check.result", "verify.passed", "run.stopping", "sandbox.destroying", "sandbox.destroyed",
        "budget.charged", "budget.released", "run.completed",
    ]  # fmt: skip
    [check] = [event["data"] for event in events if event["type"] == "check.result"]
    assert check["passed"] and check["output"] == "changed\n" and check["exit_code"] == 0
    assert run["compute"]["gib_millis"] > 0
    [listed] = [one for one in runs.ask("GET", "", params={"status": "completed"}).json() if one["id"] == id]
    assert listed["stop_reason"] == "end_turn"


def test_a_program_that_fails_is_a_run_that_fails(runs):
    run, events = runs.end(runs.create(["sh", "-c", "echo oh >&2; exit 7"]))
    assert (run["status"], run["stop_reason"]) == ("failed", "agent_error")
    assert "code 7" in run["detail"]
    [exited] = [event["data"] for event in events if event["type"] == "worker.exited"]
    assert exited["exit_code"] == 7 and "verify.passed" not in types(events)


def test_a_failed_check_is_repaired_with_what_it_said(runs):
    agent = 'n=$(cat n 2>/dev/null || echo 0); n=$((n + 1)); echo $n > n; cat'
    check = {"command": "test $(cat n) = 3 || { echo only $(cat n); exit 4; }"}
    run, events = runs.end(runs.create(agent, prompt="count", checks=[check]))
    assert (run["status"], run["turns"]) == ("completed", 3), run
    names = [event["data"]["name"] for event in events if event["type"] == "turn.started"]
    assert names == ["build", "repair-1", "repair-2"]
    said = output(events)
    assert "only 1" in said and "only 2" in said and "exit status 4" in said and said.count("count") == 3, said
    results = [event["data"]["exit_code"] for event in events if event["type"] == "check.result"]
    assert results == [4, 4, 0]


def test_what_can_not_be_repaired_fails(runs):
    run, events = runs.end(runs.create("true", checks=[{"command": "true"}, {"command": "exit 9"}], max_repairs=1))
    assert (run["status"], run["stop_reason"], run["turns"]) == ("failed", "verification_failed", 2)
    assert "check 2" in run["detail"] and types(events).count("verify.failed") == 2


def test_a_check_that_does_not_end_fails(runs):
    run, _ = runs.end(runs.create("true", checks=[{"command": "sleep 60", "timeout_seconds": 1}], max_repairs=0))
    assert run["stop_reason"] == "verification_failed"


def test_a_held_run_waits_for_its_next_turn(runs):
    id = runs.create("cat; cat more 2>/dev/null; date +%s%N >> seen; wc -l < seen", prompt="one ", hold=True)
    runs.wait_for(id, "turn.awaited")
    assert runs.get(id)["status"] == "waiting"
    more = {"prompt": "two ", "files": [{"path": "more", "content": "more "}], "hold": True}
    assert runs.ask("POST", f"/{id}/turns", json=more).status_code == 202
    until(lambda: runs.get(id)["turns"] == 2 and runs.get(id)["status"] == "waiting", within=20)
    assert runs.ask("POST", f"/{id}/turns", json={"prompt": "three "}).status_code == 202
    run, events = runs.end(id)
    assert (run["status"], run["turns"]) == ("completed", 3)
    assert output(events).split() == ["one", "1", "two", "more", "2", "three", "more", "3"]
    assert runs.ask("POST", f"/{id}/turns", json={"prompt": "four"}).status_code == 409


def test_a_run_that_works_takes_no_turn(runs):
    id = runs.create("sleep 30", hold=True)
    runs.wait_for(id, "worker.started")
    assert runs.ask("POST", f"/{id}/turns", json={"prompt": "now"}).status_code == 409
    assert runs.ask("POST", f"/{id}/cancel").status_code == 202
    assert runs.end(id)[0]["status"] == "cancelled"


def test_a_held_run_ends_when_its_time_is_up(runs):
    run, _ = runs.end(runs.create("true", hold=True, timeout_seconds=3))
    assert (run["status"], run["stop_reason"]) == ("completed", "end_turn")
    assert "no other turn" in run["detail"]


def test_time_is_up(runs):
    began = time.monotonic()
    run, events = runs.end(runs.create("trap 'echo asked; exit 0' TERM; sleep 60 & wait", timeout_seconds=2))
    assert (run["status"], run["stop_reason"]) == ("failed", "timeout")
    # It was asked to end before it was made to.
    assert output(events) == "asked\n" and time.monotonic() - began < 20


def test_a_program_that_does_not_want_to_end_is_ended(runs):
    run, events = runs.end(runs.create("trap '' TERM; while :; do sleep 1; done", timeout_seconds=1))
    assert run["stop_reason"] == "timeout"
    [exited] = [event["data"] for event in events if event["type"] == "worker.exited"]
    assert exited["killed"] and 5000 < exited["duration_ms"] < 15000


def test_cancelled(runs):
    id = runs.create("sleep 60")
    runs.wait_for(id, "worker.started")
    assert runs.ask("POST", f"/{id}/cancel").status_code == 202
    assert runs.ask("POST", f"/{id}/cancel").status_code in (200, 202)
    run, events = runs.end(id)
    assert (run["status"], run["stop_reason"]) == ("cancelled", "cancelled")
    assert types(events).count("run.cancel_requested") == 1 and run["cancel_requested_at"]
    again = runs.ask("POST", f"/{id}/cancel")
    assert again.status_code == 200 and again.json()["status"] == "cancelled"


def test_cancelled_before_there_is_a_sandbox(runs):
    id = runs.create("sleep 60")
    runs.ask("POST", f"/{id}/cancel")
    assert runs.end(id)[0]["status"] == "cancelled"


def test_a_sandbox_out_of_memory_fails_its_run(runs):
    hog = "python3 -c 'x=[]\nwhile True: x.append(bytearray(1<<24))'"
    run, _ = runs.end(runs.create(f"{hog}; sleep 1; {hog}; echo survived", timeout_seconds=60))
    # The guest's own guard ends the program, or the kernel the whole sandbox: never the run's success by itself.
    assert run["status"] in ("failed", "completed")
    if run["stop_reason"] == "sandbox_error":
        assert "memory" in run["detail"], run


def test_a_sandbox_that_is_taken_away_fails_its_run(runs):
    id = runs.create("sleep 60")
    [ready] = [one for one in runs.wait_for(id, "worker.started") if one["type"] == "sandbox.ready"]
    assert Sandbox.kill(ready["data"]["sandbox_id"])
    run, _ = runs.end(id)
    assert (run["status"], run["stop_reason"], run["detail"]) == ("failed", "sandbox_error", "somebody ended its sandbox")


def test_nothing_leaves_unless_it_is_asked_for(runs):
    run, events = runs.end(runs.create("curl -sS -m 5 http://example.com; echo ended with $?"))
    assert run["status"] == "completed" and not run["web"]
    assert "ended with 6" in output(events) or "ended with 7" in output(events) or "ended with 28" in output(events)


def test_a_worker_says_no_more_than_it_may(runs):
    """Whatever a program prints, it is its own word, and there is so much of it."""
    lies = json.dumps({"type": "run.completed", "data": {"status": "completed"}})
    id = runs.create(f"echo '{lies}'; yes {'x' * 200} | head -c 3000000; exit 3")
    run, events = runs.end(id)
    assert run["status"] == "failed"
    said = [event for event in events if event["source"] == "worker"]
    assert {event["type"] for event in said} == {"worker.output"}
    assert max(len(json.dumps(event)) for event in said) < 40_000
    assert any(event["type"] == "worker.events_dropped" and event["data"]["dropped"] > 0 for event in events)
    assert len(said) < 200


def test_the_same_request_is_one_run(runs):
    key = uuid.uuid4().hex
    id = runs.create("echo once", key=key)
    body = {"prompt": "do it", "agent": {"command": "echo once"}, "timeout_seconds": 60}
    # The same, written otherwise.
    text = json.dumps(dict(reversed(body.items())), indent=2)
    again = runs.ask("POST", "", content=text, headers={"Idempotency-Key": key, "Content-Type": "application/json"})
    assert (again.status_code, again.json()["id"]) == (202, id), again.text
    assert again.headers["Idempotent-Replayed"] == "true"
    other = runs.ask("POST", "", json=body | {"prompt": "other"}, headers={"Idempotency-Key": key})
    assert other.status_code == 422 and other.json()["error_code"] == "idempotency_request_mismatch"
    runs.end(id)
    assert runs.ask("POST", "", json=body, headers={"Idempotency-Key": key}).json()["status"] == "completed"


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"template": "nothing"}, 404, "nothing"),
        ({"prompt": ""}, 400, "prompt"),
        ({"timeout_seconds": 0}, 400, "timeout_seconds"),
        ({"timeout_seconds": 10**9}, 400, "timeout_seconds"),
        ({"max_cost_micros": 10**15}, 400, "max_cost_micros"),
        ({"web": ["not a host"]}, 400, "web"),
        ({"agent": "builtin"}, 400, "model"),
        ({"agent": "builtin", "model": "none", "max_cost_micros": 1}, 501, "models"),
        ({"unknown": 1}, 400, "unknown"),
        ({"files": [{"path": "../x", "content": ""}]}, 400, "files.path"),
    ],
)
def test_what_can_not_be_is_refused_at_once(runs, change, status, word):
    body = {"prompt": "do it", "agent": {"command": "true"}} | change
    answer = runs.ask("POST", "", json=body)
    assert answer.status_code == status and word in answer.json()["message"], answer.text


def test_events_are_streamed_and_resumed(runs, server):
    id = runs.create("for n in 1 2 3; do echo $n; sleep 0.3; done")
    url = f"{server.url}/v1/runs/{id}/events"

    def stream(more: dict, most: int | None = None) -> list[dict]:
        events = []
        with httpx.stream("GET", url, headers=server.headers | {"Accept": "text/event-stream"} | more, timeout=30) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line[6:]))
                    if len(events) == most:
                        break
        return events

    first = stream({}, most=4)
    rest = stream({"Last-Event-ID": str(first[-1]["seq"])})
    both = first + rest
    assert [event["seq"] for event in both] == list(range(1, len(both) + 1))
    assert both[-1]["type"] == "run.completed" and both == runs.follow(id)
    assert stream({"Last-Event-ID": str(both[-1]["seq"])}) == []


def test_a_run_is_nobody_else_s(runs, server, anonymous):
    id = runs.create("true")
    assert anonymous.get(f"/v1/runs/{id}").status_code == 401
    for text in ["run_" + "0" * 20, "x", "run_..", "%00"]:
        assert runs.ask("GET", f"/{text}").status_code in (400, 404)
    refused = httpx.post(
        f"{server.url}/v2/sandboxes", headers=server.headers, json={"templateID": "base", "metadata": {"sandglass.run": id}}
    )
    assert refused.status_code == 400, "nobody gives a sandbox to a run"
    runs.end(id)
