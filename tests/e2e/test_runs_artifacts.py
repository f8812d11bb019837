"""What a run left: there after every kind of end, and nowhere if it must not be kept."""

import hashlib
import os
import subprocess
from urllib.parse import quote

import pytest
from e2b import Sandbox
from faults import crash
from runs import Runs, types

# Known content that a run makes before whatever becomes of it.
MAKE = "mkdir -p out/deep; echo one > out/a.txt; printf 'two' > out/deep/b.bin; chmod 755 out/a.txt; "


@pytest.fixture(scope="module")
def runs(server):
    return Runs(server)


def left(runs: Runs, id: str) -> dict[str, bytes]:
    """All that a run left, checked against what is said of it."""
    files = {}
    for one in runs.ask("GET", f"/{id}/artifacts").json():
        answer = runs.ask("GET", f"/{id}/artifacts/{quote(one['path'], safe='')}")
        assert answer.status_code == 200, answer.text
        assert len(answer.content) == one["bytes"]
        assert hashlib.sha256(answer.content).hexdigest() == one["sha256"] == answer.headers["etag"].strip('"')
        # A browser makes nothing of what a sandbox wrote.
        assert answer.headers["content-disposition"] == "attachment"
        assert answer.headers["x-content-type-options"] == "nosniff"
        files[one["path"]] = answer.content
    return files


def test_all_that_a_run_made_is_there(runs):
    big = "head -c 3000000 /dev/zero | tr '\\0' x > big; : > empty"
    id = runs.create(MAKE + big, files=[{"path": "given \u00fc", "content": "given"}])
    run, events = runs.end(id)
    assert run["status"] == "completed"
    files = left(runs, id)
    assert files.pop("big") == b"x" * 3000000
    assert files == {"out/a.txt": b"one\n", "out/deep/b.bin": b"two", "given \u00fc": b"given", "empty": b""}
    modes = {one["path"]: one["mode"] for one in runs.ask("GET", f"/{id}/artifacts").json()}
    assert modes["out/a.txt"] == 0o755 and modes["empty"] == 0o644
    order = types(events)
    assert order.index("sandbox.destroying") < order.index("artifacts.collected") < order.index("sandbox.destroyed")
    assert order.count("artifact.collected") == 5
    [collected] = [event["data"] for event in events if event["type"] == "artifacts.collected"]
    assert collected["files"] == 5 and collected["bytes"] == 3000012


def test_only_what_is_asked_for_leaves(runs):
    id = runs.create(MAKE + "echo no > no.txt; echo outside > /tmp/outside", outputs=["out/**/*.bin", "*.html"])
    runs.end(id)
    assert left(runs, id) == {"out/deep/b.bin": b"two"}
    for path in ["no.txt", "../tmp/outside", "/etc/passwd", "out/deep/../deep/b.bin", "%"]:
        assert runs.ask("GET", f"/{id}/artifacts/{quote(path, safe='')}").status_code == 404
    assert runs.ask("POST", "", json={"prompt": "p", "agent": {"command": "true"}, "outputs": ["[z"]}).status_code == 400


def test_links_and_devices_do_not_leave(runs):
    tricks = (
        "echo real > real; ln -s /etc/passwd link; ln -s / root; mkfifo pipe; sudo mknod zero c 1 5 2>/dev/null; "
        "ln real hard; sudo ln -s /etc/shadow shadow; mkdir d; ln -s ../../../etc d/up"
    )
    id = runs.create(tricks)
    _, events = runs.end(id)
    assert left(runs, id) == {"real": b"real\n", "hard": b"real\n"}
    [collected] = [event["data"] for event in events if event["type"] == "artifacts.collected"]
    assert collected["symlinks"] == 4


@pytest.mark.parametrize(
    ("after", "more", "reason"),
    [
        ("exit 3", {}, "agent_error"),
        ("sleep 60", {"timeout_seconds": 2}, "timeout"),
        ("true", {"checks": [{"command": "false"}], "max_repairs": 0}, "verification_failed"),
    ],
)
def test_whatever_ends_a_run_leaves_what_it_made(runs, after, more, reason):
    id = runs.create(MAKE + after, **more)
    run, _ = runs.end(id)
    assert run["stop_reason"] == reason
    assert left(runs, id) == {"out/a.txt": b"one\n", "out/deep/b.bin": b"two"}


