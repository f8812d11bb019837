"""Paths that are no files, or lead where they should not: refused at once, in words, and nothing is changed."""

import httpx
import pytest
from guest import Guest, refused, routing
from support import until

LONG = "/tmp" + "/d" * 2100
WIDE = "/tmp/" + "w" * 256
WIDE_UTF8 = "/tmp/" + "ü" * 128


@pytest.fixture(scope="module")
def guest(sandbox):
    sandbox.commands.run("useradd -m outsider", user="root")
    return Guest(sandbox)


def root(sandbox, command: str) -> str:
    return sandbox.commands.run(command, user="root").stdout


def everywhere(guest, path: str, *statuses: int):
    """Every operation that takes a path refuses it."""
    refused(guest.read(path), *statuses)
    refused(guest.write(path), *statuses)
    for method in ["Stat", "ListDir", "MakeDir", "Remove"]:
        refused(guest.files(method, path=path), *statuses)
    refused(guest.files("Move", source=path, destination="/tmp/elsewhere"), *statuses)
    refused(guest.files("Move", source="/etc/hostname", destination=path), *statuses)


@pytest.mark.parametrize(
    ("path", "hint"),
    [("/tmp/a\0b", "NUL"), (LONG, "4096 bytes"), (WIDE, "255 bytes"), (WIDE_UTF8, "255 bytes"), ("\0", "NUL")],
    ids=["NUL", "long", "wide", "wide in UTF-8", "only NUL"],
)
def test_texts_that_are_no_path(guest, path, hint):
    everywhere(guest, path, 400)
    assert hint in refused(guest.read(path), 400)


def test_the_longest_that_are_one(sandbox, guest):
    deep = "/tmp/" + "/".join(["d" * 255] * 15)
    path = f"{deep}/{'f' * (4095 - len(deep))}"
    assert len(path) == 4096
    assert guest.write(path, b"deep").status_code == 200
    assert guest.read(path).content == b"deep"
    assert guest.files("Remove", path="/tmp/" + "d" * 255).status_code == 200


@pytest.mark.parametrize("path", [b"/tmp/\xff", b"/tmp/\xc3\x28/x", b"/tmp/\xed\xa0\x80"])
def test_bytes_that_are_no_text(sandbox, guest, path):
    """They are not turned into another name on the way."""
    refused(guest.read(path), 400)
    refused(guest.write(path), 400)
    assert sandbox.commands.run("ls /tmp | grep -c '\ufffd' || true").stdout == "0\n"
    body = b'{"path":"' + path + b'"}'
    headers = {"Content-Type": "application/json"}
    refused(guest.http.post("/filesystem.Filesystem/Stat", content=body, headers=headers), 400)


def test_names_that_are_no_text_do_not_harm_a_listing(sandbox, guest):
    sandbox.commands.run("mkdir -p odd && touch odd/$'\\xff\\xfe' odd/$'\\n' odd/plain")
    names = {entry["name"] for entry in guest.files("ListDir", path="odd").json()["entries"]}
    assert names == {"\ufffd\ufffd", "\n", "plain"}
    refused(guest.read("odd/\ufffd\ufffd"), 404)
    assert guest.files("Remove", path="odd").status_code == 200
    sandbox.commands.run("test ! -e odd")


def test_more_folders_than_wait_for_their_removal(sandbox, guest):
    sandbox.commands.run("mkdir -p many/{1..3000}/x && touch many/{1..3000}/f")
    assert guest.files("Remove", path="many").status_code == 200
    sandbox.commands.run("test ! -e many")


def test_malformed_queries(guest):
    for query in ["path=/etc/hostname&path=/etc/passwd", "path=/x&signature_expiration=soon", "path=%ff"]:
        refused(guest.http.get(f"/files?{query}"), 400)
        refused(guest.http.post(f"/files?{query}", content=b""), 400)
    refused(guest.http.get("/files"), 400)
    refused(guest.http.get("/files?path="), 400)


@pytest.mark.parametrize("name", ["zero", "full", "null", "random", "urandom", "tty", "ptmx", "shm", "pts"])
def test_devices_are_no_files(guest, name):
    """Reading one would never end, and writing one with the agent's rights may do anything."""
    refused(guest.read(f"/dev/{name}"), 400)
    refused(guest.write(f"/dev/{name}"), 400, 403)
    refused(guest.write(f"/dev/{name}/x"), 400) if name not in ("shm", "pts") else None


