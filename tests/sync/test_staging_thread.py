"""Staging beside the engine's thread: old weights until commit, no failure hidden, no hang."""

from __future__ import annotations

import time
from copy import deepcopy

import pytest

from deltasync import ReceiverOptions, StagingThread
from deltasync.errors import (
    ConfigError,
    PeerLost,
    SyncAborted,
    TargetMoved,
    TransportClosed,
    TransportTimeout,
)
from deltasync.sync.protocol.receiver_session import ReceiverState
from deltasync.testing.links import PROMPT_S, within
from deltasync.transports.base import Frame, ReceiveTransport
from deltasync.wire.frame import decode
from tests.worlds.engines import engine, replace_storage, staging_engine
from tests.worlds.links import ThroughReceiver, bits_equal

by_options = pytest.mark.parametrize(
    "options",
    [ReceiverOptions(stall_timeout_s=60), ReceiverOptions(stall_timeout_s=60, max_staged_bytes=0)],
    ids=["staged", "in place"],
)


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving the context waits for the end of a turn."""
    monkeypatch.setattr("deltasync.sync.staging_thread._TURN_S", 0.02)
    monkeypatch.setattr(StagingThread, "_turn_s", 0.02)


@pytest.mark.promise("All or nothing", "Staging writes nothing.")
@by_options
def test_the_engine_serves_the_old_version_until_it_commits(options: ReceiverOptions) -> None:
    with staging_engine(options) as (here, staging):
        assert not staging.is_staged()
        for version in range(1, 4):
            old = deepcopy(here.replica)
            sent = here.send_step()
            while not staging.is_staged():
                assert bits_equal(here.replica, old)  # a request is served
            time.sleep(0.05)
            assert bits_equal(here.replica, old)
            assert not sent.done()
            assert staging.commit() == here.receiver.version == version
            assert bits_equal(here.source, here.replica)
            assert sent.result(60).kind == ("delta" if version > 1 else "full")
            assert not staging.is_staged()
        assert staging.last_error is None


@pytest.mark.promise("Checks", "Replaced storage is detected before what is staged is written.")
@by_options
def test_storage_replaced_before_the_pause_is_noticed_in_it(options: ReceiverOptions) -> None:
    with staging_engine(options) as (here, staging):
        here.join(staging)
        sent = here.stage_step(staging)
        replace_storage(here.replica)
        old = deepcopy(here.replica)
        with pytest.raises(TargetMoved):
            staging.commit()
        is_in_place = options.max_staged_bytes == 0
        assert here.receiver.is_dirty is is_in_place
        assert is_in_place or bits_equal(here.replica, old)
        with pytest.raises(SyncAborted, match="TargetMoved"):
            sent.result(60)


class Silent(ThroughReceiver):
    """A link on which the sender falls silent at a message of a kind."""

    def __init__(self, inner: ReceiveTransport, kind: str) -> None:
        super().__init__(inner)
        self._kind = kind

    def receive(self, *, timeout_s: float) -> Frame:
        frame = super().receive(timeout_s=timeout_s)
        if decode(frame.header)[0].kind != self._kind:
            return frame
        self._kind = ""
        time.sleep(timeout_s)
        raise TransportTimeout("nothing came in time")


@pytest.mark.promise(
    "Time",
    "A sender that is silent within a sync is lost after `stall_timeout_s`, but not before "
    "twice its own timeout.",
)
@pytest.mark.parametrize("kind", ["bucket", "prepare"])
def test_a_sender_that_falls_silent_within_a_sync_is_a_failed_sync(kind: str) -> None:
    options = ReceiverOptions(stall_timeout_s=0.2)
    with staging_engine(options, lambda inner: Silent(inner, kind)) as (here, staging):
        with pytest.raises(SyncAborted):
            here.send(timeout_s=0.5).result(60)
        here.join(staging)
        assert isinstance(staging.last_error, TransportTimeout)


@pytest.mark.promise("Time", "A `receive_weights` that times out loses nothing.")
def test_waiting_for_a_sync_is_no_failed_sync() -> None:
    with staging_engine() as (here, staging):
        here.join(staging)
        time.sleep(0.1)
        assert staging.last_error is None
        assert here.receiver.state is ReceiverState.READY


def test_leaving_with_a_staged_version_fails_it_at_the_sender_and_loses_nothing() -> None:
    with engine() as here:
        with StagingThread(here.receiver) as staging:
            here.join(staging)
            old = deepcopy(here.replica)
            sent = here.stage_step(staging, timeout_s=2)
            began = time.monotonic()
        assert time.monotonic() - began < PROMPT_S
        with within(PROMPT_S), pytest.raises(SyncAborted):
            sent.result(60)
        assert bits_equal(here.replica, old)
        assert not here.receiver.is_dirty
        # The version was decided: who comes later may write it still, and then rejoins.
        with StagingThread(here.receiver) as later:
            assert later.wait_staged(timeout_s=60)
            assert later.commit() == 2
            assert bits_equal(here.source, here.replica)
            assert here.send().result(60).full_synced == 0
            assert isinstance(later.last_error, PeerLost)


def test_a_thread_that_does_not_run_is_an_error_and_no_silence() -> None:
    """Not begun, begun twice, or ended because the receiver was closed."""
    with engine() as here:
        staging = StagingThread(here.receiver)
        for ask in (staging.is_staged, lambda: staging.wait_staged(timeout_s=0), staging.commit):
            with pytest.raises(ConfigError, match="use it as a context manager"):
                ask()
        with staging:
            here.join(staging)
            with pytest.raises(ConfigError, match="once"):
                staging.__enter__()
            assert not staging.is_staged()
            here.receiver.close()
            with within(PROMPT_S), pytest.raises(TransportClosed):
                staging.wait_staged(timeout_s=60)
            with pytest.raises(TransportClosed):
                staging.commit()
