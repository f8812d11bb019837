"""Templates that hold running processes: built in a sandbox of their own, restored as often as wanted."""

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2b import Sandbox
from faults import log_size, reached
from support import until

# What runs on: it counts in memory and shows it, so a copy can be told from what was started anew.
COUNTER = """
import os, time
n = 0
while True:
    n += 1
    with open("/var/lib/counter/new", "w") as file:
        file.write(f"{os.getpid()} {n} {os.getuid()} {os.getcwd()} {os.environ['COLOUR']}")
    os.replace("/var/lib/counter/new", "/var/lib/counter/now")
    time.sleep(0.02)
"""

SETUP = """
set -eu
echo "setting up as $(id -un) in $PWD"
echo "$COLOUR" >/etc/colour
install -m 755 counter.py /usr/local/lib/counter.py
install -d -o user /var/lib/counter
"$PWD/tools/mark" /etc/marked
"""

DEFINITION = {
    "name": "counter",
    "setup": "setup.sh",
    "start": "exec python3 /usr/local/lib/counter.py",
    "ready": "test -s /var/lib/counter/now",
    "workdir": "/srv",
    "memory_mib": 512,
    "cpu": 1,
    "disk_mib": 512,
    "env": {"COLOUR": "a b'c"},
}


def folder(where, definition=None, **files):
    """A template's folder, as its author has it."""
    definition = DEFINITION if definition is None else definition
    where.mkdir(parents=True, exist_ok=True)
    # JSON's strings, numbers and lists are TOML's; tables come last.
    plain = [f"{key} = {json.dumps(value)}" for key, value in definition.items() if not isinstance(value, dict)]
    tables = [
        f"[{key}]\n" + "\n".join(f"{name} = {json.dumps(text)}" for name, text in value.items())
        for key, value in definition.items()
        if isinstance(value, dict)
    ]
    (where / "template.toml").write_text("\n".join(plain + tables) + "\n")
    (where / "setup.sh").write_text(files.get("setup", SETUP))
    (where / "counter.py").write_text(COUNTER)
    (where / "tools").mkdir(exist_ok=True)
    (where / "tools/mark").write_text("#!/bin/sh\necho marked >$1\n")
    (where / "tools/mark").chmod(0o755)
    return where


def build(server, where, **options):
    return server.cli("template", "build", str(where), **options)


def call(server, method: str, path: str, **options) -> httpx.Response:
    return httpx.request(method, server.url + path, **({"headers": server.headers, "timeout": 120} | options))


def counted(sandbox) -> tuple[int, int, str]:
    """Its process, how far it has come, and what else it says of itself."""
    pid, n, rest = sandbox.commands.run("cat /var/lib/counter/now").stdout.split(" ", 2)
    return int(pid), int(n), rest


def create(server, template: str) -> tuple[Sandbox, str]:
    """A sandbox of the template, and which way it came to run."""
    body = {"templateID": template, "timeout": 300}
    response = call(server, "POST", "/v2/sandboxes", json=body)
    assert response.status_code == 201, response.text
    sandbox = Sandbox.connect(response.json()["sandboxID"], **server.opts)
    return sandbox, response.headers["sandglass-origin"]


def sandboxes(server) -> list[str]:
    response = call(server, "GET", "/v2/sandboxes")
    return [row["sandboxID"] for row in response.json()]


# Sandboxes that are none of a test's: those of other files may be paused.
OTHERS = set()


@pytest.fixture(autouse=True)
def others(server):
    OTHERS.clear()
    OTHERS.update(sandboxes(server))


def no_sandbox(server) -> bool:
    return set(sandboxes(server)) <= OTHERS


def images(server) -> list[str]:
    return sorted(entry.name for entry in (server.data_dir / "host" / "images").iterdir())


