"""A server in a network of the test's own, with upstreams in another one: nothing of it reaches beyond the machine.

    server's namespace                        upstreams' namespace
    u0 198.51.100.1/24  ───────────────────── u1 198.51.100.2/24
                                              lo: name servers of this machine, and addresses that nobody may reach
"""

from __future__ import annotations

import contextlib
import ctypes
import http.server
import os
import socket
import socketserver
import ssl
import struct
import subprocess
import threading
from pathlib import Path

import httpx
from e2b import Sandbox
from support import Server

UPSTREAM = "198.51.100.2"
SERVER = "198.51.100.1"

# Each answers on port 80 in the upstreams' namespace, and no packet of a sandbox may get there.
FORBIDDEN = ["169.254.169.254", "169.254.170.2", "100.100.100.200", "10.0.0.1", "192.168.77.1"]

CLONE_NEWNET = 0x40000000


def run(*command: str):
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def inside(namespace: str):
    """This thread, and what it starts, is in a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str):
        with open(path) as file:
            if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns {path}")

    with open("/proc/thread-self/ns/net") as home:
        enter(f"/run/netns/{namespace}")
        try:
            yield
        finally:
            enter(f"/proc/self/fd/{home.fileno()}")


class Witness(http.server.ThreadingHTTPServer):
    """A web server that remembers who asked it for what."""

    daemon_threads = True

    def __init__(self, address: str, port: int, tls: ssl.SSLContext | None = None):
        self.seen: list[str] = []
        self.connections = 0
        super().__init__((address, port), Page)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def verify_request(self, request, client_address):
        self.connections += 1
        return True

    def handle_error(self, request, client_address):
        """A client that breaks off is what these tests are about."""


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.seen.append(self.headers.get("Host", ""))
        body = b"the upstream's page\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Echo(socketserver.ThreadingTCPServer):
    """Sends back what it gets, and knows when connections ended."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: str, port: int):
        self.open = 0
        self.bytes = 0
        super().__init__((address, port), EchoOne)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class EchoOne(socketserver.BaseRequestHandler):
    def handle(self):
        self.server.open += 1
        try:
            while data := self.request.recv(4096):
                self.server.bytes += len(data)
                self.request.sendall(data)
        except OSError:
            pass
        finally:
            self.server.open -= 1


class Names(socketserver.ThreadingUDPServer):
    """A name server in which every name below `.example` has the upstream's address, and some have others. Of names below
    some domains another server is asked."""

    daemon_threads = True

    def __init__(self, address: str, others: dict[str, str]):
        self.others = others
        self.delegated: dict[str, tuple[str, int]] = {}
        self.asked: list[str] = []
        super().__init__((address, 53), NamesOne)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class NamesOne(socketserver.BaseRequestHandler):
    def handle(self):
        query, reply = self.request
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode("latin-1"))
            at += 1 + query[at]
        name = ".".join(labels).lower()
        (kind,) = struct.unpack(">H", query[at + 1 : at + 3])
        self.server.asked.append(name)
        for domain, server in self.server.delegated.items():
            if name.endswith(f".{domain}"):
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as far:
                    far.settimeout(10)
                    far.sendto(query, server)
                    with contextlib.suppress(OSError):
                        reply.sendto(far.recv(65535), self.client_address)
                return
        address = self.server.others.get(name, UPSTREAM if name.endswith(".example") else None)
        found = kind == 1 and address is not None
        header = query[:2] + struct.pack(">5H", 0x8180 if address else 0x8183, 1, int(found), 0, 0)
        answer = b""
        if found:
            answer = b"\xc0\x0c" + struct.pack(">2HIH", 1, 1, 60, 4) + socket.inet_aton(address)
        reply.sendto(header + query[12 : at + 5] + answer, self.client_address)


class Relay(socketserver.ThreadingTCPServer):
    """An address of this process's network that leads to one of another. SDKs keep threads, which can't be moved."""

    daemon_threads = True

    def __init__(self, namespace: str):
        self.namespace = namespace
        self.target: tuple[str, int] | None = None
        super().__init__(("127.0.0.1", 0), RelayOne)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class RelayOne(socketserver.BaseRequestHandler):
    def handle(self):
        with inside(self.server.namespace):
            try:
                far = socket.create_connection(self.server.target, timeout=10)
            except OSError:
                return
        far.settimeout(None)
        back = threading.Thread(target=self.pump, args=(far, self.request), daemon=True)
        back.start()
        self.pump(self.request, far)
        back.join()
        far.close()

    @staticmethod
    def pump(source: socket.socket, to: socket.socket):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                to.sendall(data)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_WR)


