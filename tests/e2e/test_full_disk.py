"""Sandboxes that fill the file system of the data folder: it can be emptied by the same API."""

import subprocess

import pytest
from e2b import Sandbox
from e2b.exceptions import ServiceBusyException
from support import until


def free(server) -> int:
    return int(subprocess.check_output(["stat", "-f", "-c", "%a", server.data_dir]))


def test_a_full_disk_can_be_emptied(cramped_server):
    server = cramped_server
    greedy = Sandbox.create(timeout=300, **server.opts)
    other = Sandbox.create(timeout=300, **server.opts)
    greedy.commands.run("head -c 600M /dev/zero > /tmp/x; sync; true", user="root", timeout=60)
    until(lambda: free(server) == 0, what="the disk is full")
    with pytest.raises(ServiceBusyException, match="out of disk space"):
        Sandbox.create(timeout=300, **server.opts)
    assert greedy.kill()
    assert not greedy.is_running()
    until(lambda: free(server) > 0, what="the disk has room")
    # The one that failed has not spoiled the store for those that follow.
    third = Sandbox.create(timeout=300, **server.opts)
    assert third.commands.run("echo yes").stdout == "yes\n"
    assert third.kill() and other.kill()
    server.assert_nothing_left()