def another_agent(server, image: str):
    """Makes an image look as one that was made with another agent."""
    meta = server.data_dir / "host" / "images" / image / "meta.json"
    said = json.loads(meta.read_text())
    said["pinned"]["agent"] = "0" * 64
    meta.write_text(json.dumps(said))


@pytest.fixture
def built(server, tmp_path):
    """The counter, built on the server that most tests share."""
    result = build(server, folder(tmp_path / "counter"))
    yield result
    call(server, "DELETE", "/v1/templates/counter")


def test_copies_go_on_where_the_template_was(server, built):
    assert "setting up as root in /run/sandglass/build" in built.stderr
    assert "the template 'counter' is ready" in built.stdout
    assert no_sandbox(server), "the sandbox of the build is gone"
    copies = [create(server, "counter") for _ in range(3)]
    pids = set()
    for copy, origin in copies:
        assert origin == "template; path=restore"
        pid, n, rest = counted(copy)
        pids.add(pid)
        assert rest == f"{copy.commands.run('id -u').stdout.strip()} /srv a b'c"
        until(lambda copy=copy, n=n: counted(copy)[1] > n, what="it counts on")
        assert copy.commands.run("pwd; echo $COLOUR; cat /etc/marked").stdout == "/srv\na b'c\nmarked\n"
        assert not copy.files.exists("/run/sandglass/build")
        info = call(server, "GET", f"/v1/sandboxes/{copy.sandbox_id}").json()
        assert (info["template"], info["origin"], info["start_path"]) == ("counter", "template", "restore")
        assert (info["limits"]["memory_mib"], info["limits"]["cpus"], info["limits"]["disk_mib"]) == (512, 1, 512)
    assert len(pids) == 1, "it is the same process in all of them"
    # Each is its own.
    copies[0][0].commands.run("echo mine >/etc/marked", user="root")
    assert copies[1][0].commands.run("cat /etc/marked").stdout == "marked\n"
    # What it started is no command of a client: it keeps nobody from being idle.
    assert [process.cmd for process in copies[0][0].commands.list() if "counter" in process.cmd] == []
    for copy, _ in copies:
        copy.kill()


def test_it_is_shown_listed_and_deleted(server, built):
    shown = json.loads(server.cli("template", "show", "counter").stdout)
    assert (shown["base"], shown["user"], shown["workdir"]) == ("base", "user", "/srv")
    assert shown["tree_bytes"] >= shown["image"]["disk"]["bytes"] > 0
    listed = server.cli("template", "list").stdout
    assert "counter" in listed and "base" in listed
    copy, _ = create(server, "counter")
    snapshot = copy.create_snapshot()
    server.cli("template", "delete", "counter")
    assert call(server, "GET", "/v1/templates/counter").status_code == 404
    assert call(server, "POST", "/v2/sandboxes", json={"templateID": "counter"}).status_code == 404
    # What was made from it has all that it needs, also to come back and to be copied.
    copy.pause()
    copy = Sandbox.connect(copy.sandbox_id, **server.opts)
    before = counted(copy)
    again = Sandbox.create(snapshot.snapshot_id, **server.opts)
    assert counted(again)[0] == before[0]
    assert again.commands.run("pwd; echo $COLOUR").stdout == "/srv\na b'c\n"
    for one in (copy, again):
        one.kill()
    Sandbox.delete_snapshot(snapshot.snapshot_id, **server.opts)
    refused = server.cli("template", "delete", "base", check=False)
    assert refused.returncode == 1 and "prepared by the server" in refused.stderr


