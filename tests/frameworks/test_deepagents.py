"""LangChain's Deep Agents with their sandboxes of E2B, as released.

No model is asked: what one would say is written here.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest
from deepagents import create_deep_agent
from e2b import AsyncSandbox, Sandbox
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_e2b import AsyncE2BSandbox, E2BSandbox

numbers = itertools.count()


def call(tool: str, **arguments) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": tool, "args": arguments, "id": f"call-{next(numbers)}"}])


class Scripted(BaseChatModel):
    """Says one thing after the other."""

    script: list

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools, **more):
        return self

    def _generate(self, messages, *rest, **more) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.script.pop(0))])


@pytest.fixture
def sandbox():
    with Sandbox.create(timeout=120) as sandbox:
        yield sandbox
    assert sandbox.is_running() is False


SCRIPT = [
    call("write_file", file_path="/home/user/sums.py", content="print(sum(range(11)))\nprint('a needle')\n"),
    call("execute", command="python3 sums.py && pwd"),
    call("edit_file", file_path="/home/user/sums.py", old_string="range(11)", new_string="range(101)"),
    call("execute", command="python3 sums.py; exit 3"),
    call("read_file", file_path="/home/user/sums.py"),
    call("grep", pattern="needle", path="/home/user", output_mode="content"),
    call("glob", pattern="*.py", path="/home/user"),
    call("ls", path="/home/user"),
    call("read_file", file_path="/home/user/nothing"),
    AIMessage("done"),
]

ANSWERS = [
    ["sums.py"],
    ["55", "/home/user", "exit code 0"],
    ["sums.py"],
    ["5050", "exit code 3"],
    ["range(101)"],
    ["sums.py", "a needle"],
    ["sums.py"],
    ["/home/user/sums.py"],
    ["Error: File '/home/user/nothing'"],
]


def checked(messages):
    answers = [message.content for message in messages if isinstance(message, ToolMessage)]
    assert len(answers) == len(ANSWERS), answers
    for answer, wanted in zip(answers, ANSWERS, strict=True):
        assert all(text in answer for text in wanted), (answer, wanted)
    assert messages[-1].content == "done"


def test_an_agent_works_in_a_sandbox(sandbox):
    """Files written, changed, searched and read, and commands with their codes."""
    agent = create_deep_agent(model=Scripted(script=list(SCRIPT)), backend=E2BSandbox(sandbox=sandbox))
    checked(agent.invoke({"messages": "go on"})["messages"])
    assert "5050" in sandbox.commands.run("python3 sums.py").stdout


async def test_an_agent_works_in_a_sandbox_with_the_asynchronous_sdk():
    async with await AsyncSandbox.create(timeout=120) as sandbox:
        backend = AsyncE2BSandbox(sandbox=sandbox)
        agent = create_deep_agent(model=Scripted(script=list(SCRIPT)), backend=backend)
        checked((await agent.ainvoke({"messages": "go on"}))["messages"])
        # Several at once are what an agent with parallel calls does.
        results = await asyncio.gather(*(backend.aexecute(f"sleep 1; echo {n}") for n in range(8)))
        assert [result.output for result in results] == [f"{n}\n" for n in range(8)]
    assert await sandbox.is_running() is False


def test_commands_end_in_time_and_say_how(sandbox):
    backend = E2BSandbox(sandbox=sandbox)
    failed = backend.execute("echo out; echo err >&2; exit 7")
    assert (failed.output, failed.exit_code) == ("out\n\nerr\n", 7)
    late = backend.execute("sleep 30 & echo $! > started; wait", timeout=2)
    assert late.exit_code == 124
    assert backend.execute("kill -0 $(cat started)").exit_code == 1


def test_files_go_both_ways(sandbox):
    backend = E2BSandbox(sandbox=sandbox)
    data = bytes(range(256)) * 4096
    (sent,) = backend.upload_files([("/home/user/deep/er/data.bin", data)])
    assert sent.error is None
    found, missing, folder, relative = backend.download_files(
        ["/home/user/deep/er/data.bin", "/home/user/nothing", "/home/user/deep", "deep"]
    )
    assert found.content == data
    assert (missing.error, folder.error, relative.error) == ("file_not_found", "is_directory", "invalid_path")
    (refused,) = backend.upload_files([("/home/user/deep", b"")])
    assert refused.error == "is_directory"


def test_text_beyond_a_command_line_is_written_and_edited(sandbox):
    """What is too long for a command goes as a file."""
    backend = E2BSandbox(sandbox=sandbox)
    text = "line\n" * 40_000 + "the needle\n"
    assert backend.write("/home/user/long", text).error is None
    assert backend.edit("/home/user/long", "line\n" * 20_000, "fewer\n" * 20_000).error is not None
    assert backend.edit("/home/user/long", "the needle\n", "n" * 200_000).error is None
    assert sandbox.files.read("/home/user/long") == "line\n" * 40_000 + "n" * 200_000


def test_what_a_killed_sandbox_answers_is_an_error(sandbox):
    backend = E2BSandbox(sandbox=sandbox)
    assert backend.execute("true").exit_code == 0
    sandbox.kill()
    # That is the SDK's word for it, and so the framework's.
    assert backend.execute("true").exit_code == 124
