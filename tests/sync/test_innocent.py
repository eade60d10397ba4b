"""Receivers that did nothing wrong keep their weights and their membership."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, wait
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
    WeightReceiver,
)
from deltasync.delta.bucket import MIN_BUCKET_BYTES
from deltasync.errors import CallOrderError, ConfigError, SyncAborted, TransportTimeout
from deltasync.integrations.trainer_info import TrainerInfo
from deltasync.integrations.worker import Worker
from deltasync.sync.protocol.receiver_session import ReceiverState
from deltasync.sync.sender import WeightSender
from deltasync.transports import inprocess, shared_memory
from deltasync.transports.address import Address
from deltasync.transports.base import Frame, SendTransport
from deltasync.wire.frame import decode
from tests.worlds.links import (
    Model,
    Receivers,
    ThroughSender,
    bits_equal,
    random_model,
    step,
    until,
)
from tests.worlds.trainers import rows_of, trainer_of

SHAPES = {"a": (40, 7), "b": (300,), "c": (1,)}
LARGE = {"a": (64, 512), "b": (64, 512)}
STAGED, IN_PLACE = (
    ReceiverOptions(stall_timeout_s=5),
    ReceiverOptions(stall_timeout_s=5, max_staged_bytes=0),
)


class Watched(ThroughSender):
    """A sender's link that notes what it sends, and does something before a message goes out."""

    def __init__(self, inner: SendTransport) -> None:
        super().__init__(inner)
        self.sent: list[str] = []
        self.before: Callable[[str], object] = lambda kind: None

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        kind = decode(frame.header)[0].kind
        self.before(kind)
        self.sent.append(kind)
        super().send(frame, timeout_s=timeout_s)

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        kind = decode(header)[0].kind
        self.before(kind)
        self.sent.append(kind)
        super().tell(peers, header, timeout_s=timeout_s)

    def lose_at(self, kind: str, receivers: Receivers, name: str) -> None:
        """Lose a receiver, for good, when the next message of a kind goes out."""

        def lose(going: str) -> None:
            if going == kind:
                self.before = lambda kind: None
                receivers.serving[name].receiver.close()

        self.before = lose
        self.sent.clear()


class Fleet(Receivers):
    """A sender whose link is watched, and receivers of one process."""

    def __init__(self, source: nn.Module, *, options: SenderOptions | None = None) -> None:
        link = inprocess.Sender()
        super().__init__([link])
        self.link = Watched(link)
        self.sender = WeightSender(ModuleSource(source), self.link, options=options)


def models(count: int) -> list[Model]:
    return [random_model(SHAPES, seed) for seed in range(count)]


@pytest.mark.promise("All or nothing", "A receiver that has written nothing is not dirty.")
@pytest.mark.parametrize("kind", ["full", "delta"])
@pytest.mark.parametrize("options", [STAGED, IN_PLACE], ids=["staged", "in place"])
def test_a_receiver_lost_at_begin_costs_the_others_nothing(
    options: ReceiverOptions, kind: str
) -> None:
    source, good, bad = models(3)
    here = Fleet(source)
    try:
        innocent = here.add(good, engine="good", options=options)
        here.add(bad, engine="bad", options=options)
        here.wait(2)
        if kind == "delta":
            here.sender.send_weights(timeout_s=5)
            step(source, torch.Generator().manual_seed(1), 0.1)
        here.link.lose_at("begin", here, "bad/0")
        stats = here.sender.send_weights(timeout_s=5)
        assert (stats.kind, stats.receivers, set(stats.lost)) == (kind, 1, {"bad[0/1]"})
        first = here.link.sent[here.link.sent.index("begin") :]
        assert first[:3] == ["begin", "abort", "begin"]  # no payload for nothing
        assert bits_equal(source, good)
        assert (innocent.errors, innocent.receiver.is_dirty) == ([], False)
    finally:
        here.close()


@pytest.mark.promise("All or nothing", "A receiver killed in any phase costs the others nothing.")
@pytest.mark.parametrize("options", [STAGED, IN_PLACE], ids=["staged", "in place"])
@pytest.mark.parametrize("kind", ["full", "delta"])
def test_a_receiver_lost_between_payloads_costs_the_others_nothing(
    kind: str, options: ReceiverOptions
) -> None:
    source, good, bad = (random_model(LARGE, seed) for seed in range(3))
    here = Fleet(source, options=SenderOptions(bucket_bytes=MIN_BUCKET_BYTES))
    try:
        innocent = here.add(good, engine="good", options=options)
        here.add(bad, engine="bad", options=options)
        here.wait(2)
        if kind == "delta":
            here.sender.send_weights(timeout_s=30)
            step(source, torch.Generator().manual_seed(1), 0.9)
        here.link.lose_at("bucket", here, "bad/0")
        stats = here.sender.send_weights(timeout_s=30)
        assert (stats.kind, stats.receivers, set(stats.lost)) == (kind, 1, {"bad[0/1]"})
        assert stats.num_buckets > 2
        assert "abort" not in here.link.sent
        assert here.link.sent.count("begin") == 1  # payloads went out once
        assert bits_equal(source, good)
        assert (innocent.errors, innocent.receiver.is_dirty) == ([], False)
    finally:
        here.close()


