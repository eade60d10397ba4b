"""An engine that sleeps: nothing looks at its weights, nobody waits for it, little is lost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from deltasync import ModuleTarget, ReceiverOptions, WeightReceiver, subscribe
from deltasync.errors import (
    CallOrderError,
    ConfigError,
    SyncAborted,
)
from deltasync.sync.events import SyncEvent, SyncFailed
from deltasync.sync.protocol.receiver_session import ReceiverState
from deltasync.testing.links import PROMPT_S, within
from deltasync.transports.base import Frame
from deltasync.wire.frame import encode
from deltasync.wire.messages import Finish
from tests.sync import asleep
from tests.worlds.engines import bits_of, model, staging_engine
from tests.worlds.links import Serving, bits_equal, until
from tests.worlds.peers import STAGED, Hand, commit, prepare
from tests.worlds.programs import run

OPTIONS = ReceiverOptions(stall_timeout_s=2)


@pytest.mark.promise("Checks", "Between `detach` and `attach` nothing reads or writes the weights.")
def test_nothing_looks_at_weights_that_were_released() -> None:
    """They cannot be read while the engine sleeps; a trainer sends all the time."""
    done = run(Path(asleep.__file__))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("max_staged_bytes", [1 << 20, 1], ids=["staged", "in place"])
def test_weights_that_are_kept_take_the_next_delta(max_staged_bytes: int) -> None:
    """A sync that begins while the engine sleeps costs nothing else. Twice is the same as once."""
    options = ReceiverOptions(stall_timeout_s=2, max_staged_bytes=max_staged_bytes)
    told: list[SyncEvent] = []
    with staging_engine(options) as (here, staging), subscribe(told.append):
        here.receiver.attach()
        here.join(staging)
        for syncs in range(3):
            before = bits_of(here.replica)
            here.receiver.detach()
            here.receiver.detach()
            assert here.receiver.is_detached
            assert here.sender.num_receivers == 1  # it has not left
            with within(PROMPT_S):  # of a timeout of 60 each
                for _ in range(syncs):
                    with pytest.raises(ConfigError, match=r"\[0/1\]: .* sleep.*: wake them up"):
                        here.send_step().result(PROMPT_S)
            assert not staging.wait_staged(timeout_s=0.1)
            assert here.holds(before)
            here.receiver.attach()
            here.receiver.attach()
            stats = here.join(staging)
            assert (stats.kind, stats.joined, stats.full_synced) == ("delta", 0, 0)
        assert staging.last_error is None
    failed = [event for event in told if isinstance(event, SyncFailed)]
    assert [(event.lost, event.receivers) for event in failed] == [({}, 1)] * 3


@pytest.mark.parametrize("moved", [False, True])
def test_weights_that_were_lost_or_moved_come_back_by_a_full_sync(moved: bool) -> None:
    with staging_engine(OPTIONS) as (here, staging):
        here.join(staging)
        here.receiver.detach()
        weights = here.replica.get_parameter("a")
        if moved:
            weights.data = weights.data.clone()
        weights.data.zero_()
        here.receiver.attach()
        for _ in range(3):  # a sync that begins at once fails, and the next one heals
            sent = here.send_step()
            while not sent.done():
                if staging.wait_staged(timeout_s=0.05):
                    staging.commit()
        assert sent.result().receivers == 1
        assert bits_equal(here.source, here.replica)
        here.receiver.check_serving()


def test_an_engine_that_sleeps_does_not_keep_another_from_the_weights() -> None:
    with staging_engine(OPTIONS) as (here, staging):
        other = model(2)
        receiver = WeightReceiver(ModuleTarget(other), here.link.receiver(), engine="other")
        serving = Serving(receiver).start()
        here.trainer.submit(here.sender.wait_for_receivers, 2, timeout_s=60).result()
        assert here.join(staging).receivers == 2
        here.receiver.detach()
        stats = here.send_step().result(60)
        assert (stats.receivers, list(stats.lost)) == (1, ["engine[0/1]"])
        assert bits_equal(here.source, other)
        here.receiver.attach()
        here.trainer.submit(here.sender.wait_for_receivers, 2, timeout_s=60).result()
        assert here.join(staging).receivers == 2  # it has rejoined
        serving.stop()
        assert serving.errors == []


def test_what_was_staged_is_not_written_once_the_engine_sleeps() -> None:
    with staging_engine(OPTIONS) as (here, staging):
        here.join(staging)
        before = bits_of(here.replica)
        sent = here.stage_step(staging)
        here.receiver.detach()
        assert not staging.is_staged()
        with pytest.raises(CallOrderError):
            staging.commit()
        with pytest.raises(SyncAborted):  # soon: nobody waits for an engine that sleeps
            sent.result(PROMPT_S)
        assert here.holds(before)
        here.receiver.attach()
        assert here.join(staging).joined == 1


def test_an_engine_of_two_ranks_that_sleeps_before_it_knows_of_the_other_is_dirty() -> None:
    """Whether the other rank has the version nobody here knows, and nothing is undone later."""
    hand = Hand(ReceiverOptions(stall_timeout_s=60), world=2)
    thread = threading.Thread(target=lambda: hand.say([*STAGED, prepare(), commit()]))
    thread.start()
    until(lambda: hand.receiver.state is ReceiverState.COMMITTED)
    hand.receiver.detach()
    now = bits_of(hand.module)
    finish = Finish(version=6, undo=())
    hand.transport.send(Frame(encode(finish)), timeout_s=60)
    thread.join(60)
    assert not thread.is_alive()
    assert hand.receiver.is_dirty
    assert all((one == other).all() for one, other in zip(now, bits_of(hand.module), strict=True))
