"""The command line, as scripts use it."""

import json
import re
import uuid

import pytest
from e2b import Sandbox
from support import until


def test_run_streams_and_exits_with_the_commands_code(server):
    result = server.cli("run", "--", "sh", "-c", "echo out; echo err >&2; exit 7", check=False)
    assert (result.returncode, result.stdout) == (7, "out\n")
    assert "err\n" in result.stderr
    server.cli("run", "--timeout", "60", "--", "true")
    listed = json.loads(server.cli("sandbox", "list", "--json").stdout)
    assert not [item for item in listed if item["sandboxID"] in result.stderr]


def test_run_passes_arguments_untouched(server):
    result = server.cli("run", "--", "printf", "%s|", "a b", "$HOME", "'", "--json")
    assert result.stdout == "a b|$HOME|'|--json|"


def test_run_with_an_unknown_template_fails(server):
    result = server.cli("run", "--template", "no-such-template", "--", "true", check=False)
    assert result.returncode != 0 and "no-such-template" in result.stderr


def test_sandbox_verbs(server, fresh):
    listed = json.loads(server.cli("sandbox", "list", "--json").stdout)
    assert fresh.sandbox_id in json.dumps(listed)
    assert fresh.sandbox_id in server.cli("sandbox", "list").stdout
    info = json.loads(server.cli("sandbox", "info", "--json", fresh.sandbox_id).stdout)
    assert (info["id"], info["engine"], info["state"]) == (fresh.sandbox_id, "gvisor", "running")
    done = server.cli("sandbox", "exec", fresh.sandbox_id, "--", "sh", "-c", "whoami; exit 3", check=False)
    assert (done.returncode, done.stdout) == (3, "user\n")
    done = server.cli("sandbox", "exec", "--user", "root", "--cwd", "/tmp", fresh.sandbox_id, "--", "pwd")
    assert done.stdout == "/tmp\n"
    server.cli("sandbox", "kill", fresh.sandbox_id)
    assert not fresh.is_running()
    kill_again = ("sandbox", "kill", fresh.sandbox_id)
    until(lambda: server.cli(*kill_again, check=False).returncode != 0, what="nothing left to kill")
    ended = json.loads(server.cli("sandbox", "info", "--json", fresh.sandbox_id).stdout)
    assert ended["state"] in ("ending", "ended") and ended["end_reason"] == "killed"


def test_teams_and_keys(server):
    local = ("--data-dir", str(server.data_dir))
    server.cli("team", "create", *local, "reds")
    assert "reds" in server.cli("team", "list", *local).stdout
    made = server.cli("key", "create", *local, "--team", "reds", "--name", "ci", "--json")
    key = re.search(r"e2b_[0-9a-f]{40}", made.stdout)[0]
    listing = server.cli("key", "list", *local, "--json").stdout
    assert key not in listing
    Sandbox.create(timeout=30, api_key=key).kill(api_key=key)
    ours = [item for item in json.loads(listing) if item.get("name") == "ci"]
    server.cli("key", "revoke", *local, ours[0]["id"])
    with pytest.raises(Exception, match="401"):
        Sandbox.create(timeout=30, api_key=key)
    server.cli("team", "revoke", *local, "reds")


def test_the_secret_of_a_key_is_nowhere_on_disk(server):
    stored = b"".join(
        path.read_bytes() for path in (server.data_dir / "serve").rglob("*") if path.is_file()
    )
    assert server.api_key.encode() not in stored


def test_ledger_counts_what_runs(server, fresh):
    code, ledger = server.ledger(wait=5)
    assert code == 0 and ledger["sandboxes"] >= 1 and ledger["left_over"] == []


def test_ledger_of_no_data_folder_fails(server, tmp_path):
    assert server.cli("ledger", "--data-dir", str(tmp_path), check=False).returncode != 0


def test_help_is_there_for_everything(server):
    for verb in [(), ("serve",), ("run",), ("sandbox", "exec"), ("ledger",), ("team", "create"), ("key", "create")]:
        assert "Usage:" in server.cli(*verb, "--help").stdout


def test_without_a_key_the_cli_says_what_to_do(server):
    import os
    import subprocess

    from support import PROGRAM

    env = {name: value for name, value in os.environ.items() if name != "E2B_API_KEY"}
    result = subprocess.run([PROGRAM, "sandbox", "list"], env=env, capture_output=True, text=True)
    assert result.returncode != 0 and "E2B_API_KEY" in result.stderr


def test_sandboxes_are_found_by_label_and_age(server):
    odd, mark = "b c=&%é", uuid.uuid4().hex
    sandbox = Sandbox.create(timeout=60, metadata={"mark": mark, "odd": odd})
    other = Sandbox.create(timeout=60, metadata={"mark": mark})

    def listed(*args: str) -> set[str]:
        said = server.cli("sandbox", "list", "--json", *args).stdout
        return {one["sandboxID"] for one in json.loads(said)}

    try:
        both = {sandbox.sandbox_id, other.sandbox_id}
        assert listed("--metadata", f"mark={mark}") == both
        assert listed("--metadata", f"mark={mark}", "--metadata", f"odd={odd}") == {sandbox.sandbox_id}
        assert listed("--metadata", f"mark={mark}", "--older", "0s") == both
        assert listed("--metadata", f"mark={mark}", "--older", "1h") == set()
    finally:
        assert sandbox.kill() and other.kill()
    for wrong in (["--older", "1"], ["--metadata", "mark"]):
        assert server.cli("sandbox", "list", *wrong, check=False).returncode == 2


def test_paused_and_resumed_with_memory_and_without(server):
    sandbox = Sandbox.create(timeout=120)
    id, boot = sandbox.sandbox_id, lambda: sandbox.commands.run("cat /proc/sys/kernel/random/boot_id").stdout
    try:
        boots = [boot()]
        for pause, resume in [([], []), (["--files-only"], []), ([], ["--reboot"])]:
            server.cli("sandbox", "pause", *pause, id)
            server.cli("sandbox", "resume", *resume, "--timeout", "120", id)
            boots.append(boot())
        assert boots[0] == boots[1] and len(set(boots)) == 3
    finally:
        assert sandbox.kill()
