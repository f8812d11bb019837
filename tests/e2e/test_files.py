"""Files through the SDK."""

import hashlib
import io
import os

import httpx
import pytest
from e2b import AuthenticationException, FileNotFoundException, FileType, InvalidArgumentException, Sandbox
from e2b.exceptions import NotEnoughSpaceException
from support import until


def test_text_round_trip(sandbox):
    info = sandbox.files.write("/home/user/a.txt", "Grüße\n")
    assert (info.name, info.path, info.type) == ("a.txt", "/home/user/a.txt", FileType.FILE)
    assert sandbox.files.read("/home/user/a.txt") == "Grüße\n"
    assert sandbox.commands.run("cat a.txt; stat -c '%U %G %a' a.txt").stdout == "Grüße\nuser user 644\n"
    sandbox.files.write("a.txt", "shorter")
    assert sandbox.files.read("a.txt") == "shorter"


@pytest.mark.parametrize("data", [b"", b"\x00\xff\r\n" * 10, os.urandom(300_000)])
@pytest.mark.parametrize("octets", [True, False])
def test_bytes_round_trip(sandbox, data, octets):
    sandbox.files.write("/tmp/bytes", data, use_octet_stream=octets)
    assert bytes(sandbox.files.read("/tmp/bytes", format="bytes")) == data
    assert b"".join(sandbox.files.read("/tmp/bytes", format="stream")) == data


def test_gzip_both_ways(sandbox):
    text = "abc" * 100_000
    sandbox.files.write("/tmp/zipped", text, gzip=True)
    assert sandbox.files.read("/tmp/zipped", gzip=True) == text


def test_fifty_mib_round_trip(sandbox):
    chunk = os.urandom(1 << 20)
    digest = hashlib.sha256(chunk * 50).hexdigest()
    sandbox.files.write("/tmp/big", io.BytesIO(chunk * 50), request_timeout=60)
    assert sandbox.commands.run("sha256sum /tmp/big").stdout.split()[0] == digest
    back = hashlib.sha256()
    for part in sandbox.files.read("/tmp/big", format="stream"):
        back.update(part)
    assert back.hexdigest() == digest
    sandbox.files.remove("/tmp/big")


def test_transfers_leave_no_memory_behind(sandbox):
    """Their buffers are used again while they last, and then given back."""

    def agent_kib() -> int:
        return int(sandbox.commands.run("grep ^VmRSS: /proc/1/status", user="root").stdout.split()[1])

    # What the first of everything costs is no matter here.
    sandbox.files.write("/tmp/warm", b"w")
    sandbox.files.read("/tmp/warm")
    before = agent_kib()
    data = os.urandom(20 << 20)
    sandbox.files.write("/tmp/large", data)
    assert bytes(sandbox.files.read("/tmp/large", format="bytes")) == data
    until(lambda: agent_kib() < before + 1536, what="that the agent gave its memory back")


def test_parents_are_made_and_belong_to_the_user(sandbox):
    sandbox.files.write("/home/user/new/deep/file", "x")
    owners = sandbox.commands.run("stat -c %U new new/deep new/deep/file").stdout.split()
    assert owners == ["user"] * 3


def test_files_belong_to_whom_the_client_names(sandbox):
    """As in E2B, the client may reach every file; `user` says whose a new one is, and where `~` leads."""
    sandbox.files.write("/root/secret", "x", user="root")
    assert sandbox.commands.run("stat -c '%U %a' /root/secret", user="root").stdout == "root 644\n"
    sandbox.files.write("~/mine", "x", user="root")
    assert sandbox.files.exists("/root/mine")
    with pytest.raises(AuthenticationException):
        sandbox.files.write("/tmp/x", "x", user="nobody-here")


def test_list_info_exists(sandbox):
    sandbox.commands.run("mkdir -p l/sub/subsub && echo hi > l/f && ln -s f l/link && touch l/sub/subsub/z")
    names = {entry.name: entry for entry in sandbox.files.list("l")}
    assert names.keys() == {"f", "link", "sub"}
    assert names["f"].size == 3 and names["f"].type == FileType.FILE
    assert names["sub"].type == FileType.DIR
    assert {entry.path for entry in sandbox.files.list("/home/user/l", depth=3)} >= {
        "/home/user/l/sub/subsub",
        "/home/user/l/sub/subsub/z",
    }
    info = sandbox.files.get_info("l/f")
    assert (info.path, info.mode, info.permissions, info.owner, info.group) == (
        "/home/user/l/f",
        0o644,
        "-rw-r--r--",
        "user",
        "user",
    )
    assert sandbox.files.get_info("l/link").symlink_target == "/home/user/l/f"
    assert sandbox.files.exists("l/f") and sandbox.files.exists("l/sub")
    assert not sandbox.files.exists("l/none")
    for missing in (sandbox.files.get_info, sandbox.files.list, sandbox.files.read):
        with pytest.raises(FileNotFoundException):
            missing("/no/such/thing")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.list("l/f")


