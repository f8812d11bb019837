"""Watching folders through the SDK."""

import statistics
import threading
import time

import pytest
from e2b import (
    FileNotFoundException,
    FilesystemEventType,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    RateLimitException,
    Sandbox,
)
from e2b.exceptions import SandboxException
from support import until

CHMOD, CREATE, REMOVE, RENAME, WRITE = (
    FilesystemEventType.CHMOD,
    FilesystemEventType.CREATE,
    FilesystemEventType.REMOVE,
    FilesystemEventType.RENAME,
    FilesystemEventType.WRITE,
)


# 100 000 files in 100 folders, where making them takes little time.
MANY = """python3 -c '
import os
for d in range(100):
    os.mkdir(f"/dev/shm/{d}")
    for n in range(1000):
        os.close(os.open(f"/dev/shm/{d}/{n}", os.O_CREAT | os.O_WRONLY))
'"""


def told(handle):
    return [(event.name, event.type) for event in handle.get_new_events()]


@pytest.fixture
def folder(sandbox, request):
    path = f"/home/user/{request.node.name}"
    sandbox.files.make_dir(path)
    return path


def test_a_new_file_is_three_events(sandbox, folder):
    handle = sandbox.files.watch_dir(folder)
    sandbox.files.write(f"{folder}/new.txt", "content")
    assert told(handle) == [("new.txt", CREATE), ("new.txt", CHMOD), ("new.txt", WRITE)]
    assert told(handle) == []
    # However many pieces it is written in.
    sandbox.files.write(f"{folder}/big", b"x" * 3_000_000)
    assert told(handle) == [("big", CREATE), ("big", CHMOD), ("big", WRITE)]
    sandbox.files.write(f"{folder}/new.txt", "changed")
    assert told(handle) == [("new.txt", WRITE), ("new.txt", CHMOD), ("new.txt", WRITE)]
    sandbox.files.rename(f"{folder}/new.txt", f"{folder}/renamed")
    sandbox.files.remove(f"{folder}/renamed")
    assert told(handle) == [("new.txt", RENAME), ("renamed", CREATE), ("renamed", REMOVE)]
    handle.stop()
    with pytest.raises(SandboxException):
        handle.get_new_events()


def test_commands_are_seen(sandbox, folder):
    handle = sandbox.files.watch_dir(folder)
    name = r"$'a\xffb'"
    sandbox.commands.run(f"cd {folder}; mkdir d; echo 1 > d/below; true > {name}; chmod 600 {name}; ln -s / link")
    assert told(handle) == [("d", CREATE), ("a\ufffdb", CREATE), ("a\ufffdb", CHMOD), ("link", CREATE)]
    handle.stop()


def test_folders_below(sandbox, folder):
    sandbox.files.make_dir(f"{folder}/old")
    handle = sandbox.files.watch_dir(folder, recursive=True)
    sandbox.files.write(f"{folder}/old/f", "1")
    assert told(handle) == [("old/f", CREATE), ("old/f", CHMOD), ("old/f", WRITE)]
    # Made at once with what is in it.
    sandbox.commands.run(f"mkdir -p {folder}/new/deep && echo 1 > {folder}/new/deep/f")
    events = told(handle)
    assert [name for name, kind in events if kind == CREATE] == ["new", "new/deep", "new/deep/f"]
    sandbox.commands.run(f"mv {folder}/new {folder}/moved; echo 2 >> {folder}/moved/deep/f")
    assert told(handle) == [("new", RENAME), ("moved", CREATE), ("moved/deep/f", WRITE)]
    sandbox.files.remove(f"{folder}/moved")
    assert told(handle) == [("moved/deep/f", REMOVE), ("moved/deep", REMOVE), ("moved", REMOVE)]
    handle.stop()


@pytest.mark.newest_sdk
def test_entries(sandbox, folder):
    handle = sandbox.files.watch_dir(folder, recursive=True, include_entry=True)
    sandbox.files.write(f"{folder}/sub/f", "four")
    sandbox.files.remove(f"{folder}/sub/f")
    events = handle.get_new_events()
    first = events[0]
    assert (first.name, first.entry.path, first.entry.type) == ("sub", f"{folder}/sub", FileType.DIR)
    assert events[-1].type == REMOVE and events[-1].entry is None
    sandbox.files.write(f"{folder}/sub/g", "four")
    written = handle.get_new_events()[-1]
    assert (written.name, written.type) == ("sub/g", WRITE)
    assert (written.entry.name, written.entry.path, written.entry.size, written.entry.owner) == (
        "g",
        f"{folder}/sub/g",
        4,
        "user",
    )
    handle.stop()


