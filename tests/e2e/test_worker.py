"""The worker that every sandbox has, in a real one. The model is scripted, and beside it: no way leads out."""

import json

import pytest
from beside import Beside
from e2b import CommandExitException, Sandbox

GUEST = "/usr/lib/sandglass/guest"


@pytest.fixture(scope="module")
def box(server):
    box = Sandbox.create(timeout=600)
    box.commands.run("mkdir -p /workspace && chown user: /workspace", user="root")
    yield box
    box.kill()


class Run:
    """A turn of the worker, and what it told."""

    def __init__(self, box: Sandbox, script: str, **job):
        with Beside(box, script) as provider:
            job = {
                "prompt": "prove where you are",
                "model": "scripted",
                "dialect": "messages",
                "folder": "/workspace/project",
                "tools": {"shell": True, "web": False},
                "turn": {"name": "build", "number": 1},
                "history": None,
                "seconds": 60,
            } | job
            box.files.write("/tmp/job.json", json.dumps(job))
            env = {"SANDGLASS_MODEL_URL": provider.url, "SANDGLASS_MODEL_TOKEN": "sgm_canary"}
            try:
                done = box.commands.run(f"{GUEST} worker < /tmp/job.json", envs=env, timeout=90)
            except CommandExitException as failed:
                done = failed
        self.code, self.stderr = done.exit_code, done.stderr
        self.events = [json.loads(line) for line in done.stdout.splitlines()]

    def of(self, kind: str) -> list[dict]:
        return [event["data"] for event in self.events if event["type"] == kind]


PROVE = """
upstream.script(
    Turn("I look around.", (Use("shell", {"command": "whoami; pwd"}),)),
    Turn(uses=(Use("shell", {"command": "curl -sS -m 5 http://example.com/"}), Use("list_files", {}))),
    lambda asked: Turn(uses=(Use("write_file", {"path": "proof.txt", "content": asked.results()[0]}),)),
    Turn("It is proved."),
)
"""


@pytest.mark.parametrize("dialect", ["messages", "chat", "responses"])
def test_a_task_is_done_in_every_dialect(box, dialect):
    run = Run(box, PROVE, dialect=dialect, folder=f"/workspace/{dialect}")
    assert run.code == 0, (run.stderr, run.events)
    assert box.files.read(f"/workspace/{dialect}/proof.txt") == f"user\n/workspace/{dialect}\n[exit status: 0]"
    looked, fetched = run.of("shell.exited")
    # No way leads out, and the model is told so.
    assert looked["exit_code"] == 0 and fetched["exit_code"] not in (0, None)
    assert [said["text"] for said in run.of("worker.message")] == ["I look around.", "It is proved."]
    [written], [ended] = run.of("file.written"), run.of("turn.ended")
    assert written["path"] == f"/workspace/{dialect}/proof.txt"
    assert (ended["reason"], ended["used"]["calls"], ended["used"]["output_tokens"]) == ("end_turn", 4, 80)
    assert run.events[-1] == {"type": "worker.exited", "data": {"code": 0}}


def test_a_later_turn_goes_on_with_what_was_said(box):
    history = "/home/user/.sandglass/history.json"
    first = Run(box, 'upstream.script(Turn("The word is heron."))', history=history)
    script = 'upstream.script(lambda asked: Turn(json.dumps([asked.prompts(), "heron" in asked.raw.decode()])))'
    second = Run(box, script, history=history, prompt="which word?", turn={"name": "repair-1", "number": 2})
    assert (first.code, second.code) == (0, 0)
    assert json.loads(second.of("worker.message")[0]["text"]) == [["prove where you are", "which word?"], True]


@pytest.mark.parametrize("dialect", ["messages", "chat", "responses"])
@pytest.mark.parametrize(
    ("said", "code", "reason"),
    [
        ('Status(402, "billing_error", headers={"x-should-retry": "false"})', 2, "budget_exhausted"),
        ('Status(429, "insufficient_quota", headers={"x-should-retry": "false"})', 2, "budget_exhausted"),
        ('Status(400, "invalid_request_error")', 3, "model_error"),
        ("Turn('half', fail=3), Turn('half', fail=3)", 3, "model_error"),
        ("Turn('half', cut=3), HALF", 3, "model_error"),
        ("GARBAGE, GARBAGE", 3, "model_error"),
        ('Status(529, "overloaded_error", retry_after=0), Gone(), Turn("now")', 0, "end_turn"),
        ("Turn('half', cut=3), Turn('x' * (1 << 20))", 0, "end_turn"),
    ],
)
def test_a_turn_ends_as_the_model_lets_it(box, dialect, said, code, reason):
    script = f"upstream.script({said})\nupstream.always(Turn('never'))"
    run = Run(box, script, dialect=dialect)
    assert (run.code, run.of("turn.ended")[0]["reason"]) == (code, reason), run.events
    assert not any(message["text"] == "never" for message in run.of("worker.message"))


def test_the_way_to_the_model_is_told_to_no_command(box):
    run = Run(box, 'upstream.script(Turn(uses=(Use("shell", {"command": "env"}),)), Turn("done"))')
    assert run.code == 0
    told = json.dumps(run.events)
    assert "PATH=" in told and "sgm_canary" not in told


def test_a_small_model_writes_one_command(box):
    run = Run(
        box,
        'upstream.script(Turn("```\\necho hello > hello.txt\\n```"))',
        mode="command",
        dialect="chat",
        folder="/workspace/small",
    )
    assert run.code == 0, run.events
    assert box.files.read("/workspace/small/hello.txt") == "hello\n"


def test_the_web_is_asked_by_the_ordinary_way(box):
    script = """
upstream.script(
    Turn(uses=tuple(Use("fetch_url", {"url": url}) for url in (upstream.url + "/page", "http://example.com"))),
    lambda asked: Turn(json.dumps(asked.results())),
)"""
    run = Run(box, script, tools={"shell": False, "web": True})
    near, far = json.loads(run.of("worker.message")[0]["text"])
    assert "there is no /page" in near
    assert "could not be fetched" in far
