"""An engine that sleeps: nothing looks at its weights, nobody waits for it, little is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    StagingThread,
    SyncStats,
    WeightReceiver,
    WeightSender,
)
from deltasync.errors import (
    CallOrderError,
    ConfigError,
    SyncAborted,
    TransportClosed,
    TransportTimeout,
)
from deltasync.sync.protocol.receiver_session import ReceiverState
from deltasync.testing.links import PROMPT_S, within
from deltasync.transports import inprocess
from deltasync.transports.base import Frame
from deltasync.wire.frame import encode
from deltasync.wire.messages import Finish
from tests.sync import asleep
from tests.worlds.links import Serving, bits_equal, random_model, step, until
from tests.worlds.peers import STAGED, Hand, commit, prepare
from tests.worlds.programs import run

SHAPES = {"a": (40, 7), "b": (300,)}


class Engine:
    """An engine that serves in the test's thread, and a trainer in another one."""

    def __init__(self, options: ReceiverOptions) -> None:
        self.source, self.replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
        link = self.link = inprocess.Sender()
        self.sender = WeightSender(ModuleSource(self.source), link)
        self.receiver = WeightReceiver(ModuleTarget(self.replica), link.receiver(), options=options)
        self.trainer = ThreadPoolExecutor(1)

    def send(self) -> Future[SyncStats]:
        step(self.source, torch.Generator().manual_seed(self.sender.version), 0.1)

        def sync() -> SyncStats:
            self.sender.wait_for_receivers(1, timeout_s=60)
            return self.sender.send_weights(timeout_s=60)

        return self.trainer.submit(sync)

    def follow(self, staging: StagingThread) -> SyncStats:
        """A sync, committed."""
        sent = self.send()
        assert staging.wait_staged(timeout_s=5)
        staging.commit()
        assert bits_equal(self.source, self.replica)
        return sent.result(5)


@contextmanager
def engine(options: ReceiverOptions | None = None) -> Iterator[Engine]:
    made = Engine(options or ReceiverOptions(stall_timeout_s=2))
    try:
        yield made
    finally:
        made.receiver.close()
        made.sender.close()
        made.trainer.shutdown()


@pytest.mark.promise("Checks", "Between `detach` and `attach` nothing reads or writes the weights.")
@pytest.mark.parametrize("kind", ["staged", "in place"])
def test_nothing_looks_at_weights_that_were_released(kind: str) -> None:
    """They cannot be read while the engine sleeps; a trainer sends all the time."""
    done = run(Path(asleep.__file__), "detach", kind, "3")
    assert done.returncode == 0, done.stderr


def test_weights_that_are_kept_take_the_next_delta() -> None:
    with engine() as here, StagingThread(here.receiver) as staging:
        here.follow(staging)
        for _ in range(2):
            here.receiver.detach()
            assert here.receiver.is_detached
            assert here.sender.num_receivers == 1  # it has not left
            here.receiver.attach()
            stats = here.follow(staging)
            assert (stats.kind, stats.joined) == ("delta", 0)
        assert staging.last_error is None


@pytest.mark.parametrize("moved", [False, True])
def test_weights_that_were_lost_or_moved_come_back_by_a_full_sync(moved: bool) -> None:
    with engine() as here, StagingThread(here.receiver) as staging:
        here.follow(staging)
        here.receiver.detach()
        weights = here.replica.get_parameter("a")
        if moved:
            weights.data = weights.data.clone()
        weights.data.zero_()
        here.receiver.attach()
        for _ in range(3):  # a sync that begins at once fails, and the next one heals
            sent = here.send()
            while not sent.done():
                if staging.wait_staged(timeout_s=0.05):
                    staging.commit()
        assert sent.result().receivers == 1
        assert bits_equal(here.source, here.replica)
        here.receiver.check_serving()


