"""Volumes: what several sandboxes share."""

from __future__ import annotations

import contextlib
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2b import Sandbox, Volume
from e2b.exceptions import VolumeException
from support import until

pytestmark = pytest.mark.newest_sdk


def fresh_name() -> str:
    return f"v-{uuid.uuid4().hex[:12]}"


def destroyed(volume: Volume):
    """Deletes a volume whose last sandbox has just been killed."""

    def gone():
        with contextlib.suppress(VolumeException):
            return Volume.destroy(volume.volume_id)

    until(gone, within=20, what="the volume is gone")


@pytest.fixture
def volume(server):
    volume = Volume.create(fresh_name())
    yield volume
    destroyed(volume)


def test_a_volume_is_made_mounted_and_deleted(server):
    volume = Volume.create(fresh_name())
    assert Volume.get_info(volume.volume_id).name == volume.name
    assert volume.volume_id in [one.volume_id for one in Volume.list()]
    with Sandbox.create(timeout=120, volume_mounts={"/mnt/data": volume}) as sandbox:
        ran = sandbox.commands.run("echo written > /mnt/data/file && cat /mnt/data/file")
        assert ran.stdout == "written\n"
        assert list(sandbox.get_info().volume_mounts) == [{"name": volume.name, "path": "/mnt/data"}]
        with pytest.raises(VolumeException, match=f"in use.*{sandbox.sandbox_id}"):
            Volume.destroy(volume.volume_id)
    destroyed(volume)
    assert Volume.destroy(volume.volume_id) is False


def test_two_sandboxes_share_a_volume(volume):
    with ThreadPoolExecutor() as pool:
        make = lambda _: Sandbox.create(timeout=120, volume_mounts={"/mnt/data": volume.name})  # noqa: E731
        one, other = pool.map(make, range(2))
    with one, other:
        one.files.write("/mnt/data/a", "by one")
        assert other.files.read("/mnt/data/a") == "by one"
        other.commands.run("mv /mnt/data/a /mnt/data/b && echo more >> /mnt/data/b")
        assert one.files.read("/mnt/data/b") == "by onemore\n"
        assert not one.files.exists("/mnt/data/a")
