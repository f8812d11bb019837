"""A sandbox whose time is up is paused, if it asked for that, and a request makes it run again."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2b import Sandbox, SandboxException
from faults import PATIENCE, configured, crash, log_size, reached
from support import cgroups_named, until
from test_pause import is_prepared

NOT_FOUND = "The sandbox was not found"
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


def call(server, method: str, path: str, **options) -> httpx.Response:
    return httpx.request(method, server.url + path, headers=server.headers, timeout=PATIENCE, **options)


def detail(server, sandbox) -> dict:
    """What the server itself calls it."""
    response = call(server, "GET", f"/v1/sandboxes/{sandbox.sandbox_id}")
    assert response.status_code == 200, response.text
    return response.json()


def paused(server, sandbox, mode: str = "full") -> list[str]:
    """Waits until it is paused. What its history says."""

    def look():
        found = detail(server, sandbox)
        assert found["state"] in ("running", "pausing", "paused", "resuming"), found
        return found["state"] == "paused" and found

    found = until(look, within=PATIENCE, what="it is paused")
    assert found["pause_mode"] == mode, found
    return [event["detail"] for event in found["events"]]


def pausing(server, on_timeout="pause", auto_resume: bool | None = None, **options) -> Sandbox:
    """One that is to be paused, and that remembers something in its memory and on its disk."""
    lifecycle = {"on_timeout": on_timeout} | ({} if auto_resume is None else {"auto_resume": auto_resume})
    sandbox = Sandbox.create(timeout=300, lifecycle=lifecycle, **options, **server.opts)
    sandbox.commands.run("echo kept > /dev/shm/memory; echo kept > /home/user/disk; echo kept > /tmp/disk")
    return sandbox


def connect(server, sandbox, **options) -> Sandbox:
    return Sandbox.connect(sandbox.sandbox_id, timeout=120, **options, **server.opts)


def remembers(sandbox) -> str:
    return sandbox.commands.run("cat /dev/shm/memory /home/user/disk /tmp/disk 2>/dev/null; true").stdout


def ask(server, sandbox, port: int, path: str = "/", **headers) -> httpx.Response:
    route = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}
    return httpx.get(server.url + path, headers=route | headers, timeout=PATIENCE)


@pytest.mark.parametrize("when", [0, 1])
def test_its_memory_is_kept_when_its_time_is_up(server, when):
    sandbox = pausing(server)
    try:
        info = sandbox.get_info()
        assert info.lifecycle == {"on_timeout": "pause", "auto_resume": False}
        boot = sandbox.commands.run(BOOT_ID).stdout
        sandbox.set_timeout(when)
        assert "its time is up" in paused(server, sandbox)
        # What it ran in is gone, and its next computer stands still.
        until(lambda: is_prepared(server, sandbox.sandbox_id), within=PATIENCE, what="its next computer")
        ends = sandbox.get_info().end_at
        assert sandbox.get_info().end_at == ends and ends.timestamp() <= time.time()
        # It did not ask to be woken.
        assert not sandbox.is_running()
        answer = ask(server, sandbox, 49983, "/health")
        assert (answer.status_code, answer.json()["message"]) == (502, NOT_FOUND)
        again = connect(server, sandbox)
        assert remembers(again) == "kept\n" * 3 and again.commands.run(BOOT_ID).stdout == boot
        # It is paused again at the next end.
        again.set_timeout(0)
        paused(server, sandbox)
        assert remembers(connect(server, sandbox)) == "kept\n" * 3
    finally:
        assert Sandbox.kill(sandbox.sandbox_id, **server.opts)


@pytest.mark.newest_sdk
def test_only_its_files_are_kept_if_it_asked_for_that(server):
    sandbox = pausing(server, {"action": "pause", "mode": "filesystem"}, envs={"MINE": "x"})
    try:
        boot = sandbox.commands.run(BOOT_ID).stdout
        sandbox.commands.run("sleep 1000", background=True, timeout=0)
        sandbox.set_timeout(0)
        paused(server, sandbox, "filesystem")
        answer = call(server, "GET", f"/sandboxes/{sandbox.sandbox_id}").json()
        assert (answer["state"], answer["pauseMode"]) == ("paused", "filesystem")
        again = connect(server, sandbox)
        assert again.sandbox_id == sandbox.sandbox_id and again._envd_access_token == sandbox._envd_access_token
        assert remembers(again) == "kept\n" * 2
        assert again.commands.run(BOOT_ID).stdout != boot
        assert again.commands.list() == []
        assert again.commands.run("echo $MINE; hostname").stdout == f"x\n{sandbox.sandbox_id}\n"
    finally:
        assert Sandbox.kill(sandbox.sandbox_id, **server.opts)


def test_paused_with_its_files_alone_and_started_anew_from_a_whole_image(server):
    sandbox = pausing(server, "kill")
    path = f"/sandboxes/{sandbox.sandbox_id}"
    try:
        boots = [sandbox.commands.run(BOOT_ID).stdout]
        for pause, resume, mode in [(False, None, "filesystem"), (True, False, "full"), (False, False, "filesystem")]:
            sandbox.commands.run("echo kept > /dev/shm/memory; echo more >> /home/user/log")
            assert call(server, "POST", f"{path}/pause", json={"memory": pause}).status_code == 204
            paused(server, sandbox, mode)
            body = {"timeout": 120} | ({} if resume is None else {"memory": resume})
            assert call(server, "POST", f"{path}/connect", json=body).status_code == 201
            assert remembers(sandbox) == "kept\n" * 2
            boots.append(sandbox.commands.run(BOOT_ID).stdout)
        assert len(set(boots)) == 4
        assert sandbox.files.read("/home/user/log") == "more\n" * 3
        assert detail(server, sandbox)["generation"] == 4
    finally:
        assert Sandbox.kill(sandbox.sandbox_id, **server.opts)


@pytest.mark.parametrize(
    "body",
    [
        {"autoResume": {"enabled": True}},
        {"autoPauseMemory": False},
        {"autoPause": True, "autoPauseMemory": False, "autoResume": {"enabled": True}},
    ],
    ids=["no pause", "no pause without memory", "no memory"],
)
def test_what_makes_no_sense_is_refused(server, body):
    answer = call(server, "POST", "/v2/sandboxes", json={"templateID": "base"} | body)
    assert answer.status_code == 400 and "auto" in answer.json()["message"], answer.text


def test_a_request_makes_it_run_again(server):
    sandbox = pausing(server, auto_resume=True)
    try:
        assert sandbox.get_info().lifecycle["auto_resume"]
        sandbox.commands.run("python3 -m http.server 8000 -d /home/user", background=True, timeout=0)
        until(lambda: ask(server, sandbox, 8000).status_code == 200, what="a server inside")
        for request in (
            lambda: sandbox.commands.run("echo on").stdout == "on\n",
            lambda: ask(server, sandbox, 8000, "/disk").text == "kept\n",
            lambda: sandbox.is_running(),
            lambda: sandbox.files.read("/dev/shm/memory") == "kept\n",
        ):
            sandbox.set_timeout(0)
            paused(server, sandbox)
            assert request()
            # For as long as it was made for.
            left = sandbox.get_info().end_at.timestamp() - time.time()
            assert 200 < left <= 300
            assert remembers(sandbox) == "kept\n" * 3
        found = detail(server, sandbox)
        assert found["generation"] == 5
        assert [event["detail"] for event in found["events"]].count("a request to one of its ports") == 4
        # Paused by who has the key, it is woken as well; with its files alone it is not.
        sandbox.pause()
        assert sandbox.is_running()
        path = f"/sandboxes/{sandbox.sandbox_id}"
        assert call(server, "POST", f"{path}/pause", json={"memory": False}).status_code == 204
        answer = ask(server, sandbox, 8000)
        assert (answer.status_code, answer.json()["message"]) == (502, NOT_FOUND)
    finally:
        assert Sandbox.kill(sandbox.sandbox_id, **server.opts)


def test_many_requests_make_it_run_once(server):
    sandbox = pausing(server, auto_resume=True)
    try:
        sandbox.commands.run("python3 -m http.server 8000 -d /home/user", background=True, timeout=0)
        until(lambda: ask(server, sandbox, 8000).status_code == 200, what="a server inside")
        sandbox.set_timeout(0)
        # Also those that come while it is still being paused.
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: ask(server, sandbox, 8000, "/disk"), range(48)))
        assert {(answer.status_code, answer.text) for answer in answers} == {(200, "kept\n")}
        paused_then = detail(server, sandbox)["generation"]
        assert paused_then in (1, 2)
        sandbox.pause()
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: ask(server, sandbox, 8000, "/disk"), range(48)))
        assert {(answer.status_code, answer.text) for answer in answers} == {(200, "kept\n")}
        assert detail(server, sandbox)["generation"] == paused_then + 1
    finally:
        assert Sandbox.kill(sandbox.sandbox_id, **server.opts)


def test_a_stranger_wakes_nobody(server):
    sandbox = pausing(server, auto_resume=True, network={"allow_public_traffic": False})
    try:
        sandbox.commands.run("python3 -m http.server 8000 -d /home/user", background=True, timeout=0)
        token, access = sandbox.traffic_access_token, sandbox._envd_access_token
        assert token and access
        mine = {"e2b-traffic-access-token": token}
        until(lambda: ask(server, sandbox, 8000, **mine).status_code == 200, what="a server inside")
        sandbox.set_timeout(0)
        paused(server, sandbox)
        for port, headers in [
            (8000, {}),
            (8000, {"e2b-traffic-access-token": "x" * len(token)}),
            (8000, {"X-Access-Token": access}),
            (49983, {}),
            (49983, {"X-Access-Token": token}),
            (49983, {"X-Access-Token": access[:-1]}),
        ]:
            answer = ask(server, sandbox, port, "/health", **headers)
            assert answer.status_code == 403, (port, headers, answer.text)
            assert detail(server, sandbox)["state"] == "paused"
        # A signed address is judged inside, so it wakes nobody either.
        signed = httpx.URL(sandbox.download_url("/home/user/disk"))
        answer = ask(server, sandbox, 49983, signed.raw_path.decode())
        assert answer.status_code == 403 and detail(server, sandbox)["state"] == "paused"
        assert ask(server, sandbox, 8000, "/disk", **mine).text == "kept\n"
        sandbox.set_timeout(0)
        paused(server, sandbox)
        assert ask(server, sandbox, 49983, "/health", **{"X-Access-Token": access}).status_code == 204
    finally:
        assert Sandbox.kill(sandbox.sandbox_id, **server.opts)


def test_one_that_can_not_be_woken_stays_as_it_is_and_says_why(servers, tmp_path):
    server = configured(servers, tmp_path, "[quota]\nsandboxes = 1\n[host]\ndisk_mib = 1000000\n")
    sandbox = pausing(server, auto_resume=True)
    sandbox.set_timeout(0)
    paused(server, sandbox)
    other = Sandbox.create(timeout=300, **server.opts)
    route = {"X-Access-Token": sandbox._envd_access_token}
    answer = ask(server, sandbox, 49983, "/health", **route)
    assert answer.status_code == 429 and "quota" in answer.json()["message"], answer.text
    assert other.kill()
    server.stop()
    server.start("control.resume.host=error*1")
    answer = ask(server, sandbox, 49983, "/health", **route)
    assert answer.status_code == 503 and "could not be resumed" in answer.json()["message"], answer.text
    assert "control.resume.host made it fail" in " ".join(paused(server, sandbox))
    assert remembers(sandbox) == "kept\n" * 3
    assert sandbox.kill()
    server.stop()


def test_it_waits_for_a_server_that_can_pause_it(lone_server):
    server = lone_server
    sandbox, ended = pausing(server), Sandbox.create(timeout=300, **server.opts)
    for one in (sandbox, ended):
        one.set_timeout(6)
    crash(server, "both")
    # The watchdog ends the one, and leaves the other alone: nothing but a server can keep its memory.
    until(lambda: not cgroups_named(ended.sandbox_id), within=PATIENCE, what="a sandbox whose time is up")
    assert cgroups_named(sandbox.sandbox_id)
    server.start()
    paused(server, sandbox)
    assert remembers(connect(server, sandbox)) == "kept\n" * 3


@pytest.mark.parametrize("victim", ["serve", "both"])
@pytest.mark.parametrize("point", ["control.pause.freeze", "engine.image.checkpoint", "engine.image.finish"])
def test_the_server_dies_while_it_pauses_it(lone_server, point, victim):
    server = lone_server
    server.stop()
    log_from = log_size(server)
    server.start(f"{point}=hang")
    sandbox = pausing(server)
    sandbox.set_timeout(0)
    until(lambda: reached(server, log_from), within=PATIENCE, what="the pause to hang")
    crash(server, victim)
    server.start()
    paused(server, sandbox)
    assert remembers(connect(server, sandbox)) == "kept\n" * 3


def test_a_pause_that_fails_is_tried_again(lone_server):
    server = lone_server
    server.stop()
    server.start("engine.image.checkpoint=error*1;engine.image.copy=error*1")
    sandbox = pausing(server)
    sandbox.set_timeout(0)
    history = paused(server, sandbox)
    assert len([line for line in history if line.startswith("it could not be paused:")]) == 2, history
    assert remembers(connect(server, sandbox)) == "kept\n" * 3


def test_memory_is_given_up_only_where_it_can_not_be_kept_and_that_is_on_record(server):
    sandbox = pausing(server)
    try:
        holding = "exec 3> gone; rm gone; echo kept >&3; touch held; exec sleep 1000"
        sandbox.commands.run(holding, background=True, timeout=0)
        until(lambda: sandbox.files.exists("/home/user/held"), what="the file to be deleted")
        sandbox.set_timeout(0)
        history = paused(server, sandbox, "filesystem")
        [reason] = [line for line in history if "only its files are kept" in line]
        assert '"/home/user/gone", deleted from its disk' in reason
        assert remembers(connect(server, sandbox)) == "kept\n" * 2
    finally:
        assert Sandbox.kill(sandbox.sandbox_id, **server.opts)


def test_more_time_comes_in_time_where_a_pause_fails(lone_server):
    server = lone_server
    server.stop()
    server.start("control.pause.freeze=error")
    sandbox = pausing(server)
    sandbox.set_timeout(0)
    events = lambda: detail(server, sandbox)["events"]  # noqa: E731
    tried = lambda: [event for event in events() if "could not be paused" in event["detail"]]  # noqa: E731
    until(tried, within=PATIENCE, what="a pause that fails")
    # In between it runs, and can be used.
    path = f"/sandboxes/{sandbox.sandbox_id}/timeout"
    until(lambda: call(server, "POST", path, json={"timeout": 300}).is_success, what="more time")
    so_far = len(tried())
    assert remembers(sandbox) == "kept\n" * 3
    assert len(tried()) == so_far
    assert sandbox.kill()
    with pytest.raises(SandboxException):
        sandbox.commands.run("true")