def test_a_version_of_which_payloads_are_missing_is_not_decided() -> None:
    """Whoever else was lost before."""
    source, good, bad = (random_model(LARGE, seed) for seed in range(3))
    here = Fleet(source, options=SenderOptions(bucket_bytes=MIN_BUCKET_BYTES))
    try:
        here.add(good, engine="good")
        here.add(bad, engine="bad")
        here.wait(2)
        here.sender.send_weights(timeout_s=30)
        step(source, torch.Generator().manual_seed(1), 0.9)
        seen: list[str] = []

        def fail(kind: str) -> None:
            seen.append(kind)
            if seen.count("bucket") == 1 and kind == "bucket":
                here.serving["bad/0"].receiver.close()
            elif seen.count("bucket") == 3 and kind == "bucket":
                raise TransportTimeout("planted")

        here.link.sent.clear()
        here.link.before = fail
        stats = here.sender.send_weights(timeout_s=30)
        assert (stats.receivers, set(stats.lost)) == (1, {"bad[0/1]"})
        first = here.link.sent[: here.link.sent.index("abort")]
        assert "prepare" not in first
        assert bits_equal(source, good)
    finally:
        here.close()


def test_ranks_of_a_trainer_send_nothing_where_a_receiver_is_lost_at_begin() -> None:
    source, good, bad = models(3)
    links: list[Watched] = []

    def watched(rank: int, inner: SendTransport) -> SendTransport:
        links.append(Watched(inner))
        return links[-1]

    with trainer_of(source, rows_of(source, 2), wrap=watched) as here:
        innocent = here.add(good, engine="good", options=IN_PLACE)
        here.add(bad, engine="bad", options=IN_PLACE)
        here.wait(2)
        here.send()
        step(source, torch.Generator().manual_seed(1), 0.1)
        here.step()
        links[1].sent.clear()
        links[0].lose_at("begin", here, "bad/0")
        assert here.send().receivers == 1
        assert links[0].sent[:5] == ["upcoming", "attempt", "begin", "abort", "attempt"]
        assert links[1].sent == ["attempt", "bucket", "prepare"]
        assert bits_equal(source, good)
        assert (innocent.errors, innocent.receiver.is_dirty) == ([], False)


def test_an_engine_that_paused_for_a_sync_that_was_given_up_is_a_member_still() -> None:
    """It writes in place: `commit` was called, and nothing had come yet."""
    source, good, bad = models(3)
    here = Fleet(source)
    receiver = WeightReceiver(
        ModuleTarget(good), here.links[0].receiver(), engine="good", options=IN_PLACE
    )
    outcomes: list[int | SyncAborted] = []

    def engine(staging: StagingThread) -> None:
        if not staging.wait_staged(timeout_s=0.05):
            return
        try:
            outcomes.append(staging.commit())
        except SyncAborted as error:
            outcomes.append(error)

    try:
        here.add(bad, engine="bad", options=IN_PLACE)
        with StagingThread(receiver) as staging, ThreadPoolExecutor(1) as threads:
            here.wait(2)
            here.link.lose_at("begin", here, "bad/0")
            sent = threads.submit(here.sender.send_weights, timeout_s=5)
            while not sent.done():
                engine(staging)
            assert sent.result(5).receivers == 1
            assert receiver.state is ReceiverState.READY
            assert staging.last_error is None
        assert isinstance(outcomes.pop(), int)
        assert all("before anything was written" in str(error) for error in outcomes)
        assert bits_equal(source, good)
    finally:
        receiver.close()
        here.close()


