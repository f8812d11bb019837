"""A real server as a test needs it, and waiting without guessing a time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("SANDGLASS_PROGRAM", str(ROOT / "target/release/sandglass"))

# The user stories are told with two SDKs: the newest one, and the last one with the first generation of endpoints.
OLD_SDK = version("e2b") == "2.45.1"

# The first start on a machine prepares the template, which downloads packages.
READY_WITHIN = 600
STOP_WITHIN = 30


def cgroups_named(name: str) -> list[Path]:
    """The control groups of that name in all hierarchies, while other servers make and remove theirs."""
    return [Path(folder) for folder, _, _ in os.walk("/sys/fs/cgroup") if os.path.basename(folder) == name]


def loop_files() -> list[str]:
    """What loop devices are attached to, while other servers attach and detach theirs."""
    files = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            files.append(file.read_text())
    return files


def until(condition, within: float = 10.0, what: str = "the condition"):
    """Asks again until the answer is truthy, and returns it."""
    deadline = time.monotonic() + within
    while True:
        if answer := condition():
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} was not so within {within} s; last answer: {answer!r}")
        time.sleep(0.02)


def status_of(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def children_of(pid: int) -> list[int]:
    """Direct children, from every thread of the process."""
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


class PeakMemory:
    """How much the resident memory of processes of this machine rises at most, from here on."""

    def __init__(self, *pids: int):
        self.pids = pids
        for pid in pids:
            # 5 makes the kernel forget the highest resident size so far (proc_pid_clear_refs(5)).
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self.before = self._peaks()

    def _peaks(self) -> dict[int, int]:
        return {pid: int(status_of(pid)["VmHWM"].split()[0]) for pid in self.pids}

    def rise(self) -> int:
        """In MiB, of the process that rose most."""
        return max(peak - self.before[pid] for pid, peak in self._peaks().items()) >> 10


# What a test may have that is not about these bounds: whatever it asks for, on whatever machine it runs.
ROOMY = """
[quota]
sandboxes = 1000000
cpus = 1000000
memory_mib = 1000000000
[host]
memory_mib = 1000000000
cpu_overcommit = 1000000
disk_mib = 1000000000
"""


class Server:
    """`sandglass serve` on a data folder of its own. It can be killed and started again."""

    def __init__(self, data_dir: Path, *options: str):
        self.data_dir = data_dir
        # What `serve` is told besides.
        self.options = options
        self.log_path = data_dir.with_suffix(".log")
        self.address = "127.0.0.1:0"
        # How programs of this server's user are started.
        self.program = [PROGRAM]
        self.api_key = ""
        self.process: subprocess.Popen | None = None
        # What becomes the server by `exec`, with its command line as the last arguments.
        self.wrap: list[str] = []

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def halves(self) -> list[int]:
        """The process that clients talk to, and the privileged one."""
        return [self.pid, *children_of(self.pid)]

    @property
    def opts(self) -> dict:
        """What an SDK call needs to reach this server and no other."""
        return {"api_key": self.api_key, "api_url": self.url, "sandbox_url": self.url}

    @property
    def headers(self) -> dict[str, str]:
        return {"X-API-Key": self.api_key}

    def start(self, failpoints: str = "") -> Server:
        """Starts it, and returns when it answers. From the second time on at the same address."""
        announced, settings = self.launch(failpoints)
        if not announced.wait(READY_WITHIN) or "E2B_API_URL" not in settings:
            raise AssertionError(f"the server did not start; the end of its log:\n{self.log_tail()}")
        self.address = settings["E2B_API_URL"].removeprefix("http://")
        self.api_key = settings.get("E2B_API_KEY", self.api_key)
        assert self.api_key, "no API key was printed at the first start"
        return self

    def launch(self, failpoints: str = "") -> tuple[threading.Event, dict]:
        """Starts it, and returns what it says when it answers, if it does."""
        options = self.options
        if "--config" not in options:
            config = self.data_dir.with_suffix(".toml")
            config.write_text(ROOMY)
            options = [*options, "--config", str(config)]
        log = self.log_path.open("ab")
        process = subprocess.Popen(
            [*self.wrap, *self.program, "serve", "--listen", self.address]
            + ["--data-dir", str(self.data_dir), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | ({"SANDGLASS_FAILPOINTS": failpoints} if failpoints else {}),
        )
        log.close()
        self.process = process
        settings: dict[str, str] = {}
        announced = threading.Event()

        def read():
            for line in process.stdout:
                if match := re.fullmatch(r"export (E2B_\w+)=(\S+)\n", line):
                    settings[match[1]] = match[2]
                if "E2B_SANDBOX_URL" in settings or "E2B_DOMAIN" in settings:
                    announced.set()
            announced.set()

        threading.Thread(target=read, daemon=True).start()
        return announced, settings

    def stop(self):
        """Asks it to stop, as an operator would. Sandboxes run on."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_WITHIN)
        self.process = None
        assert code == 0, f"the server ended with code {code}; the end of its log:\n{self.log_tail()}"

    def kill(self):
        """kill -9 of the server process, as the kernel would when memory is short."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait(STOP_WITHIN)
        self.process = None

    def cli(self, *args: str, check: bool = True, timeout: float = 100, **more) -> subprocess.CompletedProcess:
        """Runs the command line as this server's user."""
        env = dict(os.environ, E2B_API_URL=self.url, E2B_API_KEY=self.api_key)
        result = subprocess.run(
            [*self.program, *args], env=env, text=True, capture_output=True, timeout=timeout, **more
        )
        if check:
            assert result.returncode == 0, f"sandglass {args} failed:\n{result.stdout}{result.stderr}"
        return result

    def ledger(self, wait: int = 60) -> tuple[int, dict]:
        """Exit code and content of the ledger."""
        result = self.cli(
            "ledger", "--data-dir", str(self.data_dir), "--json", "--wait", str(wait), check=False
        )
        assert result.stdout, result.stderr
        return result.returncode, json.loads(result.stdout)

    def assert_nothing_left(self):
        code, ledger = self.ledger()
        assert code == 0, f"left over: {json.dumps(ledger, indent=1)}\n{self.log_tail()}"
        assert ledger["clean"] is True

    def log_tail(self, lines: int = 60) -> str:
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])