@pytest.mark.parametrize("how", ["cancelled", "taken away"])
def test_whoever_ends_a_run_leaves_what_it_made(runs, how):
    id = runs.create(MAKE + "touch ready; sleep 60")
    sandbox = runs.wait_for(id, "worker.started")[3]["data"]["sandbox_id"]
    with Sandbox.connect(sandbox) as inside:
        inside.commands.run("while [ ! -e /workspace/project/ready ]; do sleep 0.05; done")
        if how == "cancelled":
            runs.ask("POST", f"/{id}/cancel")
        else:
            inside.kill()
    runs.end(id)
    assert left(runs, id) == {"out/a.txt": b"one\n", "out/deep/b.bin": b"two", "ready": b""}


def test_a_sandbox_out_of_memory_leaves_what_it_made(runs):
    # As files in memory, which the guest's guard can't end and which count for the whole sandbox.
    id = runs.create(MAKE + "sync; sudo sh -c 'head -c 100G /dev/zero > /dev/shm/x' ; sleep 2; echo survived", timeout_seconds=60)
    run, _ = runs.end(id)
    assert left(runs, id) == {"out/a.txt": b"one\n", "out/deep/b.bin": b"two"}
    assert run["stop_reason"] in ("sandbox_error", "end_turn")
    if run["stop_reason"] == "sandbox_error":
        assert "memory" in run["detail"], run


def test_the_server_died_and_what_was_made_is_there(lone_server):
    runs = Runs(lone_server)
    ids = [runs.create(MAKE + "echo made; sleep 60"), runs.create(MAKE, hold=True)]
    runs.wait_for(ids[0], "worker.output")
    runs.wait_for(ids[1], "turn.awaited")
    crash(lone_server, "both")
    lone_server.start()
    for id in ids:
        assert runs.end(id)[0]["stop_reason"] == "host_restart"
        assert left(runs, id) == {"out/a.txt": b"one\n", "out/deep/b.bin": b"two"}


@pytest.mark.parametrize("retention", ["metadata", "none"])
def test_what_must_not_be_kept_is_nowhere(lone_server, work_folder, retention):
    """Markers of prompt, files, commands, output, paths and labels are looked for in all that the server has on the disk."""
    runs = Runs(lone_server)
    # No two of them are known to the shell as one text, so that only what they were for has them whole.
    marks = {what: f"{what}mark{os.urandom(6).hex()}" for what in ("prompt", "file", "command", "output", "path", "label", "check")}
    output = marks["output"]

    def run(retention: str) -> str:
        return runs.create(
            f"cat; : {marks['command']}; printf '%s%s\\n' {output[:8]} {output[8:]}; cp given {marks['path']}; exit 0",
            prompt=marks["prompt"],
            files=[{"path": "given", "content": marks["file"]}],
            checks=[{"command": f"echo {marks['check']}"}],
            metadata={"label": marks["label"]},
            retention=retention,
        )

    def found() -> set[str]:
        folders = [str(lone_server.data_dir), str(lone_server.log_path)]
        texts = [option for mark in marks.values() for option in ("-e", mark)]
        answer = subprocess.run(["grep", "-rhaoF", *texts, *folders], capture_output=True, text=True)
        return set(answer.stdout.split())

    id = run(retention)
    ended, events = runs.end(id)
    assert ended["status"] == "completed" and ended["prompt"] is None and ended["prompt_bytes"] > 0
    assert found() == set()
    assert any(event["type"] == "worker.output" and event["data"]["bytes"] > 0 for event in events)
    artifacts = runs.ask("GET", f"/{id}/artifacts").json()
    assert [one["bytes"] for one in artifacts] == [len(marks["file"])] * 2
    assert all(one["path"] is None and (one["sha256"] is None) == (retention == "none") for one in artifacts)
    # The same is found where it may be kept.
    runs.end(run("full"))
    assert found() == set(marks.values())
