"""The content of volumes, over the API that the SDKs use for it, and under what a guest or a client may do to it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from e2b import AsyncVolume, Sandbox, Volume
from e2b.exceptions import VolumeException, VolumePathNotFoundException
from support import cgroups_named, loop_files, status_of, until
from test_volumes import destroyed, fresh_name

pytestmark = pytest.mark.newest_sdk


@pytest.fixture
def volume(server, monkeypatch):
    monkeypatch.setenv("E2B_VOLUME_API_URL", server.url)
    volume = Volume.create(fresh_name())
    yield volume
    destroyed(volume)


@pytest.fixture
def content(server, volume):
    """Plain HTTP to the content of a volume."""
    base = f"{server.url}/volumecontent/{volume.volume_id}"
    with httpx.Client(base_url=base, headers={"Authorization": f"Bearer {volume.token}"}, timeout=60) as client:
        yield client


def test_the_sdk_works_on_content(volume):
    assert volume.list("/") == []
    written = volume.write_file("/a.txt", "hällo")
    assert (written.size, written.type.value, written.uid, written.mode) == (6, "file", 1000, 0o644)
    assert volume.read_file("/a.txt") == "hällo"
    made = volume.make_dir("/d/e", force=True, mode=0o700, uid=0, gid=0)
    assert (made.path, made.mode, made.uid) == ("/d/e", 0o700, 0)
    with pytest.raises(VolumePathNotFoundException):
        volume.make_dir("/x/y")
    with pytest.raises(VolumeException, match="there is something already"):
        volume.make_dir("/d")
    volume.write_file("/d/e/f", b"\0\1\2", uid=7, gid=8, mode=0o600)
    assert volume.read_file("/d/e/f", format="bytes") == b"\0\1\2"
    assert sorted(one.path for one in volume.list("/", depth=3)) == ["/a.txt", "/d", "/d/e", "/d/e/f"]
    assert [one.path for one in volume.list("/d")] == ["/d/e"]
    changed = volume.update_metadata("/d/e/f", mode=0o640, uid=1000)
    assert (changed.mode, changed.uid, changed.gid) == (0o640, 1000, 8)
    # It stays whose it was.
    assert volume.write_file("/d/e/f", "new").gid == 8
    assert volume.exists("/d/e/f") and not volume.exists("/d/nothing")
    assert volume.get_info("/d").type.value == "directory"
    volume.remove("/d")
    assert [one.path for one in volume.list("/")] == ["/a.txt"]
    with pytest.raises(VolumePathNotFoundException):
        volume.remove("/d")
    with pytest.raises(VolumePathNotFoundException):
        volume.read_file("/d")


def test_the_asynchronous_sdk_works_on_content(volume):
    async def story():
        same = await AsyncVolume.connect(volume.volume_id)
        await same.write_file("/a", "text")
        assert await same.read_file("/a") == "text"
        assert [one.name for one in await same.list("/")] == ["a"]
        await same.remove("/a")

    asyncio.run(story())


def test_large_files_are_streamed_and_seen_by_sandboxes(server, volume):
    blob = os.urandom(1 << 20) * 64
    with Sandbox.create(timeout=120, volume_mounts={"/mnt/v": volume}) as sandbox:
        volume.write_file("/big", io.BytesIO(blob))
        told = sandbox.commands.run("sha256sum < /mnt/v/big").stdout
        assert told.split()[0] == hashlib.sha256(blob).hexdigest()
        assert sandbox.commands.run("stat -c %s /mnt/v/big").stdout == f"{len(blob)}\n"
        assert b"".join(volume.read_file("/big", format="stream")) == blob
        sandbox.files.write("/mnt/v/by-guest", "of the guest")
        assert volume.read_file("/by-guest") == "of the guest"
        # Who wrote it may change it inside.
        volume.write_file("/shared", "one")
        assert sandbox.commands.run("echo two >> /mnt/v/shared; cat /mnt/v/shared").stdout == "onetwo\n"


def test_a_full_volume_says_so(api, server):
    made = api.post("/volumes", json={"name": fresh_name(), "sizeMB": 16}).json()
    url = f"{server.url}/volumecontent/{made['volumeID']}"
    headers = {"Authorization": f"Bearer {made['token']}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as content:
        assert content.put("/file", params={"path": "/a"}, content=b"kept").status_code == 201
        full = content.put("/file", params={"path": "/a"}, content=bytes(17 << 20))
        assert full.status_code == 507 and full.json()["code"] == "no_room", full.text
        # What was there is there, and nothing of the other is.
        assert content.get("/file", params={"path": "/a"}).content == b"kept"
        assert [one["name"] for one in content.get("/dir", params={"path": "/"}).json()] == ["a"]
    assert api.delete(f"/volumes/{made['volumeID']}").status_code == 204
    gone = httpx.get(f"{url}/path", params={"path": "/"}, headers=headers)
    assert gone.status_code == 401, gone.text


def test_a_token_is_worth_its_volume_alone(api, server, volume):
    other = api.post("/volumes", json={"name": fresh_name()}).json()
    path = f"{server.url}/volumecontent/{volume.volume_id}/path"
    ask = lambda headers: httpx.get(path, params={"path": "/"}, headers=headers).status_code  # noqa: E731
    assert ask({"Authorization": f"Bearer {volume.token}"}) == 200, "the control"
    for token in [other["token"], server.api_key, volume.token[:-1], volume.token.upper() + "x"]:
        assert ask({"Authorization": f"Bearer {token}"}) == 401, token
    assert ask({}) == 401 and ask(server.headers) == 401
    assert api.get("/volumes", headers={"X-API-Key": volume.token}).status_code == 401
    for id in ["x", "a" * 20, "..%2f" * 3]:
        url = f"{server.url}/volumecontent/{id}/path"
        assert httpx.get(url, params={"path": "/"}, headers={"Authorization": f"Bearer {volume.token}"}).status_code == 401
    assert api.delete(f"/volumes/{other['volumeID']}").status_code == 204


def test_no_link_and_no_dots_lead_out_of_a_volume(volume, content):
    with Sandbox.create(timeout=120, volume_mounts={"/mnt/v": volume}) as sandbox:
        setup = (
            "cd /mnt/v && mkdir d && echo own > d/own && ln -s / root && ln -s /etc/passwd passwd && ln -s ../.. up"
            " && ln -s d inside && mkfifo pipe && ln -s /proc/self/root proc"
        )
        sandbox.commands.run(setup, user="root")
        get = lambda path, what="file": content.get(f"/{what}", params={"path": path})  # noqa: E731
        assert get("/d/own").content == b"own\n", "the control"
        for path in ["/root/etc/passwd", "/passwd", "/up/etc/passwd", "/inside/own", "/proc/etc/passwd"]:
            assert get(path).status_code == 400, path
        for path in ["/../etc/passwd", "/d/../../files/d/own", ".."]:
            for what in ["file", "path", "dir"]:
                assert get(path, what).status_code == 400, path
        # gVisor keeps its pipes to itself.
        assert get("/pipe").status_code in (400, 404)
        # A link is one, wherever it leads.
        assert get("/passwd", "path").json()["target"] == "/etc/passwd"
        # What is written over a link takes its place, and what is removed is the link.
        assert content.put("/file", params={"path": "/passwd"}, content=b"x").status_code == 201
        assert content.put("/file", params={"path": "/root/x"}, content=b"x").status_code in (400, 404)
        assert content.delete("/path", params={"path": "/root"}).status_code == 204
        assert content.patch("/path", params={"path": "/proc"}, json={"mode": 0o777}).status_code == 400
        assert sandbox.commands.run("cat /mnt/v/passwd; head -c 4 /etc/passwd").stdout == "xroot"
    assert Path("/etc/passwd").stat().st_mode & 0o777 == 0o644


@pytest.mark.timeout(120)
def test_links_that_are_swapped_all_the_time_lead_nowhere(volume, content):
    with Sandbox.create(timeout=120, volume_mounts={"/mnt/v": volume}) as sandbox:
        swap = (
            "cd /mnt/v && mkdir d && echo own > d/passwd && ln -s /etc l && "
            "python3 -c 'import os\nwhile True:\n os.rename(\"d\",\"x\");os.rename(\"l\",\"d\");os.rename(\"d\",\"l\");os.rename(\"x\",\"d\")'"
        )
        command = sandbox.commands.run(swap, background=True, user="root")
        seen = set()

        def attack(n):
            answer = content.get("/file", params={"path": "/d/passwd"})
            seen.add((answer.status_code, answer.content if answer.status_code == 200 else b""))
            written = content.put("/file", params={"path": f"/d/n{n}"}, content=b"x")
            assert written.status_code in (201, 400, 404, 409), written.text

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(attack, range(60)))
        assert {body for status, body in seen if status == 200} <= {b"own\n"}, seen
        command.kill()
    assert not list(Path("/etc").glob("n[0-9]*"))


def test_what_is_listed_is_bounded_and_names_may_have_any_bytes(volume, content):
    with Sandbox.create(timeout=120, volume_mounts={"/mnt/v": volume}) as sandbox:
        sandbox.commands.run("mkdir /mnt/v/many && cd /mnt/v/many && seq 10001 | xargs touch", timeout=100)
        answer = content.get("/dir", params={"path": "/many"})
        assert answer.status_code == 400 and "more than 10000 entries" in answer.text, answer.text
        sandbox.commands.run("cd /mnt/v && rm many/1 && touch $'odd\\xff\\nname'")
        assert len(content.get("/dir", params={"path": "/many"}).json()) == 10000
        assert any(one["name"].startswith("odd\ufffd") for one in content.get("/dir", params={"path": "/"}).json())
    assert content.delete("/path", params={"path": "/many"}).status_code == 204


def test_a_listing_of_long_paths_is_refused_and_costs_bounded_memory(volume, content):
    make = """