@pytest.mark.parametrize("max_staged_bytes", [1 << 20, 1], ids=["staged", "in place"])
def test_a_sync_that_begins_while_the_engine_sleeps_costs_nothing_else(
    max_staged_bytes: int,
) -> None:
    options = ReceiverOptions(stall_timeout_s=2, max_staged_bytes=max_staged_bytes)
    with engine(options) as here, StagingThread(here.receiver) as staging:
        here.follow(staging)
        for _ in range(2):
            here.receiver.detach()
            before = [parameter.clone() for parameter in here.replica.parameters()]
            with within(PROMPT_S):  # of a timeout of 60 each
                for _ in range(2):
                    with pytest.raises(ConfigError, match=r"\[0/1\]: .* sleep.*: wake them up"):
                        here.send().result(PROMPT_S)
            assert not staging.wait_staged(timeout_s=0.3)
            now = list(here.replica.parameters())
            assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
            here.receiver.attach()
            stats = here.follow(staging)
            assert (stats.kind, stats.joined, stats.full_synced) == ("delta", 0, 0)
        assert staging.last_error is None


def test_an_engine_that_sleeps_does_not_keep_another_from_the_weights() -> None:
    with engine() as here, StagingThread(here.receiver) as staging:
        other = random_model(SHAPES, 2)
        receiver = WeightReceiver(ModuleTarget(other), here.link.receiver(), engine="other")
        serving = Serving(receiver).start()
        here.trainer.submit(here.sender.wait_for_receivers, 2, timeout_s=5).result()
        assert here.follow(staging).receivers == 2
        here.receiver.detach()
        stats = here.send().result(5)
        assert (stats.receivers, list(stats.lost)) == (1, ["engine[0/1]"])
        assert bits_equal(here.source, other)
        here.receiver.attach()
        here.trainer.submit(here.sender.wait_for_receivers, 2, timeout_s=5).result()
        assert here.follow(staging).receivers == 2  # it has rejoined
        serving.stop()
        assert serving.errors == []


def test_what_was_staged_is_not_written_once_the_engine_sleeps() -> None:
    with engine() as here, StagingThread(here.receiver) as staging:
        here.follow(staging)
        before = [parameter.clone() for parameter in here.replica.parameters()]
        sent = here.send()
        assert staging.wait_staged(timeout_s=5)
        here.receiver.detach()
        assert not staging.is_staged()
        with pytest.raises(CallOrderError):
            staging.commit()
        with pytest.raises(SyncAborted):  # soon: nobody waits for an engine that sleeps
            sent.result(4)
        now = list(here.replica.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        here.receiver.attach()
        assert here.follow(staging).joined == 1


@pytest.mark.parametrize("call", [WeightReceiver.stage, WeightReceiver.receive_weights])
def test_without_a_thread_calls_wait_for_attach(call: Callable[..., object]) -> None:
    with engine() as here:
        here.receiver.detach()
        with pytest.raises(TransportTimeout, match="detached"):
            call(here.receiver, timeout_s=0.05)
        waking = threading.Timer(0.1, here.receiver.attach)
        waking.start()
        sent = here.send()
        assert call(here.receiver, timeout_s=5)
        if call is WeightReceiver.stage:
            here.receiver.commit()
        assert sent.result(5).receivers == 1
        here.receiver.detach()
        closing = threading.Timer(0.1, here.receiver.close)
        closing.start()
        with pytest.raises(TransportClosed):
            call(here.receiver, timeout_s=5)


def test_detaching_and_attaching_twice_is_the_same_as_once() -> None:
    with engine() as here, StagingThread(here.receiver) as staging:
        here.receiver.attach()
        here.follow(staging)
        here.receiver.detach()
        here.receiver.detach()
        here.receiver.attach()
        here.receiver.attach()
        assert here.follow(staging).kind == "delta"


@pytest.mark.parametrize("undoes", [False, True])
def test_an_engine_of_two_ranks_that_sleeps_before_it_knows_of_the_other_is_dirty(
    undoes: bool,
) -> None:
    """Whether the other rank has the version nobody here knows, and nothing is undone later."""
    hand = Hand(ReceiverOptions(stall_timeout_s=5), world=2)
    thread = threading.Thread(target=lambda: hand.say([*STAGED, prepare(), commit()]))
    thread.start()
    until(lambda: hand.receiver.state is ReceiverState.COMMITTED)
    hand.receiver.detach()
    now = [parameter.clone() for parameter in hand.module.parameters()]
    finish = Finish(version=6, undo=("engine",) if undoes else ())
    hand.transport.send(Frame(encode(finish)), timeout_s=1)
    thread.join(10)
    assert not thread.is_alive()
    assert hand.receiver.is_dirty
    later = list(hand.module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(now, later, strict=True))
