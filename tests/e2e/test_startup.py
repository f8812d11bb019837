"""Every way in which a start fails: one line with the remedy, a code of its own, and nothing left."""

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
from pathlib import Path

import pytest
from support import PROGRAM, STOP_WITHIN, cgroups_named, children_of, loop_files, until

CACHE = "/var/cache/sandglass"


@pytest.fixture
def place():
    """A folder that the tests may mount things in, which their private namespaces take away again."""
    folder = Path(tempfile.mkdtemp(prefix="sandglass-startup-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def serve(
    place, *args, before="", listen="127.0.0.1:0", data="data", env=None, cache=CACHE
) -> subprocess.CompletedProcess:
    """Starts a server that is expected to fail; `before` is done in a mount namespace of its own."""
    command = [
        PROGRAM, "serve", "--listen", listen, "--data-dir", str(place / data), "--cache-dir", str(cache), *args,
    ]  # fmt: skip
    if before:
        script = f"set -e\n{before}\nexec \"$@\""
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=place)


def assert_fails(result, code: int, *words: str):
    assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
    assert result.stdout == "", "nothing to paste from a server that does not run"
    lines = [line for line in result.stderr.splitlines() if line.startswith("sandglass: ")]
    assert len(lines) == 1 and result.stderr.splitlines()[-1] == lines[0], result.stderr
    for word in words:
        assert word in lines[0], lines[0]


def assert_nothing_left(place, data="data"):
    """No process, mount, group, loop device or lock of it."""
    folder = str(place / data)

    def processes():
        found = []
        for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if folder.encode() in cmdline.read_bytes():
                    found.append(cmdline)
        return found

    until(lambda: not processes(), what="no process is left")
    assert folder not in Path("/proc/self/mountinfo").read_text()
    instance = Path(folder, "instance")
    if instance.exists():
        name = f"sandglass-{instance.read_text().strip()}"
        assert not cgroups_named(name)
    assert not any(folder in loop for loop in loop_files())
    if Path(folder).is_dir():
        assert subprocess.run(["flock", "--nonblock", folder, "true"]).returncode == 0, "the folder is locked"


@contextlib.contextmanager
def running(place, *args, data="data", env=None):
    """A server that starts, to see that what failed before left nothing in its way."""
    process = subprocess.Popen(
        [PROGRAM, "serve", "--listen", "127.0.0.1:0", "--data-dir", str(place / data), "--cache-dir", CACHE, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )
    try:
        assert any(line.startswith("export E2B_API_URL") for line in process.stdout)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        process.stdout.close()
        assert process.wait(STOP_WITHIN) == 0


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_not_root(place):
    command = [PROGRAM, "serve", "--data-dir", str(place / "data")]
    result = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert_fails(result, 10, "start it as root")
    assert not (place / "data").exists()


@pytest.mark.parametrize(
    "text, word",
    [
        ("lisen = '127.0.0.1:1'", "lisen"),
        ("max_lifetime_hours = 0", "max_lifetime_hours"),
        ("listen = 7", "listen"),
        ("= no toml", "not a valid config"),
        (None, "No such file"),
    ],
)
def test_a_bad_config(place, text, word):
    config = place / "config.toml"
    if text is not None:
        config.write_text(text)
    assert_fails(serve(place, "--config", str(config)), 11, word)
    assert not (place / "data").exists()


def test_a_bad_command_line_is_no_failed_start(place):
    assert serve(place, listen="nowhere").returncode == 2


def test_no_runsc(place):
    empty = place / "bin"
    empty.mkdir()
    assert_fails(serve(place, env={"PATH": str(empty)}), 12, "runsc is not installed", "apt install runsc")
    config = place / "config.toml"
    config.write_text(f"runsc = '{place}/absent'")
    assert_fails(serve(place, "--config", str(config)), 12, "not installed")
    assert_nothing_left(place)


@pytest.mark.parametrize(
    "text, word",
    [
        ("exit 1", "does not run"),
        ("echo garbage", "does not run"),
        ("kill -9 $$", "does not run"),
        ("echo runsc version 0.0~20221219.0", "too old"),
    ],
)
def test_an_unusable_runsc(place, text, word):
    script(place / "runsc", text)
    env = {"PATH": f"{place}:{os.environ['PATH']}"}
    assert_fails(serve(place, env=env), 13, word, "20240729")
    assert_nothing_left(place)


def test_no_guest(place):
    assert_fails(serve(place, "--guest", str(place / "absent")), 14, "guest", "absent")
    assert_nothing_left(place)


def test_a_foreign_data_folder(place):
    (place / "data").mkdir()
    (place / "data/thesis.txt").write_text("years of work")
    assert_fails(serve(place), 15, "neither empty nor a data folder", "--data-dir")
    assert [path.name for path in (place / "data").iterdir()] == ["thesis.txt"]
    (place / "data/instance").write_text("../../etc\n")
    assert_fails(serve(place), 15, "malformed instance file")


def test_a_data_folder_of_another_owner(place):
    (place / "data").mkdir()
    os.chown(place / "data", 65534, 65534)
    assert_fails(serve(place), 16, "must belong to root", "chown")
    os.chown(place / "data", 0, 0)
    (place / "data").chmod(0o777)
    assert_fails(serve(place), 16, "must belong to root")
    (place / "file").write_text("")
    assert_fails(serve(place, data="file/data"), 16, "can't be used")
    (place / "data").chmod(0o700)
    with running(place):
        pass


def test_a_data_folder_that_can_not_be_written(place):
    before = f"mount -t tmpfs none {place}; mount -o remount,ro {place}"
    assert_fails(serve(place, before=before), 16, "Read-only file system")


def test_a_store_of_a_newer_server(place):
    with running(place):
        pass
    database = sqlite3.connect(place / "data/serve/store.db")
    database.execute(
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)"
        " VALUES (99999999, 'later', 1, x'00', 1)"
    )
    database.commit()
    database.close()
    assert_fails(serve(place), 17, "99999999", "newer")
    assert_nothing_left(place)


