"""A real model, small enough for any machine, asked from inside of a sandbox by way of the gateway."""

import json
import socket
import subprocess
import threading
from dataclasses import dataclass

import pytest
from e2b import Sandbox
from gateway import env, grant, serve
from support import ROOT

# Loading and answering take a second each, on a processor that nobody else wants.
READY_WITHIN = 100
pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Provider:
    """Who has it."""

    url: str


@pytest.fixture(scope="module")
def model():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [ROOT / ".venv-model/bin/python", ROOT / "tests/e2e/small_model.py", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    given_up = threading.Timer(READY_WITHIN, process.kill)
    given_up.start()
    try:
        assert process.stdout.readline() == "ready\n"
        yield Provider(f"http://127.0.0.1:{port}")
    finally:
        given_up.cancel()
        process.stdin.close()
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def box(servers, work_folder, model):
    """A sandbox of a server that offers it."""
    server = serve(servers, work_folder, "small-model", model)
    box = Sandbox.create(timeout=300, **server.opts)
    box.commands.run("install -d -o user -g user /workspace", user="root")
    yield box, grant(server, box)
    box.kill()


@pytest.mark.parametrize("dialect", ["messages", "chat", "responses"])
def test_it_writes_a_file(box, dialect):
    box, granted = box
    job = {
        "prompt": "Write the word hello into the file hello.txt",
        "model": "small",
        "dialect": dialect,
        "folder": f"/workspace/{dialect}",
        "tools": {"shell": True},
        "seconds": 120,
        "mode": "command",
        "window": 2000,
        "max_output": 200,
    }
    box.files.write("/tmp/job.json", json.dumps(job))
    done = box.commands.run("/usr/lib/sandglass/guest worker < /tmp/job.json", envs=env(granted.token), timeout=130)
    assert box.files.read(f"/workspace/{dialect}/hello.txt").strip().lower() == "hello", done.stdout
    # What it read and wrote was counted by the model, and paid.
    money = granted.money()
    call = money["calls"][-1]
    assert call["model"] == "small" and not call["estimated"]
    assert call["usage"]["output"] > 0 and 0 < call["charged_micros"] < 1000 and money["reserved_micros"] == 0
