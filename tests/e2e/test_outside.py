"""What an administrator, or the kernel, does to a sandbox from outside: the record says why it ended, and all is cleared up."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from faults import answers, configured, create, groups_of, has_ended, kill, new_tag, processes_of, rows, settled
from support import until


@pytest.fixture(scope="module")
def impatient_server(servers, work_folder):
    return configured(servers, work_folder, "agent_silence_seconds = 2\n")


@pytest.fixture
def made(impatient_server):
    """A new sandbox: server, id."""
    response = create(impatient_server, new_tag())
    assert response.status_code == 201, response.text
    yield impatient_server, response.json()["sandboxID"]
    kill(impatient_server, response.json()["sandboxID"])
    assert all(row.state == "ended" for row in settled(impatient_server))
    impatient_server.assert_nothing_left()


def pids_named(id: str, name: str) -> list[int]:
    return sorted(pid for pid, found in processes_of(id).items() if name in found)


def ended(server, id: str):
    def look():
        (row,) = [row for row in rows(server) if row.id == id]
        return row.state == "ended" and row

    return until(look, within=30, what="the end of the sandbox")


@pytest.mark.parametrize("name", ["runsc-sandbox", "runsc-gofer"])
def test_a_killed_part_ends_the_sandbox_or_leaves_it_whole(made, name):
    server, id = made
    pids = pids_named(id, name)
    assert pids, processes_of(id)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    row = ended(server, id)
    assert row.end_reason == "crashed", row
    assert any("its processes are gone" in detail or "can't be heard" in detail for detail in row.details), row


def test_a_killed_stub_costs_a_process_or_the_sandbox(made):
    """Stubs run the code of guest processes. Whatever gVisor makes of it, the sandbox answers or has ended."""
    server, id = made
    stubs = [pid for pid, name in processes_of(id).items() if "runsc-" not in name]
    assert stubs, processes_of(id)
    for pid in stubs:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    row = ended(server, id)
    assert row.end_reason == "crashed", row


def test_a_stopped_sandbox_is_noticed_by_its_silence(made):
    server, id = made
    (process,) = pids_named(id, "runsc-sandbox")
    os.kill(process, signal.SIGSTOP)
    row = ended(server, id)
    assert row.end_reason == "crashed", row
    assert any("no sign of life for 2s" in detail for detail in row.details), row
    assert has_ended(process)


def test_a_pause_shorter_than_patience_is_forgiven(made):
    server, id = made
    (process,) = pids_named(id, "runsc-sandbox")
    os.kill(process, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T", what="it is stopped")
    os.kill(process, signal.SIGCONT)
    assert answers(server, id)


def test_processes_moved_out_of_their_group_end_all_the_same(made):
    """An administrator moves all processes to the root group and removes the sandbox's."""
    server, id = made
    processes = processes_of(id)
    for group in groups_of(id):
        root = next(parent for parent in group.parents if parent.parent == Path("/sys/fs/cgroup") or not (parent.parent / "cgroup.procs").exists())
        for pid in (group / "cgroup.procs").read_text().split():
            try:
                (root / "cgroup.procs").write_text(pid)
            except (ProcessLookupError, OSError):
                pass
        until(lambda group=group: removed(group), what=f"the removal of {group}")
    assert answers(server, id)
    assert kill(server, id).status_code == 204
    row = ended(server, id)
    assert row.end_reason == "killed", row
    until(lambda: all(has_ended(pid) for pid in processes), what="the end of every process")


def removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def test_network_and_folder_removed_by_hand(made):
    """Its namespaces are unpinned and its files deleted while it runs."""
    server, id = made
    data = server.data_dir / "host"
    slot = (data / "slots" / id).read_text()
    pins = [path for path in (data / "ns").iterdir() if slot in path.name]
    assert len(pins) == 2, list((data / "ns").iterdir())
    for pin in pins:
        subprocess.run(["umount", pin], check=True)
        pin.unlink()
    (data / "sandboxes" / id / "disk.img").unlink()
    assert answers(server, id)
    assert kill(server, id).status_code == 204
    assert ended(server, id).end_reason == "killed"


def test_a_loop_device_detached_by_hand(made):
    server, id = made
    listed = subprocess.run(["losetup", "-n", "-O", "NAME,BACK-FILE"], capture_output=True, text=True, check=True).stdout
    (device,) = [line.split()[0] for line in listed.splitlines() if id in line]
    # The kernel detaches it with its last user, which the sandbox is.
    subprocess.run(["losetup", "-d", device], check=True)
    assert answers(server, id)
    assert kill(server, id).status_code == 204
    assert ended(server, id).end_reason == "killed"


def test_a_client_can_read_why_it_ended(made):
    import httpx

    server, id = made
    (process,) = pids_named(id, "runsc-sandbox")
    os.kill(process, signal.SIGKILL)
    ended(server, id)
    record = httpx.get(f"{server.url}/v1/sandboxes/{id}", headers=server.headers).json()
    assert (record["state"], record["end_reason"]) == ("ended", "crashed")
    assert record["events"][-1]["state"] == "ended"
    assert "its processes are gone" in record["events"][-2]["detail"]
