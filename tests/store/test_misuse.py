"""Readers and writers that are used as nobody should: typed errors, and never a wrong model."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from deltasync import ModuleSource, ModuleTarget, ReceiverOptions, SenderOptions
from deltasync.errors import (
    CallOrderError,
    ConfigError,
    DeltaSyncError,
    RunUnknown,
    StoreError,
    StoreRefused,
    TransportClosed,
)
from deltasync.store.objects import StoreOptions
from deltasync.store.receiver import StoreReceiver
from deltasync.store.sender import StoreSender
from tests.worlds.published import Follower, Publisher
from tests.worlds.stores import local_place, wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    """Three versions in a folder."""
    made = Publisher(local_place(tmp_path / "store"))
    made.publish(3)
    return made


def assert_right(publisher: Publisher, follower: Follower) -> None:
    """What is held is what was published, and nothing if there is no version."""
    version = follower.receiver.version
    assert not follower.receiver.is_dirty
    assert version is None or follower.holds(publisher.states[version])


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """So many more files can be opened in here."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    numbers: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with suppress(OSError):
            while True:
                numbers.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(left):
            os.close(numbers.pop())
        yield
    finally:
        for number in numbers:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_receivers_live_without_descriptors(publisher: Publisher) -> None:
    for left in range(8):
        follower = Follower(publisher.place, seed=left)
        with follower.receiver:
            with few_descriptors(left):
                try:
                    follower.receiver.fetch(timeout_s=1)
                except DeltaSyncError as error:
                    refused = error
            assert_right(publisher, follower)
            assert follower.receiver.fetch() == 3, refused
            assert_right(publisher, follower)


def test_senders_live_without_descriptors(publisher: Publisher) -> None:
    refused = 0
    for left in range(5):
        with few_descriptors(left):
            try:
                publisher.publish()
            except StoreError:
                refused += 1
        publisher.publish()
    assert refused
    follower = Follower(publisher.place)
    with follower.receiver:
        assert follower.receiver.fetch() == max(publisher.states)
    assert_right(publisher, follower)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1, 1e9, "5", None])
def test_what_is_no_time_is_refused_before_anything_is_fetched(
    publisher: Publisher, seconds: Any
) -> None:
    follower = Follower(publisher.place)
    with follower.receiver as receiver:
        for call in (receiver.fetch, receiver.stage, receiver.follow().wait_staged):
            with pytest.raises(ConfigError, match="timeout_s is"):
                call(timeout_s=seconds)
        assert receiver.run is None, "nothing was opened"
    for name in ("timeout_s", "retry_timeout_s"):
        if seconds != "5":  # which pydantic reads
            with pytest.raises(ConfigError, match=f"{name} is"):
                StoreOptions(**{name: seconds})


@pytest.mark.parametrize("seed", range(3))
def test_closing_ends_a_fetch_of_another_thread(publisher: Publisher, seed: int) -> None:
    publisher.publish(2)
    for turn in range(30):
        follower, ends = Follower(publisher.place, seed=seed), list[object]()

        def fetch(follower: Follower = follower, ends: list[object] = ends) -> None:
            try:
                ends.append(follower.receiver.fetch(timeout_s=10))
            except (DeltaSyncError, AssertionError) as error:
                ends.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        time.sleep(turn * 0.0007)
        follower.receiver.close()
        thread.join(timeout=30)
        [end] = ends
        assert end == 5 or isinstance(end, TransportClosed), repr(end)
        assert_right(publisher, follower)


def test_one_thread_uses_a_receiver_at_a_time(publisher: Publisher) -> None:
    follower, refused = Follower(publisher.place), list[DeltaSyncError]()

    def fetch() -> None:
        for _ in range(30):
            try:
                follower.receiver.fetch(timeout_s=5)
            except ConfigError as error:
                refused.append(error)

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    publisher.publish(5)
    for thread in threads:
        thread.join(timeout=60)
    assert all("one thread" in str(error) for error in refused)
    assert follower.receiver.fetch() == 8
    assert_right(publisher, follower)
    follower.receiver.close()


def test_a_fetch_beside_a_follower_is_refused_or_right(publisher: Publisher) -> None:
    follower = Follower(publisher.place)
    with follower.receiver, follower.receiver.follow(pause=nullcontext) as thread:
        for _ in range(10):
            publisher.publish()
            try:
                follower.receiver.fetch(timeout_s=5)
            except (CallOrderError, ConfigError):
                continue
        deadline = time.monotonic() + 30
        while follower.receiver.version != 13:
            assert time.monotonic() < deadline, thread.last_error
            time.sleep(0.02)
    assert_right(publisher, follower)


