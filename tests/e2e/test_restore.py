"""What a sandbox that comes back knows of it, what it is asked before, and what no image can be made of."""

import time

import pytest
from e2b import CommandExitException, Sandbox
from support import until
from test_pause import call, resume, state

HOOKS = "/etc/sandglass/on-restore.d"

DELETED = {
    "open": "exec 3> 'my file'; rm 'my file'; touch held; exec sleep 1000",
    "mapped": """exec python3 -c '
import mmap, os, time
with open("my file", "w+") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
os.unlink("my file")
open("held", "w")
time.sleep(1000)
'""",
    "executed": "cp /bin/sleep 'my file'; './my file' 1000 & sleep 0.5; rm 'my file'; touch held; wait",
    "entered": "mkdir 'my file'; cd 'my file'; rmdir '../my file'; touch ../held; exec sleep 1000",
}


@pytest.fixture
def sandbox(server):
    sandbox = Sandbox.create(timeout=300)
    yield sandbox
    Sandbox.kill(sandbox.sandbox_id)


def put_hook(sandbox, name: str, text: str, mode: str = "755"):
    sandbox.files.write(f"{HOOKS}/{name}", text, user="root")
    sandbox.commands.run(f"chmod {mode} {HOOKS}/{name}", user="root")


@pytest.mark.parametrize("how", DELETED)
def test_what_no_image_can_hold_is_named(server, sandbox, how):
    held = sandbox.commands.run(DELETED[how], background=True, timeout=0)
    until(lambda: sandbox.files.exists("/home/user/held"), within=60, what="the file to be deleted")
    response = call(server, "POST", f"/sandboxes/{sandbox.sandbox_id}/pause")
    assert response.status_code == 409, response.text
    message = response.json()["message"]
    assert "/home/user/my file" in message and "runs on" in message, message
    if how in ("open", "entered"):
        assert f"process {held.pid} " in message, message
    assert state(server, sandbox) == "running"
    assert [process for process in sandbox.commands.list() if process.pid == held.pid]
    sandbox.commands.kill(held.pid)
    sandbox.pause()
    assert resume(server, sandbox).commands.run("echo on").stdout == "on\n"


def test_what_is_deleted_in_memory_is_no_hindrance(server, sandbox):
    sandbox.commands.run("exec 3> /dev/shm/x; rm /dev/shm/x; touch held; exec sleep 1000", background=True, timeout=0)
    until(lambda: sandbox.files.exists("/home/user/held"), within=60, what="the file to be deleted")
    sandbox.commands.run("echo > 'odd (deleted)'; exec 3< 'odd (deleted)'; touch odd; exec sleep 1000",
                         background=True, timeout=0)
    until(lambda: sandbox.files.exists("/home/user/odd"), within=60, what="the odd file")
    sandbox.pause()
    assert resume(server, sandbox).commands.run("pgrep -c sleep").stdout == "2\n"


def test_the_generation_can_be_read_inside_and_outside(server, sandbox):
    read = "cat /run/sandglass/generation; cat /etc/machine-id /proc/sys/kernel/random/boot_id"
    first = sandbox.commands.run(read).stdout.split()
    assert first[0] == "1" and len(first[1]) == 32
    for generation in (2, 3):
        sandbox.pause()
        sandbox = resume(server, sandbox)
        # It is the same machine.
        assert sandbox.commands.run(read).stdout.split() == [str(generation), *first[1:]]
        native = call(server, "GET", f"/v1/sandboxes/{sandbox.sandbox_id}").json()
        assert native["generation"] == generation
    with Sandbox.create(timeout=60) as other:
        assert other.commands.run("cat /etc/machine-id").stdout.strip() != first[1]


