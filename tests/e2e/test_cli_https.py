"""Sandglass's own command line, with a server that speaks https."""

import json
import os
import subprocess

import httpx
import pytest
from support import Server

DOMAIN = "cli.test"


@pytest.fixture(scope="module")
def secured(servers) -> Server:
    return servers.make("--domain", DOMAIN)


@pytest.fixture(scope="module")
def authority(secured) -> str:
    return str(secured.data_dir / "tls" / DOMAIN / "ca.pem")


@pytest.fixture
def cli(secured):
    """Runs it, by https unless it is told another address, and with no trust but what it is given."""

    def run(*args: str, check: bool = True, **env: str) -> subprocess.CompletedProcess:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "SSL_", "SANDGLASS_CA"))}
        known = {"E2B_API_KEY": secured.api_key, "E2B_API_URL": f"https://{secured.address}"}
        command = [*secured.program, *args]
        done = subprocess.run(command, env=clean | known | env, text=True, capture_output=True, timeout=100)
        assert not check or done.returncode == 0, f"{args}: {done.stdout}{done.stderr}"
        return done

    return run


def test_a_command_runs_and_what_it_says_comes_as_it_is(cli, authority):
    done = cli("run", "--ca", authority, "--", "sh", "-c", "echo out; echo err >&2; exit 7", check=False)
    assert (done.returncode, done.stdout) == (7, "out\n")
    assert "err\n" in done.stderr and "warning" not in done.stderr
    # More than fits in one record of TLS, or in one frame of anything.
    much = cli("run", "--", "sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x", SANDGLASS_CA=authority)
    assert len(much.stdout) == 3_000_000 and set(much.stdout) == {"x"}


def test_sandboxes_are_made_listed_and_used(cli, secured, authority):

    def cli_of(*args: str):
        return cli(*args, SANDGLASS_CA=authority)

    body = {"templateID": "base", "timeout": 120}
    id = httpx.post(f"{secured.url}/v2/sandboxes", headers=secured.headers, json=body, timeout=60).json()["sandboxID"]
    assert id in [one["sandboxID"] for one in json.loads(cli_of("sandbox", "list", "--json").stdout)]
    assert cli_of("sandbox", "exec", id, "--", "printf", "%s", "a b").stdout == "a b"
    assert json.loads(cli_of("sandbox", "info", "--json", id).stdout)["state"] == "running"
    cli_of("sandbox", "kill", id)
    assert "base" in cli_of("template", "list").stdout


def test_what_other_programs_are_told_to_trust_it_trusts(cli, authority):
    bundle = authority.replace("ca.pem", "bundle.pem")
    assert cli("sandbox", "list", "--json", SSL_CERT_FILE=bundle).stdout.startswith("[")


def test_who_is_not_trusted_is_not_told_the_key(cli, secured, authority, servers):
    """And what to do is said; the control is the same server with the right authority."""
    other = servers.make("--domain", "other.test")
    wrong = str(other.data_dir / "tls" / "other.test" / "ca.pem")
    for env in ({"SANDGLASS_CA": wrong}, {"SSL_CERT_FILE": wrong}, {}):
        refused = cli("sandbox", "list", check=False, **env)
        assert refused.returncode != 0 and refused.stdout == ""
        assert "can't be trusted" in refused.stderr and "--ca FILE" in refused.stderr, refused.stderr
    assert cli("sandbox", "list", "--json", SANDGLASS_CA=authority).stdout.startswith("[")
    # An authority that is trusted for its own domain is so for no other name.
    elsewhere = cli("sandbox", "list", "--url", f"https://0.0.0.0:{secured.address.rsplit(':', 1)[1]}", check=False, SANDGLASS_CA=authority)
    assert elsewhere.returncode != 0 and "as its certificate does" in elsewhere.stderr, elsewhere.stderr


def test_what_is_no_authority_is_named(cli, tmp_path):
    (tmp_path / "empty.pem").write_text("")
    for name in ("empty.pem", "absent.pem"):
        refused = cli("sandbox", "list", "--ca", str(tmp_path / name), check=False)
        assert refused.returncode != 0 and name in refused.stderr


def test_who_speaks_no_tls_is_told_from_who_is_not_there(cli, server, authority):
    plain = cli("sandbox", "list", "--url", f"https://{server.address}", check=False, SANDGLASS_CA=authority)
    assert plain.returncode != 0 and "http://" in plain.stderr, plain.stderr
    nobody = cli("sandbox", "list", "--url", "https://127.0.0.1:1", check=False, SANDGLASS_CA=authority)
    assert nobody.returncode != 0 and "no server answers" in nobody.stderr
    other = cli("sandbox", "list", "--url", "ftp://127.0.0.1", check=False)
    assert other.returncode != 0 and "https:// or http://" in other.stderr


def test_a_key_that_goes_in_the_clear_is_warned_of(cli, server):
    key = {"E2B_API_KEY": server.api_key}
    away = cli("sandbox", "list", "--json", "--url", f"http://0.0.0.0:{server.address.rsplit(':', 1)[1]}", **key)
    assert "warning" in away.stderr and away.stdout.startswith("[")
    assert cli("sandbox", "list", "--json", "--url", server.url, **key).stderr == ""


def test_a_domain_is_enough_where_there_is_dns(cli, authority):
    """There is none here, so all that is seen is where it looked."""
    refused = cli("sandbox", "list", "--domain", DOMAIN, check=False, E2B_API_URL="", SANDGLASS_CA=authority)
    assert refused.returncode != 0 and f"https://api.{DOMAIN}" in refused.stderr