class Outpost(Server):
    """A server in a network of its own, reached through a relay."""

    def __init__(self, relay: Relay, *args: str):
        super().__init__(*args)
        self.relay = relay
        self.wrap = ["nsenter", f"--net=/run/netns/{relay.namespace}"]

    @property
    def url(self) -> str:
        return self.relay.url

    def start(self, failpoints: str = "") -> Outpost:
        super().start(failpoints)
        host, port = self.address.split(":")
        self.relay.target = (host, int(port))
        return self

    def ask(self, method: str, path: str, **more) -> httpx.Response:
        answer = httpx.request(method, self.url + path, headers=self.headers, timeout=60, **more)
        assert answer.is_success, answer.text
        return answer

    def make(self, **options) -> Sandbox:
        answer = self.ask("POST", "/v2/sandboxes", json={"templateID": "base", "timeout": 600} | options)
        return Sandbox.connect(answer.json()["sandboxID"], **self.opts)


@contextlib.contextmanager
def outpost_in(estate: Estate, folder: Path, name: str, config: str):
    """A server of that name and configuration, which leaves nothing."""
    path = folder / f"{name}.toml"
    path.write_text(config)
    # Each has a way of its own: clients keep connections, which would lead to another server.
    relay = estate.keep(Relay(estate.home))
    outpost = Outpost(relay, folder / f"data-{name}", "--config", str(path))
    try:
        yield outpost.start()
        for box in outpost.ask("GET", "/v2/sandboxes").json():
            outpost.ask("DELETE", f"/sandboxes/{box['sandboxID']}")
        outpost.assert_nothing_left()
        outpost.stop()
        outpost.assert_nothing_left()
    finally:
        if outpost.process is not None and outpost.process.poll() is None:
            outpost.process.kill()
            outpost.process.wait()


class Estate:
    """The two namespaces and what listens in them."""

    def __init__(self, folder: Path, others: dict[str, str]):
        self.home, self.world = f"sg-home-{os.getpid()}", f"sg-world-{os.getpid()}"
        self.listening: list[socketserver.BaseServer] = []
        try:
            self.build(folder, others)
        except BaseException:
            self.close()
            raise

    def build(self, folder: Path, others: dict[str, str]):
        for namespace in (self.home, self.world):
            run("ip", "netns", "add", namespace)
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        run("ip", "-n", self.home, "link", "add", "u0", "type", "veth", "peer", "u1", "netns", self.world)
        for namespace, link, address in ((self.home, "u0", SERVER), (self.world, "u1", UPSTREAM)):
            run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", link)
            run("ip", "-n", namespace, "link", "set", link, "up")
        run("ip", "-n", self.home, "route", "add", "default", "via", UPSTREAM)
        lines = Path("/etc/resolv.conf").read_text().splitlines()
        servers = [line.split()[1] for line in lines if line.startswith("nameserver") and ":" not in line]
        assert servers, "/etc/resolv.conf names no name server of IPv4"
        for address in [*servers, *FORBIDDEN]:
            if not address.startswith("127."):
                run("ip", "-n", self.world, "addr", "add", f"{address}/32", "dev", "lo")
        certificate, key = folder / "upstream.pem", folder / "upstream.key"
        run(
            *["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"],
            *["-subj", "/CN=upstream", "-days", "1", "-keyout", str(key), "-out", str(certificate)],
        )
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, key)
        with inside(self.world):
            self.http = self.keep(Witness(UPSTREAM, 80))
            self.https = self.keep(Witness(UPSTREAM, 443, tls))
            self.other_port = self.keep(Witness(UPSTREAM, 8080))
            self.echo = self.keep(Echo(UPSTREAM, 5432))
            self.forbidden = [self.keep(Witness(address, 80)) for address in FORBIDDEN]
            far = [address for address in servers if not address.startswith("127.")]
            self.names = [self.keep(Names(address, others)) for address in far]
        with inside(self.home):
            near = [address for address in servers if address.startswith("127.")]
            self.names += [self.keep(Names(address, others)) for address in near]

    def keep(self, server):
        self.listening.append(server)
        return server

    def asked(self) -> list[str]:
        """All names that a name server was asked for."""
        return [name for server in self.names for name in server.asked]

    def close(self):
        for server in self.listening:
            server.shutdown()
            server.server_close()
        for namespace in (self.home, self.world):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