def test_make_dir_rename_remove(sandbox):
    assert sandbox.files.make_dir("/home/user/d/e") is True
    assert sandbox.files.make_dir("/home/user/d/e") is False
    sandbox.files.write("d/e/f", "1")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.make_dir("/home/user/d/e/f")
    moved = sandbox.files.rename("d/e/f", "d/new/g")
    assert moved.path == "/home/user/d/new/g"
    assert sandbox.files.read("d/new/g") == "1"
    with pytest.raises(FileNotFoundException):
        sandbox.files.rename("d/e/f", "d/x")
    sandbox.files.remove("d")
    assert not sandbox.files.exists("d")
    sandbox.files.remove("d")


def test_several_files_at_once(sandbox):
    written = sandbox.files.write_files([{"path": f"many/{n}", "data": f"{n}"} for n in range(20)])
    assert [entry.path for entry in written] == [f"/home/user/many/{n}" for n in range(20)]
    assert sandbox.files.read("many/19") == "19"


def test_odd_names(sandbox):
    for name in ["with space", "ünïcödé", "-rf", "a'b\"c", "new\nline", "percent%20"]:
        sandbox.files.write(f"/tmp/odd/{name}", name)
        assert sandbox.files.read(f"/tmp/odd/{name}") == name
    assert len(sandbox.files.list("/tmp/odd")) == 6


def test_directory_is_no_file(sandbox):
    with pytest.raises(InvalidArgumentException):
        sandbox.files.read("/tmp")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.write("/tmp", "x")


def test_links_are_followed_but_not_into_other_processes(sandbox):
    """The agent is root: a link of /proc would lead it out of what a path names, into itself."""
    sandbox.files.write("target/file", "content")
    sandbox.commands.run("ln -sfn target folderlink; ln -sf folderlink/file filelink; ln -sf loop loop")
    assert sandbox.files.read("folderlink/file") == "content"
    sandbox.files.write("filelink", "changed")
    assert sandbox.files.read("target/file") == "changed"
    with pytest.raises(Exception):
        sandbox.files.read("loop")
    for path in ["/proc/1/root/etc/passwd", "/proc/self/fd/0", "/proc/1/exe", "/proc/1/cwd/etc/passwd"]:
        with pytest.raises(Exception):
            sandbox.files.read(path)


def test_what_is_no_regular_file_is_refused(sandbox):
    """A pipe would block a reader for ever, and a device has no end."""
    sandbox.commands.run("mkfifo /tmp/pipe")
    for path in ["/tmp/pipe", "/dev/zero"]:
        with pytest.raises(InvalidArgumentException):
            sandbox.files.read(path)
    with pytest.raises(InvalidArgumentException):
        sandbox.files.write("/tmp/pipe", "x")


def test_a_full_disk_is_said_in_the_right_words(fresh):
    fresh.commands.run("fallocate -l $(($(df --output=avail -B1 / | tail -1) - 1048576)) /home/user/fill || true")
    with pytest.raises(NotEnoughSpaceException):
        fresh.files.write("/home/user/more", os.urandom(64 << 20))
    fresh.commands.run("rm -f fill more")
    fresh.files.write("/home/user/more", "fits")


def files_url(sandbox: Sandbox) -> str:
    return sandbox.envd_api_url + "/files"


def headers_of(sandbox: Sandbox, port: int = 49983) -> dict:
    return {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}


def test_the_guest_api_wants_its_token(sandbox):
    sandbox.files.write("/tmp/t", "x")
    path = {"path": "/tmp/t"}
    for token in [None, "", "wrong"]:
        extra = {} if token is None else {"X-Access-Token": token}
        answer = httpx.get(files_url(sandbox), params=path, headers=headers_of(sandbox) | extra)
        assert answer.status_code == 401, answer.text
        assert answer.json()["code"] == 401
        rpc = httpx.post(
            sandbox.envd_api_url + "/process.Process/List",
            json={},
            headers=headers_of(sandbox) | extra,
        )
        assert rpc.status_code == 401, rpc.text
    assert httpx.get(sandbox.envd_api_url + "/health", headers=headers_of(sandbox)).status_code == 204


