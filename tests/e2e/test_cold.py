"""Snapshots that nobody has used for long are compressed, and are what they were when somebody wants them."""

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from conftest import empty, serving_on, serving_with_reflinks
from e2b import Sandbox
from e2b.exceptions import SandboxException, ServiceBusyException
from faults import configured, new_tag
from support import ROOMY, until

MIB = 1 << 20

# It takes some seconds to compress a file of some hundreds of megabytes, so that somebody can come in between.
SOON = "[snapshots]\ncompress_after_seconds = 2\n"

# A process with something in its memory that it can tell.
FRAME = r"""
import hashlib, os, time
frame = [f"row {n} of a table" for n in range(400_000)]
while True:
    with open("/home/user/asked.tmp", "w") as file:
        file.write(hashlib.sha256("".join(frame).encode()).hexdigest())
    os.replace("/home/user/asked.tmp", "/home/user/told")
    while os.path.exists("/home/user/told"):
        time.sleep(0.01)
"""


@pytest.fixture
def server(servers, tmp_path):
    server = configured(servers, tmp_path, SOON)
    yield server
    empty(server)


def options(folder: Path) -> tuple[str, ...]:
    path = folder / f"{new_tag()}.toml"
    path.write_text(SOON + ROOMY)
    return "--config", str(path)


@pytest.fixture
def small_server(work_folder, tmp_path):
    """Its data folder has one gigabyte, and shares no blocks."""
    mount = ("-t", "tmpfs", "-o", "size=1g", "none")
    for server in serving_on(work_folder / "small", *mount, options=options(tmp_path)):
        yield server
        (server.data_dir / "hog").unlink(missing_ok=True)
        empty(server)


@pytest.fixture
def sharing_server(work_folder, tmp_path):
    yield from serving_with_reflinks(work_folder, options(tmp_path))


def images(server) -> Path:
    return server.data_dir / "host" / "images"


def image(server, snapshot) -> Path:
    return images(server) / snapshot.snapshot_id.split(":")[0]


def disk(server, snapshot) -> dict:
    return json.loads(server.cli("snapshot", "show", snapshot.snapshot_id.split(":")[0]).stdout)["disk"]


def compressed(server, snapshot) -> dict:
    """What it takes once it is compressed."""
    until(lambda: disk(server, snapshot)["compressed"], within=60, what="it is compressed")
    return disk(server, snapshot)


def taken(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def gone(server):
    """Waits until nothing of any sandbox takes room any more."""
    until(lambda: not any((server.data_dir / "host" / "sandboxes").iterdir()), what="the sandboxes are gone")


def under_way(server) -> bool:
    return any(entry.name.startswith(".making-") for entry in images(server).iterdir())


def filled(sandbox, mib: int, name: str = "/home/user/data") -> str:
    """Puts a file on its disk that is compressed to three quarters; its digest."""
    command = f"head -c {mib * 3 // 4}M /dev/urandom | base64 -w0 >{name} && sync {name} && sha256sum <{name}"
    return sandbox.commands.run(command, timeout=120).stdout


def test_memory_and_disk_come_back_for_all_who_want_them_at_once(server):
    source = Sandbox.create(timeout=300, **server.opts)
    source.files.write("/home/user/frame.py", FRAME)
    frame = source.commands.run("python3 frame.py", background=True, timeout=0)
    told = lambda box: until(lambda: box.files.exists("/home/user/told"), within=30) and box.files.read("/home/user/told")  # noqa: E731
    in_memory, on_disk = told(source), filled(source, 40)
    # What can be told only by the process that lives through it all.
    source.files.remove("/home/user/told")
    snapshot = source.create_snapshot()
    before, folder = disk(server, snapshot), image(server, snapshot)
    assert not before["compressed"] and before["exact"]
    after = compressed(server, snapshot)
    assert after["bytes"] == after["unique_bytes"] < before["bytes"] * 9 // 10, (before, after)
    assert abs(after["bytes"] - taken(folder)) < MIB and not (folder / "disk.img").exists()
    [listed] = httpx.get(f"{server.url}/v1/snapshots", headers=server.headers, timeout=60).json()
    assert listed["disk"] == after
    detail = httpx.get(f"{server.url}/v1/sandboxes/{source.sandbox_id}", headers=server.headers, timeout=60).json()
    assert detail["tree_bytes"] < before["bytes"] + taken(server.data_dir / "host" / "sandboxes" / source.sandbox_id)

    frame.disconnect()
    def create(_) -> tuple:
        copy = Sandbox.create(snapshot.snapshot_id, timeout=300, **server.opts)
        return copy, disk(server, snapshot)

    for _ in range(2):
        with ThreadPoolExecutor(5) as pool:
            copies = list(pool.map(create, range(5)))
        # On a busy machine it may be cold again before the last of them has looked.
        plain = [found for _, found in copies if not found["compressed"]]
        assert plain and all(abs(found["bytes"] - before["bytes"]) < MIB for found in plain), "the holes are filled"
        for copy, _ in copies:
            assert told(copy) == in_memory
            assert copy.commands.run("sha256sum </home/user/data").stdout == on_disk
            copy.kill()
        assert compressed(server, snapshot)["bytes"] == pytest.approx(after["bytes"], rel=0.01)
    until(lambda: [entry.name for entry in images(server).iterdir()] == [folder.name], what="nothing is left aside")
    source.kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.opts)
    assert not list(images(server).iterdir())