def test_all_teams_make_sandboxes_of_it_and_operators_alone_build(server, built):
    def admin(*args):
        return server.cli(*args, "--data-dir", str(server.data_dir)).stdout

    admin("team", "create", "users-of-templates")
    key = admin("key", "create", "--team", "users-of-templates").strip().split()[-1]
    theirs = {"headers": {"X-API-Key": key}}
    made = call(server, "POST", "/v2/sandboxes", json={"templateID": "counter"}, **theirs)
    assert (made.status_code, made.headers["sandglass-origin"]) == (201, "template; path=restore")
    assert call(server, "DELETE", f"/sandboxes/{made.json()['sandboxID']}", **theirs).status_code == 204
    for method, path in [
        ("GET", "/v1/templates"),
        ("GET", "/v1/templates/counter"),
        ("POST", "/v1/templates"),
        ("POST", "/v1/templates/builds"),
        ("DELETE", "/v1/templates/counter"),
    ]:
        assert call(server, method, path, json={}, **theirs).status_code == 403, (method, path)
    assert call(server, "DELETE", "/templates/counter", **theirs).status_code == 403


@pytest.mark.parametrize(
    ("change", "setup", "said"),
    [
        ({}, "echo almost; echo no >&2; exit 3", "setup.sh ended with exit code 3"),
        ({"start": "echo broken; exit 4"}, SETUP, "exit status 4"),
        ({"start": "sleep 1; echo broken later; exit 7", "ready": "sleep 2"}, SETUP, "exit status 7; its last lines: broken later"),
        ({"ready": "echo not yet; exit 5", "ready_timeout": 1}, SETUP, "not yet"),
        ({"user": "nobody-there"}, SETUP, "nobody-there"),
    ],
)
def test_a_build_that_fails_changes_nothing_and_leaves_nothing(server, tmp_path, built, change, setup, said):
    before = json.loads(server.cli("template", "show", "counter").stdout)
    there = images(server)
    failed = build(server, folder(tmp_path / "worse", DEFINITION | change, setup=setup), check=False)
    assert failed.returncode == 1, failed.stderr
    assert said in failed.stderr, failed.stderr
    assert json.loads(server.cli("template", "show", "counter").stdout) == before
    until(lambda: no_sandbox(server) and images(server) == there, within=60, what="nothing is left")


def test_what_leaves_others_behind_may_end_well(server, tmp_path):
    definition = {"name": "daemon", "start": "setsid sleep 4321 & sleep 0.5", "ready": "sleep 1"}
    build(server, folder(tmp_path / "daemon", definition, setup="true"))
    copy, origin = create(server, "daemon")
    assert origin == "template; path=restore"
    assert copy.commands.run("pgrep -cx sleep || true").stdout.strip() == "1"
    assert not copy.files.exists("/run/template-start")
    copy.kill()
    server.cli("template", "delete", "daemon")


def test_a_new_one_replaces_the_old_one_and_its_sandboxes_live_on(server, tmp_path, built):
    old, _ = create(server, "counter")
    pid, n, _ = counted(old)
    before = json.loads(server.cli("template", "show", "counter").stdout)
    build(server, folder(tmp_path / "counter", DEFINITION | {"env": {"COLOUR": "blue"}}))
    after = json.loads(server.cli("template", "show", "counter").stdout)
    assert after["image"]["id"] != before["image"]["id"] and after["env"]["COLOUR"] == "blue"
    until(lambda: before["image"]["id"] not in images(server), within=60, what="the old image is gone")
    new, origin = create(server, "counter")
    assert (new.commands.run("echo $COLOUR").stdout, origin) == ("blue\n", "template; path=restore")
    assert old.commands.run("echo $COLOUR").stdout == "a b'c\n"
    assert counted(old)[0] == pid and counted(old)[1] > n
    for sandbox in (old, new):
        sandbox.kill()


def test_one_is_built_on_another(server, tmp_path, built):
    more = {"name": "counter-more", "base": "counter", "setup": "setup.sh", "env": {"MORE": "1"}}
    build(server, folder(tmp_path / "more", more, setup="cat /etc/marked && echo more >/etc/more"))
    copy, origin = create(server, "counter-more")
    assert origin == "template; path=restore"
    n = counted(copy)[1]
    until(lambda: counted(copy)[1] > n, what="what its base started counts on")
    assert copy.commands.run("cat /etc/marked /etc/more; echo $COLOUR $MORE").stdout == "marked\nmore\na b'c 1\n"
    copy.kill()
    refused = build(server, folder(tmp_path / "more", more | {"memory_mib": 1024}), check=False)
    assert refused.returncode == 1 and "leave them out" in refused.stderr
    server.cli("template", "delete", "counter-more")


