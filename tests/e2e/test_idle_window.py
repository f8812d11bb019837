"""A sandbox that nobody uses any more ends, or is paused, if it or the operator asked for that."""

import json
import time
from datetime import datetime

import httpx
import pytest
from e2b import Sandbox
from faults import PATIENCE, configured, crash
from support import until


# Longer than anything here takes on a busy machine between two uses, in seconds.
WINDOW = 8
# A server inside whose answer begins, and never ends.
BEGINS = """
import socket, time
listener = socket.create_server(("127.0.0.1", 8000))
open("/home/user/listens", "w").close()
connection, _ = listener.accept()
connection.recv(65536)
connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nx")
connection.recv(1)
"""
# What the clocks of two processes may differ by.
SLACK = 0.1


def create(server, idle: int | None = None, **more) -> Sandbox:
    """One that lives for long enough. E2B's SDKs have no word for an idle window."""
    body = {"templateID": "base", "timeout": 600} | ({} if idle is None else {"idleTimeout": idle}) | more
    answer = httpx.post(f"{server.url}/v2/sandboxes", json=body, headers=server.headers, timeout=PATIENCE)
    assert answer.status_code == 201, answer.text
    return Sandbox.connect(answer.json()["sandboxID"], timeout=600, **server.opts)


def detail(server, sandbox) -> dict:
    answer = httpx.get(f"{server.url}/v1/sandboxes/{sandbox.sandbox_id}", headers=server.headers, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def over(server, sandbox, state: str = "ended") -> float:
    """Waits until its window is over and it is in this state, and says when that began."""
    look = lambda: (it := detail(server, sandbox))["state"] == state and it  # noqa: E731
    found = until(look, within=PATIENCE, what=f"it is {state}")
    [event] = [event for event in found["events"] if event["detail"].startswith("nobody has used it for ")][-1:]
    assert state == "paused" or found["end_reason"] == "timeout"
    return datetime.fromisoformat(event["at"]).timestamp()


def test_it_ends_when_nobody_has_used_it(server):
    sandbox = create(server, WINDOW)
    assert detail(server, sandbox)["idle_timeout"] == WINDOW
    used = time.time()
    sandbox.commands.run("true")
    # Neither to ask about it nor to give it time is to use it.
    sandbox.set_timeout(500)
    assert over(server, sandbox) >= used + WINDOW - SLACK
    assert not sandbox.is_running()


def test_a_command_that_runs_is_use_whether_somebody_listens_or_not(server):
    for listens in (True, False):
        # One after the other: the second must not be over before it is used.
        sandbox = create(server, WINDOW)
        begun = time.time()
        handle = sandbox.commands.run(f"sleep {2 * WINDOW}", background=True, timeout=100)
        if listens:
            handle.wait()
        else:
            handle.disconnect()
        assert over(server, sandbox) >= begun + 3 * WINDOW - SLACK


def test_an_open_connection_is_use(server):
    sandbox = create(server, WINDOW)
    sandbox.files.write("/home/user/server.py", BEGINS)
    # In the background of a command that ends: one that runs would be use by itself.
    sandbox.commands.run("python3 server.py > log 2>&1 &")
    route = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8000"}
    until(lambda: sandbox.files.exists("/home/user/listens"), within=PATIENCE, what="it to listen")
    assert sandbox.commands.list() == []
    with httpx.stream("GET", server.url, headers=route, timeout=PATIENCE) as answer:
        assert answer.status_code == 200
        # Held: an iterator that nobody has any more closes the connection.
        body = answer.iter_raw()
        assert next(body) == b"x"
        # Not a byte is carried from here on.
        time.sleep(2.5 * WINDOW)
        assert detail(server, sandbox)["state"] == "running"
        last = time.time()
    assert over(server, sandbox) >= last + WINDOW - SLACK


def test_it_is_paused_and_woken_again_and_again(server):
    sandbox = create(server, WINDOW, autoPause=True, autoResume={"enabled": True})
    try:
        sandbox.commands.run("echo kept > /dev/shm/memory")
        for _ in range(2):
            over(server, sandbox, "paused")
            assert sandbox.commands.run("cat /dev/shm/memory").stdout == "kept\n"
    finally:
        assert Sandbox.kill(sandbox.sandbox_id, **server.opts)


def test_time_without_a_server_does_not_count(lone_server):
    server = lone_server
    sandbox = create(server, WINDOW)
    crash(server, "both")
    time.sleep(WINDOW + 1)
    server.start()
    up = time.time()
    # The window begins anew.
    assert over(server, sandbox) >= up - SLACK


def test_what_the_operator_wants_unless_a_client_says_otherwise(servers, tmp_path):
    server = configured(servers, tmp_path, f"[sandbox]\nidle_timeout_seconds = {WINDOW}\n")
    usual, forever = create(server), create(server, 0)
    assert [detail(server, one)["idle_timeout"] for one in (usual, forever)] == [WINDOW, None]
    over(server, usual)
    assert detail(server, forever)["state"] == "running"
    assert forever.kill()
    server.stop()


@pytest.mark.parametrize("idle", [-1, 10**9, "1", 1.5])
def test_nonsense_is_refused(server, idle):
    body = {"templateID": "base", "idleTimeout": idle}
    answer = httpx.post(f"{server.url}/v2/sandboxes", json=body, headers=server.headers, timeout=PATIENCE)
    assert answer.status_code == 400, answer.text


def test_what_nobody_uses_can_be_found(server):
    mark = {"mark": "found"}
    command, unused, paused = (create(server, metadata=mark) for _ in range(3))
    try:
        command.commands.run("sleep 1000", background=True, timeout=0)
        unused.commands.run("true")
        paused.pause()

        def found(idle: str) -> set[str]:
            listed = server.cli("sandbox", "list", "--metadata", "mark=found", "--idle", idle, "--json").stdout
            return {one["sandboxID"] for one in json.loads(listed)}

        ids = [one.sandbox_id for one in (command, unused, paused)]
        until(lambda: found("1s") == set(ids[1:]), within=PATIENCE, what="two of them are found")
        assert found("0s") >= set(ids[1:])
        assert found("1d") == set()
        assert detail(server, command)["unused_for"] == 0
        used_now = lambda: unused.commands.run("true") and detail(server, unused)["unused_for"] < 1  # noqa: E731
        until(used_now, within=PATIENCE, what="it was used just now")
    finally:
        for one in (command, unused, paused):
            one.kill()