def test_an_engines_worker_takes_the_next_try_within_the_update_that_was_asked_for(
    tmp_path: Path,
) -> None:
    source, good, bad = models(3)
    link = Watched(shared_memory.Sender(tmp_path / "socket"))
    sender = WeightSender(ModuleSource(source), link)
    dying = WeightReceiver(
        ModuleTarget(bad), shared_memory.Receiver(tmp_path / "socket"), engine="bad"
    )
    worker = Worker()
    to = TrainerInfo(
        addresses=(Address(link="shared_memory", path=str(tmp_path / "socket")),),
        engine="good",
        tensors=(),
        max_staged_bytes=0,
        timeout_s=5.0,
    )
    worker.connect(to, ModuleTarget(good), torch.device("cpu"), rank=0, world=1)
    with ThreadPoolExecutor(2) as threads:
        try:
            threads.submit(dying.stage, timeout_s=5)
            sender.wait_for_receivers(2, timeout_s=5)
            update = threads.submit(worker.commit, 1, to.holder)
            link.before = lambda kind: dying.close() if kind == "begin" else None
            assert sender.send_weights(timeout_s=5).receivers == 1
            update.result(5)
            assert bits_equal(source, good)
        finally:
            worker.disconnect()
            sender.close()


@pytest.mark.promise("Errors", "`CallOrderError`: an early commit costs nothing.")
@pytest.mark.parametrize("kind", ["layout", "begin", "bucket", "prepare", "commit"])
def test_a_commit_that_is_called_too_early_costs_nothing(kind: str) -> None:
    """Whatever the receiver has come to: in the same thread, or while another one stages."""
    source, replica = models(2)
    link = Watched(inprocess.Sender())
    sender = WeightSender(ModuleSource(source), link)
    receiver = WeightReceiver(ModuleTarget(replica), link._inner.receiver(), options=STAGED)  # type: ignore[attr-defined]
    too_early: list[str] = []

    def call(going: str) -> None:
        if going == kind:
            with pytest.raises(CallOrderError, match="call stage first"):
                receiver.commit()
            too_early.append(receiver.state.name)

    with ThreadPoolExecutor(1) as threads:
        try:
            serving = threads.submit(lambda: [receiver.receive_weights() for _ in range(3)])
            sender.wait_for_receivers(1, timeout_s=5)
            link.before = call
            for turn in range(3):
                stats = sender.send_weights(timeout_s=5)
                assert (stats.receivers, stats.joined, stats.lost) == (1, int(turn == 0), {})
                with pytest.raises(CallOrderError, match="call stage first"):
                    receiver.commit()  # between two syncs
                step(source, torch.Generator().manual_seed(turn), 0.1)
            assert serving.result(5) == [1, 2, 3]
            assert too_early
        finally:
            receiver.close()
            sender.close()


def test_a_dirty_receiver_that_is_to_be_healed_is_not_sent_away_by_an_abort() -> None:
    source, good, bad = models(3)
    here = Fleet(source)
    try:
        innocent = here.add(good, engine="good", options=STAGED)
        innocent.receiver._session.on("corrupted")
        here.add(bad, engine="bad", options=STAGED)
        here.wait(2)
        here.link.lose_at("prepare", here, "bad/0")
        stats = here.sender.send_weights(timeout_s=5)
        assert (stats.receivers, stats.full_synced) == (1, 1)
        assert innocent.errors == []
        assert bits_equal(source, good)
        until(lambda: not innocent.receiver.is_dirty)
    finally:
        here.close()


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
@pytest.mark.parametrize("options", [STAGED, IN_PLACE], ids=["staged", "in place"])
def test_a_second_thread_in_commit_is_refused_and_costs_the_first_nothing(
    options: ReceiverOptions,
) -> None:
    source, replica = models(2)
    link = inprocess.Sender()
    sender, target = WeightSender(ModuleSource(source), link), Slow(replica)
    receiver = WeightReceiver(target, link.receiver(), options=options)
    with ThreadPoolExecutor(5) as threads, StagingThread(receiver) as staging:
        try:
            sender.wait_for_receivers(1, timeout_s=5)
            for version in (1, 2, 3):
                sent = threads.submit(sender.send_weights, timeout_s=20)
                assert staging.wait_staged(timeout_s=5)
                target.writes.clear()
                target.goes_on.clear()
                first = threads.submit(staging.commit)
                assert target.writes.wait(5)
                calls = (receiver.commit, receiver.stage, staging.commit)
                others = [threads.submit(call) for call in calls]
                wait(others, timeout=2)
                target.goes_on.set()
                assert first.result(5) == version
                for other in others:
                    with pytest.raises(ConfigError, match="under way"):
                        other.result(5)
                stats = sent.result(5)
                assert (stats.receivers, stats.joined, stats.lost) == (1, int(version == 1), {})
                assert (receiver.state, staging.last_error) == (ReceiverState.READY, None)
                assert bits_equal(source, replica)
                step(source, torch.Generator().manual_seed(version), 0.1)
        finally:
            receiver.close()
            sender.close()
