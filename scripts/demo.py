"""One disposable computer from start to end, through the public API, with the unmodified E2B SDK.

    demo.py PATH/TO/sandglass

Starts a server on a temporary data folder, prints a timeline, checks every result, shows that nothing is
left, and exits 0; or prints the end of the server's log and exits 1.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

from e2b import CommandExitException, Sandbox

PRIMES = """\
primes, candidate = [], 2
while len(primes) < 15:
    if all(candidate % p for p in primes):
        primes.append(candidate)
    candidate += 1
print(*primes)
"""
FIRST_15 = "2 3 5 7 11 13 17 19 23 29 31 37 41 43 47"

# The first start of all prepares the template, which downloads packages.
READY_WITHIN_S = 600
STOP_WITHIN_S = 20


class Server:
    """A `sandglass serve` of our own; what it says while it starts is shown as it comes."""

    def __init__(self, program: str, data_dir: str):
        command = [program, "serve", "--listen", "127.0.0.1:0", "--data-dir", data_dir]
        self.log: list[str] = []
        self.settings: dict[str, str] = {}
        self.starting = True
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        self.ready = threading.Event()
        threading.Thread(target=self._read_settings, daemon=True).start()
        threading.Thread(target=self._read_log, daemon=True).start()

    def _read_settings(self):
        for line in self.process.stdout:
            name, _, value = line.removeprefix("export ").strip().partition("=")
            if name.startswith("E2B_"):
                self.settings[name] = value
            if {"E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL"} <= self.settings.keys():
                self.ready.set()
        self.ready.set()

    def _read_log(self):
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            del self.log[:-500]
            if self.starting:
                print("    " + line.rstrip(), flush=True)

    def wait_until_ready(self):
        if not self.ready.wait(READY_WITHIN_S):
            raise RuntimeError(f"the server was not ready after {READY_WITHIN_S} s")
        if "E2B_API_KEY" not in self.settings:
            raise RuntimeError(f"the server ended with code {self.process.wait(STOP_WITHIN_S)} while it started")
        self.starting = False
        os.environ.update(self.settings)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise RuntimeError(f"the server did not stop within {STOP_WITHIN_S} s") from None
        if code != 0:
            raise RuntimeError(f"the server ended with code {code}")


class Timeline:
    """Prints what happened, with the milliseconds since the client asked for the computer."""

    def __init__(self):
        self.started = time.monotonic()

    def event(self, what: str, output: str = ""):
        print(f"[{(time.monotonic() - self.started) * 1000:7.0f} ms] {what}", flush=True)
        for line in output.rstrip("\n").splitlines():
            print(f"               {line}")


def expect(is_so: bool, what: str):
    if not is_so:
        raise AssertionError(f"expected {what}")


def one_computer(timeline: Timeline) -> None:
    sandbox = Sandbox.create(timeout=60)
    try:
        timeline.event(f"created    {sandbox.sandbox_id}")
        expect(sandbox.is_running(), "the computer to answer")
        timeline.event("ready")

        def run(command: str, cwd: str | None = None) -> str:
            result = sandbox.commands.run(command, cwd=cwd)
            timeline.event(f"$ {command}", result.stdout + result.stderr)
            return result.stdout

        sandbox.files.write("/home/user/primes.py", PRIMES)
        timeline.event("wrote      /home/user/primes.py")
        expect(run("python primes.py").strip() == FIRST_15, f"the primes {FIRST_15}")
        expect(run("whoami").strip() == "user", "to be user")
        expect(run("pwd").strip() == "/home/user", "to be in /home/user")

        command = "curl -sS -m 8 https://example.com"
        try:
            sandbox.commands.run(command)
        except CommandExitException as refused:
            timeline.event(f"$ {command}", f"{refused.stderr.rstrip()}\n(exit code {refused.exit_code})")
            expect("Could not resolve host" in refused.stderr, "no name to be resolved")
        else:
            raise AssertionError("expected curl to fail: the computer is sealed")

        run("echo 'I was here' > /tmp/proof.txt")
        expect("/tmp/proof.txt" in run("ls -l /tmp/proof.txt"), "the file to be listed")
    finally:
        destroyed = sandbox.kill()
        timeline.event("destroyed")
    expect(destroyed, "the computer to have been alive until now")


def main() -> int:
    program = sys.argv[1]
    data_dir = tempfile.mkdtemp(prefix="sandglass-demo-", dir="/var/tmp")
    print("starting the server")
    server = Server(program, data_dir)
    passed = False
    try:
        server.wait_until_ready()
        one_computer(Timeline())
        ledger = [program, "ledger", "--data-dir", data_dir, "--wait", "10"]
        # The client has its answer before the last mount is gone.
        deadline = time.monotonic() + 10
        while json.loads(subprocess.check_output([*ledger, "--json"]))["sandboxes"] > 0:
            expect(time.monotonic() < deadline, "nothing to be left after 10 s")
            time.sleep(0.05)
        print("\nwhat is left of it:", flush=True)
        subprocess.run(ledger, check=True)
        server.stop()
        passed = True
    except (Exception, KeyboardInterrupt) as error:
        print(f"\nthe demo failed: {type(error).__name__}: {error}\nthe end of the server's log:", file=sys.stderr)
        for line in server.log[-40:]:
            print(f"    {line}", file=sys.stderr)
        print(f"its data folder is kept: {data_dir}", file=sys.stderr)
        return 1
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            try:
                server.process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                server.process.kill()
        # Only a folder in which nothing is mounted any more may be removed with all that is in it.
        if passed:
            shutil.rmtree(data_dir)
    print("\nthe demo passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