@pytest.mark.parametrize("kind", ["garbage", "another program's", "damaged"])
def test_a_damaged_store(place, kind):
    with running(place):
        pass
    store = place / "data/serve/store.db"
    if kind == "garbage":
        store.write_bytes(os.urandom(64 << 10))
    elif kind == "another program's":
        database = sqlite3.connect(store)
        database.execute("PRAGMA application_id = 7")
        database.commit()
        database.close()
    else:
        # All but the header, which says that it is ours.
        content = bytearray(store.read_bytes())
        content[100:] = b"\xff" * (len(content) - 100)
        store.write_bytes(content)
    assert_fails(serve(place), 18, "serve/store.db")
    assert_nothing_left(place)


def test_no_landlock(place):
    """A kernel that does not know these system calls, as the program sees it."""
    probe = (
        "import ctypes, os, struct, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "code = [(0x20,0,0,0), (0x15,0,1,444), (0x06,0,0,0x00050000|38), (0x06,0,0,0x7fff0000)]\n"
        "text = b''.join(struct.pack('HBBI', *line) for line in code)\n"
        "buffer = ctypes.create_string_buffer(text)\n"
        "program = struct.pack('HxxxxxxQ', len(code), ctypes.addressof(buffer))\n"
        "assert libc.prctl(38, 1, 0, 0, 0) == 0\n"
        "assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    command = ["python3", "-c", probe, PROGRAM, "serve", "--listen", "127.0.0.1:0", "--data-dir", str(place / "data")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert_fails(result, 19, "landlock", "5.13")
    assert_nothing_left(place)


def test_no_control_groups(place):
    assert_fails(serve(place, before="mount -t tmpfs none /sys/fs/cgroup"), 20, "no control groups are mounted")
    before = "mount -o remount,bind,ro /sys/fs/cgroup/pids || mount -o remount,bind,ro /sys/fs/cgroup"
    assert_fails(serve(place, before=before), 20, "can't be made")
    assert_nothing_left(place)


def test_no_namespaces(place):
    command = [PROGRAM, "serve", "--listen", "127.0.0.1:0", "--data-dir", str(place / "data"), "--cache-dir", CACHE]
    bounding = subprocess.run(
        ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", *command],
        capture_output=True,
        text=True,
        timeout=60,
    )
    # Control groups can be made without it, namespaces can not.
    assert_fails(bounding, 21, "namespaces", "CAP_SYS_ADMIN")
    assert_nothing_left(place)


def test_no_packet_filter(place):
    nft = script(place / "nft", "echo 'no such table' >&2; exit 1")
    assert_fails(serve(place, before=f"mount --bind {nft} /usr/sbin/nft"), 22, "no such table", "nftables")
    assert_nothing_left(place)


def test_no_loop_devices(place):
    assert_fails(serve(place, before="mount --bind /dev/null /dev/loop-control"), 23, "loop", "modprobe loop")
    # As in a container that was given the control file and none of the devices.
    before = (
        "mount -t tmpfs none /mnt; for n in null zero urandom loop-control fd stdin stdout stderr; do"
        " if [ -c /dev/$n ] && [ ! -L /dev/$n ]; then touch /mnt/$n; mount --bind /dev/$n /mnt/$n; fi; done;"
        " mount --move /mnt /dev"
    )
    assert_fails(serve(place, before=before), 35, "none could be attached", "losetup")
    assert_nothing_left(place)


def test_no_ext4(place):
    mkfs = script(place / "mkfs", "echo 'no journal today' >&2; exit 1")
    assert_fails(serve(place, before=f"mount --bind {mkfs} /usr/sbin/mkfs.ext4"), 24, "no journal today")
    assert_nothing_left(place)


def test_a_template_without_its_tools(place):
    bin = place / "bin"
    bin.mkdir()
    for folder in ("/usr/sbin", "/usr/bin"):
        for program in Path(folder).iterdir():
            if program.name != "mmdebstrap" and not (bin / program.name).exists():
                (bin / program.name).symlink_to(program)
    # The script sets no PATH of its own, so this is all that it finds.
    env = {"PATH": str(bin)}
    result = serve(place, cache=place / "cache", env=env)
    assert_fails(result, 25, "could not be built", "mmdebstrap")
    assert_nothing_left(place)


def test_a_mirror_that_can_not_be_reached(place):
    result = subprocess.run(
        [
            "unshare", "--net", PROGRAM, "serve", "--listen", "127.0.0.1:0",
            "--data-dir", str(place / "data"), "--cache-dir", str(place / "cache"),
        ],  # fmt: skip
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert_fails(result, 36, "could not be built", "apt-get update")
    assert_nothing_left(place)


def test_a_taken_port(place):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = serve(place, listen=address)
    assert_fails(result, 30, address, "--listen")
    assert_nothing_left(place)


def test_an_address_of_another_machine(place):
    assert_fails(serve(place, listen="192.0.2.1:3000"), 31, "192.0.2.1:3000", "--listen")
    assert_nothing_left(place)


def test_a_folder_in_use(place):
    with running(place):
        assert_fails(serve(place), 32, "is in use by process", "--data-dir")
    with running(place):
        pass


def test_a_full_data_folder(place):
    (place / "data").mkdir()
    # Room for the folder itself and for no file in it.
    before = f"mount -t tmpfs -o mode=755,nr_inodes=1 none {place}/data"
    assert_fails(serve(place, before=before), 33, "No space left", "free some room")
    assert_nothing_left(place)


def test_a_full_store(place):
    """A server that has sandboxes to take up tries, also on a full disk, and its store has no room."""
    data = place / "data"
    mounted = place / "mounted"
    mounted.mkdir()
    with running(place):
        pass
    before = (
        f"mount -t tmpfs -o mode=755,size=4m none {mounted}; cp -a {data} {mounted}/; rm {mounted}/data/serve/store.db*;"
        f" mkdir -p {mounted}/data/host/sandboxes/left;"
        f" head -c 1G /dev/zero > {mounted}/filler 2>/dev/null || true"
    )
    assert_fails(serve(place, before=before, data="mounted/data"), 33, "full")


def test_a_full_cache_folder(place):
    (place / "cache").mkdir()
    result = serve(place, cache=place / "cache", before=f"mount -t tmpfs -o size=1m none {place}/cache")
    assert_fails(result, 34, "cache", "free some room")
    assert_nothing_left(place)


def works_once(place, then: str) -> tuple[str, str]:
    """A `runsc` that answers once: the start sees it work, and the privileged half does not."""
    runsc = script(
        place / "runsc",
        f"if mkdir {place}/asked 2>/dev/null; then exec /usr/bin/runsc \"$@\"; fi; {then}",
    )
    config = place / "config.toml"
    config.write_text(f"runsc = '{runsc}'")
    return "--config", str(config)


def test_the_privileged_half_says_why_itself(place):
    assert_fails(serve(place, *works_once(place, "echo worn out >&2; exit 3")), 38, "worn out", "sandglass doctor")
    assert_nothing_left(place)


def test_the_privileged_half_is_killed_at_the_start(place):
    assert_fails(serve(place, *works_once(place, "kill -9 $PPID")), 38, "signal: 9")
    with running(place):
        pass
    assert_nothing_left(place)


# --- doctor -------------------------------------------------------------------------------------------------------


def doctor(place, *args, wrap=()):
    command = [*wrap, PROGRAM, "doctor", "--json", "--data-dir", str(place / "data"), *args]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return result.returncode, json.loads(result.stdout)


def test_doctor_finds_this_machine_good_and_leaves_nothing(place):
    mounts = Path("/proc/self/mountinfo").read_text().count(str(place))
    code, said = doctor(place)
    assert (code, said["good"]) == (0, True), said
    verdicts = {check["name"]: check["verdict"] for check in said["checks"]}
    for name in ("root", "Landlock", "network namespaces", "packet filter", "control groups", "ext4"):
        assert verdicts[name] == "good", said
    # Some kernels are good for sandboxes and have a defect that an operator should know of.
    assert verdicts["kernel"] in ("good", "note"), said
    assert verdicts["a trial sandbox"] == verdicts["overlay file system"] == verdicts["loop devices"] == "good"
    assert list(place.iterdir()) == []
    assert Path("/proc/self/mountinfo").read_text().count(str(place)) == mounts
    assert not cgroups_named(f"sandglass-doctor-{os.getpid()}")


def test_doctor_without_root_says_what_it_could_not_look_at(place):
    code, said = doctor(place, wrap=("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"))
    assert (code, said["good"]) == (1, False)
    bad = [check for check in said["checks"] if check["verdict"] == "bad"]
    assert [check["name"] for check in bad] == ["root"], bad
    assert "as root" in bad[0]["remedy"]
    unseen = [check["name"] for check in said["checks"] if "takes root" in check["finding"]]
    assert {"control groups", "loop devices", "network namespaces"} <= set(unseen)


def test_doctor_names_what_is_missing(place):
    wrap = ("unshare", "--mount", "--propagation", "private", "sh", "-c")
    wrap += ("mount --bind /dev/null /dev/loop-control; mount -t tmpfs none /sys/fs/cgroup; exec \"$@\"", "sh")
    code, said = doctor(place, wrap=wrap)
    assert code == 1
    bad = {check["name"]: check["remedy"] for check in said["checks"] if check["verdict"] == "bad"}
    assert set(bad) == {"loop devices", "control groups"}
    assert "modprobe loop" in bad["loop devices"]


def test_a_doctor_that_is_killed_leaves_nothing(place):
    """Killed as soon as it holds a loop device; what has a name in the machine is removed by the next one."""
    process = subprocess.Popen([PROGRAM, "doctor", "--data-dir", str(place / "data")], stdout=subprocess.DEVNULL)

    def attached():
        return any(str(place) in file for file in loop_files())

    until(lambda: attached() or process.poll() is not None, within=60, what="a loop device of the doctor's")
    process.kill()
    process.wait()
    assert not children_of(os.getpid()) or process.pid not in children_of(os.getpid())
    until(lambda: not attached(), what="the loop device is gone")
    assert list(place.iterdir()) == []
    code, said = doctor(place)
    assert code == 0, said
    assert not cgroups_named(f"sandglass-doctor-{process.pid}")
