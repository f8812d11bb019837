"""A sandbox that is paused uses nothing, and goes on where it was."""

import json
import threading
import time
import uuid
from pathlib import Path

import httpx
import pytest
from conftest import pages
from e2b import NotFoundException, Sandbox, SandboxException, SandboxQuery, SandboxState
from faults import PATIENCE, Attempt, crash, pause, reached
from support import cgroups_named, until

COUNTER = r"""
import time
n = 0
with open("/home/user/counter", "w") as disk, open("/dev/shm/memory", "w") as memory:
    while True:
        n += 1
        for file in (disk, memory):
            file.seek(0)
            file.write(f"{n:012}")
            file.flush()
        time.sleep(0.001)
"""


def call(server, method: str, path: str, key: str = "", **options) -> httpx.Response:
    headers = {"X-API-Key": key or server.api_key}
    return httpx.request(method, server.url + path, headers=headers, timeout=60, **options)


def state(server, sandbox) -> str:
    response = call(server, "GET", f"/sandboxes/{sandbox.sandbox_id}")
    assert response.status_code == 200, response.text
    return response.json()["state"]


def resume(server, sandbox, timeout: int = 120) -> Sandbox:
    return Sandbox.connect(sandbox.sandbox_id, timeout=timeout)


@pytest.fixture
def sandbox(server):
    sandbox = Sandbox.create(timeout=300)
    yield sandbox
    Sandbox.kill(sandbox.sandbox_id)


def test_memory_processes_and_files_go_on(server, sandbox):
    sandbox.files.write("/home/user/counter.py", COUNTER)
    sandbox.files.write("/home/user/kept", "on the disk")
    started = sandbox.commands.run("python3 -u counter.py", background=True, timeout=0)
    sandbox.commands.run("python3 -m http.server 8000", background=True, timeout=0)
    boot = sandbox.commands.run("cat /proc/sys/kernel/random/boot_id; hostname").stdout
    count = lambda box, path: int(box.files.read(path) or 0)  # noqa: E731
    until(lambda: sandbox.files.exists("/dev/shm/memory") and count(sandbox, "/dev/shm/memory") > 10, what="a count")
    before, token = count(sandbox, "/dev/shm/memory"), sandbox._envd_access_token
    sandbox.pause()
    assert state(server, sandbox) == "paused"
    assert not sandbox.is_running()

    again = resume(server, sandbox)
    assert again.sandbox_id == sandbox.sandbox_id and again._envd_access_token == token
    assert state(server, again) == "running"
    after = count(again, "/dev/shm/memory")
    # It went on from there: it neither began anew nor ran meanwhile.
    assert before <= after < before + 20_000
    until(lambda: count(again, "/dev/shm/memory") > after, what="the count to go on")
    memory, disk = again.commands.run("cat /dev/shm/memory; echo; cat /home/user/counter").stdout.split()
    assert abs(int(memory) - int(disk)) < 1000
    assert again.files.read("/home/user/kept") == "on the disk"
    assert [process.pid for process in again.commands.list() if process.pid == started.pid]
    assert again.commands.run("cat /proc/sys/kernel/random/boot_id; hostname").stdout == boot
    page = httpx.get(server.url, headers={"E2b-Sandbox-Id": again.sandbox_id, "E2b-Sandbox-Port": "8000"})
    assert page.status_code == 200 and "counter.py" in page.text
    assert again.commands.kill(started.pid)


def cpu_ticks(id: str) -> int | None:
    """What the processes of a sandbox have used of the CPU; nothing where they come and go."""
    pids = {pid for group in cgroups_named(id) for pid in (group / "cgroup.procs").read_text().split()}
    try:
        fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in sorted(pids)]
    except FileNotFoundError:
        return None
    return sum(int(user) + int(system) for *_, user, system in [each[:13] for each in fields])


def is_prepared(server, id: str) -> bool:
    record = server.data_dir / "host" / "sandboxes" / id / "state.json"
    return record.exists() and '"waits"' in record.read_text()


def test_a_paused_sandbox_owns_its_image_and_what_stands_still(server, sandbox):
    id, image = sandbox.sandbox_id, server.data_dir / "host" / "images" / sandbox.sandbox_id
    assert cgroups_named(id) and not image.exists()
    sandbox.pause()
    assert image.exists()
    until(lambda: is_prepared(server, id), within=PATIENCE, what="its next computer")
    # It is stopped right after that.
    stopped = lambda before: (time.sleep(1), cpu_ticks(id) == before)[1]  # noqa: E731
    until(lambda: (before := cpu_ticks(id)) is not None and stopped(before), within=PATIENCE, what="to stand still")
    _, ledger = server.ledger(wait=0)
    assert not ledger["left_over"] and not ledger["missing"], ledger
    resume(server, sandbox)
    assert cgroups_named(id) and not image.exists() and not is_prepared(server, id)
    # With its files alone, there is nothing to make ahead.
    assert pause(server, id, memory=False).status_code == 204
    until(lambda: not cgroups_named(id), what="its processes and control groups to be gone")


