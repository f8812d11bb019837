"""Certificates that change while a server runs: those of an authority that is asked by ACME, and files of the operator's."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import stat
import subprocess
import tempfile
from pathlib import Path

import httpx
import pytest
from support import ROOMY, Server, until

DOMAIN = "boxes.test"
# Of a certificate of the authority's: enough to see one while it lasts, and the next.
LASTS = 30


# Takes the record out again.
FORGETS = 'to=clear-txt; change "$2" "$3"'


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def openssl(*arguments: object):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)



class Authority:
    """Pebble, the small authority of those who make Boulder, and the name server that it looks for proofs in."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.acme, self.management, self.dns, self.names = (free_port() for _ in range(4))
        self.ca = folder / "directory-ca.pem"
        issue(folder, self.ca, folder / "directory", ["localhost"])
        config = {
            "listenAddress": f"127.0.0.1:{self.acme}",
            "managementListenAddress": f"127.0.0.1:{self.management}",
            "certificate": f"{folder}/directory.pem",
            "privateKey": f"{folder}/directory.key",
            "httpPort": free_port(),
            "tlsPort": free_port(),
            "certificateValidityPeriod": LASTS,
        }
        (folder / "pebble.json").write_text(json.dumps({"pebble": config}))
        off = ["-http01", "", "-https01", "", "-tlsalpn01", ""]
        dns = f"127.0.0.1:{self.dns}"
        zone = ["pebble-challtestsrv", "-dns01", dns, "-management", f"127.0.0.1:{self.names}", *off]
        pebble = ["pebble", "-config", str(folder / "pebble.json"), "-dnsserver", dns]
        env = os.environ | {"PEBBLE_VA_NOSLEEP": "1", "PEBBLE_AUTHZREUSE": "0"}
        with (folder / "pebble.log").open("wb") as log:
            self.processes = [
                subprocess.Popen(program, stdout=log, stderr=subprocess.STDOUT, env=env) for program in (zone, pebble)
            ]

    def ready(self) -> Authority:
        until(lambda: "ACME directory available" in self.log(), what="the authority listens")
        return self

    def log(self) -> str:
        return (self.folder / "pebble.log").read_text()

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()

    def program(self, ends_with: str = "exit 0") -> Path:
        """What an operator would have: a program that puts records into a zone."""
        program = self.folder / f"zone-{len(list(self.folder.iterdir()))}"
        program.write_text(
            "#!/bin/sh\nset -e\n"
            f'echo "$1 $2 $(id -u)" >>{self.folder}/asked\n'
            'case "$1" in present) to=set-txt ;; clean) to=clear-txt ;; esac\n'
            'change() {\n'
            f'  curl -sS -f -d "{{\\"host\\": \\"$1.\\", \\"value\\": \\"$2\\"}}" http://127.0.0.1:{self.names}/$to\n'
            '}\nchange "$2" "$3"\n'
            f"{ends_with}\n"
        )
        program.chmod(0o755)
        return program

    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().splitlines()

    def config(self, program: Path, **more: str) -> Path:
        settings = {
            "directory": f"https://localhost:{self.acme}/dir",
            "authority": str(self.ca),
            "dns": str(program),
        } | more
        lines = "".join(f'{name} = "{value}"\n' for name, value in settings.items())
        config = self.folder / f"config-{len(list(self.folder.iterdir()))}.toml"
        tls = f'contact = ["mailto:ops@{DOMAIN}"]\nagree_to_terms = true\n{lines}'
        config.write_text(f'domain = "{DOMAIN}"\n{ROOMY}\n[tls.acme]\n{tls}')
        return config

    def trusts(self, folder: Path) -> ssl.SSLContext:
        """A client that trusts this authority and no other."""
        roots = folder / "roots.pem"
        with httpx.Client(verify=ssl.create_default_context(cafile=str(self.ca))) as client:
            roots.write_text(client.get(f"https://localhost:{self.management}/roots/0").text)
        return ssl.create_default_context(cafile=str(roots))


def issue(folder: Path, ca: Path, server: Path, names: list[str], days: int = 1):
    """A certificate for these names, with its key, of a new authority."""
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj"]
    key = folder / "ca.key"
    openssl("req", "-x509", *new, "/CN=test authority", "-days", 2, "-keyout", key, "-out", ca)
    request, extensions = folder / "request", folder / "extensions"
    openssl("req", *new, "/CN=test", "-keyout", f"{server}.key", "-out", request)
    extensions.write_text("subjectAltName=" + ",".join(f"DNS:{name}" for name in names))
    signed = ["-CA", ca, "-CAkey", key, "-CAcreateserial", "-days", days, "-extfile", extensions]
    openssl("x509", "-req", "-in", request, *signed, "-out", f"{server}.pem")


def shown(server: Server, context: ssl.SSLContext, name: str = f"api.{DOMAIN}") -> dict:
    """The certificate that a client sees and believes that asks for this name."""
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        with context.wrap_socket(raw, server_hostname=name) as secured:
            return secured.getpeercert()


@pytest.fixture
def authority(work_folder):
    folder = Path(tempfile.mkdtemp(prefix="acme-", dir=work_folder))
    authority = Authority(folder)
    try:
        yield authority.ready()
    finally:
        authority.close()