@pytest.mark.parametrize("route", ["/init", "/freeze", "/unfreeze"])
def test_internal_routes_are_not_for_clients(sandbox, route):
    answer = httpx.post(sandbox.envd_api_url + route, json={}, headers=headers_of(sandbox))
    assert answer.status_code == 404


def test_ranges(sandbox):
    sandbox.files.write("/tmp/range", "0123456789")
    headers = headers_of(sandbox) | {
        "X-Access-Token": sandbox._envd_access_token,
        "Range": "bytes=2-4",
    }
    answer = httpx.get(files_url(sandbox), params={"path": "/tmp/range"}, headers=headers)
    assert (answer.status_code, answer.text) == (206, "234")


@pytest.mark.newest_sdk
@pytest.mark.parametrize("folder", ["/home/user/labels", "/dev/shm/labels"])
def test_metadata_follows_its_file(sandbox, folder):
    """On the sandbox's disk the agent keeps it, as gVisor has no extended attributes there; in memory the kernel does."""
    files = sandbox.files
    files.make_dir(folder)
    written = files.write(f"{folder}/a", "1", metadata={"Author": "me", "note": "two words"})
    wanted = {"author": "me", "note": "two words"}
    assert written.metadata == wanted == files.get_info(f"{folder}/a").metadata
    sandbox.commands.run(f"echo more >> {folder}/a; mkdir {folder}/d; true > {folder}/plain")
    assert files.rename(f"{folder}/a", f"{folder}/b").metadata == wanted
    # Whoever moves it, and whatever was there before.
    sandbox.commands.run(f"mv {folder}/b {folder}/d/plain")
    assert {entry.path: entry.metadata for entry in files.list(folder, depth=2)} == {
        f"{folder}/d": None,
        f"{folder}/d/plain": wanted,
        f"{folder}/plain": None,
    }
    assert files.get_info(f"{folder}/d/plain").metadata == wanted
    assert files.get_info(f"{folder}/plain").metadata is None
    # A write replaces all of it.
    files.write(f"{folder}/d/plain", "2", metadata={"other": "3"})
    assert files.get_info(f"{folder}/d/plain").metadata == {"other": "3"}
    files.write(f"{folder}/d/plain", "2")
    assert files.get_info(f"{folder}/d/plain").metadata is None
    # What takes a file's place does not take it.
    for command in ("rm {0}; echo 2 > {0}", "echo 2 > {0}.tmp; mv {0}.tmp {0}"):
        files.write(f"{folder}/c", "1", metadata={"k": "v"})
        sandbox.commands.run(command.format(f"{folder}/c"))
        assert files.get_info(f"{folder}/c").metadata is None
    several = files.write_files(
        [{"path": f"{folder}/{n}", "data": n} for n in ("x", "y")], metadata={"batch": "1"}
    )
    assert [entry.metadata for entry in several] == [{"batch": "1"}] * 2
    handle = files.watch_dir(folder, include_entry=True)
    files.write(f"{folder}/w", "1", metadata={"k": "v"})
    assert handle.get_new_events()[-1].entry.metadata == {"k": "v"}
    handle.stop()


@pytest.mark.newest_sdk
def test_metadata_has_bounds(server, sandbox):
    with pytest.raises(InvalidArgumentException):
        sandbox.files.write("/tmp/m", "1", metadata={"k" * 247: "v"})
    with pytest.raises(InvalidArgumentException):
        sandbox.files.write("/tmp/m", "1", metadata={"k": "v" * 4096})
    assert not sandbox.files.exists("/tmp/m")
    sandbox.files.write("/tmp/m", "1", metadata={"k" * 246: "v" * 3000})
    assert len(sandbox.files.get_info("/tmp/m").metadata["k" * 246]) == 3000


@pytest.mark.newest_sdk
def test_metadata_lives_through_pause_and_fork(fresh):
    for path in ("/home/user/f", "/dev/shm/f"):
        fresh.files.write(path, "1", metadata={"k": "v"})
    [copy] = fresh.fork(timeout=120)
    fresh.pause()
    fresh.connect()
    try:
        for box in (fresh, copy):
            box.commands.run("mv f g; mv /dev/shm/f /dev/shm/g")
            for path in ("/home/user/g", "/dev/shm/g"):
                assert box.files.get_info(path).metadata == {"k": "v"}
            box.commands.run("rm g; true > g")
            assert box.files.get_info("/home/user/g").metadata is None
    finally:
        copy.kill()