def test_base_itself_has_a_running_image_and_nothing_else_can_be_said(server, tmp_path):
    result = build(server, "templates/base")
    assert "the template 'base' is ready" in result.stdout
    copy, origin = create(server, "base")
    assert origin == "template; path=restore"
    assert copy.commands.run("echo hi; id -un; pwd").stdout == "hi\nuser\n/home/user\n"
    copy.kill()
    refused = build(server, folder(tmp_path / "base", {"name": "base", "start": "sleep 1"}), check=False)
    assert refused.returncode == 1 and "choose another name" in refused.stderr
    server.cli("template", "delete", "base")
    copy, origin = create(server, "base")
    assert origin == "template; path=cold"
    copy.kill()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = 'a/b'", "no name for a template"),
        ("nonsense = 1", "nonsense"),
        ("base = 'nowhere'", "template 'nowhere' not found"),
        ("memory_mib = 1", "memory_mib must be between"),
        ("ready_timeout = 0", "ready_timeout"),
        ("allow = ['not a host']", "allow"),
        ("features = ['nowhere']", "nowhere"),
        ("workdir = 'srv'", "workdir"),
        ("setup = 'missing.sh'", "no file of the folder"),
        ("name =", "no TOML"),
    ],
)
def test_what_is_no_template_is_refused_with_its_field(server, tmp_path, text, said):
    where = tmp_path / "wrong"
    where.mkdir()
    (where / "template.toml").write_text(text + "\n")
    refused = build(server, where, check=False)
    assert refused.returncode == 1 and said in refused.stderr, refused.stderr
    assert no_sandbox(server)


def test_interrupted_it_leaves_nothing(server, tmp_path):
    where = folder(tmp_path / "slow", DEFINITION | {"name": "slow"}, setup="echo begun; sleep 1000")
    env = dict(os.environ, E2B_API_URL=server.url, E2B_API_KEY=server.api_key)
    building = subprocess.Popen(
        [*server.program, "template", "build", where], env=env, stderr=subprocess.PIPE, text=True
    )
    for line in building.stderr:
        if "begun" in line:
            break
    building.send_signal(signal.SIGINT)
    assert "interrupted" in building.stderr.read()
    assert building.wait(60) == 1
    until(lambda: no_sandbox(server), within=60, what="its sandbox is gone")
    assert call(server, "GET", "/v1/templates/slow").status_code == 404


def test_a_server_that_dies_during_a_build_has_the_template_of_before(lone_server, tmp_path):
    server = lone_server
    where = folder(tmp_path / "slow", DEFINITION | {"name": "slow"}, setup="echo begun; sleep 1000")
    env = dict(os.environ, E2B_API_URL=server.url, E2B_API_KEY=server.api_key)
    building = subprocess.Popen(
        [*server.program, "template", "build", where], env=env, stderr=subprocess.PIPE, text=True
    )
    for line in building.stderr:
        if "begun" in line:
            break
    server.kill()
    said = building.stderr.read()
    assert building.wait(60) == 1
    assert "the next start of the server ends it" in said
    server.start()
    assert call(server, "GET", "/v1/templates/slow").status_code == 404
    until(lambda: sandboxes(server) == [], within=60, what="the sandbox of the build to end")
    assert images(server) == []
    server.assert_nothing_left()


def test_a_sandbox_of_something_else_becomes_no_template(server, tmp_path):
    sandbox = Sandbox.create(timeout=120)
    body = {"sandbox": sandbox.sandbox_id, "template": {"name": "stolen"}}
    refused = call(server, "POST", "/v1/templates", json=body)
    assert refused.status_code == 409 and "was not made for this template" in refused.json()["message"]
    sandbox.kill()


