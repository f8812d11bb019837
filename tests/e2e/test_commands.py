"""Commands through the SDK."""

import hashlib
import time

import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    Sandbox,
    TimeoutException,
)
from support import until


def test_output_and_code(sandbox):
    result = sandbox.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code, result.error) == ("out\n", "err\n", 0, None)


@pytest.mark.parametrize("code", [1, 2, 77, 127, 255])
def test_exit_codes(sandbox, code):
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run(f"echo before; exit {code}")
    assert failed.value.exit_code == code
    assert failed.value.stdout == "before\n"


def test_a_signal_is_told_from_an_exit(sandbox):
    with pytest.raises(CommandExitException) as killed:
        sandbox.commands.run("kill -KILL $$")
    assert killed.value.exit_code == -1
    assert "killed" in killed.value.error


def test_missing_program(sandbox):
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("no-such-program")
    assert failed.value.exit_code == 127
    assert "not found" in failed.value.stderr


def test_where_and_who(sandbox):
    assert sandbox.commands.run("pwd; whoami; echo $HOME $USER $LOGNAME").stdout == (
        "/home/user\nuser\n/home/user user user\n"
    )
    assert sandbox.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    assert sandbox.commands.run("pwd", cwd="~").stdout == "/home/user\n"
    assert sandbox.commands.run("pwd; whoami", user="root").stdout.endswith("root\n")
    with pytest.raises(InvalidArgumentException, match="/no/such/folder"):
        sandbox.commands.run("pwd", cwd="/no/such/folder")
    with pytest.raises(AuthenticationException, match="nobody-here"):
        sandbox.commands.run("pwd", user="nobody-here")


def test_environment_is_only_what_was_given(sandbox):
    out = sandbox.commands.run("env", envs={"ONE": "1", "TWO": "a b\nc"}).stdout
    assert "ONE=1\n" in out and "TWO=a b\nc\n" in out
    names = {line.split("=")[0] for line in out.splitlines() if "=" in line}
    # What bash itself, the template and E2B define; nothing of the agent's or the server's.
    allowed = {"HOME", "USER", "LOGNAME", "PATH", "LANG", "PWD", "OLDPWD", "SHLVL", "_", "ONE", "TWO", "SHELL"}
    assert {name for name in names - allowed if not name.startswith("E2B_")} == set()


def test_output_arrives_while_the_command_runs(sandbox):
    seen = []
    handle = sandbox.commands.run("echo first; read -r line; echo $line", background=True, stdin=True)
    for out, _, _ in handle:
        seen.append(out)
        if out == "first\n":
            sandbox.commands.send_stdin(handle.pid, "second\n")
    assert seen == ["first\n", "second\n"]
    assert handle.wait().exit_code == 0


def test_stdin_ends_when_closed(sandbox):
    handle = sandbox.commands.run("wc -c", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "12345")
    sandbox.commands.send_stdin(handle.pid, b"\x00\xff")
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout.strip() == "7"


@pytest.mark.newest_sdk("it has no `stream_input`")
def test_streamed_stdin(sandbox):
    handle = sandbox.commands.run("sha256sum", background=True, stdin=True)
    chunk = bytes(range(256)) * 256
    sandbox.commands.stream_input(handle.pid, (chunk for _ in range(32)))
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout.split()[0] == hashlib.sha256(chunk * 32).hexdigest()


def test_without_stdin_there_is_nothing_to_read(sandbox):
    assert sandbox.commands.run("cat; echo end").stdout == "end\n"


def test_background_connect_list_kill(sandbox):
    handle = sandbox.commands.run("echo begin; sleep 300", background=True, envs={"MARK": "x"})
    listed = {process.pid: process for process in sandbox.commands.list()}
    assert listed[handle.pid].cmd == "/bin/bash"
    assert listed[handle.pid].envs["MARK"] == "x"
    # The pid is the one that the guest sees.
    sandbox.commands.run(f"kill -0 {handle.pid}")
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid)
    assert again.pid == handle.pid
    assert sandbox.commands.kill(handle.pid) is True
    with pytest.raises(CommandExitException) as killed:
        again.wait()
    assert killed.value.exit_code == -1
    assert sandbox.commands.kill(handle.pid) is False
    until(lambda: handle.pid not in {p.pid for p in sandbox.commands.list()}, what="the end of the process")
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(999_999)


