"""A server that isolates nothing, started by somebody without any privilege."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import httpx
import pytest
from e2b import CommandExitException, NotFoundException, PtySize, Sandbox, TimeoutException
from faults import crash
from support import PROGRAM, Server, status_of, until

# Nobody: no name, no group, nothing of this machine belongs to it.
UID = 64001
AS_NOBODY = ["setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups", "--no-new-privs"]
ACCEPTED = ["--engine", "fake", "--unsafe-no-isolation"]
HEADER = "sandglass-isolation"


@pytest.fixture(scope="module")
def folder():
    """A folder that everybody may enter, with the program in it."""
    folder = Path(tempfile.mkdtemp(prefix="sandglass-fake-", dir="/var/tmp"))
    folder.chmod(0o755)
    shutil.copy(PROGRAM, folder / "sandglass")
    (folder / "sandglass").chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def data_folder(folder: Path, name: str, uid: int = UID) -> Path:
    data = folder / name
    data.mkdir()
    os.chown(data, uid, uid)
    return data


def finish(server: Server):
    """Stops a server after all its sandboxes, and sees to it that nothing is left."""
    if server.process is None:
        server.start()
    pages = Sandbox.list(limit=100, **server.opts)
    while pages.has_next:
        for info in pages.next_items():
            Sandbox.kill(info.sandbox_id, **server.opts)
    server.assert_nothing_left()
    server.stop()
    server.assert_nothing_left()


@pytest.fixture(scope="module")
def fake(folder):
    server = Server(data_folder(folder, "data"))
    server.program = [*AS_NOBODY, str(folder / "sandglass")]
    server.options = ACCEPTED
    server.start()
    yield server
    finish(server)


@pytest.fixture(scope="module")
def sandbox(fake):
    sandbox = Sandbox.create(timeout=600, **fake.opts)
    yield sandbox
    assert sandbox.kill()


def test_it_says_so_loudly_and_has_no_privilege(fake, sandbox):
    log = fake.log_path.read_text()
    assert "NOTHING ISOLATES" in log
    assert "has all the rights of its user" in log
    assert status_of(fake.pid)["Uid"].split() == [str(UID)] * 4
    assert sandbox.commands.run("id -u; id -G").stdout == f"{UID}\n{UID}\n"


def test_commands(sandbox):
    done = sandbox.commands.run("echo out; echo err >&2; echo $A", envs={"A": "b"})
    assert (done.stdout, done.stderr, done.exit_code) == ("out\nb\n", "err\n", 0)
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo no >&2; exit 7")
    assert (failed.value.exit_code, failed.value.stderr) == (7, "no\n")
    home = sandbox.commands.run("pwd").stdout
    assert home == sandbox.commands.run("echo ~", user="root").stdout
    assert sandbox.commands.run("pwd", cwd="/usr").stdout == "/usr\n"


def test_background_commands_are_listed_fed_and_killed(sandbox):
    command = sandbox.commands.run("read line; echo got $line; sleep 12345", background=True, stdin=True)
    assert command.pid in [process.pid for process in sandbox.commands.list()]
    sandbox.commands.send_stdin(command.pid, "words\n")
    said = next(chunk for out, _, _ in command if (chunk := out))
    assert said == "got words\n"
    assert command.kill()
    assert command.pid not in [process.pid for process in sandbox.commands.list()]


def test_a_timeout_ends_all_that_a_command_started(sandbox):
    with pytest.raises(TimeoutException):
        sandbox.commands.run("(setsid sleep 12346 &); sleep 12346", timeout=1)
    until(lambda: not running("sleep 12346"), what="the end of the command")


def running(args: str) -> list[str]:
    listed = subprocess.run(["ps", "ax", "-o", "args"], text=True, capture_output=True, check=True)
    return [line for line in listed.stdout.splitlines() if line == args]


def test_files(sandbox):
    sandbox.files.write("a/b.txt", "text")
    assert sandbox.files.read("a/b.txt") == "text"
    assert sandbox.commands.run("cat ~/a/b.txt; stat -c %u ~/a").stdout == f"text{UID}\n"
    assert [entry.name for entry in sandbox.files.list("a")] == ["b.txt"]
    sandbox.files.rename("a/b.txt", "a/c.txt")
    assert sandbox.files.exists("a/c.txt") and not sandbox.files.exists("a/b.txt")
    sandbox.files.remove("a")
    with pytest.raises(NotFoundException):
        sandbox.files.read("a/c.txt")


def test_a_terminal(sandbox):
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60)
    sandbox.pty.send_stdin(terminal.pid, b"stty size; tty; echo $((6 * 7)); exit\n")
    output = b"".join(chunk for _, _, chunk in terminal if chunk)
    assert b"24 80" in output and b"/dev/pts/" in output and b"42" in output


def test_a_port_is_reached_through_the_edge(sandbox):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sandbox.files.write("www/index.html", "hello\n")
    sandbox.commands.run(
        f"python3 -m http.server {port} --bind 127.0.0.1 -d www", background=True, timeout=0
    ).disconnect()
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}

    def get():
        return httpx.get(sandbox.envd_api_url, headers=headers, timeout=20)

    until(lambda: get().status_code == 200, what="the port")
    answer = get()
    assert (answer.text, answer.headers[HEADER]) == ("hello\n", "none")


def test_life(fake):
    with Sandbox.create(timeout=60, metadata={"of": "fake"}, envs={"A": "b"}, **fake.opts) as sandbox:
        assert sandbox.commands.run("echo $A").stdout == "b\n"
        pages = Sandbox.list(**fake.opts)
        assert sandbox.sandbox_id in [info.sandbox_id for info in pages.next_items()]
        before = sandbox.get_info().end_at
        sandbox.set_timeout(600)
        assert sandbox.get_info().end_at > before
        again = Sandbox.connect(sandbox.sandbox_id, **fake.opts)
        assert again.commands.run("echo $A").stdout == "b\n"
        code, ledger = fake.ledger()
        assert code == 0 and ledger["counts"]["process"]["owned"] >= 1, ledger
        assert sandbox.kill()
        assert not sandbox.is_running()
    short = Sandbox.create(timeout=1, **fake.opts)
    until(lambda: not short.is_running(), what="the end of its time")


def test_a_restart_finds_sandboxes_and_their_commands(fake, sandbox):
    command = sandbox.commands.run("sleep 12347", background=True, timeout=0)
    command.disconnect()
    for end in (fake.stop, fake.kill):
        end()
        assert running("sleep 12347")
        fake.start()
        assert command.pid in [process.pid for process in sandbox.commands.list()]
    assert sandbox.commands.kill(command.pid)


def test_every_answer_says_that_nothing_isolates(fake, sandbox):
    with httpx.Client(base_url=fake.url, timeout=60) as client:
        of_sandbox = {"E2b-Sandbox-Id": sandbox.sandbox_id}
        for status, path, headers in [
            (200, "/v1/info", fake.headers),
            (200, "/v2/sandboxes", fake.headers),
            (200, f"/v1/sandboxes/{sandbox.sandbox_id}", fake.headers),
            (204, "/health", {}),
            (401, "/v2/sandboxes", {}),
            (404, "/nowhere", fake.headers),
            (404, "/sandboxes/" + "0" * 20, fake.headers),
            (204, "/health", {**of_sandbox, "E2b-Sandbox-Port": "49983"}),
            (502, "/", {**of_sandbox, "E2b-Sandbox-Port": "1"}),
            (502, "/", {"E2b-Sandbox-Id": "0" * 20, "E2b-Sandbox-Port": "1"}),
            (400, "/", of_sandbox),
        ]:
            answer = client.get(path, headers=headers)
            assert (answer.status_code, answer.headers.get(HEADER)) == (status, "none"), path
        info = client.get("/v1/info", headers=fake.headers).json()
        assert info["engine"]["isolation"] == "none"
        assert {"airlock", "own_files"} <= set(info["engine"]["refuses"])
        view = client.get(f"/v1/sandboxes/{sandbox.sandbox_id}", headers=fake.headers).json()
        assert (view["isolation"], view["network"]) == ("none", "machine")


def test_the_command_line_works_and_warns(fake, sandbox):
    warning = "warning: nothing isolates this sandbox"
    done = fake.cli("run", "--", "sh", "-c", "echo out; exit 4", check=False)
    assert (done.returncode, done.stdout) == (4, "out\n")
    assert warning in done.stderr
    done = fake.cli("sandbox", "exec", sandbox.sandbox_id, "--", "pwd")
    assert done.stdout.endswith(f"{sandbox.sandbox_id}/home\n") and warning in done.stderr
    listed = fake.cli("sandbox", "list", "--json")
    assert sandbox.sandbox_id in listed.stdout and warning not in listed.stderr
    keys = fake.cli("key", "list", "--data-dir", str(fake.data_dir), "--json")
    assert [key["name"] for key in json.loads(keys.stdout)] == ["first"]


def test_what_a_killed_agent_leaves_is_found_and_ended(fake):
    sandbox = Sandbox.create(timeout=60, **fake.opts)
    agent = int(sandbox.commands.run("echo $PPID").stdout)
    sandbox.commands.run("setsid sleep 12348", background=True, timeout=0).disconnect()
    os.kill(agent, 9)
    until(lambda: not sandbox.is_running(), what="the end of the sandbox")
    fake.assert_nothing_left()
    assert not running("sleep 12348")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "fake"], "add --unsafe-no-isolation"),
        ([*ACCEPTED, "--listen", "0.0.0.0:0"], "listen on a loopback address"),
        (["--unsafe-no-isolation"], "as root"),
        (["--engine", "gvisor", "--unsafe-no-isolation"], "as root"),
    ],
)
def test_it_does_not_start_by_accident(folder, options, message):
    data = folder / "never"
    command = [*AS_NOBODY, str(folder / "sandglass"), "serve", "--data-dir", str(data), *options]
    refused = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert refused.returncode != 0 and message in refused.stderr
    assert "Traceback" not in refused.stderr and not data.exists()


def test_the_file_can_accept_it_too(folder):
    config = folder / "config.toml"
    command = [*AS_NOBODY, str(folder / "sandglass"), "serve", "--config", str(config)]
    for text, message in [
        ('engine = "fake"\n', "add --unsafe-no-isolation"),
        ('engine = "fake"\nunsafe_no_isolation = true\nlisten = "0.0.0.0:0"\n', "listen on a loopback address"),
    ]:
        config.write_text(text + f'data_dir = "{folder}/never"\n')
        refused = subprocess.run(command, text=True, capture_output=True, timeout=60)
        assert refused.returncode != 0 and message in refused.stderr
    data = data_folder(folder, "by-file")
    config.write_text(f'engine = "fake"\nunsafe_no_isolation = true\ndata_dir = "{data}"\n')
    server = Server(data)
    server.program = [*AS_NOBODY, str(folder / "sandglass")]
    server.options = ["--config", str(config)]
    server.start()
    finish(server)


def test_folders_of_others_are_refused(fake, folder):
    """Neither root nor anybody else works in a folder that another user may change."""
    ours, theirs = data_folder(folder, "of-root", uid=0), data_folder(folder, "of-nobody")
    nobody = [*AS_NOBODY, str(folder / "sandglass")]
    for command, place, message in [
        (nobody, ours, "must belong to the user who does this"),
        ([PROGRAM], theirs, "must belong to root"),
        ([PROGRAM], fake.data_dir, "must belong to root"),
    ]:
        for verb in (["serve", "--listen", "127.0.0.1:0", *ACCEPTED], ["key", "list"]):
            refused = subprocess.run(
                [*command, *verb, "--data-dir", str(place)], text=True, capture_output=True, timeout=60
            )
            assert refused.returncode != 0 and message in refused.stderr
    assert not list(ours.iterdir()) and not list(theirs.iterdir())


def test_started_by_root_the_half_that_reads_hostile_bytes_has_no_privilege_all_the_same(folder):
    server = Server(data_folder(folder, "by-root", uid=0))
    server.options = ACCEPTED + ["--cache-dir", str(folder / "cache")]
    server.start()
    try:
        status = status_of(server.pid)
        assert "0" not in status["Uid"].split() and int(status["CapEff"], 16) == 0
        assert "NOTHING ISOLATES" in server.log_path.read_text()
        with Sandbox.create(timeout=60, **server.opts) as sandbox:
            assert sandbox.commands.run("id -u").stdout == "0\n"
    finally:
        finish(server)


def test_time_is_up_with_a_dead_server(folder):
    server = Server(data_folder(folder, "dead"))
    server.program = [*AS_NOBODY, str(folder / "sandglass")]
    server.options = ACCEPTED
    server.start()
    brief = Sandbox.create(timeout=5, **server.opts)
    longer = Sandbox.create(timeout=600, **server.opts)
    crash(server, "both")
    sandboxes = server.data_dir / "host/sandboxes"
    until(lambda: os.listdir(sandboxes) == [longer.sandbox_id], within=60, what="the end of one and of no other")
    server.start()
    record = httpx.get(f"{server.url}/v1/sandboxes/{brief.sandbox_id}", headers=server.headers).json()
    assert record["end_reason"] == "timeout"
    assert longer.commands.run("echo alive").stdout == "alive\n"
    finish(server)
