"""What images take on the disk, and what a deletion frees."""

import json
import os
import subprocess

import httpx
from e2b import Sandbox
from support import until

MIB = 1 << 20


def call(server, method: str, path: str, **options) -> httpx.Response:
    return httpx.request(method, server.url + path, headers=server.headers, timeout=120, **options)


def shown(server, snapshot) -> dict:
    return json.loads(server.cli("snapshot", "show", snapshot.snapshot_id.removesuffix(":default")).stdout)["disk"]


def taken(path) -> int:
    return int(subprocess.run(["du", "-s", "-B1", path], check=True, capture_output=True, text=True).stdout.split()[0])


def metric(server, name: str) -> int:
    lines = call(server, "GET", "/metrics").text.splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith(f"sandglass_{name} ")]
    return int(value)


def fill(sandbox, name: str, mib: int):
    sandbox.commands.run(f"head -c {mib}M /dev/urandom >{name} && sync {name}")


def test_without_shared_blocks_each_image_has_its_own(lone_server):
    server = lone_server
    sandbox = Sandbox.create(timeout=300, **server.opts)
    fill(sandbox, "data", 20)
    first, second = sandbox.create_snapshot(), sandbox.create_snapshot()
    folders = {path: taken(path) for path in (server.data_dir / "host" / "images").iterdir()}
    one, two = shown(server, first), shown(server, second)
    for disk in (one, two):
        assert disk["exact"] and disk["deletion_deferred"] is None
        assert disk["freed_by_deletion_bytes"] == disk["unique_bytes"] == disk["bytes"] > 20 * MIB
    assert abs(one["bytes"] + two["bytes"] - sum(folders.values())) < MIB
    detail = call(server, "GET", f"/v1/sandboxes/{sandbox.sandbox_id}").json()
    both = one["bytes"] + two["bytes"]
    assert both + 20 * MIB < detail["tree_bytes"] < both + 100 * MIB, "with the sandbox's own disk"
    # Those of all who watch are looked for once a minute.
    assert metric(server, 'images{kind="snapshot"}') == 2
    assert metric(server, 'image_bytes{kind="snapshot"}') == metric(server, "images_together_bytes") == both
    listed = server.cli("snapshot", "list").stdout
    assert "UNIQUE" in listed and listed.count(str(-(-one["bytes"] // MIB))) >= 2
    # A paused one is told of with its image.
    sandbox.pause()
    paused = call(server, "GET", f"/v1/sandboxes/{sandbox.sandbox_id}").json()["tree_bytes"]
    assert paused >= both + taken(server.data_dir / "host" / "images" / sandbox.sandbox_id) - MIB
    sandbox.kill()
    for snapshot in (first, second):
        assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.opts)


def test_with_shared_blocks_a_deletion_frees_what_was_said(sharing_server):
    server = sharing_server
    sandbox = Sandbox.create(timeout=300, **server.opts)
    fill(sandbox, "shared", 200)
    first = sandbox.create_snapshot()
    fill(sandbox, "own", 100)
    second = sandbox.create_snapshot()
    one, two = shown(server, first), shown(server, second)
    # Both have the large file, and so has the sandbox: it is on the disk once.
    for disk in (one, two):
        assert disk["exact"] and disk["bytes"] > 200 * MIB
        assert disk["freed_by_deletion_bytes"] == disk["unique_bytes"] < disk["bytes"] - 190 * MIB
    tree = call(server, "GET", f"/v1/sandboxes/{sandbox.sandbox_id}").json()["tree_bytes"]
    assert max(one["bytes"], two["bytes"]) < tree < one["bytes"] + two["bytes"] - 190 * MIB
    together = metric(server, "images_together_bytes")
    assert together <= tree and together < metric(server, 'image_bytes{kind="snapshot"}') - 190 * MIB
    template = call(server, "GET", "/v1/templates/base").json()
    assert template["image"] is None and 300 * MIB < template["tree_bytes"] <= tree

    def free() -> int:
        os.sync()
        system = os.statvfs(server.data_dir)
        return system.f_bfree * system.f_frsize

    sandbox.pause()
    said = shown(server, second)["freed_by_deletion_bytes"]
    before = free()
    assert Sandbox.delete_snapshot(second.snapshot_id, **server.opts)
    until(lambda: free() >= before + said - MIB, what="as much is free as was said")
    sandbox.kill()
    # What only one had together with what is gone is its own now.
    until(lambda: shown(server, first)["unique_bytes"] > 200 * MIB, what="nobody else has the large file")
    assert Sandbox.delete_snapshot(first.snapshot_id, **server.opts)
    server.assert_nothing_left()