def test_memory_of_another_runsc_is_refused_by_name_and_the_files_are_there(server, sandbox):
    sandbox.files.write("/home/user/kept", "yes")
    sandbox.pause()
    meta = server.data_dir / "host" / "images" / sandbox.sandbox_id / "meta.json"
    said = json.loads(meta.read_text())
    has, said["pinned"]["runsc"] = said["pinned"]["runsc"], "release-of-long-ago"
    meta.write_text(json.dumps(said))
    path = f"/sandboxes/{sandbox.sandbox_id}/resume"
    refused = call(server, "POST", path, json={"timeout": 60})
    assert refused.status_code == 409, refused.text
    for words in ("runsc release-of-long-ago", has, '"memory": false'):
        assert words in refused.json()["message"]
    assert call(server, "GET", f"/v1/sandboxes/{sandbox.sandbox_id}").json()["state"] == "paused"
    assert call(server, "POST", path, json={"timeout": 60, "memory": False}).status_code == 201
    assert sandbox.files.read("/home/user/kept") == "yes"


def test_what_is_legal_when(server, sandbox):
    path = f"/sandboxes/{sandbox.sandbox_id}"
    assert call(server, "POST", f"{path}/resume", json={"timeout": 60}).status_code == 409
    assert call(server, "POST", f"{path}/pause").status_code == 204
    again = call(server, "POST", f"{path}/pause")
    assert (again.status_code, again.json()["message"]) == (409, "the sandbox is already paused")
    assert call(server, "POST", f"{path}/timeout", json={"timeout": 60}).status_code == 404
    assert call(server, "PUT", f"{path}/network", json={}).status_code == 404
    with pytest.raises((NotFoundException, SandboxException)):
        sandbox.commands.run("true")
    assert call(server, "POST", f"{path}/resume", json={"timeout": 0}).status_code == 400
    assert call(server, "POST", f"{path}/resume", json={"timeout": 60}).status_code == 201
    assert sandbox.commands.run("echo hi").stdout == "hi\n"
    assert call(server, "POST", f"{path}/connect", json={"timeout": 60}).status_code == 200
    assert call(server, "POST", f"{path}/pause", json={"memory": "no"}).status_code == 400
    assert call(server, "POST", f"{path}/pause").status_code == 204
    assert call(server, "POST", f"{path}/connect", json={"timeout": 60}).status_code == 201
    missing = f"/sandboxes/{'0' * 20}"
    for verb in ("pause", "resume"):
        assert call(server, "POST", f"{missing}/{verb}").status_code == 404


def test_lists_tell_paused_from_running(server, sandbox):
    mark = {"mark": uuid.uuid4().hex}
    running, paused = (Sandbox.create(timeout=120, metadata=mark) for _ in range(2))

    def listed(*states: SandboxState) -> dict:
        query = SandboxQuery(metadata=mark, state=list(states) or None)
        return {
            info.sandbox_id: info.state.value for page in pages(Sandbox.list(query)) for info in page
        }

    try:
        paused.pause()
        both = {running.sandbox_id: "running", paused.sandbox_id: "paused"}
        assert listed() == listed(SandboxState.RUNNING, SandboxState.PAUSED) == both
        assert listed(SandboxState.PAUSED) == {paused.sandbox_id: "paused"}
        assert listed(SandboxState.RUNNING) == {running.sandbox_id: "running"}
    finally:
        assert running.kill() and Sandbox.kill(paused.sandbox_id)
    assert listed() == {}


def test_its_time_does_not_pass_while_it_is_paused(server):
    sandbox = Sandbox.create(timeout=3)
    sandbox.pause()
    until(lambda: sandbox.get_info().end_at.timestamp() < time.time() - 1, what="its old end to be past")
    assert state(server, sandbox) == "paused"
    again = resume(server, sandbox, timeout=60)
    assert 50 < again.get_info().end_at.timestamp() - time.time() <= 60
    assert again.commands.run("echo on").stdout == "on\n"
    assert again.kill()


def test_killed_while_paused(server):
    sandbox = Sandbox.create(timeout=60)
    sandbox.pause()
    assert Sandbox.kill(sandbox.sandbox_id)
    assert call(server, "GET", f"/sandboxes/{sandbox.sandbox_id}").status_code == 404
    with pytest.raises(NotFoundException):
        resume(server, sandbox)


def test_killed_while_pausing(server):
    sandbox = Sandbox.create(timeout=60)
    pausing = threading.Thread(target=lambda: call(server, "POST", f"/sandboxes/{sandbox.sandbox_id}/pause"))
    pausing.start()
    assert Sandbox.kill(sandbox.sandbox_id)
    pausing.join()
    assert call(server, "GET", f"/sandboxes/{sandbox.sandbox_id}").status_code == 404


