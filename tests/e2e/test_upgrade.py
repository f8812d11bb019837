"""A server with another agent takes up what one before it left: each sandbox keeps the agent that runs in it."""

import shutil
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox
from support import ROOT, until
from test_templates import build, create, folder

GUEST = ROOT / "target/guest/sandglass-guest"


@pytest.fixture
def server(servers, tmp_path):
    """The server of before, whose agent is another one by its content."""
    before = tmp_path / "guest"
    shutil.copy(GUEST, before)
    with before.open("ab") as file:
        # What follows the last section of a program is not looked at.
        file.write(tmp_path.name.encode())
    server = servers.make("--guest", str(before))
    yield server
    if server.process is None:
        server.start()
    for page in [Sandbox.list(limit=100, **server.opts).next_items()]:
        for info in page:
            Sandbox.kill(info.sandbox_id, **server.opts)
    server.assert_nothing_left()
    server.stop()


def upgrade(server):
    server.stop()
    server.options = ()
    server.start()


def agent(sandbox) -> str:
    """What the agent of a sandbox is, by its content; it is the program behind sudo as well."""
    return sandbox.commands.run("sha256sum < /usr/bin/sudo").stdout.split()[0]


def info(server, sandbox) -> dict:
    return httpx.get(f"{server.url}/v1/sandboxes/{sandbox.sandbox_id}", headers=server.headers, timeout=60).json()


def test_what_was_kept_comes_back_with_its_own_agent(server, tmp_path):
    paused, running = (Sandbox.create(timeout=600, **server.opts) for _ in range(2))
    before = agent(paused)
    for sandbox in (paused, running):
        sandbox.commands.run("echo kept > /dev/shm/kept; sleep 10000", background=True, timeout=0)
        until(lambda: sandbox.files.exists("/dev/shm/kept"), within=60, what="it runs")
    snapshot = paused.create_snapshot()
    build(server, folder(tmp_path / "counter"))
    assert paused.pause()

    upgrade(server)
    with Sandbox.create(timeout=600, **server.opts) as new:
        now = agent(new)
    assert now != before
    again = Sandbox.connect(paused.sandbox_id, timeout=600, **server.opts)
    copy = Sandbox.create(snapshot.snapshot_id, timeout=600, **server.opts)
    for sandbox in (again, copy, running):
        assert agent(sandbox) == before
        assert sandbox.commands.run("cat /dev/shm/kept; pgrep -c sleep").stdout == "kept\n1\n"
        sandbox.files.write("/home/user/more", "more")
        assert sandbox.files.read("/home/user/more") == "more"
    # Once more, and with what it does only now.
    again.pause()
    again = Sandbox.connect(paused.sandbox_id, timeout=600, **server.opts)
    assert agent(again) == before and again.files.read("/home/user/more") == "more"
    [fork] = again.fork(timeout=600)
    assert agent(fork) == before
    assert info(server, fork)["origin"] == "fork"
    for sandbox in (again, copy, running, fork):
        sandbox.kill()
    Sandbox.delete_snapshot(snapshot.snapshot_id, **server.opts)

    # A template serves with the agent of before, until its image was made anew.
    first, origin = create(server, "counter")
    assert (agent(first), origin) == (before, "template; path=restore")
    first.kill()

    def renewed() -> bool:
        copy, origin = create(server, "counter")
        assert origin == "template; path=restore"
        try:
            return agent(copy) == now
        finally:
            copy.kill()

    until(renewed, within=100, what="its image was made anew")
    server.cli("template", "delete", "counter")


def test_without_its_agent_it_stays_paused_and_its_files_come_back(server):
    sandbox = Sandbox.create(timeout=600, **server.opts)
    sandbox.files.write("/home/user/kept", "kept")
    digest = agent(sandbox)
    assert sandbox.pause()
    upgrade(server)
    image = server.data_dir / "host/images" / sandbox.sandbox_id / "meta.json"
    layers = [layer for layer in Path("/var/cache/sandglass/agents").iterdir() if layer.name in image.read_text()]
    [layer] = layers
    assert layer.name != digest, "a layer is named by all that is in it"
    shutil.rmtree(layer)
    resume = lambda **more: httpx.post(  # noqa: E731
        f"{server.url}/sandboxes/{sandbox.sandbox_id}/resume",
        json={"timeout": 600} | more,
        headers=server.headers,
        timeout=60,
    )
    refused = resume()
    assert refused.status_code >= 400, refused.text
    assert info(server, sandbox)["state"] == "paused"
    assert resume(memory=False).status_code == 201
    again = Sandbox.connect(sandbox.sandbox_id, timeout=600, **server.opts)
    assert again.files.read("/home/user/kept") == "kept" and agent(again) != digest
    again.kill()