def test_a_store_that_vanished_is_not_continued(publisher: Publisher) -> None:
    folder = publisher.place.folder
    assert folder is not None
    follower = Follower(publisher.place)
    follower.receiver.fetch()
    aside = folder.with_name("aside")
    folder.rename(aside)
    for _ in range(2):
        with pytest.raises(StoreRefused, match="mounted"):
            publisher.sender.publish()
        with pytest.raises(StoreError):
            follower.receiver.fetch(4, timeout_s=0.2)
        assert_right(publisher, follower)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    assert publisher.publish() == 4
    assert follower.receiver.fetch() == 4
    assert_right(publisher, follower)
    shutil.rmtree(folder)
    with pytest.raises(StoreRefused, match="StoreSender"):
        publisher.sender.publish()
    again = Publisher(publisher.place, model=publisher.model)
    assert again.publish(2) == 2
    with pytest.raises(StoreError):  # v4 is newer than all that this run has now
        follower.receiver.fetch(timeout_s=0.2)
    assert_right(publisher, follower)
    assert follower.receiver.fetch(2) == 2
    assert_right(again, follower)
    follower.receiver.close()


def test_runs_of_one_prefix_do_not_meet(tmp_path: Path, publisher: Publisher) -> None:
    other = Publisher(publisher.place)
    second = StoreSender(
        ModuleSource(other.model), publisher.place.url, options=SenderOptions(stream_id="other")
    )
    assert second.publish().version == 1
    follower = Follower(publisher.place)
    assert follower.receiver.fetch() == 3
    assert_right(publisher, follower)
    follower.receiver.close()
    with (
        StoreReceiver(ModuleTarget(follower.model), publisher.place.url) as unnamed,
        pytest.raises(RunUnknown, match="name one"),
    ):
        unnamed.fetch(timeout_s=0.2)


_READER = """
import os, sys
import obstore, obstore.exceptions, obstore.store
from pathlib import Path
import torch
os.environ["TMPDIR"] = sys.argv[2]
from deltasync.store.sender import StoreSender
from deltasync.errors import StoreRefused
from deltasync import ModuleSource, SenderOptions
from tests.worlds.published import Follower, small_model
from tests.worlds.stores import local_place
follower = Follower(local_place(Path(sys.argv[1])))
os.setuid(65534)
print(follower.receiver.fetch(), flush=True)
follower.receiver.close()
try:
    StoreSender(
        ModuleSource(small_model()), sys.argv[1], options=SenderOptions(stream_id="run")
    ).publish()
except StoreRefused as error:
    print("permissions" in str(error))
"""


@pytest.fixture
def world_readable() -> Iterator[Path]:
    """A folder that every user reaches, as the folders of pytest are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="becomes a user that may not write")
def test_a_store_that_can_only_be_read_is_read(world_readable: Path) -> None:
    publisher = Publisher(local_place(world_readable / "store"))
    publisher.publish(3)
    spool = world_readable / "spool"
    spool.mkdir()
    spool.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-c", _READER, publisher.place.url, str(spool)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout.split() == ["3", "True"], done.stderr
    assert list(spool.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_changes_nothing(publisher: Publisher) -> None:
    follower = Follower(publisher.place)
    follower.receiver.fetch()
    publisher.publish()
    follower.receiver.stage(timeout_s=10)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            follower.receiver.fetch(timeout_s=1)
        except StoreRefused:
            follower.receiver.close()
            status = 0
        finally:
            os._exit(status)
    wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, timeout_s=30)
    assert follower.receiver.commit() == 4
    assert_right(publisher, follower)
    follower.receiver.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_leaves_what_its_parent_has_fetched(publisher: Publisher) -> None:
    """In place, a version is written from files."""
    follower = Follower(publisher.place, options=ReceiverOptions(max_staged_bytes=0))
    follower.receiver.stage(timeout_s=10)
    child = os.fork()
    if child == 0:
        follower.receiver.close()
        os._exit(0)
    wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, timeout_s=60)
    follower.receiver.commit()
    assert_right(publisher, follower)
    follower.receiver.close()