import os
os.chdir("/mnt/v")
for _ in range(15):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
os.mkdir("few")
for n in range(9000):
    os.symlink("\\x01" * 4000, f"few/{n}" if n < 50 else str(n))
"""
    with Sandbox.create(timeout=120, volume_mounts={"/mnt/v": volume}) as sandbox:
        sandbox.files.write("/home/user/make.py", make)
        sandbox.commands.run("python3 make.py", user="root", timeout=100)
        deep = "/".join(["d" * 250] * 15)
        get = lambda path, depth=1: content.get("/dir", params={"path": path, "depth": depth})  # noqa: E731
        few = get(f"/{deep}/few")
        assert few.status_code == 200 and len(few.json()) == 50, "the control"
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: get("/", 64), range(8)))
        assert {answer.status_code for answer in answers} == {400}, answers[0].text
        assert "one by one" in answers[0].text
        assert len(get("/", 15).json()) == 15
        # The kernel would leave it out in silence.
        patch = lambda mode: content.patch("/path", params={"path": f"/{deep}/few"}, json={"mode": mode})  # noqa: E731
        assert patch(0o1755).json()["mode"] == 0o1755, "the control"
        assert patch(0o2755).status_code == 400
    assert content.delete("/path", params={"path": f"/{'d' * 250}"}).status_code == 204


def test_who_works_on_content_has_rights_over_files_alone_and_leaves_nothing(server, volume, content):
    def begin():
        yield b"x" * 70_000
        until(lambda: found(), what="the process that takes it")
        yield b"y"

    seen = []

    def found():
        for pid in Path("/proc").glob("[0-9]*"):
            try:
                words = (pid / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[1:2] == [b"volume-content"] and str(server.data_dir).encode() in words[2]:
                status = status_of(int(pid.name))
                # Until it has read what it is to do, it gives up all that it had.
                if status["Uid"].split()[0] != "0":
                    seen.append((status, os.readlink(pid / "root"), os.readlink(pid / "ns/net")))
        return seen

    assert content.put("/file", params={"path": "/slow"}, content=begin()).status_code == 201
    status, root, net = seen[0]
    over_files = f"{1 << 0 | 1 << 1 | 1 << 3:016x}"
    assert {status[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {over_files}
    assert {status[name] for name in ("CapInh", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1" and status["Groups"].strip() == ""
    assert root.endswith("/content/files") and net != os.readlink("/proc/self/ns/net")
    image = f"{volume.volume_id}.img"
    until(lambda: not any(image in file for file in loop_files()), what="the device is detached")
    until(lambda: not cgroups_named("content"), what="its group is gone")


def test_an_upload_that_breaks_off_leaves_what_was_there(server, volume, content):
    assert content.put("/file", params={"path": "/f"}, content=b"whole").status_code == 201

    def broken():
        yield b"half"
        raise RuntimeError("as the test wanted")

    with pytest.raises(RuntimeError):
        content.put("/file", params={"path": "/f"}, content=broken())
    until(lambda: len(content.get("/dir", params={"path": "/"}).json()) == 1, what="nothing of it is left")
    assert content.get("/file", params={"path": "/f"}).content == b"whole"