@pytest.mark.parametrize("path", ["/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd/0", "/proc/self/fd/0"])
def test_the_agents_own_streams_are_not_for_clients(guest, path):
    """They are the session with the server: a byte written there would break it for all."""
    refused(guest.read(path), 403)
    refused(guest.write(path), 403)
    refused(guest.read(path.replace("self", "1")), 403)


@pytest.mark.parametrize(
    "link", ["/proc/self/root", "/proc/1/root", "/proc/1/cwd", "/proc/self/cwd", "/proc/1/task/1/root"]
)
def test_links_of_processes_lead_nowhere(sandbox, guest, link):
    """Whoever asks for it: by name, through a link that leads there, and to write as well as to read."""
    sandbox.commands.run(f"ln -sfn {link} trap")
    for path in [f"{link}/tmp/inside", "/home/user/trap/tmp/inside"]:
        refused(guest.read(path), 403)
        refused(guest.write(path, user="root"), 403)
        for method in ["Stat", "ListDir", "MakeDir", "Remove"]:
            refused(guest.files(method, "root", path=path), 403)
    sandbox.commands.run("test ! -e /tmp/inside")


@pytest.mark.parametrize("path", ["/proc/sysrq-trigger", "/proc/self/oom_score_adj", "/sys/x", "/proc/x"])
def test_interfaces_of_the_kernel_are_no_place_for_files(guest, path):
    refused(guest.write(path, user="root"), 400, 403)


def test_what_only_looks_like_a_file_never_blocks(sandbox, guest):
    """FIFOs and sockets, by name, through links, in forms, and as a directory."""
    sandbox.commands.run(
        "mkdir -p fake && cd fake && mkfifo pipe && ln -s pipe link && ln -s /dev/zero device && python3 -c "
        "'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'"
    )
    for name in ["pipe", "link", "socket", "device"]:
        path = f"/home/user/fake/{name}"
        refused(guest.read(path), 400)
        refused(guest.write(path), 400, 403)
        refused(guest.http.post("/files", files={"file": (path, b"x")}), 400, 403)
        refused(guest.files("ListDir", path=path), 400)
        everywhere(guest, f"{path}/x", 400)
    # Their names are names like any other.
    assert guest.files("Stat", path="fake/pipe").status_code == 200
    assert guest.files("Move", source="fake/pipe", destination="fake/moved").status_code == 200
    assert guest.files("Remove", path="fake").status_code == 200


def test_files_as_directories_and_the_other_way(sandbox, guest):
    sandbox.commands.run("mkdir -p kinds/dir && echo content > kinds/file")
    everywhere(guest, "/home/user/kinds/file/x", 400)
    refused(guest.read("kinds/dir"), 400)
    refused(guest.write("kinds/dir"), 400)
    refused(guest.write("kinds/dir/"), 400)
    refused(guest.write("/"), 400)
    refused(guest.files("MakeDir", path="kinds/file"), 400)
    refused(guest.files("Remove", path="/"), 400)
    refused(guest.files("Move", source="kinds", destination="kinds/dir/below-itself"), 400, 500)
    assert sandbox.commands.run("cat kinds/file").stdout == "content\n"


def test_links_that_dangle_or_loop(sandbox, guest):
    sandbox.commands.run(
        "mkdir -p links && cd links && ln -s nowhere dangling && ln -s one two && ln -s two one && "
        "ln -s self/self self && echo end > 51 && "
        "python3 -c 'import os; [os.symlink(str(n + 1), str(n)) for n in range(1, 51)]'"
    )
    refused(guest.read("links/dangling"), 404)
    for name in ["one", "self", "self/x", "1"]:
        refused(guest.read(f"links/{name}"), 400)
        refused(guest.write(f"links/{name}"), 400)
    assert guest.read("links/20").text == "end\n"
    # As everywhere on Unix, writing to a link that dangles makes what it names.
    assert guest.write("links/dangling", b"made").status_code == 200
    assert sandbox.commands.run("cat links/nowhere; stat -c %U links/nowhere").stdout == "madeuser\n"


@pytest.fixture
def treasure(sandbox):
    """What only root may write to; and what anybody may, but is root's all the same."""
    root(
        sandbox,
        "rm -rf /treasure && mkdir -p /treasure/closed && cd /treasure && echo gold > file && echo open > open && "
        "echo deep > closed/file && chmod 644 file && chmod 666 open closed/file && chmod 700 closed",
    )
    yield
    state = root(
        sandbox,
        "cd /treasure && ls -A . && cat file closed/file && stat -c '%n %U %a' file open closed closed/file",
    )
    assert state == (
        "closed\nfile\nopen\ngold\ndeep\nfile root 644\nopen root 666\nclosed root 700\nclosed/file root 666\n"
    )