def test_hooks_run_before_a_resumed_sandbox_is_ready(server, sandbox):
    put_hook(sandbox, "20-second", "#!/bin/sh\nread first < /run/first && echo \"$first $SANDGLASS_GENERATION\" > /run/second\n")
    put_hook(sandbox, "10-first", "#!/bin/sh\nsleep 1\necho $(id -u) $E2B_SANDBOX_ID > /run/first\n(sleep 1000 &)\n")
    put_hook(sandbox, "30-no-hook", "#!/bin/sh\nexit 1\n", "644")
    put_hook(sandbox, "40-no-hook~", "#!/bin/sh\nexit 1\n")
    # One that is not resumed has no use for them.
    assert not sandbox.files.exists("/run/first")
    sandbox.pause()
    sandbox = resume(server, sandbox)
    assert sandbox.files.read("/run/second") == f"0 {sandbox.sandbox_id} 2\n"
    # What a hook leaves ends with it.
    assert sandbox.commands.run("pgrep -c sleep || true").stdout == "0\n"


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("#!/bin/sh\nexit 3\n", "755", "ended with code 3"),
        ("#!/bin/sh\nkill -9 $$\n", "755", "ended with signal 9"),
        ("#!/bin/sh\nexit 0\n", "777", "is not root's alone"),
        ("#!/no/such/program\n", "755", "could not be started"),
        ("#!/bin/sh\nsleep 1000\n", "755", "took longer"),
    ],
)
def test_a_hook_that_fails_leaves_it_paused(server, sandbox, text, mode, why):
    put_hook(sandbox, "10-bad", text, mode)
    sandbox.pause()
    response = call(server, "POST", f"/sandboxes/{sandbox.sandbox_id}/connect", json={"timeout": 60})
    assert response.status_code == 409, response.text
    assert "10-bad" in response.json()["message"] and why in response.json()["message"], response.text
    assert state(server, sandbox) == "paused"


def test_a_hook_gets_nothing_that_a_client_chose(server):
    sandbox = Sandbox.create(timeout=300, envs={"PATH": "/home/user/bin:/usr/bin:/bin", "MINE": "x"})
    try:
        sandbox.files.write("/home/user/bin/cat", "#!/bin/sh\n/usr/bin/id -u >> /home/user/ran\n/usr/bin/cat\n")
        sandbox.commands.run("chmod 755 bin/cat; echo | cat")
        # It is the one that commands get.
        assert sandbox.files.read("/home/user/ran") == "1000\n"
        put_hook(sandbox, "10-cat", "#!/bin/sh\n{ echo called | cat; env; } > /run/env\n")
        sandbox.pause()
        sandbox = resume(server, sandbox)
        called, *env = sandbox.files.read("/run/env").splitlines()
        assert called == "called" and not [line for line in env if "MINE" in line or "/home/user" in line], env
        assert f"E2B_SANDBOX_ID={sandbox.sandbox_id}" in env and "SANDGLASS_GENERATION=2" in env, env
        assert sandbox.files.read("/home/user/ran") == "1000\n"
    finally:
        Sandbox.kill(sandbox.sandbox_id)


def test_a_sandbox_with_a_full_disk_comes_back(server, sandbox):
    free = int(sandbox.commands.run("df --output=avail -B1M / | tail -1").stdout)
    fill = f"fallocate -l {max(free - 64, 1)}M fill; dd if=/dev/zero of=rest bs=64k; dd if=/dev/zero of=more bs=1"
    with pytest.raises(CommandExitException) as full:
        sandbox.commands.run(fill, user="root", cwd="/home/user", timeout=100)
    assert "No space left on device" in full.value.stderr
    # Without room a new file can't be written.
    write = "echo x > /etc/new"
    with pytest.raises(CommandExitException):
        sandbox.commands.run(write, user="root")
    for _ in range(2):
        sandbox.pause()
        sandbox = resume(server, sandbox)
        assert sandbox.commands.run("hostname").stdout == f"{sandbox.sandbox_id}\n"
    with pytest.raises(CommandExitException):
        sandbox.commands.run(write, user="root")
    sandbox.commands.run(f"rm /home/user/fill /home/user/rest; {write}", user="root")


def test_time_away_is_no_time_of_a_command(server, sandbox):
    command = sandbox.commands.run("sleep 1000", background=True, timeout=30)
    sandbox.pause()
    time.sleep(31)
    sandbox = resume(server, sandbox)
    alive = lambda: command.pid in [process.pid for process in sandbox.commands.list()]  # noqa: E731
    assert alive()
    until(lambda: not alive(), what="its time to be up", within=120)


def test_clocks_are_right_after_time_away(server, sandbox):
    clocks = "python3 -c 'import time; print(time.time(), time.monotonic())'"
    _, monotonic = map(float, sandbox.commands.run(clocks).stdout.split())
    sandbox.pause()
    time.sleep(2)
    sandbox = resume(server, sandbox)
    before = time.time()
    wall, after = map(float, sandbox.commands.run(clocks).stdout.split())
    assert before - 0.5 < wall < time.time() + 0.5
    assert after - monotonic >= 2
