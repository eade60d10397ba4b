"""Staging beside the engine's thread: old weights until commit, no failure hidden, no hang."""

from __future__ import annotations

import time
from collections.abc import Callable

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
from tests.worlds.engines import bits_of, engine, replace_storage, staging_engine
from tests.worlds.links import ThroughReceiver, bits_equal

IN_PLACE = ReceiverOptions(max_staged_bytes=0, stall_timeout_s=0.3)
by_options = pytest.mark.parametrize(
    "options",
    [ReceiverOptions(stall_timeout_s=60), ReceiverOptions(stall_timeout_s=60, max_staged_bytes=0)],
    ids=["staged", "in place"],
)


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving the context waits for the end of a turn."""
    monkeypatch.setattr("deltasync.sync.staging_thread._TURN_S", 0.02)


@pytest.mark.promise("All or nothing", "Staging writes nothing.")
@by_options
def test_the_engine_serves_the_old_version_until_it_commits(options: ReceiverOptions) -> None:
    with staging_engine(options) as (here, staging):
        assert not staging.is_staged()
        for version in range(1, 4):
            old = bits_of(here.replica)
            sent = here.send_step()
            while not staging.is_staged():
                assert here.holds(old)  # a request is served
            time.sleep(0.05)
            assert here.holds(old)
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
        old = bits_of(here.replica)
        with pytest.raises(TargetMoved):
            staging.commit()
        is_in_place = options.max_staged_bytes == 0
        assert here.receiver.is_dirty is is_in_place
        assert is_in_place or here.holds(old)
        with pytest.raises(SyncAborted, match="TargetMoved"):
            sent.result(60)


class Meddling(ThroughReceiver):
    """A link on which one frame of one kind meets `fault`."""

    def __init__(
        self, inner: ReceiveTransport, kind: str, fault: Callable[[Meddling, float], Frame]
    ) -> None:
        super().__init__(inner)
        self.inner, self._kind, self._fault = inner, kind, fault

    def receive(self, *, timeout_s: float) -> Frame:
        frame = self.inner.receive(timeout_s=timeout_s)
        if decode(frame.header)[0].kind != self._kind:
            return frame
        self._kind = ""
        return self._fault(self, timeout_s)


def damaged(_: Meddling, __: float) -> Frame:
    return Frame(b"random bytes, and enough of them for a header")


def lost(link: Meddling, timeout_s: float) -> Frame:
    link.inner.disconnect()
    return link.inner.receive(timeout_s=timeout_s)


def without_host_memory(_: Meddling, __: float) -> Frame:
    raise MemoryError


def silent(_: Meddling, timeout_s: float) -> Frame:
    time.sleep(timeout_s)
    raise TransportTimeout("nothing came in time")


@pytest.mark.parametrize(
    ("kind", "fault", "error"),
    [
        ("layout", damaged, "BadMagic"),
        ("begin", lost, "PeerLost"),
        ("bucket", lost, "PeerLost"),
        ("bucket", without_host_memory, "MemoryError"),
        ("commit", without_host_memory, "MemoryError"),
    ],
)
def test_a_failed_sync_is_kept_as_last_error_and_the_next_one_works(
    kind: str, fault: Callable[[Meddling, float], Frame], error: str
) -> None:
    with staging_engine(wrap=lambda inner: Meddling(inner, kind, fault)) as (here, staging):
        old = bits_of(here.replica)
        with pytest.raises(SyncAborted):
            here.send().result(60)
        assert here.holds(old)
        assert not staging.is_staged()
        here.join(staging)
        assert type(staging.last_error).__name__ == error


@pytest.mark.promise(
    "Time",
    "A sender that is silent within a sync is lost after `stall_timeout_s`, but not before "
    "twice its own timeout.",
)
@pytest.mark.parametrize("kind", ["bucket", "prepare"])
def test_a_sender_that_falls_silent_within_a_sync_is_a_failed_sync(kind: str) -> None:
    options = ReceiverOptions(stall_timeout_s=0.2)
    with staging_engine(options, lambda inner: Meddling(inner, kind, silent)) as (here, staging):
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
            old = bits_of(here.replica)
            sent = here.stage_step(staging, timeout_s=2)
            began = time.monotonic()
        assert time.monotonic() - began < PROMPT_S
        with within(PROMPT_S), pytest.raises(SyncAborted):
            sent.result(60)
        assert here.holds(old)
        assert not here.receiver.is_dirty
        # The version was decided: who comes later may write it still, and then rejoins.
        with StagingThread(here.receiver) as later:
            assert later.wait_staged(timeout_s=60)
            assert later.commit() == 2
            assert bits_equal(here.source, here.replica)
            assert here.send().result(60).full_synced == 0
            assert isinstance(later.last_error, PeerLost)


def test_the_sender_goes_between_stage_and_commit_and_the_decided_version_is_written() -> None:
    with staging_engine() as (here, staging):
        here.join(staging)
        with pytest.raises(SyncAborted):
            here.stage_step(staging, timeout_s=2).result(60)
        here.sender.close()
        assert staging.commit() == 2
        assert bits_equal(here.source, here.replica)
        assert not here.receiver.is_dirty


def test_a_sync_in_place_that_the_sender_gave_up_before_commit_is_dirty_and_heals() -> None:
    with staging_engine(IN_PLACE) as (here, staging):
        with pytest.raises(SyncAborted):
            here.stage_step(staging, timeout_s=2).result(60)
        with pytest.raises(PeerLost):
            staging.commit()
        assert here.receiver.is_dirty
        here.join(staging)
        assert not here.receiver.is_dirty


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
