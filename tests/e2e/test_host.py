"""What the two halves are allowed to do, and two servers side by side."""

import os
from pathlib import Path

import pytest
from e2b import Sandbox
from support import PROGRAM, children_of, status_of, until


def test_the_half_that_reads_hostile_bytes_has_no_privilege(server):
    status = status_of(server.pid)
    uids, gids = status["Uid"].split(), status["Gid"].split()
    assert len(set(uids)) == 1 and uids[0] != "0"
    assert len(set(gids)) == 1 and gids[0] != "0"
    assert status["Groups"].strip() in ("", gids[0])
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0, name
    assert status["NoNewPrivs"] == "1"
    # Nothing of the machine's file system can be seen from there.
    assert os.readlink(f"/proc/{server.pid}/root").startswith(str(server.data_dir))


def test_the_privileged_half_listens_nowhere(server):
    halves = [pid for pid in children_of(server.pid) if b"sandglass" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(halves) == 1
    host = halves[0]
    assert status_of(host)["Uid"].split()[0] == "0"
    inodes = set()
    for descriptor in Path(f"/proc/{host}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{host}/net/{table}").read_text().splitlines()[1:]:
            assert line.split()[9] not in inodes, f"an internet socket in the privileged half: {line}"


def test_the_sandbox_is_not_a_process_of_the_machine(server, fresh):
    """Guest processes are not host processes, and what runs for the sandbox has no capability in the machine."""
    fresh.commands.run("exec -a unmistakable-name sleep 600", background=True).disconnect()
    until(lambda: "unmistakable-name" in fresh.commands.run("ps -eo args").stdout, what="the guest process")
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert not process.read_bytes().startswith(b"unmistakable-name")
        except (FileNotFoundError, ProcessLookupError):
            continue


def test_two_servers_do_not_touch_each_other(server, lone_server):
    ours = Sandbox.create(timeout=120)
    theirs = Sandbox.create(timeout=120, **lone_server.opts)
    try:
        with pytest.raises(Exception, match="401"):
            Sandbox.list(**(lone_server.opts | {"api_key": server.api_key})).next_items()
        assert Sandbox.kill(theirs.sandbox_id) is False
        # The other one dies and comes back, which starts its reconciler; ours does not notice.
        lone_server.kill()
        assert ours.commands.run("echo here").stdout == "here\n"
        lone_server.start()
        assert ours.commands.run("echo here").stdout == "here\n"
        assert theirs.commands.run("echo there").stdout == "there\n"
        assert theirs.kill()
        lone_server.assert_nothing_left()
        assert ours.is_running()
        code, ledger = server.ledger(wait=5)
        assert code == 0 and ledger["sandboxes"] >= 1
    finally:
        ours.kill()


def test_a_data_folder_has_one_server(server):
    second = server.cli(
        "serve", "--listen", "127.0.0.1:0", "--data-dir", str(server.data_dir), check=False
    )
    assert second.returncode != 0
    assert f"{server.data_dir} is in use by process {server.pid} (`{server.program[-1]} serve`)" in second.stderr
    assert Sandbox.list().next_items() is not None


def test_serve_refuses_a_user_without_privilege(tmp_path):
    import subprocess

    tmp_path.chmod(0o777)
    result = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", PROGRAM, "serve", "--data-dir", str(tmp_path / "d")],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert result.returncode != 0
    assert "root" in result.stderr or "denied" in result.stderr.lower()


def test_a_neighbours_sandbox_holds_nothing_of_ours(server, lone_server):
    """What a sandbox is started with must not keep another server's disks and namespaces alive."""
    theirs = Sandbox.create(timeout=120, **lone_server.opts)
    ours = Sandbox.create(timeout=120)
    try:
        assert theirs.kill()
        lone_server.assert_nothing_left()
        lone_server.stop()
        lone_server.assert_nothing_left()
        assert ours.is_running()
    finally:
        ours.kill()