def test_what_it_started_keeps_nobody_from_being_idle(server, built):
    body = {"templateID": "counter", "timeout": 600, "idleTimeout": 2}
    made = call(server, "POST", "/v2/sandboxes", json=body)
    assert made.headers["sandglass-origin"] == "template; path=restore", made.text
    id = made.json()["sandboxID"]
    info = lambda: call(server, "GET", f"/v1/sandboxes/{id}").json()
    until(lambda: info()["state"] == "ended", within=120, what="its idle window is over")
    assert info()["end_reason"] == "timeout"


def test_one_whose_hook_fails_is_started_cold(server, tmp_path):
    hook = "/etc/sandglass/on-restore.d/never"
    setup = SETUP + f"install -d /etc/sandglass/on-restore.d\nprintf '#!/bin/sh\\nexit 9\\n' >{hook}\nchmod 755 {hook}\n"
    build(server, folder(tmp_path / "hooked", DEFINITION | {"name": "hooked"}, setup=setup))
    copy, origin = create(server, "hooked")
    assert origin == "template; path=cold"
    n = counted(copy)[1]
    until(lambda: counted(copy)[1] > n, what="it counts")
    events = call(server, "GET", f"/v1/sandboxes/{copy.sandbox_id}").json()["events"]
    assert any("never" in event["detail"] for event in events), events
    copy.kill()
    server.cli("template", "delete", "hooked")


def test_killed_on_the_way_to_a_cold_start_nothing_is_left(lone_server, tmp_path):
    server = lone_server
    build(server, folder(tmp_path / "counter"))
    image = json.loads(server.cli("template", "show", "counter").stdout)["image"]["id"]
    another_agent(server, image)
    server.stop()
    log_from = log_size(server)
    server.start(failpoints="control.template.cold=hang")
    with ThreadPoolExecutor(1) as pool:
        creating = pool.submit(call, server, "POST", "/v2/sandboxes", json={"templateID": "counter"})
        until(lambda: "control.template.cold" in reached(server, log_from), within=120, what="it hangs")
        server.kill()
        assert isinstance(creating.exception(), httpx.TransportError)
    server.start()
    until(lambda: images(server) == [image], within=60, what="the template is there, and nothing else")
    copy, origin = create(server, "counter")
    assert origin == "template; path=cold"
    copy.kill()
    server.cli("template", "delete", "counter")
    server.assert_nothing_left()


def test_it_survives_a_restart_and_an_image_that_does_not_fit_is_made_anew(lone_server, tmp_path):
    server = lone_server
    build(server, folder(tmp_path / "counter"))
    server.kill()
    server.start()
    copy, origin = create(server, "counter")
    assert origin == "template; path=restore"
    copy.kill()
    image = json.loads(server.cli("template", "show", "counter").stdout)["image"]["id"]
    another_agent(server, image)
    cold, origin = create(server, "counter")
    assert origin == "template; path=cold"
    # Its files are there, and what it starts was started anew.
    assert cold.commands.run("cat /etc/marked; echo $COLOUR; pwd").stdout == "marked\na b'c\n/srv\n"
    n = counted(cold)[1]
    until(lambda: counted(cold)[1] > n, what="it counts")
    events = call(server, "GET", f"/v1/sandboxes/{cold.sandbox_id}").json()["events"]
    assert any("it was started cold" in event["detail"] and "agent" in event["detail"] for event in events)
    cold.kill()

    def restored():
        copy, origin = create(server, "counter")
        copy.kill()
        return origin == "template; path=restore"

    until(restored, within=180, what="its image was made anew")
    assert json.loads(server.cli("template", "show", "counter").stdout)["image"]["id"] != image
    until(lambda: image not in images(server), within=60, what="the old image is gone")
    server.cli("template", "delete", "counter")
    until(lambda: images(server) == [], within=60, what="no image is left")