@pytest.mark.parametrize("owner", ["outsider", "user"])
def test_a_users_link_gives_nobody_more_than_the_named_user_may(sandbox, guest, treasure, owner):
    """The agent is root, and whoever plants a link must not make it act with that against others."""
    home = f"/home/{owner}"
    sandbox.commands.run(
        f"cd {home} && ln -sfn /treasure dir && ln -sf /treasure/file file && ln -sf /treasure/new new && "
        "ln -sf /treasure/closed/file deep && ln -sf /treasure/open open",
        user=owner,
    )
    root(sandbox, f"chmod 755 {home}")
    below = ["dir/file", "dir/new", "dir/sub/new", "dir/closed/file", "dir/closed/new"]
    for path in ["file", "new", "deep", *below]:
        assert "permission" in refused(guest.write(f"{home}/{path}", user=owner), 403), path
    refused(guest.files("MakeDir", owner, path=f"{home}/dir/sub"), 403)
    refused(guest.files("Remove", owner, path=f"{home}/dir/file"), 403)
    refused(guest.files("Remove", owner, path=f"{home}/dir/closed"), 403)
    refused(guest.files("Move", owner, source=f"{home}/dir/file", destination=f"{home}/loot"), 403)
    sandbox.commands.run("echo x > loot", user=owner, cwd=home)
    refused(guest.files("Move", owner, source=f"{home}/loot", destination=f"{home}/dir/file"), 403)
    # What the user may, works; and a file that others may write to does not change hands.
    assert guest.write(f"{home}/open", b"written", user=owner).status_code == 200
    assert root(sandbox, "cat /treasure/open") == "written"
    # Looking is for the client, who may see everything.
    assert guest.read(f"{home}/deep").text == "deep\n"


def test_hard_links_to_what_is_anothers_can_not_be_made(sandbox, treasure):
    """They would lead past all of this. The guest's kernel refuses them."""
    linked = sandbox.commands.run("cd && ln -P /treasure/file hard 2>&1 || true", user="outsider")
    assert "not permitted" in linked.stdout
    assert root(sandbox, "stat -c %h /treasure/file") == "1\n"


RACE = r"""
import os
os.chdir("/home/outsider/arena")
os.makedirs("dir", exist_ok=True)
open("started", "w").close()
while not os.path.exists("/tmp/race-is-over"):
    # The file, and the directory of the other one, are links and are not, as fast as can be.
    os.symlink("/treasure/file", "l"); os.rename("l", "file")
    open("f", "w").close(); os.rename("f", "file")
    # The client makes directories that are missing, and may be the faster one.
    try:
        os.rename("dir", "aside"); os.symlink("/treasure", "dir")
        os.unlink("dir"); os.rename("aside", "dir")
    except OSError:
        os.system("rm -rf dir aside; mkdir dir")
    # A link that root made, and one that root did not.
    try:
        os.symlink("/treasure", "l"); os.rename("l", "named")
        os.unlink("named"); os.rename("of-root", "named")
        os.rename("named", "of-root")
    except OSError:
        os.system("rm -rf named l")
"""


def every_change(sandbox, guest, at: str):
    """Every way to change what is in a folder, once, as `outsider`."""
    octets = {"Content-Type": "application/octet-stream"}
    signed = httpx.URL(sandbox.upload_url(f"{at}/file", user="outsider")).raw_path.decode()
    query = {"username": "outsider"}
    # Without the token: the signature alone lets it in.
    yield "signed", httpx.post(guest.http.base_url.join(signed), headers=octets | routing(sandbox), content=b"x")
    yield "octets", guest.write(f"{at}/new", b"clobbered", user="outsider")
    part = {"file": ("whatever", b"clobbered")}
    yield "form", guest.http.post("/files", params=query | {"path": f"{at}/file"}, files=part)
    part = {"file": (f"{at}/file", b"clobbered")}
    yield "forms", guest.http.post("/files", params=query, files=part)
    yield "MakeDir", guest.files("MakeDir", "outsider", path=f"{at}/sub/below")
    yield "Move from", guest.files("Move", "outsider", source=f"{at}/file", destination="/home/outsider/loot")
    yield "Move to", guest.files("Move", "outsider", source="/home/outsider/loot", destination=f"{at}/file")
    for name in ["file", "new", "sub", "closed"]:
        yield "Remove", guest.files("Remove", "outsider", path=f"{at}/{name}")


