"""Servers that are told to fail: where, how, and what to look at afterwards."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
from support import ROOMY, ROOT, STOP_WITHIN, Server, children_of, until

# The names as the program has them.
NAMES = re.findall(
    r'^    "([a-z_.]+)",$', (ROOT / "crates/sandglass-failpoint/src/names.rs").read_text(), re.MULTILINE
)

# What a case waits for at most: the slowest is a privileged half that waits for a verb that never ends.
PATIENCE = 60.0


def configured(servers, folder: Path, config: str) -> Server:
    """A new server with this configuration file."""
    path = folder / f"{new_tag()}.toml"
    path.write_text(config if "[host]" in config else config + ROOMY)
    return servers.make("--config", str(path))


def host_of(server: Server) -> int:
    """The pid of the privileged half."""
    halves = [pid for pid in children_of(server.pid) if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1] == b"host"]
    assert len(halves) == 1, halves
    return halves[0]


def reached(server: Server, log_from: int) -> list[str]:
    """The points at which something hangs, in the order in which it got there."""
    with server.log_path.open("rb") as log:
        log.seek(log_from)
        return re.findall(r"^failpoint (\S+) reached$", log.read().decode(errors="replace"), re.MULTILINE)


def log_size(server: Server) -> int:
    return server.log_path.stat().st_size if server.log_path.exists() else 0


@dataclass
class Row:
    """What the store says of a sandbox."""

    id: str
    tag: str
    state: str
    end_reason: str | None
    details: list[str]


def rows(server: Server) -> list[Row]:
    """All sandboxes that were created with a tag."""
    store = sqlite3.connect(f"file:{server.data_dir}/serve/store.db?mode=ro", uri=True, timeout=20)
    try:
        found = store.execute(
            "SELECT s.id, m.value, s.state, s.end_reason FROM sandboxes s "
            "JOIN sandbox_metadata m ON m.sandbox = s.id AND m.key = 'tag' ORDER BY s.created_at"
        ).fetchall()
        events = "SELECT detail FROM events WHERE sandbox = ? ORDER BY seq"
        return [Row(*row, [detail for (detail,) in store.execute(events, row[:1])]) for row in found]
    finally:
        store.close()


def settled(server: Server, within: float = PATIENCE) -> list[Row]:
    """What there is when nothing is on its way to another state."""

    def look():
        found = rows(server)
        return all(row.state in ("running", "paused", "ended") for row in found) and (found,)

    return until(look, within=within, what="every sandbox runs, is paused or has ended")[0]


def create(server: Server, tag: str, timeout: float = PATIENCE, of: str = "base") -> httpx.Response:
    """One request to create a sandbox, known by its tag, which is also its idempotency key."""
    body = {"templateID": of, "timeout": 300, "metadata": {"tag": tag}}
    headers = server.headers | {"Idempotency-Key": tag}
    return httpx.post(f"{server.url}/v2/sandboxes", json=body, headers=headers, timeout=timeout)


def kill(server: Server, id: str) -> httpx.Response:
    return httpx.delete(f"{server.url}/sandboxes/{id}", headers=server.headers, timeout=PATIENCE)


def pause(server: Server, id: str, memory: bool = True) -> httpx.Response:
    body = {} if memory else {"memory": False}
    return httpx.post(f"{server.url}/sandboxes/{id}/pause", json=body, headers=server.headers, timeout=PATIENCE)


def resume(server: Server, id: str) -> httpx.Response:
    body = {"timeout": 300}
    return httpx.post(f"{server.url}/sandboxes/{id}/resume", json=body, headers=server.headers, timeout=PATIENCE)


def snapshot(server: Server, id: str) -> httpx.Response:
    return httpx.post(f"{server.url}/sandboxes/{id}/snapshots", headers=server.headers, timeout=PATIENCE)


def fork(server: Server, id: str, count: int) -> httpx.Response:
    body = {"count": count, "timeout": 300}
    return httpx.post(f"{server.url}/sandboxes/{id}/fork", json=body, headers=server.headers, timeout=PATIENCE)


def snapshots(server: Server) -> list[str]:
    """All of them."""
    found = httpx.get(f"{server.url}/v1/snapshots", headers=server.headers, timeout=PATIENCE)
    return [one["id"] for one in found.json()]


def delete(server: Server, snapshot: str) -> httpx.Response:
    return httpx.delete(f"{server.url}/templates/{snapshot}", headers=server.headers, timeout=PATIENCE)


def images(server: Server) -> list[str]:
    """What is on the disk, of paused sandboxes and of snapshots."""
    return [entry.name for entry in (server.data_dir / "host" / "images").iterdir()]


def state(server: Server, id: str) -> str:
    return httpx.get(f"{server.url}/sandboxes/{id}", headers=server.headers, timeout=PATIENCE).json()["state"]


def answers(server: Server, id: str) -> bool:
    """Whether a command runs in it."""
    return server.cli("sandbox", "exec", id, "--", "echo", "alive").stdout == "alive\n"


def new_tag() -> str:
    return uuid.uuid4().hex


class Attempt(threading.Thread):
    """A request whose server may die under it."""

    def __init__(self, request, *args):
        super().__init__(daemon=True)
        self.request, self.args = request, args
        self.response: httpx.Response | None = None
        self.start()

    def run(self):
        try:
            self.response = self.request(*self.args)
        except httpx.HTTPError:
            pass

    @property
    def succeeded(self) -> bool:
        return self.response is not None and self.response.is_success


def all_at_once(request, items: list) -> list:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(request, items))


def crash(server: Server, victim: str):
    """kill -9 of `serve`, of `host`, or of `both`, or an orderly stop in the middle of it all: `term`. Returns when neither is left."""
    host = host_of(server)
    if victim == "term":
        os.kill(server.pid, signal.SIGTERM)
    if victim in ("host", "both"):
        os.kill(host, signal.SIGKILL)
    if victim in ("serve", "both"):
        os.kill(server.pid, signal.SIGKILL)
    server.process.wait(STOP_WITHIN)
    server.process = None
    until(lambda: has_ended(host), within=STOP_WITHIN, what="the end of the privileged half")


def has_ended(pid: int) -> bool:
    """Gone, or waiting for a parent that takes its time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def groups_of(id: str) -> list[Path]:
    """Its control groups, in every hierarchy."""
    found = subprocess.run(
        ["find", "/sys/fs/cgroup", "-type", "d", "-name", id], capture_output=True, text=True, check=True
    ).stdout.split()
    assert found, "the sandbox has no control group"
    return [Path(path) for path in found]


def processes_of(id: str) -> dict[int, str]:
    """Its processes on this machine, and what they are."""
    pids = {int(pid) for group in groups_of(id) for pid in (group / "cgroup.procs").read_text().split()}
    names = {}
    for pid in pids:
        try:
            names[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode() or "stub"
        except (FileNotFoundError, ProcessLookupError):
            continue
    return names


def unwatched(box, command: str = ""):
    """Lets root stop the agent of a sandbox, which from then on does nothing, and run a command."""
    begin = "until [ -e /begin ]; do sleep 0.05; done; kill -STOP 1"
    box.commands.run(f"{begin}; {command}", user="root", background=True, timeout=0).disconnect()
    try:
        box.files.write("/begin", "", user="root", request_timeout=10)
    except Exception:
        # It was stopped before it could answer.
        pass
