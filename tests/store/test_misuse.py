"""Readers and writers that are used as nobody should: typed errors, and never a wrong model."""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deltasync import ReceiverOptions, SenderOptions
from deltasync.delta.snapshot import Delta
from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    SourceChanged,
    StoreError,
    StoreRefused,
    TransportClosed,
    VersionMissing,
)
from deltasync.store.catalogue import Run
from deltasync.store.manifest import Way
from deltasync.store.objects import Objects
from deltasync.store.sender import StoreSender
from deltasync.store.verifying import verify_run
from deltasync.sync.source.streamed import StreamedWeights
from tests.worlds.published import (
    RUN,
    Follower,
    Publisher,
    assert_published,
    blank,
    change,
    small_model,
)
from tests.worlds.stores import Place, local_place, wait_until


@pytest.fixture
def trainer(tmp_path: Path) -> Publisher:
    """Three versions in a folder."""
    made = Publisher(local_place(tmp_path / "store"))
    made.publish(3)
    return made


def assert_right(trainer: Publisher, reader: Follower) -> None:
    """What is held is what was published, and nothing if there is no version."""
    version = reader.receiver.version
    assert not reader.receiver.is_dirty
    assert version is None or reader.holds(trainer.states[version])


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


def test_readers_and_writers_live_without_descriptors(trainer: Publisher) -> None:
    refused = [0, 0]
    for left in range(0, 8, 2):
        with Follower(trainer.place, seed=left) as reader:
            with few_descriptors(left):
                try:
                    reader.receiver.fetch(timeout_s=1)
                except DeltaSyncError:
                    refused[0] += 1
                assert_right(trainer, reader)
                try:
                    trainer.publish()
                except StoreError:
                    refused[1] += 1
            newest = trainer.publish()
            assert reader.fetch() == newest
            assert_right(trainer, reader)
    assert all(refused)


def test_closing_ends_a_fetch_of_another_thread(trainer: Publisher) -> None:
    for turn in range(15):
        reader, ends = Follower(trainer.place, seed=turn), list[object]()

        def fetch(reader: Follower = reader, ends: list[object] = ends) -> None:
            try:
                ends.append(reader.fetch())
            except (DeltaSyncError, AssertionError) as error:
                ends.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        time.sleep(turn * 0.0014)
        reader.receiver.close()
        thread.join(timeout=30)
        [end] = ends
        assert end == 3 or isinstance(end, TransportClosed), repr(end)
        assert_right(trainer, reader)


def test_a_store_that_vanished_is_not_continued(trainer: Publisher) -> None:
    folder = trainer.place.folder
    assert folder is not None
    with Follower(trainer.place) as reader:
        reader.fetch()
        aside = folder.with_name("aside")
        folder.rename(aside)
        for _ in range(2):
            with pytest.raises(StoreRefused, match="mounted"):
                trainer.sender.publish()
            with pytest.raises(StoreError):
                reader.receiver.fetch(4, timeout_s=0.2)
            assert_right(trainer, reader)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        assert trainer.publish() == reader.fetch() == 4
        assert_right(trainer, reader)
        shutil.rmtree(folder)
        with pytest.raises(StoreRefused, match="StoreSender"):
            trainer.sender.publish()
        again = Publisher(trainer.place, model=trainer.model)
        assert again.publish(2) == 2
        with pytest.raises(StoreError):  # v4 is newer than all that this run has now
            reader.receiver.fetch(timeout_s=0.2)
        assert_right(trainer, reader)
        assert reader.fetch(2) == 2
        assert_right(again, reader)


def test_a_url_has_one_run_and_a_trainer_of_another_is_refused(place: Place) -> None:
    Objects(place.url, place.options, make=True)
    with Follower(place) as reader, pytest.raises(VersionMissing, match="no version"):
        reader.receiver.fetch(timeout_s=0)
    with pytest.raises(VersionMissing, match="check the URL"):
        Run.open(place.url, place.options)
    trainer = Publisher(place, run=None)
    trainer.publish(2)
    again = Publisher(place, run=None, model=trainer.model)
    assert (again.put().kind, again.sender.run) == ("unchanged", trainer.sender.run)
    for _ in range(2):
        other = Publisher(place, run="other", model=small_model(2))
        with pytest.raises(ConfigError, match="'other': give each run a URL of its own"):
            other.put()
    assert_published(trainer)


