"""Readers and writers that are used as nobody should: typed errors, and never a wrong model."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deltasync import ReceiverOptions, SenderOptions
from deltasync.delta.snapshot import Plan
from deltasync.errors import (
    ConfigError,
    SourceChanged,
    StoreError,
    StoreRefused,
    VersionMissing,
)
from deltasync.integrations.streamed import StreamedWeights
from deltasync.store.catalogue import Run
from deltasync.store.manifest import Way
from deltasync.store.objects import Objects
from deltasync.store.sender import StoreSender
from deltasync.store.verifying import verify_run
from tests.worlds.programs import run
from tests.worlds.published import (
    RUN,
    Follower,
    Publisher,
    assert_published,
    blank,
    change,
    small_model,
)
from tests.worlds.stores import local_place, memory_place


@pytest.fixture
def trainer(tmp_path: Path) -> Publisher:
    """Three versions in a folder."""
    made = Publisher(local_place(tmp_path / "store"))
    made.publish(3)
    return made


def test_a_store_that_vanished_is_not_continued(trainer: Publisher) -> None:
    folder = trainer.place.folder
    assert folder is not None
    with Follower(trainer.place) as reader:
        reader.fetch()
        aside = folder.with_name("aside")
        folder.rename(aside)
        with pytest.raises(StoreRefused, match="mounted"):
            trainer.sender.publish()
        with pytest.raises(StoreError):
            reader.receiver.fetch(4, timeout_s=0.2)
        assert reader.holds(trainer.states[3])
        aside.rename(folder)
        assert trainer.publish() == reader.fetch() == 4
        assert reader.holds(trainer.states[4])


def test_a_url_has_one_run_and_a_trainer_of_another_is_refused() -> None:
    place = memory_place()
    Objects(place.url, make=True)
    with Follower(place) as reader, pytest.raises(VersionMissing, match="no version"):
        reader.receiver.fetch(timeout_s=0)
    with pytest.raises(VersionMissing, match="check the URL"):
        Run.open(place.url, place.options)
    trainer = Publisher(place, run=None)
    trainer.publish(2)
    again = Publisher(place, run=None, model=trainer.model)
    assert (again.put().kind, again.sender.run) == ("unchanged", trainer.sender.run)
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
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_changes_nothing_and_leaves_what_its_parent_has_fetched(
    trainer: Publisher,
) -> None:
    """In place, a version is written from files."""
    options = ReceiverOptions(max_staged_bytes=0)

    def fetch_and_close() -> None:
        with pytest.raises(StoreRefused):
            reader.receiver.fetch(timeout_s=1)
        reader.receiver.close()

    with Follower(trainer.place, options=options) as reader:
        reader.stage()
        forked(fetch_and_close)
        assert reader.receiver.commit() == 3
        assert reader.holds(trainer.states[3])


# Sources that are written while they are published


class Raced(StoreSender):
    """Something writes the source after it was compared, and before it is packed.

    Attributes:
        write: What it does.
    """

    write: Callable[[], object] = staticmethod(lambda: None)

    def _write_delta(self, delta: Plan) -> Way:
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
def test_a_late_write_is_refused_or_published_as_it_was_packed(
    tmp_path: Path, kernels: str
) -> None:
    """No version is anything but what its digest says, and the next one has all of it."""
    trainer = raced(tmp_path, kernels=kernels)
    written = {2: "0.weight", 3: "0.weight", 5: "1.running_mean", 6: "1.running_mean"}
    for turn in range(8):
        change(trainer.model, share=(0.02, 1.0)[turn % 2])
        trainer.model(torch.randn(9, 100))  # which moves the statistics
        if turn in written:
            tensor = trainer.model.state_dict()[written[turn]]
            trainer.sender.write = partial(add, tensor, (0,) * tensor.dim())  # type: ignore[attr-defined]
            with suppress(SourceChanged):
                del trainer.states[trainer.put().version]
            if turn == 3:
                trainer.start()
            continue
        trainer.put()
    assert_published(trainer)


@pytest.mark.parametrize(("name", "error"), [("0.weight", SourceChanged), ("2.weight", None)])
def test_what_changes_after_the_comparison_is_of_the_next_version(
    tmp_path: Path, name: str, error: type[SourceChanged] | None
) -> None:
    """Of the second one nothing had changed, and so nothing is packed."""
    trainer = raced(tmp_path, max_inflight_bytes=0 if error else 1000)
    trainer.publish()
    add(trainer.model.get_parameter("0.weight"), (3, 4))
    sender: Any = trainer.sender
    sender.write = lambda: add(trainer.model.get_parameter(name), (5, 6))
    with pytest.raises(error, match="was written while it was sent") if error else nullcontext():
        trainer.put()
    trainer.put()
    assert max(trainer.states) == (2 if error else 3)
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


NO_ROOM = """
import resource, signal, sys
import torch
from torch import nn
from deltasync import ModuleSource, SenderOptions, StoreSender
from deltasync.errors import StoreRefused
from deltasync.store import sender as senders

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
senders._IN_MEMORY_BYTES = 1 << 14
model = nn.Linear(200, 100, bias=False)
options = SenderOptions(compression="none", bucket_bytes=8192)
sender = StoreSender(ModuleSource(model), sys.argv[1], options=options)
sender.publish()
model.weight.data.add_(1)
for limit in range(40_000, 50_000, 97):  # within headers, and within payloads
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        sender.publish()
    except StoreRefused as error:
        assert "TMPDIR" in str(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert sender.publish().version == 2
"""


def test_no_room_for_temporary_files_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    done = run(NO_ROOM, tmp_path)
    assert done.returncode == 0, done.stderr
