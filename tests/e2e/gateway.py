"""A server whose sandboxes may call the models of a scripted provider, and what runs in them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox
from support import ROOMY, Server
from upstream import Upstream

# The provider's key: it must be nowhere that a sandbox, a log or a receipt is.
CANARY = "sk-canary-4f1d9c7be2a85036"

# A micro-dollar for each token that is read, two for each that is written.
PRICE = "{ input = 1_000_000, output = 2_000_000, max_input = 1_000_000, max_output = 64_000, image_output = 1_000_000 }"


def config_of(upstream: Upstream, folder: Path, more: str = "") -> str:
    key = folder / "provider-key"
    key.write_text(CANARY + "\n")
    key.chmod(0o600)
    return f"""
{ROOMY}
[models]
{more}
[models.providers.scripted]
base_url = "{upstream.url}"
dialects = ["messages", "chat", "responses", "images"]
key_file = "{key}"
[models.offered.large]
provider = "scripted"
upstream = "large-2026"
aliases = ["latest"]
price = {PRICE}
[models.offered.small]
provider = "scripted"
price = {PRICE}
"""


def serve(servers, work_folder: Path, name: str, upstream: Upstream, more: str = "") -> Server:
    folder = work_folder / name
    folder.mkdir()
    config = folder / "sandglass.toml"
    config.write_text(config_of(upstream, folder, more))
    return servers.make("--config", str(config))


@dataclass
class Granted:
    """A sandbox that may call models."""

    server: Server
    sandbox: Sandbox
    budget: str
    token: str

    def run(self, script: str, token: str | None = None, timeout: int = 60, **env: str) -> str:
        """What a program of Python prints in it."""
        return program(self.sandbox, script, token or self.token, timeout, **env)

    def money(self) -> dict:
        told = httpx.get(f"{self.server.url}/v1/budgets/{self.budget}", headers=self.server.headers, timeout=30)
        assert told.status_code == 200, told.text
        return told.json()

    def close(self) -> dict:
        told = httpx.delete(f"{self.server.url}/v1/budgets/{self.budget}", headers=self.server.headers, timeout=30)
        assert told.status_code == 200, told.text
        return told.json()


def env(token: str) -> dict[str, str]:
    """What a program that asks models has in its environment."""
    base = "http://models.internal"
    return {
        "SANDGLASS_MODEL_URL": base,
        "SANDGLASS_MODEL_TOKEN": token,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": token,
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": token,
    }


def program(sandbox: Sandbox, script: str, token: str, timeout: int = 60, **more: str) -> str:
    sandbox.files.write("/tmp/program.py", script)
    known = env(token) | {"PYTHONPATH": "/opt/clients"}
    return sandbox.commands.run("python3 /tmp/program.py", envs=known | more, timeout=timeout).stdout


def asked_for(server: Server, sandbox_id: str, **body) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/sandboxes/{sandbox_id}/models", headers=server.headers, json=body, timeout=30
    )


def grant(server: Server, sandbox: Sandbox, most: int = 1_000_000, **body) -> Granted:
    granted = asked_for(server, sandbox.sandbox_id, max_cost_micros=most, **body)
    assert granted.status_code == 201, granted.text
    told = granted.json()
    assert told["base_url"] == "http://models.internal"
    return Granted(server, sandbox, told["budget"], told["token"])


# The clients that providers publish, and what they need.
CLIENTS = """anthropic openai httpx httpcore httpx2 httpcore2 h11 h2 hpack hyperframe anyio sniffio certifi idna distro jiter
pydantic pydantic_core annotated_types typing_inspection typing_extensions.py docstring_parser tqdm truststore opentelemetry
opentelemetry_api""".split()


def bring_clients(sandbox: Sandbox):
    """Puts the clients of this machine's environment into a sandbox: it has the same Python."""
    import anthropic

    site = Path(anthropic.__file__).parents[1]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        # With what says their versions.
        about = [path.name for name in CLIENTS for path in site.glob(f"{name.removesuffix('.py')}-*.dist-info")]
        for name in [*CLIENTS, *about]:
            if (site / name).exists():
                tar.add(site / name, name, filter=lambda member: None if "__pycache__" in member.name else member)
    sandbox.files.write("/tmp/clients.tgz", packed.getvalue())
    sandbox.commands.run("mkdir -p /opt/clients && tar -xzf /tmp/clients.tgz -C /opt/clients", user="root", timeout=120)


# Sends one request with nothing but Python's own library, and prints what came as JSON.
PLAIN = '''
import json, os, sys, urllib.error, urllib.request
body = json.loads(os.environ["BODY"])
url = os.environ["SANDGLASS_MODEL_URL"] + os.environ.get("ROUTE", "/v1/messages")
headers = {"content-type": "application/json", "x-api-key": os.environ["SANDGLASS_MODEL_TOKEN"]}
request = urllib.request.Request(url, json.dumps(body).encode(), headers | json.loads(os.environ.get("HEADERS", "{}")))
try:
    answer = urllib.request.urlopen(request, timeout=50)
except urllib.error.HTTPError as error:
    answer = error
except OSError as error:
    print(json.dumps({"status": 0, "headers": {}, "text": str(error)}))
    sys.exit()
try:
    text, whole = answer.read().decode("utf-8", "replace"), True
except Exception as error:
    text, whole = repr(error), False
headers = {name.lower(): value for name, value in answer.headers.items()}
print(json.dumps({"status": answer.status, "headers": headers, "text": text, "whole": whole}))
'''

HELLO = {"model": "large", "max_tokens": 100, "messages": [{"role": "user", "content": "hello"}]}


def plain(granted: Granted, body: dict | None = None, route: str = "/v1/messages", **more) -> dict:
    """One request from inside."""
    env = {"BODY": json.dumps(body or HELLO), "ROUTE": route, "HEADERS": json.dumps(more.pop("headers", {}))}
    told = json.loads(granted.run(PLAIN, **more, **env))
    with contextlib.suppress(ValueError):
        told["json"] = json.loads(told["text"])
    return told


def holds(folder: Path, needle: bytes) -> list[str]:
    """The files below a folder that hold something, however large they are."""
    found = []
    for path, _, names in os.walk(folder):
        for name in names:
            file = Path(path, name)
            if not file.is_file() or file.is_symlink():
                continue
            # What is no file but looks like one can't be read.
            with contextlib.suppress(OSError), file.open("rb") as stream:
                kept = b""
                while chunk := stream.read(1 << 20):
                    if needle in kept + chunk:
                        found.append(str(file))
                        break
                    kept = chunk[-len(needle) :]
    return found


# Fixtures for the files that import them; each has a server of its own, as its fixture `models`.


@pytest.fixture(scope="module")
def upstream():
    upstream = Upstream()
    yield upstream
    upstream.close()


@pytest.fixture(scope="module")
def box(models):
    with Sandbox.create(timeout=900, **models.opts) as sandbox:
        yield sandbox


@pytest.fixture
def granted(models, box, upstream):
    upstream.script()
    upstream.asked.clear()
    granted = grant(models, box)
    yield granted
    granted.close()
    assert not upstream.unexpected
