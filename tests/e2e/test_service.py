"""The service unit: what systemd would do to the server, and what becomes of the sandboxes."""

import configparser
import subprocess
from pathlib import Path

import pytest
from e2b import Sandbox
from support import PROGRAM, ROOT, Server, cgroups_named, until

UNIT = ROOT / "packaging/sandglass.service"
CGROUPS = Path("/sys/fs/cgroup")


def settings() -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str
    parser.read(UNIT)
    return dict(parser["Service"])


def test_systemd_understands_the_unit(tmp_path):
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/sandglass", PROGRAM))
    result = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    # Units of this machine may have faults of their own.
    ours = [line for line in result.stderr.splitlines() if UNIT.name in line]
    assert not ours, result.stderr
    misspelt = tmp_path / "misspelt.service"
    misspelt.write_text(unit.read_text().replace("KillMode=mixed", "KillMode=mixd"))
    result = subprocess.run(["systemd-analyze", "verify", "--man=no", misspelt], capture_output=True, text=True)
    assert "mixd" in result.stderr, "this check finds nothing"


def test_the_unit_has_the_mount_namespace_of_the_machine():
    """The network of a sandbox is held by a mount there, which must outlive the service."""
    private = (
        "Private Protect ReadOnly ReadWrite Inaccessible TemporaryFileSystem Bind Root DynamicUser ExecPaths NoExecPaths"
    )
    assert not [key for key in settings() if key.startswith(tuple(private.split()))]


@pytest.fixture
def groups():
    """The control group that systemd would give the service, in the hierarchies that it follows processes by."""
    split = [CGROUPS / "systemd", CGROUPS / "unified", CGROUPS / "pids"]
    roots = [CGROUPS] if (CGROUPS / "cgroup.controllers").exists() else [root for root in split if root.exists()]
    made = [root / "sandglass-test-service" for root in roots]
    for group in made:
        group.mkdir()
    yield made
    for group in made:
        until(lambda group=group: not members(group), what="the service is gone")
        group.rmdir()


def members(group: Path) -> set[int]:
    return {int(line) for line in (group / "cgroup.procs").read_text().split()}


@pytest.fixture
def service(work_folder, groups):
    """A server in a group of its own, with the capabilities that the unit leaves it."""
    forbidden = settings()["CapabilityBoundingSet"].removeprefix("~").split()
    bounding = ",".join("-" + name.removeprefix("CAP_").lower() for name in forbidden)
    join = "; ".join(f"echo $$ > {group}/cgroup.procs" for group in groups)
    server = Server(work_folder / "service")
    server.wrap = ["sh", "-ec", f'{join}; exec "$@"', "sh"]
    server.wrap += ["setpriv", "--bounding-set", bounding]
    try:
        yield server.start()
    finally:
        server.stop()


def test_a_restart_leaves_sandboxes_running(service, groups):
    box = Sandbox.create(timeout=600, **service.opts)
    box.files.write("/tmp/mark", "kept")
    command = box.commands.run("until [ -e /tmp/go ]; do sleep 0.05; done; echo went on", background=True, timeout=0)
    instance = (service.data_dir / "instance").read_text().strip()
    leaves = [group for group in cgroups_named(box.sandbox_id) if group.parent.name == f"sandglass-{instance}"]
    sandbox = set.union(*(members(leaf) for leaf in leaves))
    engine = {pid for pid in sandbox if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"runsc-")}
    assert engine, "the sandbox has no processes"
    for group in groups:
        assert len(members(group)) == 2, "both halves are the service's"
        assert not members(group) & sandbox, "systemd would kill the sandbox with the service"

    # As systemd stops it: the signal goes to the main process alone, and what is then left in the group is killed.
    service.stop()
    for group in groups:
        assert not members(group), "something is left for systemd to kill"
    # Those of the guest come and go.
    assert engine <= set.union(*(members(leaf) for leaf in leaves))

    service.start()
    assert box.files.read("/tmp/mark") == "kept"
    box.files.write("/tmp/go", "")
    assert box.commands.connect(command.pid).wait().stdout == "went on\n"
    assert box.kill()
    service.assert_nothing_left()