def test_who_wants_it_or_deletes_it_need_not_wait_for_a_compression(server):
    source = Sandbox.create(timeout=300, **server.opts)
    on_disk = filled(source, 600)
    snapshot = source.create_snapshot()
    until(lambda: under_way(server), within=60, what="it is being compressed")
    copy = Sandbox.create(snapshot.snapshot_id, timeout=300, **server.opts)
    assert not disk(server, snapshot)["compressed"]
    assert copy.commands.run("sha256sum </home/user/data", timeout=60).stdout == on_disk
    until(lambda: under_way(server), within=60, what="it is being compressed")
    began = time.monotonic()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.opts)
    assert time.monotonic() - began < 5 and not image(server, snapshot).exists()
    until(lambda: not list(images(server).iterdir()), within=60, what="nothing is left of it")
    # And a server that stops does not wait either.
    snapshot = source.create_snapshot()
    until(lambda: under_way(server), within=60, what="it is being compressed")
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 9, "it takes ten seconds if something is waited for"
    server.start()
    assert [entry.name for entry in images(server).iterdir()] == [image(server, snapshot).name]
    assert Sandbox.create(snapshot.snapshot_id, timeout=300, **server.opts).kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.opts)


def test_what_is_damaged_is_refused_before_anything_starts(server):
    source = Sandbox.create(timeout=300, **server.opts)
    snapshot = source.create_snapshot()
    compressed(server, snapshot)
    # What is unused is not touched by the server from here on.
    streams = sorted(image(server, snapshot).glob("*.zst"))
    assert streams
    for stream in streams:
        sound = stream.read_bytes()
        flipped = bytearray(sound)
        flipped[len(sound) // 2] ^= 1
        for wrong in (bytes(flipped), sound[:-1], b""):
            stream.write_bytes(wrong)
            with pytest.raises(SandboxException, match="is damaged"):
                Sandbox.create(snapshot.snapshot_id, timeout=300, **server.opts)
            assert [row.sandbox_id for row in Sandbox.list(**server.opts).next_items()] == [source.sandbox_id]
            assert [entry.name for entry in images(server).iterdir()] == [image(server, snapshot).name]
        stream.write_bytes(sound)
    # The positive control.
    assert Sandbox.create(snapshot.snapshot_id, timeout=300, **server.opts).kill()
    compressed(server, snapshot)
    streams[0].write_bytes(b"")
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.opts)
    assert not list(images(server).iterdir())
    source.kill()


def test_a_full_disk_loses_nothing(small_server):
    server = small_server
    source = Sandbox.create(timeout=300, **server.opts)
    filled(source, 60, "/home/user/text")
    on_disk = source.commands.run("sha256sum </home/user/text").stdout
    snapshot = source.create_snapshot()
    after = compressed(server, snapshot)
    source.kill()
    gone(server)
    until(lambda: not under_way(server), what="the other form is gone")
    hog = server.data_dir / "hog"
    free = shutil.disk_usage(server.data_dir).free
    with hog.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - 50 * MIB)
    with pytest.raises(ServiceBusyException, match="out of disk space"):
        Sandbox.create(snapshot.snapshot_id, timeout=300, **server.opts)
    assert disk(server, snapshot) == after and shutil.disk_usage(server.data_dir).free > 45 * MIB
    hog.unlink()
    copy = Sandbox.create(snapshot.snapshot_id, timeout=300, **server.opts)
    assert copy.commands.run("sha256sum </home/user/text").stdout == on_disk
    # And nothing is compressed for which there is no room.
    copy.kill()
    gone(server)
    with hog.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(server.data_dir).free - 20 * MIB)
    before = taken(image(server, snapshot))
    with server.log_path.open() as log:
        log.seek(0, os.SEEK_END)
        until(lambda: "it could not be compressed" in log.read(), within=60, what="it was tried")
    assert not disk(server, snapshot)["compressed"] and taken(image(server, snapshot)) == before
    hog.unlink()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.opts)


def test_what_others_share_stays_shared(sharing_server):
    server = sharing_server
    source = Sandbox.create(timeout=300, **server.opts)
    on_disk = filled(source, 200)
    snapshot = source.create_snapshot()
    before, after = disk(server, snapshot), compressed(server, snapshot)
    folder = image(server, snapshot)
    # The disk is that of the sandbox that runs on: a copy of it would take room and free none.
    assert (folder / "disk.img").exists() and list(folder.glob("*.zst"))
    assert after["unique_bytes"] < before["unique_bytes"] < 200 * MIB < after["bytes"]
    copy = Sandbox.create(snapshot.snapshot_id, timeout=300, **server.opts)
    assert copy.commands.run("sha256sum </home/user/data").stdout == on_disk
    assert disk(server, snapshot)["bytes"] > 200 * MIB > disk(server, snapshot)["unique_bytes"]
    source.kill()
    copy.kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.opts)


def test_paused_sandboxes_and_templates_stay_as_they_are(server):
    sandbox = Sandbox.create(timeout=300, **server.opts)
    snapshot = sandbox.create_snapshot()
    assert sandbox.pause()
    compressed(server, snapshot)
    time.sleep(4)
    paused = images(server) / sandbox.sandbox_id
    assert (paused / "disk.img").exists() and not list(paused.glob("*.zst"))
    assert Sandbox.connect(sandbox.sandbox_id, timeout=300, **server.opts).commands.run("echo back").stdout == "back\n"
    assert Sandbox.kill(sandbox.sandbox_id, **server.opts)
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.opts)