def forked(act: Callable[[], object]) -> None:
    """A child does this well."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    ends = list[int]()

    def is_over() -> bool:
        number, status = os.waitpid(child, os.WNOHANG)
        ends.extend([status] if number else [])
        return bool(number)

    wait_until(is_over, timeout_s=60)
    assert ends == [0]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("options", [None, ReceiverOptions(max_staged_bytes=0)])
def test_a_fork_changes_nothing_and_leaves_what_its_parent_has_fetched(
    trainer: Publisher, options: ReceiverOptions | None
) -> None:
    """In place, a version is written from files."""

    def fetch_and_close() -> None:
        with pytest.raises(StoreRefused):
            reader.receiver.fetch(timeout_s=1)
        reader.receiver.close()

    with Follower(trainer.place, options=options) as reader:
        reader.stage()
        forked(fetch_and_close)
        assert reader.receiver.commit() == 3
        assert_right(trainer, reader)


# Sources that are written while they are published


class Raced(StoreSender):
    """Something writes the source after it was compared, and before it is packed.

    Attributes:
        write: What it does.
    """

    write: Callable[[], object] = staticmethod(lambda: None)

    def _write_delta(self, delta: Delta) -> Way:
        write, self.write = self.write, lambda: None
        write()
        return super()._write_delta(delta)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100), nn.Linear(100, 100))


def raced(tmp_path: Path, **options: Any) -> Publisher:
    options = {"max_inflight_bytes": 1000} | options
    return Publisher(local_place(tmp_path), 3, "gap", net(), options=options, sending=Raced)


def add(tensor: torch.Tensor, *places: tuple[int, ...]) -> None:
    with torch.no_grad():
        for place in places:
            tensor[place].add_(1)


COMPILED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=COMPILED)])
@pytest.mark.parametrize("share", [0.02, 1.0])
@pytest.mark.parametrize("name", ["0.weight", "1.running_mean"])
def test_a_late_write_is_refused_or_published_as_it_was_packed(
    tmp_path: Path, name: str, share: float, kernels: str
) -> None:
    """No version is anything but what its digest says, and the next one has all of it."""
    trainer = raced(tmp_path, kernels=kernels)
    for turn in range(8):
        change(trainer.model, share=share)
        trainer.model(torch.randn(9, 100))  # which moves the statistics
        if turn in (2, 3, 5):
            tensor = trainer.model.state_dict()[name]
            trainer.sender.write = partial(add, tensor, (0,) * tensor.dim())  # type: ignore[attr-defined]
            with suppress(SourceChanged):
                del trainer.states[trainer.put().version]
            if turn == 3:
                trainer.start()
            continue
        trainer.put()
    assert_published(trainer)


def test_a_version_of_which_more_changes_after_the_comparison_is_not_published(
    tmp_path: Path,
) -> None:
    trainer = raced(tmp_path, max_inflight_bytes=0)
    trainer.publish()
    add(trainer.model.get_parameter("0.weight"), (3, 4))
    sender: Any = trainer.sender
    sender.write = lambda: add(trainer.model.get_parameter("0.weight"), (5, 6))
    with pytest.raises(SourceChanged, match="was written while it was sent"):
        trainer.put()
    assert trainer.sender.version == 1
    trainer.put()
    assert max(trainer.states) == 2
    assert_published(trainer)


def test_a_write_after_the_comparison_is_of_the_next_version(tmp_path: Path) -> None:
    """Where nothing had changed, and so nothing is packed."""
    trainer = raced(tmp_path)
    trainer.publish()
    add(trainer.model.get_parameter("0.weight"), (3, 4))
    sender: Any = trainer.sender
    sender.write = lambda: add(trainer.model.get_parameter("2.weight"), (5, 6))
    trainer.put()
    trainer.put()
    assert max(trainer.states) == 3
    assert_published(trainer)


def test_streamed_weights_are_published_and_a_damaged_anchor_is_healed_by_the_next(
    tmp_path: Path,
) -> None:
    """A bit of the copy that the trainer keeps flips in its memory."""
    weights = StreamedWeights(SenderOptions(stream_id=RUN))
    trainer = Publisher(local_place(tmp_path), 4, model=net())
    trainer.start(weights)
    for turn in range(10):
        weights.take(trainer.model.state_dict().items())
        trainer.put()
        if turn == 0:
            weights.snapshot.read(1, 0, 1).bitwise_not_()
        add(trainer.model.get_parameter("2.weight"), (1, 1))
    [damaged] = [n for n, one in trainer.stats.items() if "memory was altered" in one.postponed]
    healed = trainer.stats[damaged + 1]
    assert (healed.kind, healed.postponed) == ("anchor", "")
    assert verify_run(tmp_path).proved == [1, *range(damaged + 1, 11)]
    with Follower(trainer.place, model=blank(trainer.model)) as reader:
        assert reader.fetch() == 10
        assert reader.holds(trainer.states[10])
