"""What a sandbox holds is bit by bit what it held, however often it comes back, and its copies share no secret."""

import threading

import pytest
from e2b import Sandbox
from support import until
from test_snapshots import port, start

CYCLES = 50

# Files on the disk and in memory that never change, and a database that never rests. It answers over HTTP what is wrong.
HOLDER = r"""
import hashlib, http.server, os, sqlite3, threading

fixed = {}
for path in ("/home/user/fixed", "/dev/shm/fixed"):
    with open(path, "wb") as file:
        file.write(os.urandom(4 << 20))
    fixed[path] = hashlib.sha256(open(path, "rb").read()).hexdigest()

lock = threading.Lock()
base = sqlite3.connect("/home/user/base.db", check_same_thread=False, isolation_level=None)
assert base.execute("pragma journal_mode=wal").fetchone() == ("wal",)
base.execute("create table counted (n integer primary key, half text)")
rows = 0

def count():
    global rows
    while True:
        with lock:
            # Often in the middle of one when everything stops.
            base.execute("begin")
            base.execute("insert into counted values (?, 'one')", (rows + 1,))
            base.execute("update counted set half = 'both' where n = ?", (rows + 1,))
            base.execute("commit")
            rows += 1

def wrong():
    for path, digest in fixed.items():
        if hashlib.sha256(open(path, "rb").read()).hexdigest() != digest:
            yield path
    with lock:
        if base.execute("pragma integrity_check").fetchall() != [("ok",)]:
            yield "the integrity of the database"
        if base.execute("select count(*), max(n), sum(half = 'both') from counted").fetchone() != (rows, rows, rows):
            yield f"the rows, which were to be {rows}"

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        said = f"{rows} {'; '.join(wrong()) or 'right'}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

threading.Thread(target=count, daemon=True).start()
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""

# 64 MiB that no image can shrink, and a digest of each page.
PAGES = r"""
import hashlib, http.server, os

size = 4096
memory = bytearray(os.urandom(64 << 20))
digests = [hashlib.sha256(memory[at:at + size]).digest() for at in range(0, len(memory), size)]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        changed = sum(hashlib.sha256(memory[n * size:(n + 1) * size]).digest() != digest
                      for n, digest in enumerate(digests))
        said = f"{changed} of {len(digests)}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

http.server.HTTPServer(("", 8000), Handler).serve_forever()
"""

# What a program draws that was started after the restore; the last one as a client of TLS would.
DRAWN = r"""
import os, random, ssl, uuid
hello = ssl.MemoryBIO()
client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="example.com")
try:
    client.do_handshake()
except ssl.SSLWantReadError:
    pass
# After the heads of record and message, and the version.
print(os.urandom(16).hex(), uuid.uuid4().hex, random.getrandbits(128), hello.read()[11:43].hex())
"""


@pytest.fixture
def sandbox(server):
    sandbox = Sandbox.create(timeout=600)
    yield sandbox
    Sandbox.kill(sandbox.sandbox_id)


def answer(server, sandbox) -> str:
    response = port(server, sandbox, 8000)
    assert response.status_code == 200, response.text
    return response.text


@pytest.mark.timeout(400)
def test_nothing_changes_over_fifty_pauses(server, sandbox):
    start(sandbox, "holder", HOLDER)
    until(lambda: port(server, sandbox, 8000).status_code == 200, within=60, what="it holds all")
    counted = 0
    for cycle in range(CYCLES):
        sandbox.pause()
        sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
        rows, said = answer(server, sandbox).split(" ", 1)
        assert said == "right", f"after {cycle + 1} pauses"
        assert int(rows) >= counted
        counted = int(rows)
    until(lambda: int(answer(server, sandbox).split()[0]) > counted, what="it goes on")
    assert sandbox.commands.run("cat /run/sandglass/generation").stdout.strip() == str(CYCLES + 1)


def test_every_page_of_memory_is_as_it_was(server, sandbox):
    start(sandbox, "pages", PAGES)
    until(lambda: port(server, sandbox, 8000).status_code == 200, within=60, what="it holds all")
    unchanged = "0 of 16384"
    assert answer(server, sandbox) == unchanged
    snapshot = sandbox.create_snapshot()
    try:
        assert answer(server, sandbox) == unchanged
        with Sandbox.create(snapshot.snapshot_id, timeout=120) as copy:
            assert answer(server, copy) == unchanged
        sandbox.pause()
        sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
        assert answer(server, sandbox) == unchanged
    finally:
        Sandbox.delete_snapshot(snapshot.snapshot_id)


@pytest.mark.timeout(600)
def test_a_hundred_copies_draw_each_its_own(server, sandbox):
    sandbox.files.write("/home/user/drawn.py", DRAWN)
    drawn, lock = [], threading.Lock()
    for _ in range(10):
        copies = sandbox.fork(count=10, timeout=120)
        threads = []
        for copy in copies:
            def draw(copy=copy):
                said = copy.commands.run("python3 drawn.py", timeout=100).stdout.split()
                with lock:
                    drawn.append(said)
                copy.kill()

            threads.append(threading.Thread(target=draw))
            threads[-1].start()
        for thread in threads:
            thread.join()
    assert len(drawn) == 100 and all(len(said) == 4 for said in drawn)
    for what, all_of_them in zip(["urandom", "uuid4", "random", "TLS"], zip(*drawn)):
        assert len(set(all_of_them)) == 100, what
