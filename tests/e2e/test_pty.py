"""Interactive terminals."""

import threading

import pytest
from e2b import CommandExitException, PtySize
from support import until


class Terminal:
    """A PTY whose output is collected by a thread."""

    def __init__(self, sandbox, **options):
        self.sandbox = sandbox
        self.handle = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60, **options)
        self.output = b""
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self):
        try:
            for _, _, chunk in self.handle:
                if chunk is not None:
                    self.output += chunk
        except Exception:
            pass

    def type(self, text: str):
        self.sandbox.pty.send_stdin(self.handle.pid, text.encode())

    def expect(self, text: str, within: float = 15):
        until(lambda: text.encode() in self.output, within, f"{text!r} in the output {self.output[-500:]!r}")

    def expect_prompt(self, within: float = 15):
        """The shell waits for a line. Before that, what is typed may reach a program that is about to end."""
        # gVisor leaves an interrupt character in the input, at which the shell rings the bell.
        until(lambda: self.output.rstrip(b"\a").endswith(b"$ "), within, "a prompt")

    def end(self):
        self.sandbox.pty.kill(self.handle.pid)
        self.thread.join(10)
        assert not self.thread.is_alive()


def test_a_shell_in_a_terminal(sandbox):
    terminal = Terminal(sandbox, envs={"MARK": "value"}, cwd="/tmp")
    try:
        terminal.type("echo $((6*7))-$MARK-$TERM; pwd; tty\n")
        terminal.expect("42-value-xterm-256color")
        terminal.expect("/tmp\r\n")
        terminal.expect("/dev/pts/")
        terminal.type("stty size\n")
        terminal.expect("24 80")
        sandbox.pty.resize(terminal.handle.pid, PtySize(rows=50, cols=132))
        terminal.type("stty size\n")
        terminal.expect("50 132")
    finally:
        terminal.end()


def test_interrupt_reaches_the_foreground(sandbox):
    terminal = Terminal(sandbox)
    try:
        terminal.type("sleep 1000\n")
        # Once it has its own program, it is in the foreground.
        until(
            lambda: "sleep 1000" in sandbox.commands.run("ps -eo args | grep '^[s]leep' || true").stdout,
            what="the program in the foreground",
        )
        terminal.type("\x03")
        terminal.expect_prompt()
        terminal.type("echo back-$?\n")
        terminal.expect("back-130")
    finally:
        terminal.end()


def test_exit_ends_it_with_its_code(sandbox):
    terminal = Terminal(sandbox)
    terminal.type("exit 5\n")
    terminal.thread.join(15)
    assert not terminal.thread.is_alive()
    with pytest.raises(CommandExitException) as ended:
        terminal.handle.wait()
    assert ended.value.exit_code == 5


def test_a_second_client_sees_the_same_terminal(sandbox):
    terminal = Terminal(sandbox)
    try:
        terminal.type("echo one-$((1+1))\n")
        terminal.expect("one-2")
        other = sandbox.pty.connect(terminal.handle.pid)
        sandbox.pty.send_stdin(terminal.handle.pid, b"echo two-$((2+2))\n")
        seen = b""
        for _, _, chunk in other:
            seen += chunk or b""
            if b"two-4" in seen:
                break
        other.disconnect()
        terminal.expect("two-4")
    finally:
        terminal.end()


def test_killing_is_prompt_and_reaches_its_children(sandbox):
    terminal = Terminal(sandbox)
    terminal.type("sleep 5555 & echo started\n")
    terminal.expect("started\r\n")
    terminal.end()
    until(
        lambda: "5555" not in sandbox.commands.run("ps -eo args | grep '[s]leep 5555' || true").stdout,
        what="the end of the terminal's children",
    )
    assert sandbox.pty.kill(terminal.handle.pid) is False
