"""Files of a sandbox as an archive that is read from outside, whatever is inside and whoever answers there."""

from __future__ import annotations

import io
import json
import os
import signal
import tarfile
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox
from faults import processes_of
from support import cgroups_named, loop_files, status_of, until

PROJECT = "/home/user/project"


def archive(server, sandbox, path=PROJECT, globs=(), status=200):
    """The files by name, and what was left out."""
    answer = httpx.get(
        f"{server.url}/v1/sandboxes/{sandbox.sandbox_id}/archive",
        headers=server.headers,
        params=[("path", path), *(("glob", glob) for glob in globs)],
        timeout=120,
    )
    assert answer.status_code == status, answer.text
    if status != 200:
        return answer.json()["message"]
    assert answer.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        members = tar.getmembers()
        files = {member.name: (member, tar.extractfile(member).read()) for member in members}
    left_out = json.loads(files.pop(".sandglass-left-out.json")[1])
    assert members[-1].name == ".sandglass-left-out.json" and len(files) == len(members) - 1
    return files, {reason: count for reason, count in left_out.items() if count}


def host_processes(server, word: bytes) -> list[int]:
    found = []
    for pid in Path("/proc").glob("[0-9]*"):
        try:
            words = (pid / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[1:2] == [word] and str(server.data_dir).encode() in words[2]:
            found.append(int(pid.name))
    return found


def assert_nothing_reads(server):
    until(lambda: not host_processes(server, b"collect-files"), what="nobody reads any more")
    until(lambda: not cgroups_named("collect"), what="their group is gone")


def test_an_archive_has_the_files_as_they_are(server):
    with Sandbox.create(timeout=120) as sandbox:
        blob = os.urandom(3 << 20)
        sandbox.files.write(f"{PROJECT}/out/blob", blob)
        sandbox.files.write(f"{PROJECT}/{'long/' * 40}ü.txt", "text")
        sandbox.files.write(f"{PROJECT}/empty", "")
        sandbox.commands.run(f"chmod 750 {PROJECT}/out/blob && ln -s /etc/passwd {PROJECT}/link && mkfifo {PROJECT}/pipe")
        files, left_out = archive(server, sandbox)
        assert set(files) == {"out/blob", f"{'long/' * 40}ü.txt", "empty"}
        member, content = files["out/blob"]
        assert (member.mode, content) == (0o750, blob)
        assert abs(member.mtime - sandbox.files.get_info(f"{PROJECT}/out/blob").modified_time.timestamp()) < 2
        assert files[f"{'long/' * 40}ü.txt"][1] == b"text"
        assert left_out["symlinks"] == 1
        # By patterns, and of the template as of what is the sandbox's own.
        assert set(archive(server, sandbox, globs=["out"])[0]) == {"out/blob"}
        assert set(archive(server, sandbox, globs=["{e,x}mpty", "**/*.txt"])[0]) == {"empty", f"{'long/' * 40}ü.txt"}
        assert "passwd" in archive(server, sandbox, "/etc", ["passwd"])[0]
        sandbox.files.write("/tmp/in-tmp", "x")
        assert "in-tmp" in archive(server, sandbox, "/tmp")[0]
        for path, status, why in (
            ("/nothing", 404, "no such folder"),
            (f"{PROJECT}/empty", 400, "no folder"),
            (f"{PROJECT}/../..", 400, "without '.', '..'"),
            ("relative", 400, "absolute"),
        ):
            assert why in archive(server, sandbox, path, status=status)
        assert "pattern" in archive(server, sandbox, globs=["../*"], status=400)
    archive(server, sandbox, status=404)
    assert_nothing_reads(server)


def test_a_link_above_the_folder_leads_nowhere(server):
    with Sandbox.create(timeout=120) as sandbox:
        sandbox.files.write("/home/user/real/project/f", "x")
        sandbox.commands.run("ln -s real /home/user/work; ln -s / /home/user/root")
        assert set(archive(server, sandbox, "/home/user/real/project")[0]) == {"f"}
        assert "symbolic link" in archive(server, sandbox, "/home/user/work/project", status=400)
        assert "symbolic link" in archive(server, sandbox, "/home/user/root/etc", status=400)


def test_it_needs_no_agent_and_survives_a_restart_and_a_pause(servers):
    server = servers.make()
    with Sandbox.create(timeout=300, **server.opts) as sandbox:
        sandbox.files.write(f"{PROJECT}/f", "written before")
        # Nothing inside runs any more, the agent included.
        pids = processes_of(sandbox.sandbox_id)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(Exception):
                sandbox.commands.run("true", timeout=1, request_timeout=2)
            assert archive(server, sandbox)[0]["f"][1] == b"written before"
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
    with Sandbox.create(timeout=300, **server.opts) as sandbox:
        sandbox.files.write(f"{PROJECT}/f", "kept")
        server.kill()
        server.start()
        assert archive(server, sandbox)[0]["f"][1] == b"kept"
        sandbox.pause()
        assert archive(server, sandbox)[0]["f"][1] == b"kept"
        sandbox.connect()
        assert sandbox.commands.run(f"cat {PROJECT}/f").stdout == "kept"
        sandbox.commands.run(f"echo more >> {PROJECT}/f")
        assert archive(server, sandbox)[0]["f"][1] == b"keptmore\n"
    assert_nothing_reads(server)


def test_who_reads_has_one_right_and_sees_one_file_system_that_it_cannot_write(server):
    with Sandbox.create(timeout=120) as sandbox:
        sandbox.commands.run(f"mkdir {PROJECT} && head -c 300000000 /dev/zero > {PROJECT}/large", timeout=120)
        url = f"{server.url}/v1/sandboxes/{sandbox.sandbox_id}/archive"
        with httpx.stream("GET", url, headers=server.headers, params={"path": PROJECT}, timeout=60) as answer:
            parts = answer.iter_raw(1000)
            next(parts)
            [pid] = host_processes(server, b"collect-files")
            status, mounts = status_of(pid), Path(f"/proc/{pid}/mounts").read_text()
            assert {status[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {f"{1 << 2:016x}"}
            assert {status[name] for name in ("CapInh", "CapAmb")} == {"0" * 16}
            assert status["NoNewPrivs"] == "1" and status["Groups"].strip() == ""
            assert status["Uid"].split()[0] not in ("0", "1000")
            assert os.readlink(f"/proc/{pid}/root").endswith("/collected")
            assert os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
            [options] = [line.split()[3].split(",") for line in mounts.splitlines() if line.split()[2] == "overlay"]
            assert {"ro", "nosuid", "nodev", "noexec", "nosymfollow"} <= set(options)
            assert "upperdir" not in mounts
            # It ends with the sandbox, and is in nobody's way.
            sandbox.kill()
            with pytest.raises(httpx.HTTPError):
                for _ in parts:
                    pass
    assert_nothing_reads(server)
    until(lambda: not any(sandbox.sandbox_id in file for file in loop_files()), what="the disk is gone")


def test_who_goes_away_leaves_nothing_and_who_is_slow_is_in_the_way_of_nobody_else(server):
    with Sandbox.create(timeout=120) as sandbox:
        sandbox.commands.run(f"mkdir {PROJECT} && head -c 100000000 /dev/zero > {PROJECT}/large", timeout=120)
        url = f"{server.url}/v1/sandboxes/{sandbox.sandbox_id}/archive"
        with httpx.Client(headers=server.headers, params={"path": PROJECT}, timeout=60) as client:
            slow = [client.send(client.build_request("GET", url), stream=True) for _ in range(4)]
            assert [answer.status_code for answer in slow] == [200] * 4
            assert client.get(url).status_code == 429 or client.get(url).status_code == 503
            for answer in slow:
                answer.close()
            until(lambda: client.get(url, params={"path": PROJECT, "glob": "none"}).status_code == 200)
    assert_nothing_reads(server)


def test_a_guest_that_changes_everything_meanwhile_gets_nothing_out(server):
    """What it swaps in are links to files that the machine, the template and other places have; what it swaps out is told."""
    swap = f"""
import os, threading
os.makedirs("{PROJECT}/d", exist_ok=True)
os.chdir("{PROJECT}")
open("f", "w").write("public"); open("d/f", "w").write("public")
def swap(name, target):
    while True:
        os.symlink(target, name + ".l"); os.rename(name, name + ".r"); os.rename(name + ".l", name)
        os.unlink(name); os.rename(name + ".r", name)
for one in (("f", "/etc/shadow"), ("d", "/etc"), ("d", "/proc/self/root")):
    threading.Thread(target=swap, args=one).start()
"""
    with Sandbox.create(timeout=120) as sandbox:
        sandbox.files.write("/home/user/swap.py", swap)
        sandbox.commands.run("python3 /home/user/swap.py 2>/dev/null", background=True)
        until(lambda: sandbox.files.exists(f"{PROJECT}/f") or None, what="it swaps")
        seen = set()
        for _ in range(30):
            files, _ = archive(server, sandbox)
            for name, (_, content) in files.items():
                seen.add(name)
                assert content in (b"public", b""), name
        assert seen


def test_many_deep_and_strange_names_are_told_or_counted(server):
    make = f"""
import os
os.makedirs("{PROJECT}/many"); os.chdir("{PROJECT}")
for n in range(20000): open(f"many/{{n}}", "w").close()
for byte in range(1, 256):
    if byte not in b"/.": open(b"x" + bytes([byte]), "w").close()
os.chdir("{PROJECT}")
for _ in range(100):
    os.mkdir("deep"); os.chdir("deep"); open("f", "w").close()
os.chdir("{PROJECT}")
with open("sparse", "w") as f: f.truncate(8 << 30)
"""
    with Sandbox.create(timeout=300) as sandbox:
        sandbox.files.write("/home/user/make.py", make)
        sandbox.commands.run("python3 /home/user/make.py", timeout=200)
        files, left_out = archive(server, sandbox)
        assert sum(name.startswith("many/") for name in files) == 20000
        assert (left_out["names"], left_out["too_deep"], left_out["too_large"]) == (128, 1, 1)
        assert sum(name.startswith("x") for name in files) == 125


@pytest.mark.parametrize("point", ["control.collect.begin", "engine.collect.attach", "engine.worker.start"])
def test_a_step_that_fails_costs_one_answer_and_leaves_nothing(servers, point):
    server = servers.make()
    server.stop()
    server.start(f"{point}=error*1")
    with Sandbox.create(timeout=120, **server.opts) as sandbox:
        sandbox.files.write(f"{PROJECT}/f", "x")
        archive(server, sandbox, status=500)
        assert set(archive(server, sandbox)[0]) == {"f"}
    assert_nothing_reads(server)


def test_a_dead_reader_breaks_the_archive_off_and_nobody_takes_it_for_the_whole(server):
    with Sandbox.create(timeout=120) as sandbox:
        sandbox.commands.run(f"mkdir {PROJECT} && head -c 300000000 /dev/zero > {PROJECT}/large", timeout=120)
        url = f"{server.url}/v1/sandboxes/{sandbox.sandbox_id}/archive"
        with httpx.stream("GET", url, headers=server.headers, params={"path": PROJECT}, timeout=60) as answer:
            parts = answer.iter_raw(1000)
            next(parts)
            [pid] = host_processes(server, b"collect-files")
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                for _ in parts:
                    pass
        assert set(archive(server, sandbox)[0]) == {"large"}
    assert_nothing_reads(server)
