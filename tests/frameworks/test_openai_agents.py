"""The OpenAI Agents SDK with its own sandboxes of E2B, as released.

No model is asked: what one would say is written here.
"""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import pytest
from agents import ModelResponse, RunConfig, Runner, Usage, set_tracing_disabled
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions, E2BSandboxType
from agents.models.interface import Model
from agents.sandbox import ExecTimeoutError, LocalSnapshot, Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox import WorkspaceReadNotFoundError
from agents.sandbox.capabilities import Filesystem, Shell
from agents.sandbox.entries import File
from e2b import Sandbox
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

set_tracing_disabled(True)

numbers = itertools.count()


def call(tool: str, **arguments) -> ResponseFunctionToolCall:
    id = f"call-{next(numbers)}"
    return ResponseFunctionToolCall(
        id=id, call_id=id, name=tool, arguments=json.dumps(arguments), type="function_call"
    )


def say(text: str) -> ResponseOutputMessage:
    return ResponseOutputMessage(
        id=f"say-{next(numbers)}",
        content=[ResponseOutputText(text=text, annotations=[], type="output_text")],
        role="assistant",
        status="completed",
        type="message",
    )


class Scripted(Model):
    """Says one thing after the other, and keeps what the tools answered."""

    def __init__(self, *script):
        self.script = list(script)
        self.answers: list[str] = []

    async def get_response(self, system_instructions, input, *rest, **more) -> ModelResponse:
        outputs = [item["output"] for item in input if isinstance(item, dict) and "output" in item]
        self.answers = [str(output) for output in outputs]
        said = self.script.pop(0)
        if callable(said):
            said = said(self.answers[-1])
        return ModelResponse(output=[said], usage=Usage(), response_id=None)

    def stream_response(self, *rest, **more):
        raise NotImplementedError("these runs are not streamed")


def options(story: str, **more) -> E2BSandboxClientOptions:
    return E2BSandboxClientOptions(
        sandbox_type=E2BSandboxType.E2B, timeout=120, metadata={"story": story}, on_timeout="kill", **more
    )


def left(story: str) -> list[tuple[str, str]]:
    """The sandboxes of a story that are there, with their states."""
    found = [info for info in everything(Sandbox.list()) if info.metadata.get("story") == story]
    return [(info.sandbox_id, info.state.value) for info in found]


def everything(pages):
    while pages.has_next:
        yield from pages.next_items()


async def test_an_agent_works_in_a_sandbox_that_ends_with_its_run():
    """Files that it is given, commands one after the other, an error, a terminal that stays, and a patch."""

    def at_the_prompt(answer: str):
        session = int(answer.split("session ID ")[1].split()[0])
        return call("write_stdin", session_id=session, chars="print(seen + 1)\n", yield_time_ms=1500)

    model = Scripted(
        call("exec_command", cmd="cat data.txt && echo sum > result.txt && pwd"),
        call("exec_command", cmd="cat result.txt; ls nothing-here"),
        call("exec_command", cmd="python3 -q -i -c 'seen = 41'", tty=True, yield_time_ms=1500),
        at_the_prompt,
        say("done"),
    )
    agent = SandboxAgent(
        name="worker",
        model=model,
        default_manifest=Manifest(entries={"data.txt": File(content=b"one two\n")}),
        capabilities=[Shell(), Filesystem()],
    )
    sandbox = SandboxRunConfig(client=E2BSandboxClient(), options=options("run"))
    ended = await Runner.run(agent, "go on", run_config=RunConfig(sandbox=sandbox))
    assert ended.final_output == "done"
    first, second, third, fourth = model.answers
    assert "one two\n/workspace" in first and "exited with code 0" in first
    assert "sum" in second and "nothing-here" in second and "exited with code 2" in second
    assert "running with session ID" in third
    assert "42" in fourth
    assert left("run") == []


@pytest.fixture
async def session(request):
    story = request.node.name
    session = await E2BSandboxClient().create(options=options(story))
    async with session:
        yield session
    assert left(story) == []


async def test_commands(session):
    result = await session.exec("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 3)
    assert (await session.exec("id -un", user="root")).stdout == b"root\n"
    with pytest.raises(ExecTimeoutError):
        await session.exec("sleep 30 & echo $! > started; wait", timeout=2)
    # What was started is gone, and the sandbox is as it was.
    assert (await session.exec("kill -0 $(cat started)")).exit_code == 1


async def test_files(session):
    data = bytes(range(256)) * 4096
    await session.mkdir(Path("deep/er"), parents=True)
    await session.write(Path("deep/er/data.bin"), io.BytesIO(data))
    assert (await session.read(Path("deep/er/data.bin"))).read() == data
    assert (await session.exec("stat -c '%s %U' deep/er/data.bin")).stdout == b"1048576 user\n"
    assert [Path(entry.path).name for entry in await session.ls(Path("deep/er"))] == ["data.bin"]
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path("nothing"))
    await session.rm(Path("deep"), recursive=True)
    assert await session.ls(Path(".")) == []


async def test_a_paused_session_goes_on_where_it_was():
    client = E2BSandboxClient()
    session = await client.create(options=options("pause", pause_on_exit=True))
    async with session:
        await session.exec("nohup sleep 1000 >/dev/null 2>&1 & echo $! > pid; echo kept > file")
    (paused,) = left("pause")
    assert paused == (session.state.sandbox_id, "paused")
    # As it is stored between two runs.
    state = client.deserialize_session_state(client.serialize_session_state(session.state))
    again = await client.resume(state)
    async with again:
        assert again.state.sandbox_id == paused[0]
        assert (await again.exec("cat file && kill -0 $(cat pid)")).stdout == b"kept\n"
    assert left("pause") == [paused]
    assert Sandbox.kill(paused[0])


@pytest.mark.parametrize("persistence", ["tar", "snapshot"])
async def test_a_workspace_is_taken_to_another_sandbox(tmp_path, persistence):
    client = E2BSandboxClient()
    story = f"persist {persistence}"
    kept = LocalSnapshot(id="workspace", base_path=tmp_path)
    session = await client.create(options=options(story, workspace_persistence=persistence), snapshot=kept)
    async with session:
        await session.exec("mkdir -p sub && echo kept > sub/file && chmod 750 sub/file")
    assert left(story) == []
    # One way keeps the files, the other the whole computer.
    snapshots = [snapshot.snapshot_id for snapshot in everything(Sandbox.list_snapshots())]
    assert len(snapshots) == (persistence == "snapshot")
    again = await client.resume(session.state)
    async with again:
        assert (await again.exec("cat sub/file; stat -c %a sub/file")).stdout == b"kept\n750\n"
    assert left(story) == []
    for snapshot in everything(Sandbox.list_snapshots()):
        Sandbox.delete_snapshot(snapshot.snapshot_id)
