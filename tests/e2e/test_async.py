"""The asynchronous SDK: the same computer, driven from an event loop."""

import asyncio
import hashlib
import os
import statistics
import time

import pytest
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    PtySize,
    SandboxQuery,
    TimeoutException,
)
from e2b.exceptions import SandboxNotFoundException


@pytest.fixture
async def box(server):
    sandbox = await AsyncSandbox.create(timeout=120)
    yield sandbox
    await sandbox.kill()


async def test_life(server):
    sandbox = await AsyncSandbox.create(timeout=60, metadata={"who": "async"}, envs={"A": "1"})
    assert await sandbox.is_running()
    info = await sandbox.get_info()
    assert info.metadata == {"who": "async"}
    await sandbox.set_timeout(100)
    assert (await sandbox.get_info()).end_at > info.end_at
    same = await AsyncSandbox.connect(sandbox.sandbox_id)
    assert (await same.commands.run("echo $A")).stdout == "1\n"
    listing = AsyncSandbox.list(query=SandboxQuery(metadata={"who": "async"}))
    assert [item.sandbox_id for item in await listing.next_items()] == [sandbox.sandbox_id]
    assert await sandbox.kill() is True
    assert not await sandbox.is_running()
    with pytest.raises(SandboxNotFoundException):
        await sandbox.get_info()


async def test_wrong_key(server):
    with pytest.raises(AuthenticationException):
        await AsyncSandbox.create(api_key="e2b_" + "1" * 40)


async def test_commands(box):
    result = await box.commands.run("echo out; echo err >&2; pwd; whoami")
    assert (result.stdout, result.stderr) == ("out\n/home/user\nuser\n", "err\n")
    with pytest.raises(CommandExitException) as failed:
        await box.commands.run("exit 7")
    assert failed.value.exit_code == 7
    with pytest.raises(TimeoutException):
        await box.commands.run("sleep 60", timeout=1)


async def test_many_commands_at_once(box):
    results = await asyncio.gather(*(box.commands.run(f"echo {n}") for n in range(25)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(25)]


async def test_background_and_stdin(box):
    seen = []
    handle = await box.commands.run("cat", background=True, stdin=True, on_stdout=seen.append)
    await box.commands.send_stdin(handle.pid, "hello\n")
    await box.commands.close_stdin(handle.pid)
    result = await handle.wait()
    assert result.stdout == "hello\n" == "".join(seen)

    sleeper = await box.commands.run("sleep 600", background=True)
    assert sleeper.pid in {process.pid for process in await box.commands.list()}
    again = await box.commands.connect(sleeper.pid)
    assert await box.commands.kill(sleeper.pid) is True
    with pytest.raises(CommandExitException):
        await again.wait()


async def test_files(box):
    await box.files.write("/home/user/x/y.txt", "content")
    assert await box.files.read("x/y.txt") == "content"
    assert await box.files.exists("x/y.txt")
    assert [entry.name for entry in await box.files.list("x")] == ["y.txt"]
    assert (await box.files.get_info("x/y.txt")).size == 7
    await box.files.rename("x/y.txt", "x/z.txt")
    await box.files.remove("x")
    with pytest.raises(FileNotFoundException):
        await box.files.read("x/z.txt")


async def test_fifty_mib_round_trip(box):
    data = os.urandom(1 << 20) * 50
    await box.files.write("/tmp/big", data, request_timeout=60)
    digest = hashlib.sha256()
    async for part in await box.files.read("/tmp/big", format="stream"):
        digest.update(part)
    assert digest.hexdigest() == hashlib.sha256(data).hexdigest()


async def test_pty(box):
    output = bytearray()
    done = asyncio.Event()

    def on_data(chunk: bytes):
        output.extend(chunk)
        if b"sum-42" in output:
            done.set()

    handle = await box.pty.create(PtySize(rows=24, cols=80), on_data=on_data, timeout=60)
    await box.pty.send_stdin(handle.pid, b"echo sum-$((40+2))\n")
    await asyncio.wait_for(done.wait(), 15)
    assert await box.pty.kill(handle.pid) is True


async def test_ten_computers_at_once(server):
    async def one(n: int) -> str:
        sandbox = await AsyncSandbox.create(timeout=120)
        try:
            return (await sandbox.commands.run(f"echo {n}")).stdout
        finally:
            await sandbox.kill()

    assert await asyncio.gather(*(one(n) for n in range(10))) == [f"{n}\n" for n in range(10)]


async def test_watching(box):
    """Events come as a stream."""
    seen, ends = [], []
    handle = await box.files.watch_dir("/home/user", seen.append, on_exit=ends.append, recursive=True, timeout=0)
    took = []
    for n in range(20):
        await box.files.write(f"/home/user/{n}", "1")
        began = time.monotonic()
        while len(seen) < 3 * (n + 1):
            await asyncio.sleep(0.001)
            assert time.monotonic() < began + 10, seen
        took.append(time.monotonic() - began)
    assert statistics.median(took) < 0.02, took
    assert [(event.name, event.type.value) for event in seen[:3]] == [("0", "create"), ("0", "chmod"), ("0", "write")]
    await handle.stop()
    await box.files.write("/home/user/late", "1")
    await asyncio.sleep(0.1)
    assert len(seen) == 60

    # Its end is told: in time, and when the folder goes.
    await box.files.watch_dir("/home/user", seen.append, on_exit=ends.append, timeout=1)
    await box.files.make_dir("/home/user/gone")
    await box.files.watch_dir("/home/user/gone", seen.append, on_exit=ends.append, timeout=0)
    await box.files.remove("/home/user/gone")
    began = time.monotonic()
    while len(ends) < 3:
        await asyncio.sleep(0.01)
        assert time.monotonic() < began + 10, ends
    assert sorted(type(end).__name__ for end in ends) == ["NoneType", "NoneType", "TimeoutException"]


@pytest.mark.newest_sdk("it tells a watch nothing of the end of its sandbox")
async def test_a_watch_ends_with_its_sandbox(server):
    """Its client hears that the sandbox is gone, and not that all went well."""
    sandbox = await AsyncSandbox.create(timeout=60)
    ended = asyncio.get_running_loop().create_future()
    await sandbox.files.watch_dir("/home/user", lambda _: None, on_exit=ended.set_result, timeout=0)
    await sandbox.kill()
    end = await asyncio.wait_for(ended, 20)
    assert isinstance(end, TimeoutException) and "was killed or reached its end of life" in str(end)
