"""Sealed: no way out, and it says so quickly."""

import time

import pytest
from e2b import CommandExitException, Sandbox


def failing(sandbox, command: str, timeout: float = 30):
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run(command, timeout=timeout)
    return failed.value


def test_names_do_not_resolve(sandbox):
    started = time.monotonic()
    failed = failing(sandbox, "curl -sS -m 8 https://example.com")
    assert failed.exit_code == 6
    assert "Could not resolve host" in failed.stderr
    assert time.monotonic() - started < 5


# The server may take a connection before it resets it.
CONNECT = "python3 -c \"import socket; socket.create_connection(('{}', {}), timeout=8).recv(1)\""


@pytest.mark.parametrize(
    ("address", "port"),
    [
        ("1.1.1.1", 443),
        ("169.254.169.254", 80),
        ("10.0.0.1", 22),
        ("192.168.0.1", 80),
        ("172.17.0.1", 80),
    ],
)
def test_tcp_is_refused_at_once(sandbox, address, port):
    started = time.monotonic()
    failed = failing(sandbox, CONNECT.format(address, port))
    assert "timed out" not in failed.stderr, failed.stderr
    assert time.monotonic() - started < 5


def test_neither_gateway_nor_server_can_be_reached(server, sandbox):
    port = server.address.rsplit(":", 1)[1]
    gateway = sandbox.commands.run("ip route show default | cut -d' ' -f3").stdout.strip()
    for address in filter(None, [gateway, "127.0.0.1"]):
        for target in (port, 22):
            failed = failing(sandbox, CONNECT.format(address, target))
            assert "timed out" not in failed.stderr, failed.stderr


def test_udp_goes_nowhere(sandbox):
    """The datagram leaves the guest without an error, and nothing ever answers."""
    script = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1.5);"
        "s.sendto(b'x', ('1.1.1.1', 4433));"
        "\ntry: print('answer', s.recv(100))\nexcept TimeoutError: print('silence')"
    )
    sandbox.files.write("/tmp/udp.py", script)
    assert sandbox.commands.run("python3 /tmp/udp.py").stdout == "silence\n"


def test_dns_is_refused_and_not_only_silent(sandbox):
    """A query to any address is answered with REFUSED."""
    script = (
        "import socket, struct\n"
        "q = struct.pack('>6H', 7, 0x100, 1, 0, 0, 0) + b'\\x07example\\x03com\\x00' + struct.pack('>2H', 1, 1)\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5)\n"
        "s.sendto(q, ('9.9.9.9', 53)); print('udp', s.recv(512)[3] & 15)\n"
        "t = socket.create_connection(('9.9.9.9', 53), timeout=5)\n"
        "t.sendall(struct.pack('>H', len(q)) + q); print('tcp', t.recv(514)[5] & 15)\n"
    )
    sandbox.files.write("/tmp/dns.py", script)
    assert sandbox.commands.run("python3 /tmp/dns.py").stdout == "udp 5\ntcp 5\n"


def test_no_ipv6(sandbox):
    assert sandbox.commands.run("ip -6 addr show scope global").stdout == ""
    failed = failing(sandbox, CONNECT.format("2606:4700:4700::1111", 443))
    assert "timed out" not in failed.stderr


def test_loopback_works(sandbox):
    script = (
        "import socket, threading\n"
        "l = socket.create_server(('127.0.0.1', 0))\n"
        "threading.Thread(target=lambda: l.accept()[0].sendall(b'hi'), daemon=True).start()\n"
        "print(socket.create_connection(l.getsockname()).recv(2))\n"
    )
    sandbox.files.write("/tmp/loop.py", script)
    assert sandbox.commands.run("python3 /tmp/loop.py").stdout == "b'hi'\n"


def test_all_computers_look_the_same_and_do_not_see_each_other(sandbox, fresh):
    look = "ip -o -4 addr show eth0; cat /sys/class/net/eth0/address 2>/dev/null; ip link show eth0 | tail -1"
    one, two = (box.commands.run(look).stdout for box in (sandbox, fresh))
    assert one == two
    server = fresh.commands.run("python3 -m http.server 8000 --bind 0.0.0.0", background=True)
    address = fresh.commands.run("ip -o -4 addr show eth0").stdout.split()[3].split("/")[0]
    failing(sandbox, CONNECT.format(address, 8000))
    fresh.commands.kill(server.pid)


def test_root_inside_does_not_change_it(fresh):
    """The walls stand outside: what root does to routes and filters inside opens nothing."""
    fresh.commands.run(
        "ip route flush table main; ip addr add 10.1.2.3/8 dev eth0; ip route add default dev eth0; true",
        user="root",
    )
    failed = failing(fresh, "curl -sSf -m 8 http://1.1.1.1/")
    assert failed.exit_code != 0


def test_internet_cannot_be_asked_for(server):
    """The ceiling of this server is the default, which is empty, so it is sealed whatever the client asks."""
    with Sandbox.create(timeout=60, allow_internet_access=True) as sandbox:
        assert failing(sandbox, "curl -sS -m 8 https://example.com").exit_code == 6