@pytest.mark.parametrize("end", ["kill", "stop"])
@pytest.mark.parametrize("point", ["control.snapshot.insert", "control.snapshot.image", "control.snapshot.ready"])
def test_killed_or_stopped_while_it_is_written_it_is_as_it_was(lone_server, tmp_path, point, end):
    server = lone_server
    build(server, folder(tmp_path / "counter"))
    before = json.loads(server.cli("template", "show", "counter").stdout)
    server.stop()
    log_from = log_size(server)
    server.start(failpoints=f"{point}=hang")
    env = dict(os.environ, E2B_API_URL=server.url, E2B_API_KEY=server.api_key)
    building = subprocess.Popen(
        [*server.program, "template", "build", tmp_path / "counter"], env=env, stderr=subprocess.PIPE, text=True
    )
    until(lambda: point in reached(server, log_from), within=120, what="it hangs")
    getattr(server, end)()
    building.communicate(timeout=60)
    server.start()
    assert json.loads(server.cli("template", "show", "counter").stdout) == before
    until(lambda: images(server) == [before["image"]["id"]], within=60, what="what was half written is gone")
    until(lambda: sandboxes(server) == [], within=60, what="the sandbox of the build is gone")
    copy, origin = create(server, "counter")
    assert origin == "template; path=restore"
    copy.kill()
    server.cli("template", "delete", "counter")


def test_who_has_a_key_of_the_team_alone_is_not_told_how_to_get_into_a_build(server, tmp_path):
    key = server.cli("key", "create", "--data-dir", str(server.data_dir), "--name", "plain").stdout.split()[-1]
    body = {"name": "watched", "setup": "true"}
    made = call(server, "POST", "/v1/templates/builds", json=body)
    assert made.status_code == 201, made.text
    id = made.json()["sandboxID"]
    assert made.json()["envdAccessToken"]
    for path, options in (("", {}), ("/connect", {"json": {"timeout": 60}})):
        method = "POST" if path else "GET"
        told = call(server, method, f"/sandboxes/{id}{path}", headers={"X-API-Key": key}, **options)
        assert told.status_code == 200 and not told.json().get("envdAccessToken"), told.text
    # Nobody passes for one.
    marked = {"templateID": "base", "metadata": {"sandglass.template": "watched"}}
    refused = call(server, "POST", "/v2/sandboxes", json=marked)
    assert refused.status_code == 400 and "sandglass.template" in refused.json()["message"]
    Sandbox.kill(id)


def test_an_environment_that_does_not_fit_is_refused_and_costs_the_template_nothing(server, built):
    image = json.loads(server.cli("template", "show", "counter").stdout)["image"]["id"]
    body = {"templateID": "counter", "envVars": {"A": "\x01" * 64_000}}
    refused = call(server, "POST", "/v2/sandboxes", json=body)
    assert refused.status_code == 400 and "envVars" in refused.json()["message"]
    assert json.loads(server.cli("template", "show", "counter").stdout)["image"]["id"] == image


def test_what_its_base_started_is_started_again_as_well(lone_server, tmp_path):
    server = lone_server
    build(server, folder(tmp_path / "counter"))
    more = {"name": "more", "base": "counter", "start": "touch /tmp/mine; exec sleep 100000"}
    build(server, folder(tmp_path / "more", more, setup="true"))
    image = json.loads(server.cli("template", "show", "more").stdout)["image"]["id"]
    another_agent(server, image)
    cold, origin = create(server, "more")
    assert origin == "template; path=cold"
    n = counted(cold)[1]
    until(lambda: counted(cold)[1] > n, what="it counts")
    assert cold.files.exists("/tmp/mine")
    cold.kill()
    for name in ("more", "counter"):
        server.cli("template", "delete", name)