def test_a_race_for_a_link_wins_nothing(sandbox, guest, treasure):
    """A program swaps what a client changes for a link to what is root's. In all verbs; see `races.rs` for many more tries."""
    root(
        sandbox,
        "rm -f /tmp/race-is-over; cd /home/outsider; chmod 755 .; rm -rf arena; install -d -o outsider arena arena/plain; "
        "ln -s plain arena/of-root",
    )
    sandbox.files.write("/tmp/race.py", RACE)
    racer = sandbox.commands.run("python3 /tmp/race.py", user="outsider", background=True, timeout=100)
    until(lambda: sandbox.files.exists("/home/outsider/arena/started"), what="the race")
    outcomes: dict[str, set[int]] = {}
    try:
        for _ in range(25):
            answer = guest.write("/home/outsider/arena/file", b"clobbered", user="outsider")
            outcomes.setdefault("file", set()).add(answer.status_code)
            for folder in ["dir", "named"]:
                for verb, answer in every_change(sandbox, guest, f"/home/outsider/arena/{folder}"):
                    outcomes.setdefault(verb, set()).add(answer.status_code)
                    if answer.status_code != 200:
                        refused(answer, 400, 403, 404, 409)
            # To look is allowed, and is told of one place or of the other.
            answer = guest.files("ListDir", path="/home/outsider/arena/dir", depth=2)
            names = {entry["name"] for entry in answer.json().get("entries", [])}
            assert "open" not in names or {"closed", "file"} <= names, names
    finally:
        root(sandbox, "touch /tmp/race-is-over")
    assert racer.wait().exit_code == 0
    # Both sides of the race were seen, so there was one.
    for verb, seen in outcomes.items():
        assert 200 in seen and seen & {400, 403, 404, 409}, outcomes


def test_a_refusal_reaches_a_client_that_is_still_sending(guest):
    """A connection that is closed under an upload would be broken for the client, and not refused."""
    data = b"d" * (16 << 20)
    for _ in range(3):
        for path in ["/tmp", "/dev/zero", "/proc/self/root/x", "/tmp/a\0b"]:
            refused(guest.write(path, data), 400, 403)


def agent_rss(sandbox) -> int:
    """Resident memory of the agent in KiB."""
    return int(root(sandbox, "grep ^VmRSS: /proc/1/status").split()[1])


def test_a_sparse_file_of_a_tebibyte(sandbox, guest):
    """It is offered whole, its parts are at hand, and nobody holds it in memory."""
    size = 1 << 40
    end = f"printf end | dd of=sparse bs=1 seek={size - 3} conv=notrunc"
    sandbox.commands.run(f"truncate -s {size} sparse && {end}")
    head = guest.http.head("/files", params={"path": "sparse"})
    assert (head.status_code, head.headers["content-length"]) == (200, str(size))
    last = guest.read("sparse", headers={"Range": "bytes=-3"})
    assert (last.status_code, last.content) == (206, b"end")
    refused(guest.read("sparse", headers={"Range": f"bytes={size}-"}), 416)
    before = agent_rss(sandbox)
    with guest.http.stream("GET", "/files", params={"path": "sparse"}) as stream:
        seen = 0
        for part in stream.iter_raw():
            assert part.strip(b"\0") == b""
            seen += len(part)
            if seen > 64 << 20:
                break
    assert agent_rss(sandbox) - before < 32 << 10
    sandbox.commands.run("rm sparse")


def test_a_file_that_grows_while_it_is_read_ends_where_it_was_announced(sandbox, guest):
    sandbox.commands.run("head -c 20000000 /dev/zero > growing")
    with guest.http.stream("GET", "/files", params={"path": "growing"}) as stream:
        parts = stream.iter_raw()
        seen = len(next(parts))
        sandbox.commands.run("head -c 20000000 /dev/urandom >> growing")
        seen += sum(len(part) for part in parts)
        assert seen == int(stream.headers["content-length"]) == 20_000_000


def test_a_file_that_shrinks_while_it_is_read_breaks_off(sandbox, guest):
    """What is missing can't be made up: the client must not take it for the whole."""
    sandbox.commands.run("head -c 50000000 /dev/zero > shrinking")
    with pytest.raises(Exception, match="(?i)peer closed|incomplete|disconnected"):
        with guest.http.stream("GET", "/files", params={"path": "shrinking"}) as stream:
            parts = stream.iter_raw()
            next(parts)
            sandbox.commands.run("truncate -s 10 shrinking")
            for _ in parts:
                pass
