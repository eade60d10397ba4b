"""Receivers that did nothing wrong keep their weights and their membership."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    SenderOptions,
    StagingThread,
    StoreReceiver,
    StoreSender,
    WeightReceiver,
)
from deltasync.errors import CallOrderError, ConfigError
from deltasync.sync.protocol.receiver_session import ReceiverState
from tests.worlds.links import Model, Watched, bits_equal, fleet, random_model, step

SHAPES = {"a": (40, 50), "b": (300,), "c": (1,)}
SMALL = SenderOptions(bucket_bytes=1024)
WAYS = {"staged": None, "in place": 0}
OPTIONS = [ReceiverOptions(stall_timeout_s=60, max_staged_bytes=most) for most in WAYS.values()]
STAGED, IN_PLACE = OPTIONS


def models(count: int) -> list[Model]:
    return [random_model(SHAPES, seed) for seed in range(count)]


def change(source: Model, seed: int = 1) -> None:
    step(source, torch.Generator().manual_seed(seed), 0.9)


@pytest.mark.promise("All or nothing", "A receiver that has written nothing is not dirty.")
@pytest.mark.promise("All or nothing", "A receiver killed in any phase costs the others nothing.")
@pytest.mark.promise(
    "All or nothing",
    "A server lost while others write what arrives leaves none of them dirty, where the "
    "transport outlives losses.",
)
@pytest.mark.parametrize("options", OPTIONS, ids=WAYS)
@pytest.mark.parametrize("kind", ["full", "delta"])
@pytest.mark.parametrize("phase", ["begin", "bucket"])
def test_a_receiver_that_is_lost_costs_the_others_nothing(
    phase: str, kind: str, options: ReceiverOptions
) -> None:
    source, good, bad = models(3)
    with fleet(source, options=SMALL, wrap=Watched) as here:
        innocent = here.add(good, engine="good", options=options)
        here.add(bad, engine="bad", options=options)
        here.wait(2)
        if kind == "delta":
            here.sender.send_weights(timeout_s=30)
            change(source)
        here.link.lose_at(phase, here, "bad/0")
        stats = here.sender.send_weights(timeout_s=30)
        assert (stats.kind, stats.receivers, set(stats.lost)) == (kind, 1, {"bad[0/1]"})
        assert stats.num_buckets > 2
        sent = here.link.sent[here.link.sent.index("begin") :]
        if phase == "begin":  # no payload for nothing
            assert sent[:3] == ["begin", "abort", "begin"]
        else:  # payloads went out once
            assert (sent.count("begin"), sent.count("abort")) == (1, 0)
        assert bits_equal(source, good)
        assert (innocent.errors, innocent.receiver.is_dirty) == ([], False)


@pytest.mark.promise("Errors", "`CallOrderError`: an early commit costs nothing.")
def test_a_commit_that_is_called_too_early_costs_nothing() -> None:
    """Whatever the receiver has come to: in the same thread, or while another one stages."""
    source, replica = models(2)
    too_early: set[str] = set()
    with fleet(source, wrap=Watched) as here, ThreadPoolExecutor(1) as threads:
        receiver = WeightReceiver(ModuleTarget(replica), here.transport.receiver(), options=STAGED)

        def call(kind: str) -> None:
            with pytest.raises(CallOrderError, match="call stage first"):
                receiver.commit()
            too_early.add(kind)

        with closing(receiver):
            serving = threads.submit(lambda: [receiver.receive_weights() for _ in range(3)])
            here.wait(1)
            here.link.before = call
            for turn in range(3):
                stats = here.sender.send_weights(timeout_s=60)
                assert (stats.receivers, stats.joined, stats.lost) == (1, int(turn == 0), {})
                call("between")
                change(source, turn)
            assert serving.result(60) == [1, 2, 3]
        assert too_early >= {"layout", "begin", "bucket", "prepare", "commit", "between"}


class Slow(ModuleTarget):
    """A target whose write ends only when it may."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.writes, self.goes_on = Event(), Event()

    def finish(self, changed: Collection[int] | None = None) -> None:
        self.writes.set()
        self.goes_on.wait(30)
        super().finish(changed)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A second thread in `commit` is refused, and costs the first nothing.",
)
@pytest.mark.parametrize("options", OPTIONS, ids=WAYS)
def test_a_second_thread_in_commit_is_refused_and_costs_the_first_nothing(
    options: ReceiverOptions,
) -> None:
    source, replica = models(2)
    target = Slow(replica)
    with fleet(source) as here, ThreadPoolExecutor(5) as threads:
        receiver = WeightReceiver(target, here.transport.receiver(), options=options)
        with closing(receiver), StagingThread(receiver) as staging:
            here.wait(1)
            for version in (1, 2):
                sent = threads.submit(here.sender.send_weights, timeout_s=60)
                assert staging.wait_staged(timeout_s=60)
                target.writes.clear()
                target.goes_on.clear()
                first = threads.submit(staging.commit)
                assert target.writes.wait(60)
                calls = (receiver.commit, receiver.stage, staging.commit)
                others = [threads.submit(call) for call in calls]
                wait(others, timeout=60)
                target.goes_on.set()
                assert first.result(60) == version
                for other in others:
                    with pytest.raises(ConfigError, match="under way"):
                        other.result(60)
                stats = sent.result(60)
                assert (stats.receivers, stats.joined, stats.lost) == (1, int(version == 1), {})
                assert (receiver.state, staging.last_error) == (ReceiverState.READY, None)
                assert bits_equal(source, replica)
                change(source, version)


@pytest.mark.parametrize("options", OPTIONS, ids=WAYS)
def test_storages_that_were_read_and_written_can_be_resized(
    options: ReceiverOptions, tmp_path: Path
) -> None:
    """As FSDP1 and engines that sleep do."""
    source, engine, reader = models(3)
    publisher = StoreSender(ModuleSource(source), tmp_path)
    with fleet(source, options=SMALL) as here:
        here.add(engine, options=options)
        here.wait(1)
        with closing(StoreReceiver(ModuleTarget(reader), tmp_path)) as receiver:
            for seed in range(3):
                change(source, seed)
                here.sender.send_weights(timeout_s=60)
                publisher.publish()
                receiver.fetch()
    for model in (source, engine, reader):
        assert bits_equal(source, model)
        for weights in model.parameters():
            assert weights.untyped_storage().resizable()
