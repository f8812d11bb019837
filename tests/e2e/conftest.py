"""One server for the whole run, and sandboxes from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox
from estate import Estate
from support import OLD_SDK, PROGRAM, Server, until
from upstream import Upstream


def pytest_sessionstart(session):
    # Never a skip: without root or the program nothing here can be believed.
    if os.geteuid() != 0:
        pytest.exit("the end-to-end tests need root", returncode=1)
    if not os.access(PROGRAM, os.X_OK):
        pytest.exit(f"{PROGRAM} is missing; run `make build`", returncode=1)


# Files that take a minute or more. Started as late as the alphabet has them, one would be all that runs at the end.
LONGEST = (
    "test_agents.py",
    "test_faults.py",
    "test_hostile_agent.py",
    "test_live_templates.py",
    "test_runsc.py",
    "test_startup.py",
)


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if OLD_SDK:
        # Deselected, not skipped: a skip is a failure.
        unknown = [item for item in items if item.get_closest_marker("newest_sdk")]
        items[:] = [item for item in items if item not in unknown]
        config.hook.pytest_deselected(items=unknown)


class Servers:
    """Makes servers, and sees to it at the end that none of them left anything on the machine."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.made: list[Server] = []

    def make(self, *options: str) -> Server:
        server = Server(self.folder / f"data-{len(self.made)}", *options)
        self.made.append(server)
        return server.start()

    def close(self):
        failures = []
        for server in self.made:
            try:
                if server.process is None or server.process.poll() is not None:
                    server.process = None
                    server.start()
                for page in pages(Sandbox.list(limit=100, **server.opts)):
                    for info in page:
                        Sandbox.kill(info.sandbox_id, **server.opts)
                server.assert_nothing_left()
                server.stop()
                server.assert_nothing_left()
            except BaseException as failure:
                failures.append(failure)
                if server.process is not None and server.process.poll() is None:
                    server.process.kill()
                    server.process.wait()
        if failures:
            raise BaseExceptionGroup("servers that did not end well", failures)


def pages(paginator):
    while paginator.has_next:
        yield paginator.next_items()


@pytest.fixture(scope="session")
def work_folder():
    folder = Path(tempfile.mkdtemp(prefix="sandglass-e2e-", dir="/var/tmp"))
    yield folder
    # Kept when a server left something: then there may be mounts in it, and the log is wanted.
    if not any(str(folder) in line for line in Path("/proc/mounts").read_text().splitlines()):
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def estate(work_folder):
    """Networks of a test's own. A file whose name servers say something else, or that needs more, has another one."""
    estate = Estate(work_folder, {})
    yield estate
    estate.close()


@pytest.fixture(scope="session")
def servers(work_folder):
    servers = Servers(work_folder)
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def server(servers):
    """The server that most tests share. The SDK finds it by the environment, as a user would have it."""
    server = servers.make()
    os.environ.update(
        E2B_API_KEY=server.api_key, E2B_API_URL=server.url, E2B_SANDBOX_URL=server.url
    )
    return server


@pytest.fixture
def lone_server(servers):
    """A server that the test may kill."""
    server = servers.make()
    yield server
    empty(server)


def empty(server):
    # What a test leaves must not slow the others down; the end of the run checks again.
    if server.process is None or server.process.poll() is not None:
        server.process = None
        server.start()
    for page in pages(Sandbox.list(limit=100, **server.opts)):
        for info in page:
            Sandbox.kill(info.sandbox_id, **server.opts)
    server.assert_nothing_left()
    server.stop()


def serving_on(mount, *what, options=()):
    """A server whose data folder is on a file system of its own, which is mounted for it."""
    mount.mkdir()
    subprocess.run(["mount", *what, mount], check=True)
    server = Server(mount / "data", *options)
    try:
        yield server.start()
    finally:
        server.stop()
        # The server's last processes leave it a moment later.
        until(lambda: subprocess.run(["umount", mount], capture_output=True).returncode == 0, what="unmounted")
        mount.rmdir()


@pytest.fixture
def cramped_server(work_folder):
    """A server whose data folder has a small file system of its own, another one than the cache folder's."""
    yield from serving_on(work_folder / "cramped", "-t", "tmpfs", "-o", "size=256m", "none")


def serving_with_reflinks(work_folder, options=()):
    """A server whose data folder is on a file system where files share blocks."""
    image = work_folder / "sharing.img"
    with image.open("wb") as file:
        file.truncate(4 << 30)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True)
    try:
        yield from serving_on(work_folder / "sharing", "-o", "loop", image, options=options)
    finally:
        image.unlink()


@pytest.fixture
def sharing_server(work_folder):
    yield from serving_with_reflinks(work_folder)


@pytest.fixture(scope="module")
def sandbox(server):
    """A sandbox for tests that do no harm to each other."""
    sandbox = Sandbox.create(timeout=600)
    yield sandbox
    assert sandbox.kill(), "the sandbox of the module ended while its tests ran"


@pytest.fixture
def fresh(server):
    """A sandbox that the test may break."""
    sandbox = Sandbox.create(timeout=300)
    yield sandbox
    sandbox.kill()


@pytest.fixture
def upstream():
    """A provider of models that says what the test wrote down, and is asked for nothing else."""
    upstream = Upstream()
    yield upstream
    upstream.close()
    assert not upstream.unexpected, [(asked.path, asked.raw[:2000]) for asked in upstream.unexpected]


@pytest.fixture
def api(server):
    """Plain HTTP to the control plane."""
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=60) as client:
        yield client


@pytest.fixture
def anonymous(server):
    """Plain HTTP without a key."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
