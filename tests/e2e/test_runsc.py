"""A `runsc` that hangs, crashes, prints garbage or lies. Every request ends in bounded time, says why, and leaves nothing."""

import os
import threading

import pytest
from faults import answers, configured, create, kill, new_tag, settled

# Misbehaves on one verb as a file beside it says, and is the real one otherwise.
WRAPPER = r"""#!/bin/bash
read -r mode < "$0.mode"
for verb in "$@"; do
  case "$verb" in create|start|--version) break ;; esac
done
case "$verb $mode" in
  "--version foreign"*) exec echo "runsc version 0.0~20990101.0" ;;
  "--version garbage") exec head -c 100000 /dev/urandom ;;
  "--version crash") kill -SEGV $$ ;;
  "$verb $verb-hang"|"start foreign-start-hang") exec sleep 1000 ;;
  "$verb $verb-garbage") head -c 10000 /dev/urandom >&2; head -c 10000 /dev/urandom; exit 128 ;;
  "$verb $verb-garbled-log") head -c 100000 /dev/urandom > "$(sed -n 's/.*--log \([^ ]*\).*/\1/p' <<< "$*")"; exit 128 ;;
  "$verb $verb-segv"|"start foreign-start-segv") kill -SEGV $$ ;;
  "$verb $verb-kill") kill -KILL $$ ;;
  "$verb $verb-flood"|"start foreign-start-flood") head -c 100M /dev/zero | tr '\0' x >&2; exit 1 ;;
  "$verb $verb-lie") exit 0 ;;
  "$verb $verb-daemon") sleep 1000 & exit 0 ;;
  "$verb $verb-slow") sleep 2 ;;
esac
exec /usr/bin/runsc "$@"
"""

# What a client may have to wait: the engine's own limit, and some for a busy machine.
BOUND = 55


class Wrapped:
    """A server whose `runsc` does as it is told."""

    def __init__(self, servers, folder, mode: str):
        self.wrapper = folder / f"runsc-{new_tag()}"
        self.wrapper.write_text(WRAPPER)
        self.wrapper.chmod(0o755)
        self.does(mode)
        self.server = configured(servers, folder, f'runsc = "{self.wrapper}"\n')

    def does(self, mode: str):
        aside = self.wrapper.with_suffix(".next")
        aside.write_text(mode + "\n")
        os.replace(aside, f"{self.wrapper}.mode")

    def assert_works(self):
        response = create(self.server, new_tag())
        assert response.status_code == 201, response.text
        id = response.json()["sandboxID"]
        assert answers(self.server, id)
        assert kill(self.server, id).status_code == 204
        assert all(row.state == "ended" for row in settled(self.server))
        self.server.assert_nothing_left()


@pytest.fixture(scope="module")
def real(servers, work_folder):
    return Wrapped(servers, work_folder, "well")


@pytest.fixture(scope="module")
def foreign(servers, work_folder):
    """One of a version that is not known, and so driven by its command line."""
    return Wrapped(servers, work_folder, "foreign")


def fails(wrapped: Wrapped, mode: str, status: int, why: str):
    """A request fails in time, with the reason in the record, and leaves nothing."""
    wrapped.does(mode)
    tag = new_tag()
    response = create(wrapped.server, tag, timeout=BOUND)
    assert response.status_code == status, (mode, response.text)
    assert response.json()["message"]
    wrapped.does("foreign" if mode.startswith("foreign") else "well")
    (row,) = [row for row in settled(wrapped.server) if row.tag == tag]
    assert row.state == "ended" and row.end_reason in ("create_failed", "crashed"), (mode, row)
    assert any(why in detail for detail in row.details), (mode, row.details)
    assert all(len(detail) < 4096 and detail.isprintable() for detail in row.details), (mode, row.details)
    wrapped.server.assert_nothing_left()


@pytest.mark.timeout(200)
def test_misbehaviour_of_create(real):
    for mode, status, why in [
        ("create-garbage", 500, "runsc ended with exit code 128"),
        ("create-garbled-log", 500, "runsc ended with exit code 128"),
        ("create-segv", 500, "runsc ended with signal 11"),
        ("create-kill", 503, "out of memory"),
        ("create-flood", 500, "runsc ended with exit code 1"),
        ("create-lie", 500, "find the sandbox process"),
        ("create-daemon", 500, "find the sandbox process"),
    ]:
        fails(real, mode, status, why)
    real.does("create-slow")
    real.assert_works()


@pytest.mark.timeout(200)
def test_misbehaviour_of_start(foreign):
    for mode, why in [("foreign-start-segv", "runsc ended with signal 11"), ("foreign-start-flood", "runsc ended with exit code 1")]:
        fails(foreign, mode, 500, why)
    foreign.assert_works()


@pytest.mark.timeout(200)
def test_hangs_end_in_time_and_hold_up_nobody_else(real, foreign):
    """Side by side, because each takes as long as the engine's patience."""
    cases = [(real, "create-hang", "did not end within"), (foreign, "foreign-start-hang", "did not end within")]
    failures = []

    def case(wrapped, mode, why):
        try:
            fails(wrapped, mode, 500, why)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=case, args=one) for one in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    real.assert_works()
    foreign.assert_works()
