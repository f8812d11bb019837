"""kill -9 of the server at the worst moments. Afterwards every sandbox is owned or gone."""

import threading

import pytest
from e2b import CommandExitException, Sandbox
from e2b.exceptions import SandboxNotFoundException
from support import until


def alive(server) -> set[str]:
    paginator = Sandbox.list(limit=100, **server.opts)
    found = set()
    while paginator.has_next:
        found |= {info.sandbox_id for info in paginator.next_items()}
    return found


def test_ten_running_sandboxes_survive(lone_server):
    server = lone_server
    boxes = [Sandbox.create(timeout=300, **server.opts) for _ in range(10)]
    for number, box in enumerate(boxes):
        box.files.write("/tmp/number", str(number))
    # One counts on through the crash, one ends during it, with a code of its own.
    counting = boxes[0].commands.run(
        # In its place all at once: a file that gets shorter while it is read is a broken answer.
        "i=0; while :; do i=$((i+1)); echo $i > /tmp/next; mv /tmp/next /tmp/count; sleep 0.05; done",
        background=True,
        timeout=0,
    )
    ending = boxes[1].commands.run(
        "until [ -e /tmp/go ]; do sleep 0.05; done; echo the end; exit 42", background=True, timeout=0
    )
    before = {box.sandbox_id: box.get_info().end_at for box in boxes}
    server.kill()
    server.start()

    assert alive(server) == {box.sandbox_id for box in boxes}
    for number, box in enumerate(boxes):
        again = Sandbox.connect(box.sandbox_id, timeout=10, **server.opts)
        assert again.files.read("/tmp/number") == str(number)
        assert again.get_info().end_at == before[box.sandbox_id]

    # A command that was running runs on; it can be found, watched to its end, and killed.
    first = int(boxes[0].files.read("/tmp/count"))
    until(lambda: int(boxes[0].files.read("/tmp/count")) > first, what="the counting to go on")
    assert counting.pid in {process.pid for process in boxes[0].commands.list()}
    assert boxes[0].commands.kill(counting.pid)
    handle = boxes[1].commands.connect(ending.pid)
    boxes[1].files.write("/tmp/go", "")
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert (ended.value.exit_code, ended.value.stdout) == (42, "the end\n")

    for box in boxes:
        assert box.kill()
    server.assert_nothing_left()


def test_a_command_that_ended_meanwhile_still_has_its_code(lone_server):
    server = lone_server
    box = Sandbox.create(timeout=300, **server.opts)
    handle = box.commands.run("until [ -e /tmp/go ]; do sleep 0.02; done; exit 17", background=True, timeout=0)
    box.commands.run("(until [ -e /tmp/gone ]; do sleep 0.02; done; touch /tmp/go) >/dev/null 2>&1 &")
    box.files.write("/tmp/gone", "")
    server.kill()
    server.start()
    with pytest.raises(CommandExitException) as ended:
        box.commands.connect(handle.pid).wait()
    assert ended.value.exit_code == 17


def test_timeouts_fire_although_the_server_was_down(lone_server):
    server = lone_server
    box = Sandbox.create(timeout=3, **server.opts)
    info = box.get_info()
    server.kill()
    # Down for the whole rest of its life.
    import datetime

    until(lambda: datetime.datetime.now(datetime.timezone.utc) > info.end_at, within=10, what="its time to be up")
    server.start()
    until(lambda: not box.is_running(), within=5, what="its end")
    with pytest.raises(SandboxNotFoundException):
        box.get_info()
    server.assert_nothing_left()


@pytest.mark.parametrize("moment", ["all are asked for", "the first is answered"])
@pytest.mark.parametrize("during", ["create", "kill", "both"])
def test_storms(lone_server, during, moment):
    """Killed in the middle of many creates and kills; nothing is lost and nothing leaks."""
    server = lone_server
    kept: set[str] = set()
    lock = threading.Lock()
    underway = threading.Semaphore(0)
    answered = threading.Event()

    def create():
        try:
            underway.release()
            box = Sandbox.create(timeout=300, retries=0, **server.opts)
            answered.set()
            with lock:
                kept.add(box.sandbox_id)
        except Exception:
            pass

    def kill(box):
        try:
            underway.release()
            box.kill(retries=0)
            answered.set()
        except Exception:
            pass

    victims = []
    if during != "create":
        victims = [Sandbox.create(timeout=300, **server.opts) for _ in range(5)]
    jobs = [threading.Thread(target=kill, args=(box,)) for box in victims]
    if during != "kill":
        jobs += [threading.Thread(target=create) for _ in range(6)]
    for job in jobs:
        job.start()
    for _ in jobs:
        underway.acquire()
    if moment == "the first is answered":
        assert answered.wait(30)
    server.kill()
    for job in jobs:
        job.join()
    server.start()

    # Whoever got an answer has a sandbox; whoever was being killed may be gone or not yet.
    now = alive(server)
    assert kept <= now, "a sandbox that was handed out is gone"
    for id in now:
        box = Sandbox.connect(id, **server.opts)
        if id in kept:
            assert box.commands.run("echo alive").stdout == "alive\n"
        box.kill()
    server.assert_nothing_left()


def test_killed_again_and_again(lone_server):
    """A crash while the last crash is being cleared up."""
    server = lone_server
    boxes = [Sandbox.create(timeout=300, **server.opts) for _ in range(3)]
    for _ in range(3):
        server.kill()
        server.start()
    assert alive(server) == {box.sandbox_id for box in boxes}
    for box in boxes:
        assert box.commands.run("echo here").stdout == "here\n"
        assert box.kill()
    server.assert_nothing_left()


def test_an_orderly_stop_leaves_sandboxes_running(lone_server):
    server = lone_server
    box = Sandbox.create(timeout=300, **server.opts)
    box.files.write("/tmp/mark", "kept")
    server.stop()
    server.start()
    assert box.files.read("/tmp/mark") == "kept"
    assert box.kill()