def test_many_want_it_back_at_once(server, sandbox):
    sandbox.commands.run("echo once > /dev/shm/state")
    sandbox.pause()
    path, statuses = f"/sandboxes/{sandbox.sandbox_id}/connect", []
    connect = lambda: statuses.append(call(server, "POST", path, json={"timeout": 60}).status_code)  # noqa: E731
    threads = [threading.Thread(target=connect) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 201} and 201 in statuses, statuses
    assert sandbox.commands.run("cat /dev/shm/state").stdout == "once\n"


def test_it_is_as_sealed_as_before_and_its_receipts_go_on(server, sandbox):
    def receipts() -> list[dict]:
        response = call(server, "GET", f"/v1/sandboxes/{sandbox.sandbox_id}/egress")
        return [line["receipt"] for line in response.json()]

    def ask(box, name: str):
        said = box.commands.run(f"getent hosts {name} || echo none").stdout
        assert said == "none\n"
        return until(lambda: [one for one in receipts() if one.get("name") == name], what=f"the receipt of {name}")

    assert {one["generation"] for one in ask(sandbox, "before.example")} == {1}
    sandbox.pause()
    again = resume(server, sandbox)
    assert {one["generation"] for one in ask(again, "after.example")} == {2}
    assert [one for one in receipts() if one.get("name") == "before.example"]
    refused = again.commands.run("curl -sS -m 8 http://192.0.2.1/ 2>&1; true").stdout
    assert "refused" in refused or "reset" in refused or "Failed to connect" in refused, refused


def test_ten_times_over(server, sandbox):
    sandbox.commands.run("echo 0 > /dev/shm/n; echo 0 > n")
    for n in range(10):
        sandbox.pause()
        sandbox = resume(server, sandbox)
        said = sandbox.commands.run("for f in /dev/shm/n n; do echo $(($(cat $f) + 1)) > $f; cat $f; done").stdout
        assert said.split() == [str(n + 1)] * 2


def test_what_can_not_be_paused_runs_on(server, sandbox):
    holding = "exec 3> gone; rm gone; echo kept >&3; touch held; exec sleep 1000"
    held = sandbox.commands.run(holding, background=True, timeout=0)
    until(lambda: sandbox.files.exists("/home/user/held"), what="the file to be deleted")
    response = call(server, "POST", f"/sandboxes/{sandbox.sandbox_id}/pause")
    assert response.status_code == 409, response.text
    assert "runs on" in response.json()["message"]
    assert state(server, sandbox) == "running"
    # With all that it had, and it can be paused once that is gone.
    assert [process for process in sandbox.commands.list() if process.pid == held.pid]
    assert sandbox.commands.kill(held.pid)
    sandbox.pause()
    assert resume(server, sandbox).commands.run("echo on").stdout == "on\n"


def test_a_new_server_finds_it_paused(lone_server):
    server = lone_server
    sandbox = Sandbox.create(timeout=120, **server.opts)
    sandbox.commands.run("echo kept > /dev/shm/state")
    sandbox.pause()
    crash(server, "both")
    server.start()
    assert state(server, sandbox) == "paused"
    again = Sandbox.connect(sandbox.sandbox_id, timeout=60, **server.opts)
    assert again.commands.run("cat /dev/shm/state").stdout == "kept\n"


@pytest.fixture
def stuck_server(lone_server):
    """One that never gets an image written."""
    lone_server.stop()
    lone_server.start("engine.image.checkpoint=hang")
    return lone_server


def test_while_it_is_being_paused(stuck_server):
    server = stuck_server
    sandbox = Sandbox.create(timeout=300, **server.opts)
    path = f"/sandboxes/{sandbox.sandbox_id}"
    pausing = [Attempt(pause, server, sandbox.sandbox_id)]
    until(lambda: reached(server, 0), what="the image to be begun")
    # The second one joins the first.
    pausing.append(Attempt(pause, server, sandbox.sandbox_id))
    for method, verb, body in [
        ("POST", "timeout", {"timeout": 60}),
        ("POST", "refreshes", {"duration": 60}),
        ("PUT", "network", {}),
        ("POST", "resume", {"timeout": 60}),
    ]:
        answer = call(server, method, f"{path}/{verb}", json=body)
        assert (answer.status_code, "being paused" in answer.json()["message"]) == (409, True), answer.text
    assert state(server, sandbox) == "running" and all(one.is_alive() for one in pausing)
    # Who ends it need not wait for an image that nobody wants any more.
    assert call(server, "DELETE", path).status_code == 204
    assert call(server, "GET", path).status_code == 404
    crash(server, "both")
    for one in pausing:
        one.join(PATIENCE)
        assert not one.is_alive() and not one.succeeded
    server.start()
    detail = lambda: call(server, "GET", f"/v1/sandboxes/{sandbox.sandbox_id}").json()  # noqa: E731
    until(lambda: detail()["state"] == "ended", what="its end")
    assert detail()["end_reason"] == "killed"
    server.assert_nothing_left()
