"""Every limit fires, and only the sandbox feels it."""

import os
import shutil
import threading
import time

import httpx
import pytest
from e2b import CommandExitException, Sandbox
from support import until


def native(server, sandbox) -> dict:
    return httpx.get(f"{server.url}/v1/sandboxes/{sandbox.sandbox_id}", headers=server.headers).json()


def test_disk(server, fresh):
    limit = native(server, fresh)["limits"]["disk_mib"] << 20
    free_before = shutil.disk_usage(server.data_dir).free
    with pytest.raises(CommandExitException) as full:
        fresh.commands.run(
            f"fallocate -l {limit - (600 << 20)} fill; dd if=/dev/zero of=rest bs=1M status=none", timeout=100
        )
    assert "No space left on device" in full.value.stderr
    # The sandbox goes on, and so does the machine.
    fresh.commands.run("rm -f fill rest; echo fine > fine")
    assert free_before - shutil.disk_usage(server.data_dir).free < limit + (1 << 30)


def test_tmp_counts_as_disk_and_shm_has_a_size(server, fresh):
    root, tmp = fresh.commands.run("df --output=size / /tmp | tail -2").stdout.split()
    assert abs(int(root) - int(tmp)) < int(root) // 10
    with pytest.raises(CommandExitException) as full:
        fresh.commands.run("dd if=/dev/zero of=/dev/shm/x bs=1M status=none", timeout=60)
    assert "No space left" in full.value.stderr
    fresh.commands.run("rm /dev/shm/x")


def test_memory(server, fresh):
    mib = native(server, fresh)["limits"]["memory_mib"]
    # A program may use nearly all that is advertised...
    fresh.commands.run(f"python3 -c \"x = b'x' * ({mib * 3 // 4} << 20); print(len(x))\"", timeout=60)
    # ... and more than that ends it, or the sandbox, but never the machine.
    with pytest.raises(Exception) as ended:
        fresh.commands.run(f"python3 -c \"x = b'x' * ({mib * 2} << 20); print(len(x))\"", timeout=60)
    if isinstance(ended.value, CommandExitException):
        assert ended.value.stdout == ""
    else:
        until(lambda: not fresh.is_running(), what="the end of the sandbox")
    with Sandbox.create(timeout=60) as other:
        assert other.commands.run("echo unharmed").stdout == "unharmed\n"


def test_cpus(server, fresh):
    """Twice as many busy loops as cores get no more than the cores' time."""
    cpus = native(server, fresh)["limits"]["cpus"]
    assert int(fresh.commands.run("nproc").stdout) == max(2, cpus)


def test_wall_clock_ends_a_busy_sandbox(server):
    sandbox = Sandbox.create(timeout=3)
    started = time.monotonic()
    sandbox.commands.run("while :; do :; done", background=True, timeout=60)
    until(lambda: not sandbox.is_running(), within=8, what="the end of the sandbox")
    assert time.monotonic() - started < 7


@pytest.mark.alone
def test_fork_bomb_and_busy_loops_leave_the_agent_answering(server, fresh):
    """`/health` within 250 ms once the bomb is seen, or the sandbox has ended and says why."""
    loops = "for i in 1 2 3 4; do (while :; do :; done) & done"
    bomb = "bomb() { bomb | bomb & }; bomb"
    handle = fresh.commands.run(f"{loops}; {bomb}; wait", background=True, timeout=60)
    headers = {"E2b-Sandbox-Id": fresh.sandbox_id, "E2b-Sandbox-Port": "49983"}
    quick = 0
    with httpx.Client(base_url=server.url, headers=headers, timeout=10) as client:
        ends = time.monotonic() + 60
        # The agent ends what silences it; then it is as quick as ever, although the loops go on.
        while quick < 20 and time.monotonic() < ends:
            started = time.monotonic()
            answer = client.get("/health")
            if answer.status_code == 502:
                break
            assert answer.status_code == 204, answer.text
            quick = quick + 1 if time.monotonic() - started < 0.25 else 0
    handle.disconnect()
    if fresh.is_running():
        assert quick == 20, "the agent stayed slow"
    else:
        reason = until(lambda: native(server, fresh).get("end_reason"), what="the reason of the end")
        assert reason in ("processes", "out_of_memory"), reason
    # Others don't notice.
    with Sandbox.create(timeout=60) as other:
        assert other.commands.run("echo unharmed").stdout == "unharmed\n"


def test_open_files_and_output_without_end_do_not_grow_the_server(server, fresh):
    """A client that never reads and a guest that never stops writing: the server's memory stays."""

    def rss():
        with open(f"/proc/{server.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = rss()
    handles = [fresh.commands.run("yes xxxxxxxxxxxxxxxx", background=True, timeout=60) for _ in range(4)]
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        assert rss() - before < 128 << 20
        time.sleep(0.1)
    for handle in handles:
        fresh.commands.kill(handle.pid)
        handle.disconnect()


def test_many_sandboxes_at_once(server):
    made, errors = [], []

    def one():
        try:
            with Sandbox.create(timeout=120) as sandbox:
                assert sandbox.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == sandbox.sandbox_id
                made.append(sandbox.sandbox_id)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(set(made)) == 8
