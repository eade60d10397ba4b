"""What was fetched is given back when a version is there, not when cycles are collected."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltasync.testing.processes import Child
from tests.store.published import Follower, Publisher
from tests.store.stores import local_place


@pytest.mark.timeout(120)
def test_files_are_closed_as_soon_as_a_version_is_written(tmp_path: Path) -> None:
    """In a process of its own, where no other test has files or opens any meanwhile."""
    with Child(follow, tmp_path / "store") as child:
        child.wait(timeout_s=90)


def follow(folder: Path) -> None:
    gc.disable()
    place = local_place(folder)
    publisher = Publisher(place, anchor_every=4)
    publisher.publish()
    numbers = set()
    for seed in range(4):
        publisher.publish(3)
        follower = Follower(place, seed=seed)
        with follower.receiver:
            follower.receiver.fetch()
            publisher.publish(2)
            follower.receiver.fetch()
            assert follower.holds(publisher.states[follower.receiver.version or 0])
        numbers.add(len(os.listdir("/proc/self/fd")))
        assert not [link for link in _open_files() if "deltasync-fetched" in link]
    assert len(numbers) == 1


def _open_files() -> Iterator[str]:
    """Paths of the files that this process has open, or mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        yield line.partition("/")[2]
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
