"""What was fetched is given back when a version is there, not when cycles are collected."""

from __future__ import annotations

import gc
from pathlib import Path

from deltasync.testing.processes import Child
from tests.descriptors import open_links
from tests.worlds.published import Follower, Publisher
from tests.worlds.stores import local_place


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
        numbers.add(len(open_links()))
        assert not [name for name in open_links() + _mapped() if "deltasync-fetched" in name]
    assert len(numbers) == 1


def _mapped() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()
