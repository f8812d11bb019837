"""A sandbox that nobody uses costs next to nothing, and is itself again when somebody does."""

from pathlib import Path

from e2b import Sandbox
from support import until

FULL_US, IDLE_US = 50, 100_000


def slacks(server, sandbox) -> set[int]:
    """The timer slacks of all threads of a sandbox, in microseconds."""
    instance = (server.data_dir / "instance").read_text().strip()
    # Version 1 has a hierarchy for each controller, version 2 one for all.
    root = Path("/sys/fs/cgroup")
    root = root if (root / "cgroup.controllers").exists() else root / "pids"
    group = root / f"sandglass-{instance}" / sandbox.sandbox_id
    found = set()
    for pid in (group / "cgroup.procs").read_text().split():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            try:
                found.add(int(Path(f"/proc/{thread.name}/timerslack_ns").read_text()) // 1000)
            except (FileNotFoundError, ProcessLookupError):
                pass
    return found


def test_an_idle_sandbox_is_slowed_until_it_is_used(server):
    with Sandbox.create(timeout=120) as busy, Sandbox.create(timeout=120) as watched, Sandbox.create(timeout=120) as idle:
        # Works by itself: nobody is connected to it.
        busy.commands.run("setsid sh -c 'while :; do :; done' > /dev/null 2>&1 &")
        # Waits for somebody, who is connected.
        waiting = watched.commands.run("cat", background=True, stdin=True)
        until(lambda: slacks(server, idle) == {IDLE_US}, within=60, what="an idle sandbox to be slowed")
        assert slacks(server, busy) == {FULL_US}
        assert slacks(server, watched) == {FULL_US}
        handle = idle.commands.run("sleep 100", background=True)
        until(lambda: slacks(server, idle) == {FULL_US}, within=20, what="a used sandbox to be itself again")
        handle.kill()
        waiting.kill()


def test_a_sandbox_that_was_slowed_by_another_server_wakes_up(lone_server):
    server = lone_server
    with Sandbox.create(timeout=120, **server.opts) as sandbox:
        until(lambda: slacks(server, sandbox) == {IDLE_US}, within=60, what="an idle sandbox to be slowed")
        server.kill()
        server.start()
        handle = sandbox.commands.run("sleep 100", background=True)
        until(lambda: slacks(server, sandbox) == {FULL_US}, within=20, what="a used sandbox to be itself again")
        handle.kill()