def test_disconnecting_does_not_end_a_command(sandbox):
    handle = sandbox.commands.run("read -r line < /tmp/gate; echo $line > /tmp/after; exit 3", background=True)
    sandbox.commands.run("mkfifo /tmp/gate 2>/dev/null || true")
    handle.disconnect()
    gate = sandbox.commands.run("mkfifo /tmp/gate2; read -r l < /tmp/gate2; exit 3", background=True)
    gate.disconnect()
    until(
        lambda: sandbox.commands.run("test -p /tmp/gate2 && echo yes || true").stdout == "yes\n",
        what="the fifo",
    )
    sandbox.commands.run("echo go > /tmp/gate2", timeout=10)
    # The exit is kept for a client that comes late.
    with pytest.raises(CommandExitException) as late:
        sandbox.commands.connect(gate.pid).wait()
    assert late.value.exit_code == 3
    sandbox.commands.kill(handle.pid)


def test_timeout_ends_all_that_the_command_started(sandbox):
    started = time.monotonic()
    with pytest.raises(TimeoutException):
        sandbox.commands.run(
            "setsid sh -c '(sleep 4321 &) ; sleep 4321' & setsid sleep 4321 & sleep 4321", timeout=1.5
        )
    assert time.monotonic() - started < 5
    until(
        lambda: sandbox.commands.run("pgrep -f 'sleep 4321' | grep -v $$ | wc -l || true", user="root")
        .stdout.strip()
        .endswith("0")
        or None,
        what="the end of double-forked children",
    )


def test_kill_ends_double_forked_children(sandbox):
    handle = sandbox.commands.run("(setsid sleep 8765 &) ; echo up; sleep 8765", background=True)
    for out, _, _ in handle:
        if out == "up\n":
            break
    assert sandbox.commands.kill(handle.pid)
    until(
        lambda: "8765" not in sandbox.commands.run("ps -eo args | grep '[s]leep 8765' || true").stdout,
        what="the end of double-forked children",
    )


def test_large_output_is_complete(sandbox):
    mib = 32
    command = f"head -c {mib * 1024 * 1024} /dev/zero | tr '\\0' 'x'; echo; echo done >&2"
    result = sandbox.commands.run(command)
    assert len(result.stdout) == mib * 1024 * 1024 + 1
    assert set(result.stdout) == {"x", "\n"}
    assert result.stderr == "done\n"


def test_text_cut_anywhere_is_whole_again(sandbox):
    result = sandbox.commands.run("python3 -c \"print('äß€😀' * 50000)\"")
    assert result.stdout == "äß€😀" * 50000 + "\n"


def test_a_slow_reader_slows_only_itself(sandbox):
    noisy = sandbox.commands.run("yes", background=True)
    try:
        started = time.monotonic()
        assert sandbox.commands.run("echo quick").stdout == "quick\n"
        assert time.monotonic() - started < 5
    finally:
        sandbox.commands.kill(noisy.pid)
        noisy.disconnect()


def test_many_at_once(sandbox):
    handles = [sandbox.commands.run(f"sleep 0.2; echo {n}", background=True) for n in range(20)]
    assert [handle.wait().stdout for handle in handles] == [f"{n}\n" for n in range(20)]


@pytest.mark.alone
def test_a_login_shell_starts_quickly(sandbox):
    """The profile starts no process: otherwise each command would pay for it."""
    times = []
    for _ in range(15):
        started = time.monotonic()
        sandbox.commands.run("true")
        times.append(time.monotonic() - started)
    assert sorted(times)[len(times) // 2] < 0.5


def test_the_tools_that_base_promises(sandbox):
    for tool in "bash python python3 curl git tput ps ip sed grep tar".split():
        sandbox.commands.run(f"command -v {tool}")
    sandbox.commands.run("git --exec-path | xargs -I{} test -x {}/git-daemon")
    assert sandbox.commands.run("! command -v mcp-gateway && echo none").stdout == "none\n"
    sandbox.commands.run("test -w /usr/local && test -w /code && touch /usr/local/bin/x /code/x")


def test_pid_1_is_the_agent_and_not_for_users(sandbox):
    assert sandbox.commands.run("ps -o ppid= $$").stdout.strip() == "1"
    with pytest.raises(CommandExitException):
        sandbox.commands.run("kill -9 1")
    assert sandbox.is_running()


def test_root_may_end_its_own_computer(server):
    sandbox = Sandbox.create(timeout=60)
    with pytest.raises(Exception):
        sandbox.commands.run("kill -9 1; sleep 30", user="root")
    until(lambda: not sandbox.is_running(), what="the end of the sandbox")
    sandbox.kill()
