"""The templates of the repository whose packages come from the machine's own mirror: live interpreters with packages loaded."""

import ipaddress
import re
import socket
import subprocess
from urllib.parse import urlsplit

import pytest
from e2b import CommandExitException, Sandbox
from faults import configured, fork
from support import ROOT

# Most of it is spent by a package mirror.
BUILD_WITHIN = 600
pytestmark = pytest.mark.timeout(BUILD_WITHIN + 120)


def mirrors() -> set[str]:
    """The addresses of the mirrors that apt of this machine uses."""
    told = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
        capture_output=True, text=True, check=True,
    )
    hosts = {urlsplit(line).hostname for line in told.stdout.split()}
    return {found[4][0] for host in hosts for found in socket.getaddrinfo(host, 80, socket.AF_INET)}


def config() -> str:
    """One that allows them, also where they are in a range that only an operator opens."""
    private = sorted(address for address in mirrors() if not ipaddress.ip_address(address).is_global)
    return f"""
[egress]
open_private = {[address + "/32" for address in private]}
[egress.features.packages]
from = "host"
"""


@pytest.fixture(scope="module")
def packages(servers, work_folder):
    """A server whose builds may reach the mirror of the machine."""
    return configured(servers, work_folder, config())


def build(server, name: str):
    result = server.cli("template", "build", str(ROOT / "templates" / name), check=False, timeout=BUILD_WITHIN)
    assert result.returncode == 0, result.stderr[-4000:]


def copies(server, name: str, count: int) -> list[Sandbox]:
    return [Sandbox.create(name, timeout=300, **server.opts) for _ in range(count)]


def test_python_data_has_pandas_in_an_interpreter_that_runs(packages):
    build(packages, "python-data")
    first, second = copies(packages, "python-data", 2)
    run = lambda sandbox, code: sandbox.commands.run(f"python-data {code!r}").stdout
    assert run(first, "pd.DataFrame({'n': [1, 2, 3]}).n.sum()") == "6\n"
    # One namespace, that of the same process in each copy, and each copy's own.
    run(first, "frame = pd.DataFrame({'n': range(1000)})")
    assert run(first, "int(frame.n.sum())") == "499500\n"
    with pytest.raises(CommandExitException) as failed:
        run(second, "frame")
    assert "NameError" in failed.value.stdout and failed.value.exit_code == 1
    draw = "random.random(), np.random.random()"
    drawn = [run(sandbox, f"import random; print({draw})") for sandbox in (first, second)]
    assert drawn[0] != drawn[1]
    # So it is for what comes back, and for what is copied of it.
    made = fork(packages, first.sandbox_id, 2)
    assert made.status_code == 201, made.text
    children = [Sandbox.connect(one["sandbox"]["sandboxID"], **packages.opts) for one in made.json()]
    drawn = [run(sandbox, f"({draw})") for sandbox in (first, *children)]
    assert len(set(drawn)) == len(drawn)
    assert all(run(child, "int(frame.n.sum())") == "499500\n" for child in children)
    for sandbox in (first, second, *children):
        sandbox.kill()


def test_node_runs_on_and_draws_its_own_numbers(packages):
    build(packages, "node")
    first, second = copies(packages, "node", 2)
    run = lambda sandbox, code: sandbox.commands.run(f'node-live "{code}"').stdout
    assert re.fullmatch(r"v\d+\.\d+\.\d+\n", run(first, "process.version"))
    run(first, "globalThis.mine = 42")
    assert run(first, "mine") == "42\n"
    with pytest.raises(CommandExitException) as failed:
        run(second, "mine")
    assert "ReferenceError" in failed.value.stdout
    assert run(first, "process.pid") == run(second, "process.pid"), "it is the same process"
    for draw in [
        "Math.random()",
        "require('crypto').randomUUID()",
        "require('crypto').randomBytes(16).toString('hex')",
        "require('crypto').randomInt(2 ** 40)",
        "require('crypto').webcrypto.getRandomValues(new Uint32Array(4)).join()",
    ]:
        drawn = [run(sandbox, draw) for sandbox in (first, second, first)]
        assert len(set(drawn)) == 3, (draw, drawn)
    numbers = [float(n) for n in run(first, "Array.from({length: 2000}, Math.random).join('\\n')").split()]
    assert all(0 <= n < 1 for n in numbers) and 0.45 < sum(numbers) / len(numbers) < 0.55
    for sandbox in (first, second):
        sandbox.kill()
