"""What teams and the machine may have together: exactly that, and who gets no more hears which bound it was."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2b import Sandbox
from faults import answers, configured, create, kill, new_tag, settled, unwatched
from support import Server, status_of, until


def bounded(servers, work_folder, quota: str = "", host: str = "") -> Server:
    """A server with these bounds and, on every machine, no others that matter."""
    roomy = {"memory_mib": 10**9, "disk_mib": 10**9, "cpu_overcommit": 10**6}
    given = {line.split("=")[0].strip() for line in host.splitlines()}
    rest = "".join(f"{key} = {value}\n" for key, value in roomy.items() if key not in given)
    return configured(servers, work_folder, f"[quota]\n{quota}\n[host]\n{host}\n{rest}")


@pytest.fixture
def cleared(servers, work_folder):
    """Makes servers, and ends all their sandboxes."""
    made = []

    def make(**bounds):
        made.append(bounded(servers, work_folder, **bounds))
        return made[-1]

    yield make
    for server in made:
        for row in settled(server):
            kill(server, row.id)
        settled(server)
        server.assert_nothing_left()
        server.stop()


def refused(response: httpx.Response, status: int, *words: str):
    assert response.status_code == status, response.text
    assert response.headers["should-retry"] == "false"
    assert all(word in response.json()["message"] for word in words), response.text
    if status == 503:
        assert response.json()["error_code"] == "sandbox_capacity_unavailable"


def test_of_200_creates_at_once_a_team_gets_exactly_its_quota(cleared):
    server = cleared(quota="sandboxes = 3")
    with ThreadPoolExecutor(200) as threads:
        # A loaded machine takes its time for so many connections.
        responses = list(threads.map(lambda _: create(server, new_tag(), timeout=300), range(200)))
    made = [response for response in responses if response.status_code == 201]
    assert len(made) == 3
    for response in responses:
        if response not in made:
            refused(response, 429, "3 sandboxes", "quota.sandboxes", "kill")
    assert len([row for row in settled(server) if row.state == "running"]) == 3
    # As soon as one is killed there is room for one.
    assert kill(server, made[0].json()["sandboxID"]).status_code == 204
    assert create(server, new_tag()).status_code == 201
    refused(create(server, new_tag()), 429, "quota.sandboxes")


@pytest.mark.parametrize(
    ("quota", "words"),
    [("cpus = 3", ["3 cores", "has 2", "quota.cpus"]), ("memory_mib = 2047", ["2047 MiB of memory", "has 1024"])],
)
def test_a_quota_says_what_it_is(cleared, quota, words):
    server = cleared(quota=quota)
    assert create(server, new_tag()).status_code == 201
    refused(create(server, new_tag()), 429, *words)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("memory_mib = 2047", ["MiB of memory", "1024 of 2047", "host.memory_mib"]),
        ("disk_mib = 8191", ["MiB of disk", "4096 of 8191", "host.disk_mib"]),
        ("loop_devices = 1", ["loop devices", "1 of 1", "host.loop_devices"]),
    ],
)
def test_a_full_machine_says_what_it_lacks_also_after_a_crash(cleared, host, words):
    server = cleared(host=host)
    first = create(server, new_tag())
    assert first.status_code == 201, first.text
    refused(create(server, new_tag()), 503, *words)
    server.kill()
    server.start()
    refused(create(server, new_tag()), 503, *words)
    # Nobody has to wait until all of it is removed.
    assert kill(server, first.json()["sandboxID"]).status_code == 204
    second = create(server, new_tag())
    assert second.status_code == 201, second.text
    assert answers(server, second.json()["sandboxID"])


def test_connections_into_sandboxes_are_bounded_over_all_of_them(cleared):
    server = cleared(host="connections = 3")
    boxes = [Sandbox.create(timeout=300, **server.opts) for _ in range(2)]
    held = [boxes[n % 2].commands.run("sleep 1000", background=True, timeout=0) for n in range(3)]
    for box in boxes:
        headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49983"}
        response = httpx.get(f"{server.url}/health", headers=headers)
        refused(response, 503, "no more connections")
    refused(create(server, new_tag()), 503, "all 3 connections", "host.connections")
    for handle in held:
        handle.disconnect()
    until(lambda: create(server, new_tag()).status_code == 201, within=60, what="room for another sandbox")
    for box in boxes:
        assert box.commands.run("echo alive").stdout == "alive\n"
        box.kill()


def test_memory_of_many_transfers_is_given_back(cleared):
    """100 uploads that nobody takes fill the server's buffers, and when they end it is as small as before."""
    server = cleared()
    box = Sandbox.create(timeout=300, **server.opts)

    def rss() -> int:
        return int(status_of(server.pid)["VmRSS"].split()[0]) >> 10

    before = rss()
    head = (
        f"POST /files?path=big HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {box.sandbox_id}\r\nE2b-Sandbox-Port: 49983\r\n"
        f"X-Access-Token: {box._envd_access_token}\r\nContent-Type: application/octet-stream\r\n"
        "Content-Length: 1000000000\r\n\r\n"
    )
    host, port = server.address.split(":")
    uploads = [socket.create_connection((host, int(port))) for _ in range(100)]
    for upload in uploads:
        upload.sendall(head.encode())
        upload.sendall(b"x" * 65536)
        upload.settimeout(1)
    # Each has begun, and from here on nobody reads in there.
    unwatched(box)

    def fill(upload: socket.socket):
        try:
            while True:
                upload.sendall(b"x" * 65536)
        except TimeoutError:
            pass

    threads = [threading.Thread(target=fill, args=(upload,)) for upload in uploads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    full = rss()
    assert full > before + 30, "nothing was held up"
    for upload in uploads:
        upload.close()
    until(lambda: rss() < before + 40, within=60, what="memory given back")
    box.kill()
