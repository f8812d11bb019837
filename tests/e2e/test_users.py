"""Users, and sudo although the engine ignores set-uid."""

import pytest
from e2b import CommandExitException
from test_pty import Terminal


def run(sandbox, command, **options):
    return sandbox.commands.run(command, **options).stdout


def test_sudo_is_root_without_a_password(sandbox):
    assert run(sandbox, "sudo whoami") == "root\n"
    assert run(sandbox, "sudo id -u; id -u") == "0\n1000\n"
    assert run(sandbox, "sudo -u user whoami") == "user\n"
    run(sandbox, "sudo touch /etc/made-by-sudo && test -O /etc/passwd || stat -c %U /etc/made-by-sudo")
    assert run(sandbox, "stat -c %U /etc/made-by-sudo") == "root\n"


@pytest.mark.parametrize("code", [0, 1, 42, 255])
def test_sudo_passes_the_exit_code(sandbox, code):
    assert run(sandbox, f"sudo sh -c 'exit {code}'; echo $?") == f"{code}\n"


def test_sudo_passes_descriptors(sandbox):
    assert run(sandbox, "printf abc | sudo cat | sudo tr a-z A-Z") == "ABC"
    result = sandbox.commands.run("sudo sh -c 'echo out; echo err >&2'")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")


def test_sudo_resets_the_environment(sandbox):
    env = run(sandbox, "sudo env", envs={"LD_PRELOAD": "/nowhere.so", "SECRET": "x", "PYTHONPATH": "/tmp"})
    assert "SECRET" not in env and "LD_PRELOAD" not in env and "PYTHONPATH" not in env
    assert "HOME=/root\n" in env and "USER=root\n" in env
    assert "SUDO_USER=user\n" in env


def test_sudo_keeps_the_folder(sandbox):
    assert run(sandbox, "sudo pwd", cwd="/tmp") == "/tmp\n"


def test_sudo_passes_signals(sandbox):
    with pytest.raises(CommandExitException) as ended:
        sandbox.commands.run(
            "sudo sh -c 'trap \"exit 9\" TERM; echo up > /tmp/up; while :; do sleep 0.05; done' & "
            "until [ -e /tmp/up ]; do sleep 0.05; done; kill -TERM $!; wait $!"
        )
    assert ended.value.exit_code == 9


def test_sudo_is_interactive_in_a_terminal(sandbox):
    terminal = Terminal(sandbox)
    try:
        terminal.type("sudo -i\n")
        terminal.type("echo I-am-$(whoami)-$(tty | cut -c1-8)\n")
        terminal.expect("I-am-root-/dev/pts")
        terminal.type("exit\n")
        terminal.expect_prompt()
        terminal.type("echo again-$(whoami)\n")
        terminal.expect("again-user")
    finally:
        terminal.end()


def test_missing_command_and_user(sandbox):
    with pytest.raises(CommandExitException) as missing:
        sandbox.commands.run("sudo no-such-program")
    assert missing.value.exit_code in (1, 127)
    assert "no-such-program" in missing.value.stderr
    with pytest.raises(CommandExitException):
        sandbox.commands.run("sudo -u nobody-here true")


def test_only_the_sudo_group_may(sandbox):
    """A user outside the group gets nothing from the agent, whatever client it uses."""
    sandbox.commands.run("useradd -m outsider", user="root")
    with pytest.raises(CommandExitException) as refused:
        sandbox.commands.run("sudo whoami", user="outsider")
    assert "root" not in refused.value.stdout
    sandbox.commands.run("whoami", user="outsider")


def test_users_are_kept_apart(sandbox):
    sandbox.commands.run("echo secret > /root/s; chmod 600 /root/s", user="root")
    with pytest.raises(CommandExitException):
        sandbox.commands.run("cat /root/s")
