"""`sandglass verify`: attacks fail here, succeed where they must, and leave nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from support import PROGRAM, Server, until

# These measure time, which wants a machine on which nothing else runs. `test_limits.py` has the ceiling of the processor.
MEASURED = {"limits.neighbour", "limits.cpu"}

GROUPS = {"isolation", "files_and_api", "egress", "limits", "lifecycle"}


def traces() -> set[str]:
    """What servers of any instance have on this machine outside of namespaces."""
    groups = {str(path) for path in Path("/sys/fs/cgroup").glob("*/sandglass-*")}
    groups |= {str(path) for path in Path("/sys/fs/cgroup").glob("sandglass-*")}
    stages = subprocess.run(["losetup", "-n", "-O", "BACK-FILE"], capture_output=True, text=True).stdout
    return groups | {line for line in stages.splitlines() if "(deleted)" in line}


def verify(*options: str, **env: str) -> tuple[int, list[dict]]:
    result = subprocess.run(
        [PROGRAM, "verify", "--json", *options],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)["probes"]


def stage_of(process: subprocess.Popen) -> list[str]:
    """The control groups of the servers that it started."""
    command = "verify-janitor"
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[1:2] == [command.encode()]:
            return [words[i + 1].decode() for i, word in enumerate(words) if word == b"--instance"]
    return []


@pytest.mark.alone
@pytest.mark.timeout(900)
def test_every_attack_fails_and_every_control_succeeds():
    before = traces()
    code, probes = verify("--cycles", "24")
    not_held = [probe for probe in probes if probe["verdict"] != "held"]
    assert [probe for probe in not_held if probe["id"] not in MEASURED] == []
    assert code == (1 if not_held else 0)
    assert len(probes) >= 60 and {probe["group"] for probe in probes} == GROUPS
    assert all(probe["id"].startswith(f"{probe['group']}.") and probe["why"] for probe in probes)
    until(lambda: traces() <= before, within=30, what="nothing is left")


@pytest.mark.alone
def test_a_verify_that_is_killed_leaves_nothing():
    before = traces()
    process = subprocess.Popen(
        [PROGRAM, "verify", "--only", "lifecycle"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    instances = until(lambda: stage_of(process), within=60, what="it has started")
    alive = [Path(f"/sys/fs/cgroup/{controller}sandglass-{i}") for i in instances for controller in ("", "pids/")]
    until(lambda: any(path.exists() for path in alive), within=60, what="a server of it runs")
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not any(path.exists() for path in alive), within=60, what="its control groups are gone")
    until(lambda: traces() <= before, within=60, what="nothing is left")


def test_a_barrier_that_is_missing_is_reported(work_folder):
    # Nothing isolates the sandboxes of this server, so attacks on them succeed.
    server = Server(work_folder / "data-unsealed", "--engine", "fake", "--unsafe-no-isolation")
    hostname = os.uname().nodename
    server.start()
    try:
        code, probes = verify("--url", server.url, "--only", "isolation", E2B_API_KEY=server.api_key)
    finally:
        server.stop()
    verdicts = {probe["id"]: probe["verdict"] for probe in probes}
    assert code == 1
    for probe in ("isolation.path", "isolation.kill", "isolation.hostname", "isolation.mknod", "isolation.bpf"):
        assert verdicts[probe] == "broken_out", probes
    # Controls there are none, and the machine is as it was.
    assert verdicts["lifecycle.processes"] == "skipped"
    assert os.uname().nodename == hostname
