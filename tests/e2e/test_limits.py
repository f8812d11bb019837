"""Every limit fires, and only the sandbox feels it."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from e2b import CommandExitException, Sandbox
from faults import processes_of, unwatched
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


def ended_by(server, sandbox) -> str:
    """Why it ended, once it has."""
    until(lambda: native(server, sandbox)["state"] == "ended", within=60, what="the end of the sandbox")
    return native(server, sandbox)["end_reason"]


def eats(mib: int) -> str:
    """A program that takes memory piece by piece, and touches it."""
    return f"python3 -c 'x = [b\"x\" * (1 << 20) for _ in range({mib})]; print(len(x))'"


def test_memory_that_is_used_up_ends_the_command_and_not_the_sandbox(server, fresh):
    mib = native(server, fresh)["limits"]["memory_mib"]
    # A program may use nearly all that is advertised...
    assert fresh.commands.run(eats(mib * 3 // 4), timeout=60).stdout == f"{mib * 3 // 4}\n"
    neighbour = fresh.commands.run("sleep 1000", background=True, timeout=0)
    with Sandbox.create(timeout=300) as other:
        # ... and more than that ends it with its whole command, which is told why.
        with pytest.raises(CommandExitException) as killed:
            fresh.commands.run(f"{eats(mib * 2)}; echo went on", timeout=60)
        assert killed.value.exit_code == -1
        assert killed.value.error.startswith("signal: killed: the sandbox ran out of memory")
        assert killed.value.stdout == ""
        # Everything else goes on, inside and beside it.
        assert fresh.commands.run("echo alive").stdout == "alive\n"
        assert [process.pid for process in fresh.commands.list()] == [neighbour.pid]
        assert other.commands.run("echo unharmed").stdout == "unharmed\n"
    neighbour.disconnect()


def test_memory_that_nobody_watches_ends_the_sandbox_which_says_so(server, fresh):
    """Root stops the agent, which would end the eater: the limit holds without it."""
    mib = native(server, fresh)["limits"]["memory_mib"]
    with Sandbox.create(timeout=300) as other:
        unwatched(fresh, eats(mib * 2))
        assert ended_by(server, fresh) == "out_of_memory"
        assert other.commands.run("echo unharmed").stdout == "unharmed\n"


def test_cpus(server, fresh):
    """Twice as many busy loops as cores get no more than the cores' time."""
    cpus = native(server, fresh)["limits"]["cpus"]
    assert int(fresh.commands.run("nproc").stdout) == max(2, cpus)


def test_wall_clock_ends_a_busy_sandbox(server):
    sandbox = Sandbox.create(timeout=3)
    sandbox.commands.run("while :; do :; done", background=True, timeout=60).disconnect()
    assert ended_by(server, sandbox) == "timeout"


def test_wall_clock_ends_a_sandbox_whose_agent_is_stopped(server):
    """Long before its silence would."""
    sandbox = Sandbox.create(timeout=15)
    unwatched(sandbox)
    assert ended_by(server, sandbox) == "timeout"


def test_wall_clock_ends_a_sandbox_that_stands_still(server):
    """All its processes are stopped, as by an administrator."""
    sandbox = Sandbox.create(timeout=4)
    processes = processes_of(sandbox.sandbox_id)
    assert processes
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    assert ended_by(server, sandbox) == "timeout"
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), within=30, what="the end of its processes")


@pytest.mark.alone
def test_a_users_fork_bomb_leaves_the_agent_answering(server, fresh):
    """The agent ends what silences it, and goes on, although loops do as well."""
    loops = "for i in 1 2 3 4; do (while :; do :; done) & done"
    bomb = "bomb() { bomb | bomb & }; bomb"
    fresh.commands.run(loops, background=True, timeout=0).disconnect()
    handle = fresh.commands.run(f"{bomb}; sleep 1000", background=True, timeout=0)
    headers = {"E2b-Sandbox-Id": fresh.sandbox_id, "E2b-Sandbox-Port": "49983"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30) as client:

        def over():
            answer = client.get("/health")
            assert answer.status_code == 204, answer.text
            return handle.pid not in [process.pid for process in fresh.commands.list(request_timeout=60)]

        until(over, within=240, what="the end of the bomb")
    handle.disconnect()
    assert fresh.commands.run("echo alive", timeout=60).stdout == "alive\n"
    # Others don't notice.
    with Sandbox.create(timeout=60) as other:
        assert other.commands.run("echo unharmed").stdout == "unharmed\n"


def test_a_user_has_so_many_processes_and_no_more(server, fresh):
    limit = native(server, fresh)["limits"]["processes"]
    assert fresh.commands.run("ulimit -Hu; ulimit -Su").stdout == f"{limit}\n{limit}\n"
    with pytest.raises(CommandExitException) as raised:
        fresh.commands.run(f"ulimit -Hu {limit + 1}")
    assert "Operation not permitted" in raised.value.stderr
    # The kernel keeps to it. With a limit that small, nothing becomes slow.
    full = "for n in $(seq 60); do sleep 1000 & done; wait"
    said = fresh.commands.run(f"(ulimit -u 30; {full}) 2>&1 | grep -m 1 -o 'Resource temporarily unavailable'")
    assert said.stdout == "Resource temporarily unavailable\n"


def test_roots_processes_without_end_end_the_sandbox_which_says_so(server, fresh):
    """Root has no limit of its own but the sandbox's."""
    with Sandbox.create(timeout=300) as other:
        # Small ones, or memory ends first.
        storm = "exec sh -c 'while :; do sleep 1000 & done'"
        unwatched(fresh, storm)
        assert ended_by(server, fresh) == "pids"
        assert other.commands.run("echo unharmed").stdout == "unharmed\n"


def test_descriptors(server, fresh):
    """A process gets so many and no more, and with it all of its sandbox goes on."""
    greedy = """
import errno, os, resource
print(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    print(errno.errorcode[error.errno], len(held), flush=True)
input()
"""
    fresh.files.write("greedy.py", greedy)
    greedy = [fresh.commands.run("python3 greedy.py", stdin=True, background=True, timeout=0) for _ in range(4)]
    for handle in greedy:
        told = []
        for out, _, _ in handle:
            told += (out or "").split()
            if len(told) >= 3:
                break
        limit, error, held = told
        assert error in ("EMFILE", "ENFILE") and int(held) < int(limit), told
    assert fresh.commands.run("cat greedy.py | wc -l").stdout.strip() == "10"
    for handle in greedy:
        fresh.commands.kill(handle.pid)


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