def test_the_folder_itself(sandbox, folder):
    handle = sandbox.files.watch_dir(folder)
    sandbox.files.remove(folder)
    assert told(handle) == [(".", REMOVE)]
    sandbox.files.make_dir(folder)
    sandbox.files.write(f"{folder}/f", "of another folder")
    assert told(handle) == []
    handle.stop()


def test_what_cannot_be_watched(sandbox, folder):
    with pytest.raises(FileNotFoundException):
        sandbox.files.watch_dir(f"{folder}/none")
    sandbox.files.write(f"{folder}/file", "")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.watch_dir(f"{folder}/file")
    handle = sandbox.files.watch_dir(folder)
    handle.stop()
    with pytest.raises(NotFoundException):
        handle.stop()


def test_too_many_watchers_are_refused(fresh):
    handles = []
    with pytest.raises(RateLimitException, match="watchers in this sandbox already"):
        for _ in range(1000):
            handles.append(fresh.files.watch_dir("/home/user"))
    assert len(handles) == 128
    handles.pop().stop()
    handles.append(fresh.files.watch_dir("/home/user"))
    fresh.files.write("/home/user/f", "1")
    assert all(told(handle)[0] == ("f", CREATE) for handle in handles)


def test_too_many_events_are_told_to_be_lost(fresh):
    """Nothing is lost without a word, and the watcher goes on."""
    handle = fresh.files.watch_dir("/dev/shm", recursive=True)
    fresh.commands.run(MANY, timeout=120)
    names = set()
    with pytest.raises(SandboxException, match="events were lost"):
        while True:
            events = told(handle)
            assert events, "all of them found room, which this test did not expect"
            names |= {name for name, _ in events}
    assert len(names) > 10_000
    fresh.files.write("/dev/shm/99/after", "1")
    assert told(handle) == [("99/after", CREATE), ("99/after", CHMOD), ("99/after", WRITE)]


def test_a_hundred_thousand_files_are_seen_by_who_reads(fresh):
    handle = fresh.files.watch_dir("/dev/shm", recursive=True)
    command = fresh.commands.run(MANY, background=True, timeout=120)
    ended = threading.Thread(target=command.wait)
    ended.start()
    created: list[str] = []
    while True:
        last = not ended.is_alive()
        created += [name for name, kind in told(handle) if kind == CREATE]
        if last:
            break
    wanted = {f"{d}/{n}" for d in range(100) for n in range(1000)} | {str(d) for d in range(100)}
    assert len(created) == len(wanted) and set(created) == wanted


@pytest.mark.newest_sdk
def test_a_watcher_lives_through_pause_and_fork(fresh):
    fresh.commands.run("mkdir -p w/sub")
    handle = fresh.files.watch_dir("/home/user/w", recursive=True)
    fresh.files.write("/home/user/w/before", "1")
    [copy] = fresh.fork(timeout=120)
    try:
        # The copy has the watcher as well, under the same id.
        theirs = copy.files.watch_dir("/home/user/w")
        theirs._watcher_id = handle._watcher_id
        copy.commands.run("mkdir w/sub/copy && true > w/sub/copy/f")
        created = [name for name, kind in told(theirs) if kind == CREATE]
        assert created == ["before", "sub/copy", "sub/copy/f"]
    finally:
        copy.kill()
    fresh.pause()
    fresh.connect()
    fresh.files.write("/home/user/w/sub/after", "1")
    fresh.commands.run("mkdir w/new && true > w/new/f && mv w/sub w/moved && true > w/moved/f")
    created = [name for name, kind in told(handle) if kind == CREATE]
    assert created == ["before", "sub/after", "new", "new/f", "moved", "moved/f"]


def test_events_come_soon(server):
    """From the end of the write to the client, on the median: the promise is 20 ms."""
    sandbox = Sandbox.create(timeout=120)
    try:
        handle = sandbox.files.watch_dir("/home/user")
        took = []
        for n in range(30):
            sandbox.files.write(f"/home/user/{n}", "1")
            began = time.monotonic()
            until(lambda: told(handle))
            took.append(time.monotonic() - began)
        assert statistics.median(took) < 0.02, took
    finally:
        sandbox.kill()
