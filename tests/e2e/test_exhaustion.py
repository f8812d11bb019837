"""A machine that runs out of something. The answer is 503 and names it, nothing is left, and it works again with room."""

import contextlib
import os
import resource
import subprocess
from pathlib import Path

import pytest
from faults import answers, configured, create, host_of, kill, new_tag, settled
from support import until

# Control groups of version 1 have a hierarchy for each kind, of version 2 one for all.
UNIFIED = Path("/sys/fs/cgroup/cgroup.controllers").exists()


def refused(server, what: str):
    """No sandbox is made, and the message says what is missing."""
    tag = new_tag()
    response = create(server, tag)
    assert response.status_code == 503, response.text
    assert response.json()["error_code"] == "sandbox_capacity_unavailable"
    assert what in response.json()["message"], response.text
    assert response.headers["should-retry"] == "false"


def works_again(server):
    assert all(row.state == "ended" for row in settled(server))
    server.assert_nothing_left()
    response = create(server, new_tag())
    assert response.status_code == 201, response.text
    id = response.json()["sandboxID"]
    assert answers(server, id)
    assert kill(server, id).status_code == 204
    assert all(row.state == "ended" for row in settled(server))
    server.assert_nothing_left()


class Group:
    """A control group of one kind with some processes of a server in it."""

    def __init__(self, kind: str, pids: list[int]):
        base = Path("/sys/fs/cgroup") if UNIFIED else Path("/sys/fs/cgroup") / kind
        self.kind, self.path = kind, base / f"sandglass-exhausted-{os.getpid()}"
        self.base, self.pids = base, pids
        self.path.mkdir()
        if UNIFIED:
            (base / "cgroup.subtree_control").write_text(f"+{kind}")

    def __enter__(self):
        for pid in self.pids:
            (self.path / "cgroup.procs").write_text(str(pid))
        return self

    def __exit__(self, *_):
        for pid in (self.path / "cgroup.procs").read_text().split():
            try:
                (self.base / "cgroup.procs").write_text(pid)
            except ProcessLookupError:
                pass
        until(self.removed, what=f"the removal of {self.path}")

    def removed(self) -> bool:
        try:
            self.path.rmdir()
        except OSError:
            return False
        return True

    def write(self, name: str, value: int):
        (self.path / name).write_text(str(value))

    def read(self, name: str) -> int:
        return int((self.path / name).read_text())


def lowest_free(pid: int) -> int:
    """The number that its next descriptor gets, once it opens and closes none any more."""

    def look():
        numbers = {int(descriptor.name) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}
        return next(number for number in range(len(numbers) + 1) if number not in numbers)

    looks = [look() for _ in range(20)]

    def rests():
        looks.append(look())
        return len(set(looks[-20:])) == 1

    until(rests, what="a privileged half at rest")
    return looks[-1]


def test_descriptors(lone_server):
    server = lone_server
    host = host_of(server)
    before = resource.prlimit(host, resource.RLIMIT_NOFILE)
    used = lowest_free(host)
    try:
        # None at all, and then some: each step of a creation is one that lacks them.
        for spare in (0, 1, 2, 3, 5, 8):
            resource.prlimit(host, resource.RLIMIT_NOFILE, (used + spare, before[1]))
            response = create(server, new_tag())
            assert response.status_code in (201, 503), response.text
            assert response.status_code == 201 or "file descriptors" in response.json()["message"], response.text
            assert spare > 0 or response.status_code == 503
            if response.status_code == 201:
                kill(server, response.json()["sandboxID"])
    finally:
        resource.prlimit(host, resource.RLIMIT_NOFILE, before)
    works_again(server)


def test_processes(lone_server):
    server = lone_server
    with Group("pids", [host_of(server)]) as group:
        group.write("pids.max", group.read("pids.current"))
        refused(server, "processes")
        # Enough to begin, and perhaps not enough to end.
        group.write("pids.max", group.read("pids.current") + 1)
        response = create(server, new_tag())
        assert response.is_success or (response.status_code == 503 and "processes" in response.text), response.text
        if response.is_success:
            kill(server, response.json()["sandboxID"])
        group.write("pids.max", 10_000)
        works_again(server)


# Moves itself where there is little memory, as if the machine had no more.
POOR = """#!/bin/bash
case " $* " in *" create "*) [ -e "$0.group" ] && echo $$ > "$(cat "$0.group")/cgroup.procs" ;; esac
exec /usr/bin/runsc "$@"
"""


def test_memory(servers, work_folder):
    """The kernel kills `runsc` while it makes a sandbox."""
    wrapper = work_folder / "poor-runsc"
    wrapper.write_text(POOR)
    wrapper.chmod(0o755)
    server = configured(servers, work_folder, f'runsc = "{wrapper}"\n')
    told = work_folder / "poor-runsc.group"
    with Group("memory", []) as group:
        group.write("memory.max" if UNIFIED else "memory.limit_in_bytes", 512 << 10)
        told.write_text(str(group.path))
        refused(server, "memory")
        told.unlink()
        works_again(server)
    server.stop()


@pytest.fixture
def private_server(servers):
    """A server in a mount namespace of its own, so that its devices can be taken away."""
    server = servers.make()
    server.stop()
    server.wrap = ["unshare", "--mount", "--propagation", "slave"]
    server.start()
    yield server
    server.stop()
    server.wrap = []
    server.start()
    works_again(server)
    server.stop()


def test_loop_devices(private_server):
    server = private_server
    inside = ("nsenter", "-t", str(host_of(server)), "-m")
    subprocess.run([*inside, "mount", "--bind", "/dev/null", "/dev/loop-control"], check=True)
    refused(server, "loop devices")
    subprocess.run([*inside, "umount", "/dev/loop-control"], check=True)
    works_again(server)


def test_disk(cramped_server):
    server = cramped_server
    ballast = server.data_dir.parent / "ballast"

    def fill(left: int) -> bool:
        """All but so many blocks, unless the server takes some at this moment."""
        system = os.statvfs(server.data_dir)
        with ballast.open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, (system.f_bavail - left) * system.f_frsize)
            return True
        ballast.unlink()
        return False

    # None at all, and then enough for the store but not for a sandbox.
    for left in (0, 16, 32):
        until(lambda: fill(left), what="a full disk")
        refused(server, "disk space")
        ballast.unlink()
    works_again(server)
