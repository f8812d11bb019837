"""Output without end, input that nobody takes, clients that stop reading: memory is bounded, the rest goes on."""

import base64
import json
import struct
import threading

import pytest
from e2b import PtySize, Sandbox, TimeoutException
from guest import Guest, routing
from support import PeakMemory, until
from wire import Wire

# Far above what the buffers of one stream hold together, and far below what is sent here.
BOUND_MIB = 64


def agent_mib(sandbox) -> int:
    """Resident memory of the agent."""
    line = sandbox.commands.run("grep ^VmRSS: /proc/1/status", user="root").stdout
    return int(line.split()[1]) >> 10


class Start:
    """A started command whose output is read only when the test says so."""

    def __init__(self, server, sandbox, *command: str, receive_buffer: int | None = None):
        self.wire = Wire(server, receive_buffer)
        message = json.dumps({"process": {"cmd": command[0], "args": command[1:]}, "stdin": False}).encode()
        body = struct.pack(">BI", 0, len(message)) + message
        headers = routing(sandbox) | {
            "X-Access-Token": sandbox._envd_access_token,
            "Content-Type": "application/connect+json",
            "Content-Length": str(len(body)),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.wire.sendall(f"POST /process.Process/Start HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode() + body)
        head = self.wire.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        self._body = bytearray()
        self.pid = next(self.events())["start"]["pid"]

    def _fill(self, length: int) -> bool:
        """Reads chunks until so much of the body is there."""
        while len(self._body) < length:
            size = int(self.wire.until(b"\r\n") or b"0", 16)
            if size == 0:
                return False
            self._body += self.wire.exactly(size)
            self.wire.exactly(2)
        return True

    def events(self):
        """The events, one after the other; the end of the stream comes as `{"trailer": …}`."""
        while self._fill(5):
            flags, length = struct.unpack(">BI", self._body[:5])
            assert self._fill(5 + length), "the stream broke off"
            message = json.loads(self._body[5 : 5 + length])
            del self._body[: 5 + length]
            yield {"trailer": message} if flags & 2 else message["event"]

    def close(self):
        self.wire.close()


@pytest.mark.timeout(300)
def test_a_gibibyte_of_output_costs_no_memory_and_hides_no_exit_code(server, sandbox):
    """Nobody holds it: neither half of the server nor the agent. The code is the command's own."""
    size = 1 << 30
    before = agent_mib(sandbox)
    memory = PeakMemory(*server.halves)
    agent = before
    started = Start(server, sandbox, "/bin/bash", "-c", f"head -c {size} /dev/zero; exit 77")
    seen, measured, end = 0, 0, None
    for event in started.events():
        if "data" in event:
            output = base64.b64decode(event["data"]["stdout"])
            assert not output.strip(b"\0")
            seen += len(output)
            if seen - measured > size // 5:
                measured = seen
                agent = max(agent, agent_mib(sandbox))
        elif "end" in event:
            end = event["end"]
    started.close()
    assert seen == size
    assert (end["exitCode"], end["exited"]) == (77, True)
    assert memory.rise() < BOUND_MIB
    assert agent - before < BOUND_MIB


LITTLE_BY_LITTLE = "python3 -c 'import os, time\nfor _ in range(2000): os.write(1, b\".\"); time.sleep(0.0005)'"


def by_pipe(sandbox):
    assert sandbox.commands.run(LITTLE_BY_LITTLE).stdout == "." * 2000


def by_terminal(sandbox):
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60)
    sandbox.files.write("/tmp/little", LITTLE_BY_LITTLE)
    sandbox.pty.send_stdin(terminal.pid, b"sh /tmp/little; exit\n")
    seen = []
    terminal.wait(on_pty=seen.append)
    assert b"".join(seen).count(b".") >= 2000


@pytest.mark.parametrize("said", [by_pipe, by_terminal])
def test_output_that_comes_little_by_little_costs_no_memory(sandbox, said):
    before = agent_mib(sandbox)
    for _ in range(2):
        said(sandbox)
    assert agent_mib(sandbox) - before < 16


STUBBORN = r"""
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
    signal.signal(number, signal.SIG_IGN)
# Two generations of daemons, each in a session of its own, all with the command's pipes open.
for _ in range(2):
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            break
print("up", flush=True)
while True:
    signal.pause()
"""


def test_a_command_that_will_not_end_is_ended_with_all_that_it_started(sandbox):
    """It ignores every signal that can be ignored, has forked out of its session, and holds its pipes open."""
    sandbox.files.write("/tmp/stubborn-9142.py", STUBBORN)
    count = "ps -eo args | grep -c '[s]tubborn-9142.py' || true"
    output = []
    handle = sandbox.commands.run("python3 /tmp/stubborn-9142.py", background=True, timeout=8)
    with pytest.raises(TimeoutException):
        handle.wait(on_stdout=output.append)
    assert "".join(output).count("up") > 6, "they did not all start"
    # The stream ended only when they had: nothing has to be waited for.
    assert sandbox.commands.run(count).stdout == "0\n"


# Counts what it could write.
PRODUCER = r"""
import mmap, os, struct
with open("/tmp/progress", "wb+") as file:
    file.truncate(8)
    count, block = 0, b"x" * 4096
    while True:
        count += os.write(1, block)
        file.seek(0); file.write(struct.pack("<Q", count)); file.flush()
"""


def progress(sandbox) -> int:
    return struct.unpack("<Q", bytes(sandbox.files.read("/tmp/progress", format="bytes")))[0]


def stands_still(sandbox) -> int:
    """Waits until the producer gets no further while whole commands run, and says how far it got."""

    def same():
        before = progress(sandbox)
        for _ in range(3):
            sandbox.commands.run("true")
        return before if before > 0 and progress(sandbox) == before else None

    return until(same, within=60, what="the producer held up")


@pytest.fixture
def producer(sandbox):
    sandbox.files.write("/tmp/producer.py", PRODUCER)
    sandbox.commands.run("rm -f /tmp/progress")
    return ["/usr/bin/python3", "/tmp/producer.py"]


def test_a_client_that_stops_reading_stops_its_command_and_nothing_else(server, sandbox, producer):
    before = agent_mib(sandbox)
    memory = PeakMemory(*server.halves)
    started = Start(server, sandbox, *producer, receive_buffer=64 << 10)
    until(lambda: sandbox.files.exists("/tmp/progress"), what="the producer")
    written = stands_still(sandbox)
    # About 1 MiB here and in the sandbox, and what the kernel holds of the connection to the client.
    assert written < 10 << 20, written
    # Other streams of the same sandbox are as quick as ever, large ones too.
    data = b"y" * (8 << 20)
    sandbox.files.write("/tmp/other", data)
    assert bytes(sandbox.files.read("/tmp/other", format="bytes")) == data
    assert progress(sandbox) == written
    # The command can be ended all the same, and who reads on gets all that it wrote, and how it ended.
    assert sandbox.commands.kill(started.pid) is True
    written = progress(sandbox)
    seen, end = 0, None
    for event in started.events():
        seen += len(base64.b64decode(event["data"]["stdout"])) if "data" in event else 0
        end = event.get("end", end)
    started.close()
    # The last write may have been cut short before it was counted.
    assert written <= seen < written + (128 << 10)
    assert end["status"] == "signal: killed"
    assert memory.rise() < BOUND_MIB
    assert agent_mib(sandbox) - before < BOUND_MIB


def test_a_stalled_stream_does_not_keep_a_sandbox_alive(server, producer):
    """Many clients that do not read: the sandbox is ended at once, and each connection is cut, not finished."""
    sandbox = Sandbox.create(timeout=120)
    memory = PeakMemory(*server.halves)
    try:
        sandbox.files.write("/tmp/producer.py", PRODUCER)
        stalled = [Start(server, sandbox, *producer, receive_buffer=64 << 10) for _ in range(16)]
        until(lambda: sandbox.files.exists("/tmp/progress"), what="the producers")
        stands_still(sandbox)
    finally:
        assert sandbox.kill()
    assert not sandbox.is_running()
    for started in stalled:
        assert not started.wire.rest().endswith(b"0\r\n\r\n")
        started.close()
    assert memory.rise() < BOUND_MIB


def test_every_kind_of_stream_breaks_off_with_its_sandbox(server):
    """None of them ends as if all had gone well: a client would take what it has for the whole."""
    sandbox = Sandbox.create(timeout=120)
    sandbox.commands.run("truncate -s 10G large")
    terminal = {"process": {"cmd": "/bin/bash"}, "pty": {"size": {"cols": 80, "rows": 24}}}
    running = sandbox.commands.run("sleep 1000", background=True, timeout=0)
    selected = {"process": {"pid": running.pid}}
    calls = {
        "process.Process/Start": terminal,
        "process.Process/Connect": selected,
        "process.Process/StreamInput": {"start": selected},
        "filesystem.Filesystem/WatchDir": {"path": "/home/user", "recursive": True},
    }
    wires = {}
    try:
        for method, message in calls.items():
            wires[method] = wire = Wire(server)
            headers = routing(sandbox) | {"X-Access-Token": sandbox._envd_access_token}
            headers |= {"Content-Type": "application/connect+json", "Transfer-Encoding": "chunked"}
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            body = json.dumps(message).encode()
            body = struct.pack(">BI", 0, len(body)) + body
            wire.sendall(f"POST /{method} HTTP/1.1\r\nHost: x\r\n{lines}\r\n{len(body):x}\r\n".encode() + body + b"\r\n")
            # What a client streams goes on, and the others have said all.
            if method != "process.Process/StreamInput":
                wire.sendall(b"0\r\n\r\n")
                assert wire.until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 "), method
                assert b'"start"' in wire.until(b"}")
        wires["download"] = wire = Wire(server, 64 << 10)
        headers = routing(sandbox) | {"X-Access-Token": sandbox._envd_access_token}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        wire.sendall(f"GET /files?path=large HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
        length = int(wire.until(b"\r\n\r\n").lower().split(b"content-length: ")[1].split()[0])
    finally:
        assert sandbox.kill()
    for method, wire in wires.items():
        rest = wire.rest()
        assert not rest.endswith(b"0\r\n\r\n") and b"\x02\0\0" not in rest, (method, rest[-200:])
        assert not rest.startswith(b"HTTP/1.1 2") and len(rest) < length, method
        wire.close()


def test_a_download_that_stops_holds_nobody_up(server, sandbox):
    sandbox.commands.run("truncate -s 10G /tmp/large")
    memory = PeakMemory(*server.halves)
    before = agent_mib(sandbox)
    wires = []
    for _ in range(20):
        wire = Wire(server, 64 << 10)
        headers = routing(sandbox) | {"X-Access-Token": sandbox._envd_access_token}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        wire.sendall(f"GET /files?path=/tmp/large HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
        assert wire.until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")
        wires.append(wire)
    # More than there are threads for blocking work: none of them may be kept waiting in one.
    assert sandbox.commands.run("echo quick").stdout == "quick\n"
    sandbox.files.write("/tmp/small", "small")
    assert sandbox.files.read("/tmp/small") == "small"
    for wire in wires:
        wire.close()
    assert memory.rise() < BOUND_MIB
    assert agent_mib(sandbox) - before < BOUND_MIB


def test_input_that_nobody_takes_stops_who_sends_it(server, sandbox):
    """A gibibyte for the standard input of a program that never reads: it stays with the client."""
    handle = sandbox.commands.run("sleep 600", background=True, stdin=True)
    before = agent_mib(sandbox)
    memory = PeakMemory(*server.halves)
    data = base64.b64encode(b"z" * (1 << 20)).decode()
    select = json.dumps({"start": {"process": {"pid": handle.pid}}}).encode()
    feed = json.dumps({"data": {"input": {"stdin": data}}}).encode()
    sent = 0
    with Wire(server) as wire:
        headers = routing(sandbox) | {"X-Access-Token": sandbox._envd_access_token}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        wire.sendall(
            f"POST /process.Process/StreamInput HTTP/1.1\r\nHost: x\r\n{lines}"
            "Content-Type: application/connect+json\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )

        def send(message: bytes):
            body = struct.pack(">BI", 0, len(message)) + message
            wire.sendall(b"%x\r\n%b\r\n" % (len(body), body))

        def flood():
            nonlocal sent
            try:
                send(select)
                for _ in range(1024):
                    send(feed)
                    sent += 1
            except OSError:
                pass

        sender = threading.Thread(target=flood)
        sender.start()

        def stopped():
            seen = sent
            for _ in range(3):
                sandbox.commands.run("true")
            return seen == sent

        until(stopped, within=60, what="the sender held up")
        assert sent < 40, "the input went somewhere"
        # The program ends, and so does the request that waits for it.
        assert sandbox.commands.kill(handle.pid) is True
        assert wire.until(b"\r\n\r\n").startswith(b"HTTP/1.1 ")
        sender.join(60)
        assert not sender.is_alive()
    assert memory.rise() < BOUND_MIB
    assert agent_mib(sandbox) - before < BOUND_MIB


def test_forms_without_end_are_refused_within_bounds(sandbox):
    """The head of a part that never ends, and more files than one request may carry."""
    guest = Guest(sandbox)
    before = agent_mib(sandbox)

    def endless():
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="'
        for _ in range(2048):
            yield b"f" * 65536

    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    try:
        answer = guest.http.post("/files", content=endless(), headers=headers)
        assert answer.status_code == 400, answer.text
    except Exception as cut:
        # Refused before it was read to its end, which may reach the client as a broken connection only.
        assert "write" in type(cut).__name__.lower() or "protocol" in type(cut).__name__.lower(), repr(cut)
    assert agent_mib(sandbox) - before < BOUND_MIB
    many = [("file", (f"/tmp/many/{n}", b"")) for n in range(1001)]
    answer = guest.http.post("/files", files=many)
    assert answer.status_code == 400 and "too many" in answer.json()["message"]