def test_an_authority_gives_a_certificate_and_the_next_one(authority, servers, work_folder):
    server = servers.make("--config", str(authority.config(authority.program())))
    trusting = authority.trusts(work_folder)
    first = shown(server, trusting)
    assert {name for _, name in first["subjectAltName"]} == {DOMAIN, f"*.{DOMAIN}"}
    shown(server, trusting, f"8000-x.{DOMAIN}")
    # One record for the domain, one for what is below it, and neither stays. The operator's program has the rights that it needs.
    record = f"_acme-challenge.{DOMAIN} 0"
    assert authority.asked() == [f"present {record}"] * 2 + [f"clean {record}"] * 2
    kept = server.data_dir / "tls" / "acme" / DOMAIN
    for name in ("certificate.pem", "account.json"):
        assert stat.S_IMODE((kept / name).stat().st_mode) == 0o600
    # A start asks for nothing that is there.
    server.stop()
    server.start()
    assert shown(server, trusting)["serialNumber"] == first["serialNumber"]
    # The next one is there before this one ends, and no client notices.
    renewed = until(
        lambda: (now := shown(server, trusting))["serialNumber"] != first["serialNumber"] and now,
        within=LASTS,
        what="another certificate is shown",
    )
    assert ssl.cert_time_to_seconds(renewed["notBefore"]) < ssl.cert_time_to_seconds(first["notAfter"])
    # By the account that there is.
    assert len(re.findall(r"There are now \d+ accounts", authority.log())) == 1
    until(
        lambda: f"certificate_expires {ssl.cert_time_to_seconds(shown(server, trusting)['notAfter'])}"
        in httpx.get(f"{server.url}/metrics", headers=server.headers).text,
        what="the metrics tell of it",
    )


def test_who_asks_an_authority_has_no_privilege(authority, servers):
    # While the operator's program runs, who asked for it waits.
    program = authority.program('for pid in $(pgrep -x -f "/proc/self/exe acme"); do grep -E "^(Uid|CapEff|NoNewPrivs)" /proc/$pid/status; done >>' + f"{authority.folder}/status")
    server = servers.make("--config", str(authority.config(program)))
    status = (authority.folder / "status").read_text()
    assert status and not re.search(r"Uid:.*\b0\b", status)
    assert set(re.findall(r"CapEff:\s*(\w+)", status)) == {"0" * 16}
    assert set(re.findall(r"NoNewPrivs:\s*(\w+)", status)) == {"1"}
    assert server.url


@pytest.mark.parametrize(
    ("ends_with", "more", "said"),
    [
        ("exit 3", {}, "ended with exit status: 3"),
        ("exit 0", {"dns": "/nonexistent/program"}, "can't be started"),
        ("exit 0", {"authority": "/etc/ssl/certs/ca-certificates.crt"}, "gave no certificate"),
        ("exit 0", {"directory": "https://localhost:1/dir"}, "gave no certificate"),
        # A program that says that it has done it, and has not.
        (FORGETS, {}, "No TXT records found"),
    ],
    ids=["program", "no-program", "untrusted", "no-authority", "no-record"],
)
def test_without_a_certificate_a_server_does_not_start(authority, work_folder, ends_with, more, said):
    server = Server(authority.folder / "data", "--config", str(authority.config(authority.program(ends_with), **more)))
    server.launch()
    assert server.process.wait(timeout=60) == 26, server.log_tail()
    assert said in server.log_tail(), server.log_tail()
    server.assert_nothing_left()
    # Whoever gives it up has a certificate of the server's own.
    own = authority.folder / "own.toml"
    own.write_text(f'domain = "{DOMAIN}"\n{ROOMY}')
    server.options = ("--config", str(own))
    server.start()
    server.stop()


def test_files_are_read_again(servers, work_folder):
    folder = work_folder / "replaced"
    folder.mkdir()
    names = [DOMAIN, f"*.{DOMAIN}"]
    trusting = []

    def replace(names: list[str], days: int = 1):
        issue(folder, folder / "ca.pem", folder / "new", names, days)
        # In the way of programs that renew certificates: a moment with a key that does not go with its certificate.
        for kind in ("pem", "key"):
            os.replace(folder / f"new.{kind}", folder / f"server.{kind}")
        trusting.append(ssl.create_default_context(cafile=str(folder / "ca.pem")))

    replace(names)
    config = folder / "config.toml"
    files = f'certificate = "{folder}/server.pem"\nkey = "{folder}/server.key"\n'
    config.write_text(f'domain = "{DOMAIN}"\n{ROOMY}\n[tls]\n{files}')
    server = servers.make("--config", str(config))
    shown(server, trusting[0])

    def is_shown(context) -> bool:
        try:
            return bool(shown(server, context))
        except ssl.SSLError:
            return False

    replace(names)
    until(lambda: is_shown(trusting[1]), within=30, what="the new certificate is shown")
    assert not is_shown(trusting[0])
    # One that is for another name changes nothing, nor one that has expired, nor one that is gone.
    replace(["elsewhere.test"])
    until(lambda: "it is not for" in server.log_tail(), within=30, what="that is said")
    shown(server, trusting[1])
    replace(names, -1)
    until(lambda: "it expired on" in server.log_tail(), within=30, what="that is said, too")
    shown(server, trusting[1])
    (folder / "server.key").unlink()
    until(lambda: "No such file" in server.log_tail(), within=30, what="and that")
    shown(server, trusting[1])
    replace(names)
    until(lambda: is_shown(trusting[4]), within=30, what="the next one is shown")
