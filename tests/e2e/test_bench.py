"""The benches measure something, fail at nothing, and leave nothing. What they measure is no business of a test."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import PROGRAM, children_of, until

WITHIN_S = 300


def bench(*args: str) -> dict:
    command = [PROGRAM, "bench", *args, "--json"]
    result = subprocess.run(command, text=True, capture_output=True, timeout=WITHIN_S)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert (report["bench"], report["failed"], report["failures"]) == (args[0], 0, [])
    assert report["ledger"]["clean"] is True
    assert (report["ledger"]["server"], report["ledger"]["counts"]) == ("stopped", {})
    for series in report["series"]:
        samples = sorted(series["samples"])
        assert samples, f"{series['name']} has no samples"
        summary = series["summary"]
        assert (summary["n"], summary["max"]) == (len(samples), samples[-1])
        assert samples[0] <= summary["p50"] <= summary["p95"] <= summary["p99"] <= summary["max"]
    for target in report["targets"]:
        assert isinstance(target["met"], bool) and target["bound"] in ("at_most", "at_least"), target
    return report


def samples(report: dict) -> dict[str, list[float]]:
    return {series["name"]: series["samples"] for series in report["series"]}


def test_cold_create():
    found = samples(bench("cold-create", "-n", "3", "--warmup", "0"))
    ours, reference = found["create to first output"], found["reference: runsc run"]
    assert len(ours) == len(reference) == 3 and min(ours + reference) > 0
    assert all(create < output for create, output in zip(found["of it, create"], ours))


def test_exec():
    found = samples(bench("exec", "-n", "3", "--warmup", "0"))
    assert {name: len(values) for name, values in found.items()} == {
        "request to end": 3,
        "reference: spawn inside": 3,
    }
    assert min(found["request to end"] + found["reference: spawn inside"]) > 0


def test_transfer():
    found = samples(bench("transfer", "-n", "1", "--python", sys.executable))
    assert len(found) == 6 and all(len(values) == 1 and values[0] > 0 for values in found.values())


def test_idle():
    found = samples(bench("idle", "--count", "2", "--settle", "0", "--window", "2"))
    assert len(found["CPU of a sandbox"]) == len(found["memory of a sandbox (PSS)"]) == 2
    assert min(found["memory of a sandbox (PSS)"]) > 1
    assert found["memory of serve (RSS)"][0] > 1 and found["memory of host (RSS)"][0] > 1


def test_egress():
    found = samples(bench("egress", "-n", "1"))
    rates = found["100 MB over an allowed TLS connection"] + found["reference: over a bare copy loop"]
    assert len(rates) == 2 and min(rates) > 0
    assert len(found["a new TLS connection"]) == len(found["reference: by a bare copy loop"]) == 20
    assert len(found["memory of serve for an idle connection"]) == 1


def test_edge():
    found = samples(bench("edge", "-n", "3", "--warmup", "0"))
    assert len(found["a request on a new connection"]) == len(found["reference: from the airlock"]) == 3
    assert len(found["100 MB of one answer"]) == len(found["reference: 100 MB from the airlock"]) == 1
    assert min(value for values in found.values() for value in values) > 0


def test_live():
    found = samples(bench("live", "-n", "3", "--warmup", "0"))
    assert {len(values) for values in found.values()} == {3}
    assert min(value for values in found.values() for value in values) > 0


@pytest.mark.timeout(300)
def test_pool():
    found = samples(bench("pool", "-n", "2", "--warmup", "0"))
    assert len(found.pop("reference's commands while the pool is filled")) > 0
    assert {name: len(values) for name, values in found.items()} == {
        "create to first output": 2,
        "of it, create": 2,
        "reference: in a sandbox that runs": 2,
        "the same of 20 at once": 20,
    }
    assert min(value for values in found.values() for value in values) > 0


@pytest.mark.timeout(300)
def test_restore():
    found = samples(bench("restore", "-n", "2", "--warmup", "0"))
    assert {name: len(values) for name, values in found.items()} == {
        "reference: runsc restore": 2,
        "create of a snapshot": 2,
        "resume": 2,
        "reference: runsc checkpoint and restore, 64 MB": 2,
        "fork to first output of the copy, 64 MB": 2,
        "reference: runsc pause, checkpoint and resume, 64 MB": 2,
        "its source stands still, 64 MB": 2,
        "20 of a snapshot at once": 1,
    }
    assert min(value for values in found.values() for value in values) > 0


@pytest.mark.timeout(300)
def test_soak():
    found = samples(bench("soak", "--cycles", "20", "--pauses", "5", "--parallel", "4"))
    assert len(found["create, run, kill"]) == 20
    assert len(found["create, run, pause, resume, run, kill"]) == 5


def test_an_interrupted_bench_leaves_nothing():
    process = subprocess.Popen(
        [PROGRAM, "bench", "soak", "--cycles", "1000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def data_folder() -> Path | None:
        for child in children_of(process.pid):
            try:
                arguments = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            except FileNotFoundError:
                continue
            if "--data-dir" in arguments:
                return Path(arguments[arguments.index("--data-dir") + 1])
        return None

    try:
        data = until(data_folder, 30, "the bench's server")
        until(lambda: any((data / "host/sandboxes").glob("*")), 60, "a sandbox of the bench")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=WITHIN_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1 and "interrupted" in said
    # It is kept when the ledger is not clean.
    assert not data.parent.exists(), said


def test_a_server_that_runs_can_be_measured(server):
    result = server.cli("bench", "exec", "-n", "1", "--url", server.url, "--api-key", server.api_key, "--json")
    report = json.loads(result.stdout)
    assert (report["failed"], report["ledger"]) == (0, None)


def test_without_a_server_a_bench_fails(server):
    result = server.cli("bench", "exec", "--url", "http://127.0.0.1:1", "--api-key", "none", check=False)
    assert result.returncode == 1 and "127.0.0.1:1" in result.stderr


@pytest.mark.parametrize("name", ["cold-create", "exec", "transfer", "idle", "soak", "restore", "pool", "edge", "live"])
def test_every_bench_is_listed_with_its_target(server, name):
    assert any(line.startswith(name) for line in server.cli("bench", "--list").stdout.splitlines())
