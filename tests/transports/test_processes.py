"""The helpers that run functions in processes fail loudly and leave nothing running."""

import multiprocessing
import os
import time

import pytest

from deltasync.testing.processes import Child, ChildFailed
from tests.worlds.ranks import run_ranks


def fail_at_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unwell")
    time.sleep(60)


def sleep() -> None:
    time.sleep(60)


def has_parent(process: int, is_so: bool) -> None:
    assert (os.getppid() == process) is is_so


@pytest.mark.parametrize(("chosen", "is_ours"), [("spawn", True), ("forkserver", False)])
def test_children_are_forked_elsewhere_where_that_was_chosen(
    chosen: str | None, is_ours: bool
) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(chosen, force=True)
    try:
        with Child(has_parent, os.getpid(), is_ours) as child:
            child.wait(timeout_s=40)
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_the_traceback_of_a_failed_rank_is_told_at_once() -> None:
    with pytest.raises(ChildFailed, match=r"(?s)rank 1 raised.*fail_at_one.*rank one is unwell"):
        run_ranks(fail_at_one, 2, timeout_s=40)


def test_a_child_that_hangs_is_told_and_killed() -> None:
    with Child(sleep) as child:
        assert child.is_alive
        with pytest.raises(ChildFailed, match="still runs"):
            child.wait(timeout_s=0.1)
    assert not child.is_alive
    with pytest.raises(ChildFailed, match="ended with -9"):
        child.wait(timeout_s=0)
