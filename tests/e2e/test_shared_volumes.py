"""Volumes under what a client, a guest or a crash may do to them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path

import httpx
import pytest
from e2b import AsyncSandbox, AsyncVolume, Sandbox, Volume
from faults import Attempt, all_at_once, crash, log_size, reached
from support import loop_files, until
from test_volumes import destroyed, fresh_name, volume

pytestmark = pytest.mark.newest_sdk
__all__ = ["volume"]


def test_the_asynchronous_sdk(server):
    async def story():
        made = await AsyncVolume.create(fresh_name())
        sandbox = await AsyncSandbox.create(timeout=120, volume_mounts={"/mnt/data": made})
        ran = await sandbox.commands.run("echo written > /mnt/data/file && cat /mnt/data/file")
        assert ran.stdout == "written\n"
        assert (await AsyncVolume.get_info(made.volume_id)).name == made.name
        await sandbox.kill()
        return made

    destroyed(asyncio.run(story()))


def test_bad_requests(api, volume):
    for name in ["", "a b", "../x", "x" * 129, "ü"]:
        answer = api.post("/volumes", json={"name": name})
        assert answer.status_code == 400 and "1 to 128 characters" in answer.text, answer.text
    assert api.post("/volumes", json={"name": volume.name}).status_code == 409
    for size in [0, 15, -1, 1 << 40]:
        answer = api.post("/volumes", json={"name": fresh_name(), "sizeMB": size})
        assert answer.status_code == 400 and "sizeMB must be 16 to" in answer.text, answer.text
    for path in ["/", "/proc", "/proc/1", "/tmp", "/run/x", "/etc", "mnt", "/mnt/../etc", "/usr/lib/sandglass"]:
        mounts = [{"name": volume.name, "path": path}]
        answer = api.post("/v2/sandboxes", json={"templateID": "base", "volumeMounts": mounts})
        assert answer.status_code == 400 and "volumeMounts" in answer.text, answer.text
    two = [{"name": volume.name, "path": "/mnt/a"}, {"name": fresh_name(), "path": "/mnt/a/b"}]
    answer = api.post("/sandboxes", json={"templateID": "base", "volumeMounts": two})
    assert answer.status_code == 400 and "overlap" in answer.text, answer.text
    answer = api.post("/sandboxes", json={"templateID": "base", "volumeMounts": two[1:]})
    assert answer.status_code == 404 and f"volume '{two[1]['name']}' not found" in answer.text, answer.text
    for id in ["x", "a" * 20]:
        assert api.get(f"/volumes/{id}").status_code == 404
        assert api.delete(f"/volumes/{id}").status_code == 404


def test_another_teams_volume_is_one_that_is_not_there(server, volume):
    team = fresh_name()
    server.cli("team", "create", team, "--data-dir", str(server.data_dir))
    key = server.cli("key", "create", "--team", team, "--data-dir", str(server.data_dir)).stdout.strip()
    with httpx.Client(base_url=server.url, headers={"X-API-Key": key}, timeout=60) as theirs:
        assert theirs.get("/volumes").json() == []
        assert theirs.get(f"/volumes/{volume.volume_id}").status_code == 404
        assert theirs.delete(f"/volumes/{volume.volume_id}").status_code == 404
        mounts = [{"name": volume.name, "path": "/mnt/v"}]
        answer = theirs.post("/v2/sandboxes", json={"templateID": "base", "volumeMounts": mounts})
        assert answer.status_code == 404, answer.text


def test_a_guest_gets_no_further_than_its_volumes(server, volume):
    other = Volume.create(fresh_name())
    with (
        Sandbox.create(timeout=120, volume_mounts={"/mnt/v": volume}) as sandbox,
        Sandbox.create(timeout=120, volume_mounts={"/mnt/v": other}) as neighbour,
    ):
        neighbour.files.write("/mnt/v/secret", "of the neighbour")
        # The control: a link within the volume is followed.
        run = lambda command: sandbox.commands.run(f"{command} 2>&1 || true", user="root").stdout  # noqa: E731
        assert run("cd /mnt/v && echo own > own && ln -s own link && cat link") == "own\n"
        run(f"ln -s {server.data_dir} /mnt/v/data; ln -s ../../.. /mnt/v/up")
        for path in ["data/host", f"data/host/volumes/{other.volume_id}.img", "../secret", "up/volume-0", "../files"]:
            assert "No such file" in run(f"ls -d /mnt/v/{path}"), path
        # Its other mounts, and no device of the machine.
        assert "lost+found" not in run("ls -A /mnt/v /mnt/v/..")
        assert run("mknod /mnt/v/dev b 7 0; head -c 1 /mnt/v/dev") != "\0"
    destroyed(other)


def test_what_is_past_the_size_finds_no_room(api):
    made = api.post("/volumes", json={"name": fresh_name(), "sizeMB": 16})
    assert made.status_code == 201 and made.json()["sizeMB"] == 16, made.text
    small = Volume.connect(made.json()["volumeID"])
    with Sandbox.create(timeout=120, volume_mounts={"/mnt/v": small}) as sandbox:
        ran = sandbox.commands.run("head -c 17M /dev/zero > /mnt/v/big; rm /mnt/v/big; echo x > /mnt/v/small; cat /mnt/v/small")
        assert "No space left on device" in ran.stderr and ran.stdout == "x\n"
    destroyed(small)


def test_a_pause_a_snapshot_and_a_fork_keep_their_volumes(api, volume):
    with Sandbox.create(timeout=300, volume_mounts={"/mnt/v": volume}) as sandbox:
        sandbox.files.write("/mnt/v/a", "before")
        sandbox.beta_pause()
        with Sandbox.create(timeout=120, volume_mounts={"/mnt/v": volume}) as other:
            other.files.write("/mnt/v/b", "meanwhile")
        sandbox.connect(timeout=300)
        assert [sandbox.files.read(f"/mnt/v/{name}") for name in "ab"] == ["before", "meanwhile"]
        snapshot = sandbox.create_snapshot()
        with Sandbox.create(snapshot.snapshot_id, timeout=120) as copy:
            assert copy.files.read("/mnt/v/a") == "before"
            copy.files.write("/mnt/v/a", "by the copy")
            assert sandbox.files.read("/mnt/v/a") == "by the copy"
        answer = api.delete(f"/volumes/{volume.volume_id}")
        assert answer.status_code == 409 and snapshot.snapshot_id.split(":")[0] in answer.text, answer.text
        Sandbox.delete_snapshot(snapshot.snapshot_id)
        mounts = [{"name": volume.name, "path": "/mnt/v"}]
        answer = api.get(f"/sandboxes/{sandbox.sandbox_id}")
        assert answer.json()["volumeMounts"] == mounts


def volumes_of(server) -> tuple[dict[str, str], set[str]]:
    """The states of all volumes by the store, and the names of those that are on the machine."""
    store = sqlite3.connect(f"file:{server.data_dir}/serve/store.db?mode=ro", uri=True, timeout=20)
    try:
        rows = dict(store.execute("SELECT id, state FROM volumes").fetchall())
    finally:
        store.close()
    return rows, {path.name.removesuffix(".img") for path in (server.data_dir / "host/volumes").iterdir()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["serve", "host"])
def test_killed_while_volumes_are_made_and_deleted(lone_server, victim):
    server = lone_server
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=60) as client:
        kept = client.post("/volumes", json={"name": "kept", "sizeMB": 16}).json()
    making = ["control.volume.insert", "control.volume.host", "control.volume.ready", "engine.volume.format", "engine.volume.rename"]
    deleting = ["control.volume.delete", "control.volume.remove", "control.volume.forget", "engine.volume.remove"]
    for points, verb in [(making, "POST"), (deleting, "DELETE")]:
        for point in points:
            with httpx.Client(base_url=server.url, headers=server.headers, timeout=60) as client:
                path, body = "/volumes", {"name": f"v{len(point)}", "sizeMB": 16}
                if verb == "DELETE":
                    path, body = f"/volumes/{client.post(path, json=body).json()['volumeID']}", None
            server.stop()
            log_from = log_size(server)
            server.start(f"{point}=hang*1")
            attempt = Attempt(
                lambda: httpx.request(verb, f"{server.url}{path}", json=body, headers=server.headers, timeout=60)  # noqa: B023
            )
            until(lambda: reached(server, log_from), within=60, what=point)  # noqa: B023
            crash(server, victim)
            attempt.join(60)
            server.start()
            rows, there = until(lambda: settled_volumes(server), within=60, what=f"settled after {point}")
            assert kept["volumeID"] in rows, point
            with httpx.Client(base_url=server.url, headers=server.headers, timeout=60) as client:
                for one in client.get("/volumes").json():
                    if one["volumeID"] != kept["volumeID"]:
                        assert client.delete(f"/volumes/{one['volumeID']}").status_code == 204
    server.assert_nothing_left()


def settled_volumes(server):
    rows, there = volumes_of(server)
    return (rows, there) if set(rows) == there and set(rows.values()) == {"ready"} else None


@pytest.mark.timeout(300)
def test_one_device_for_each_volume_whatever_is_killed(lone_server):
    server = lone_server
    volume = Volume.create(fresh_name(), api_key=server.api_key, api_url=server.url)
    image = str(server.data_dir / f"host/volumes/{volume.volume_id}.img")
    devices = lambda: [file for file in loop_files() if file.strip() == image]  # noqa: E731
    make = lambda _: Sandbox.create(timeout=300, volume_mounts={"/mnt/v": volume.name}, **server.opts)  # noqa: E731
    sandboxes = all_at_once(make, range(3))
    assert len(devices()) == 1
    sandboxes[0].files.write("/mnt/v/a", "first")
    for victim in ["host", "serve", "both"]:
        crash(server, victim)
        server.start()
        sandboxes.append(make(None))
        assert len(devices()) == 1
        sandboxes[-1].files.write("/mnt/v/a", victim)
        assert {one.files.read("/mnt/v/a") for one in sandboxes} == {victim}
    # A host that dies while it attaches one leaves none.
    all_at_once(lambda sandbox: sandbox.kill(), sandboxes)
    until(lambda: not devices(), what="the device detaches with its last sandbox")
    server.stop()
    log_from = log_size(server)
    server.start("engine.volume.attach=hang*1")
    mounts = [{"name": volume.name, "path": "/mnt/v"}]
    body = {"templateID": "base", "volumeMounts": mounts}
    attempt = Attempt(
        lambda: httpx.post(f"{server.url}/v2/sandboxes", json=body, headers=server.headers, timeout=60)
    )
    until(lambda: reached(server, log_from), within=60, what="a hanging attach")
    crash(server, "host")
    attempt.join(60)
    server.start()
    until(lambda: not devices(), what="nothing is attached")
    assert make(None).files.read("/mnt/v/a") == "both"
    assert Path(image).stat().st_size == 1024 << 20


# What is done to a file while the sandbox is away that has it open, and whether it may come back then.
MEANWHILE = {
    "nothing": (":", True),
    "another file": ("echo x > other", True),
    "read": ("cat f", True),
    "appended": ("echo more >> f", False),
    "written with the same size and time": ("touch -r f ref; echo CHANGED > f; touch -r ref f", False),
    "replaced with the same size and time": ("cp -p f g; mv g f", False),
    "deleted": ("rm f", False),
    "renamed": ("mv f g", False),
    "a folder in use replaced": ("mv d e; mkdir d", False),
    "a folder in use written to": ("touch d/new", True),
    "a mapped file changed": ("echo more >> mapped", False),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("what", MEANWHILE)
def test_who_comes_back_finds_open_files_as_they_were_or_is_refused(api, volume, what):
    command, allowed = MEANWHILE[what]
    with (
        Sandbox.create(timeout=300, volume_mounts={"/mnt/v": volume}) as sandbox,
        Sandbox.create(timeout=300, volume_mounts={"/mnt/v": volume}) as other,
    ):
        other.commands.run("cd /mnt/v && mkdir d && echo changed > f && echo content > mapped && sync")
        program = (
            "import mmap, os, time\n"
            "os.chdir('/mnt/v/d'); f = open('/mnt/v/f', 'a')\n"
            "with open('/mnt/v/mapped', 'r+') as file: m = mmap.mmap(file.fileno(), 0)\n"
            "open('/tmp/ready', 'w')\ntime.sleep(1000)\n"
        )
        sandbox.commands.run(f"python3 -c \"{program}\"", background=True)
        until(lambda: sandbox.files.exists("/tmp/ready"), what="the program has its files")
        sandbox.beta_pause()
        other.commands.run(f"cd /mnt/v && {command}")
        resume = lambda **more: api.post(f"/v2/sandboxes/{sandbox.sandbox_id}/connect", json={"timeout": 300, **more})  # noqa: E731
        answer = resume()
        if allowed:
            assert answer.status_code == 201, answer.text
        else:
            assert answer.status_code == 409 and "/mnt/v/" in answer.text and volume.name in answer.text, answer.text
            # It is as it was, and comes back from its files.
            assert resume().status_code == 409
            assert resume(memory=False).status_code == 201
        assert sandbox.commands.run("ls /mnt/v").stdout


# What somebody else does to what a program has, and whether an image of it can come back then.
UNDERNEATH = {
    "nothing": (":", True),
    "another file": ("rm other", True),
    "appended": ("echo more >> f", True),
    "deleted": ("rm f", False),
    "replaced": ("echo changed > g && mv g f", False),
    "replaced by a folder": ("rm f && mkdir f", False),
    "a mapped file deleted": ("rm mapped", False),
    "a working folder deleted": ("rmdir d", False),
    "a working folder replaced": ("mv d e && mkdir d", False),
}


def has_files(sandbox, files="f = open('/mnt/v/f', 'a')", more=""):
    """Starts a program that has files of a volume."""
    program = (
        f"import mmap, os, time\nos.chdir('/mnt/v/d'); {files}\n"
        "with open('/mnt/v/mapped', 'r+') as file: m = mmap.mmap(file.fileno(), 0)\n"
        f"{more}\nopen('/tmp/ready', 'w')\ntime.sleep(1000)\n"
    )
    handle = sandbox.commands.run(f"python3 -c \"{program}\"", background=True)
    until(lambda: sandbox.files.exists("/tmp/ready"), what="the program has its files")
    return handle


FILES = "cd /mnt/v && mkdir d && echo f > f && echo other > other && echo content > mapped && sync"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("what", UNDERNEATH)
def test_no_image_is_made_that_could_never_come_back(api, volume, what):
    command, allowed = UNDERNEATH[what]
    with (
        Sandbox.create(timeout=300, volume_mounts={"/mnt/v": volume}) as sandbox,
        Sandbox.create(timeout=300, volume_mounts={"/mnt/v": volume}) as other,
    ):
        other.commands.run(FILES)
        program = has_files(sandbox)
        other.commands.run(f"cd /mnt/v && {command}")
        path = f"/sandboxes/{sandbox.sandbox_id}"
        made = api.post(f"{path}/snapshots", json={})
        if allowed:
            assert made.status_code == 201, made.text
            with Sandbox.create(made.json()["snapshotID"], timeout=120) as copy:
                assert copy.commands.run("ls /mnt/v").exit_code == 0
            Sandbox.delete_snapshot(made.json()["snapshotID"])
            return
        for verb, body in [("snapshots", {}), ("pause", {}), ("fork", {"count": 1})]:
            answer = api.post(f"{path}/{verb}", json=body)
            assert answer.status_code == 409 and "/mnt/v/" in answer.text and "python3" in answer.text, (verb, answer.text)
            # It runs on, with all that it has.
            assert sandbox.commands.run("echo on").stdout == "on\n"
        assert [it for it in api.get("/v1/snapshots").json() if it["sandbox"] == sandbox.sandbox_id] == []
        # Without the memory, or without the program, nothing is in the way.
        program.kill()
        made = api.post(f"{path}/snapshots", json={})
        assert made.status_code == 201, made.text
        Sandbox.delete_snapshot(made.json()["snapshotID"])
        assert api.post(f"{path}/pause", json={}).status_code == 204


def test_what_the_content_api_takes_away_is_in_no_image(server, api, volume, monkeypatch):
    monkeypatch.setenv("E2B_VOLUME_API_URL", server.url)
    with Sandbox.create(timeout=300, volume_mounts={"/mnt/v": volume}) as sandbox:
        sandbox.commands.run(FILES)
        has_files(sandbox)
        path = f"/sandboxes/{sandbox.sandbox_id}/snapshots"
        made = api.post(path, json={})
        assert made.status_code == 201, made.text
        volume.write_file("/f", "by somebody else")
        answer = api.post(path, json={})
        assert answer.status_code == 409 and "/mnt/v/f" in answer.text, answer.text
        # And what was made before does not come back with it.
        answer = api.post("/v2/sandboxes", json={"templateID": made.json()["snapshotID"]})
        assert answer.status_code == 409 and "/mnt/v/f" in answer.text, answer.text
        Sandbox.delete_snapshot(made.json()["snapshotID"])


@pytest.mark.parametrize("count", [200, 300])
def test_more_files_than_can_be_told_are_in_no_image(api, volume, count):
    with Sandbox.create(timeout=300, volume_mounts={"/mnt/v": volume}) as sandbox:
        sandbox.commands.run(FILES)
        has_files(sandbox, f"f = [open('/mnt/v/n%d' % n, 'w') for n in range({count})]")
        made = api.post(f"/sandboxes/{sandbox.sandbox_id}/snapshots", json={})
        if count == 200:
            assert made.status_code == 201, made.text
            Sandbox.delete_snapshot(made.json()["snapshotID"])
        else:
            assert made.status_code == 409 and "too many files" in made.text, made.text
            assert sandbox.commands.run("echo on").stdout == "on\n"
            assert api.post(f"/sandboxes/{sandbox.sandbox_id}/pause", json={"memory": False}).status_code == 204


def test_names_that_nobody_could_look_at_are_in_no_image(api, volume):
    with Sandbox.create(timeout=300, volume_mounts={"/mnt/v": volume}) as sandbox:
        sandbox.commands.run(FILES)
        has_files(sandbox, r"f = open(b'/mnt/v/no-\\xff-text', 'w')")
        made = api.post(f"/sandboxes/{sandbox.sandbox_id}/snapshots", json={})
        assert made.status_code == 409 and "no-" in made.text, made.text


@pytest.mark.timeout(200)
def test_what_goes_while_an_image_comes_back_is_no_failure_of_the_server(lone_server):
    """Between the look and the restore nobody can hold a file: then the answer says what is missing."""
    server = lone_server
    volume = Volume.create(fresh_name(), api_key=server.api_key, api_url=server.url)
    make = lambda: Sandbox.create(timeout=300, volume_mounts={"/mnt/v": volume.name}, **server.opts)  # noqa: E731
    sandbox, other = make(), make()
    other.commands.run(FILES)
    has_files(sandbox)
    sandbox.beta_pause()
    # As if it had been opened after it was looked at: nothing is known of it.
    with sqlite3.connect(server.data_dir / "serve/store.db", timeout=20) as store:
        store.execute("UPDATE volume_marks SET marks = '[]' WHERE image = ?", (sandbox.sandbox_id,))
    store.close()
    other.commands.run("rm /mnt/v/f")
    resume = lambda **more: httpx.post(  # noqa: E731
        f"{server.url}/sandboxes/{sandbox.sandbox_id}/resume",
        json={"timeout": 300, **more},
        headers=server.headers,
        timeout=60,
    )
    for _ in range(2):
        answer = resume()
        assert answer.status_code == 409 and volume.name in answer.text and "memory" in answer.text, answer.text
    assert resume(memory=False).status_code == 201
    assert sandbox.commands.run("ls /mnt/v").exit_code == 0


def test_the_command_line(server):
    name = fresh_name()
    id = server.cli("volume", "create", name, "--size", "16").stdout.strip()
    other = json.loads(server.cli("volume", "create", fresh_name(), "--json").stdout)
    rows = server.cli("volume", "list").stdout.splitlines()
    assert rows[0].split() == ["VOLUME", "NAME", "MIB"] and [id, name, "16"] in [row.split() for row in rows]
    told = json.loads(server.cli("volume", "list", "--json").stdout)
    assert {"volumeID": id, "name": name, "sizeMB": 16} in told and "token" not in str(told)
    refused = server.cli("volume", "delete", name, "none-of-these", check=False)
    assert refused.returncode == 1 and "none-of-these" in refused.stderr
    # All or none.
    assert id in server.cli("volume", "list").stdout
    server.cli("volume", "delete", name)
    deleted = server.cli("volume", "delete", other["volumeID"], "--json").stdout
    assert json.loads(deleted) == {"deleted": [other["volumeID"]]}
    left = server.cli("volume", "list").stdout
    assert id not in left and other["volumeID"] not in left
