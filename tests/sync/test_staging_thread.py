"""Staging beside the engine's thread: old weights until commit, no failure hidden, no hang."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    StagingThread,
    SyncStats,
    WeightReceiver,
    WeightSender,
)
from deltasync.delta.bits import as_bits
from deltasync.errors import (
    CallOrderError,
    ConfigError,
    PeerLost,
    SyncAborted,
    TargetMoved,
    TransportClosed,
    TransportTimeout,
)
from deltasync.sync.protocol.receiver_session import ReceiverState
from deltasync.testing.links import PROMPT_S, within
from deltasync.transports import inprocess
from deltasync.transports.base import Frame, ReceiveTransport
from deltasync.wire.frame import decode
from tests.worlds.links import Model, ThroughReceiver, bits_equal, until


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving the context waits for the end of a turn."""
    monkeypatch.setattr("deltasync.sync.staging_thread._TURN_S", 0.02)


def model(seed: int = 0) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return Model({name: torch.randn(300, generator=generator).bfloat16() for name in "ab"})


def bits_of(module: Model) -> list[Tensor]:
    return [as_bits(parameter.data).clone() for parameter in module.parameters()]


def holds(module: Model, bits: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits_of(module), bits, strict=True))


class Engine:
    """An engine that serves in the test's thread, and a trainer in another one."""

    def __init__(
        self,
        options: ReceiverOptions,
        wrap: Callable[[ReceiveTransport], ReceiveTransport] = lambda transport: transport,
    ) -> None:
        self.source, self.replica = model(0), model(1)
        transport = inprocess.Sender()
        self.sender = WeightSender(ModuleSource(self.source), transport)
        self.receiver = WeightReceiver(
            ModuleTarget(self.replica), wrap(transport.receiver()), options=options
        )
        self._trainer = ThreadPoolExecutor(1)

    def send(self, *, timeout_s: float = 60.0) -> Future[SyncStats]:
        """A sync under way."""

        def sync() -> SyncStats:
            self.sender.wait_for_receivers(1, timeout_s=60)
            return self.sender.send_weights(timeout_s=timeout_s)

        return self._trainer.submit(sync)

    def nudge(self) -> None:
        as_bits(self.source.get_parameter("a").data)[7] ^= 1

    def join(self, staging: StagingThread) -> None:
        """A first sync, committed."""
        sent = self.send()
        assert staging.wait_staged(timeout_s=60)
        staging.commit()
        assert sent.result(60).full_synced == 1
        assert bits_equal(self.source, self.replica)

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
        self._trainer.shutdown()


def replace_storage(module: Model) -> None:
    parameter = module.get_parameter("a")
    parameter.data = parameter.data.clone()


@contextmanager
def engine(
    options: ReceiverOptions | None = None,
    wrap: Callable[[ReceiveTransport], ReceiveTransport] = lambda transport: transport,
) -> Iterator[Engine]:
    made = Engine(options or ReceiverOptions(stall_timeout_s=60), wrap)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.promise("All or nothing", "Staging writes nothing.")
def test_the_engine_serves_the_old_version_until_it_commits() -> None:
    with engine() as here, StagingThread(here.receiver) as staging:
        old = bits_of(here.replica)
        assert not staging.is_staged()
        sent = here.send()
        while not staging.is_staged():
            assert holds(here.replica, old)  # a request is served
        time.sleep(0.05)
        assert holds(here.replica, old)
        assert not sent.done()
        assert staging.commit() == here.receiver.version == 1
        assert bits_equal(here.source, here.replica)
        assert sent.result(60).receivers == 1
        assert not staging.is_staged()


def test_many_syncs_in_a_row() -> None:
    with engine() as here, StagingThread(here.receiver) as staging:
        here.join(staging)
        for version in range(2, 8):
            here.nudge()
            sent = here.send()
            assert staging.wait_staged(timeout_s=60)
            assert not bits_equal(here.source, here.replica)
            assert staging.commit() == version
            assert sent.result(60).kind == "delta"
            assert bits_equal(here.source, here.replica)
        assert staging.last_error is None


@pytest.mark.promise("Checks", "Replaced storage is detected before what is staged is written.")
def test_storage_replaced_before_the_pause_is_noticed_in_it() -> None:
    with engine() as here, StagingThread(here.receiver) as staging:
        here.join(staging)
        here.nudge()
        sent = here.send()
        assert staging.wait_staged(timeout_s=60)
        replace_storage(here.replica)
        old = bits_of(here.replica)
        with pytest.raises(TargetMoved):
            staging.commit()
        assert holds(here.replica, old)
        with pytest.raises(SyncAborted, match="TargetMoved"):
            sent.result(60)


@pytest.mark.promise("Checks", "Replaced storage is detected before what is staged is written.")
@pytest.mark.parametrize("max_staged_bytes", [1 << 20, 1], ids=["staged", "in place"])
def test_storage_replaced_is_written_to_only_by_a_sync_in_place(max_staged_bytes: int) -> None:
    options = ReceiverOptions(stall_timeout_s=60, max_staged_bytes=max_staged_bytes)
    with engine(options) as here, StagingThread(here.receiver) as staging:
        here.join(staging)
        here.nudge()
        sent = here.send()
        assert staging.wait_staged(timeout_s=60)
        replace_storage(here.replica)
        with pytest.raises(TargetMoved):
            staging.commit()
        assert here.receiver.is_dirty is (max_staged_bytes == 1)
        with pytest.raises(SyncAborted, match="TargetMoved"):
            sent.result(60)


def test_joining_by_digest_alone_stages_nothing() -> None:
    with engine() as here, StagingThread(here.receiver) as staging:
        here.replica.load_state_dict(here.source.state_dict())
        assert here.send().result(60).full_synced == 0
        assert not staging.wait_staged(timeout_s=0.05)
        with pytest.raises(CallOrderError, match="nothing is staged"):
            staging.commit()
        here.nudge()
        sent = here.send()
        assert staging.wait_staged(timeout_s=60)
        assert staging.commit() == 2
        assert sent.result(60).kind == "delta"


def test_waiting_without_a_sender_comes_back_in_time() -> None:
    with engine() as here, StagingThread(here.receiver) as staging, within(PROMPT_S):
        assert not staging.wait_staged(timeout_s=0.05)


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


def exhausted(_: Meddling, __: float) -> Frame:
    raise torch.OutOfMemoryError("there is no room to stage it")


def without_host_memory(_: Meddling, __: float) -> Frame:
    raise MemoryError


def without_memory_for_tensors(_: Meddling, __: float) -> Frame:
    torch.empty(1 << 60, dtype=torch.uint8)
    raise AssertionError


def without_memory_for_maps(_: Meddling, __: float) -> Frame:
    mmap.mmap(-1, 1 << 60)
    raise AssertionError


def silent(_: Meddling, timeout_s: float) -> Frame:
    time.sleep(timeout_s)
    raise TransportTimeout("nothing came in time")


@pytest.mark.parametrize("kind", ["layout", "begin", "bucket", "prepare", "commit"])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (damaged, "BadMagic"),
        (lost, "PeerLost"),
        (exhausted, "OutOfMemoryError"),
        (without_host_memory, "MemoryError"),
        (without_memory_for_tensors, "RuntimeError"),
        (without_memory_for_maps, "OSError"),
    ],
)
def test_a_failed_sync_is_kept_as_last_error_and_the_next_one_works(
    kind: str, fault: Callable[[Meddling, float], Frame], error: str
) -> None:
    with (
        engine(wrap=lambda inner: Meddling(inner, kind, fault)) as here,
        StagingThread(here.receiver) as staging,
    ):
        old = bits_of(here.replica)
        with pytest.raises(SyncAborted):
            here.send().result(60)
        assert holds(here.replica, old)
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
    with (
        engine(
            ReceiverOptions(stall_timeout_s=0.2), lambda inner: Meddling(inner, kind, silent)
        ) as here,
        StagingThread(here.receiver) as staging,
    ):
        with pytest.raises(SyncAborted):
            here.send(timeout_s=3).result(60)
        here.join(staging)
        assert isinstance(staging.last_error, TransportTimeout)


@pytest.mark.promise("Time", "A `receive_weights` that times out loses nothing.")
def test_waiting_for_a_sync_is_no_failed_sync() -> None:
    with engine() as here, StagingThread(here.receiver) as staging:
        here.join(staging)
        time.sleep(0.1)
        assert staging.last_error is None
        assert here.receiver.state is ReceiverState.READY


def test_a_commit_that_fails_reaches_the_engine_and_the_next_sync_works() -> None:
    with engine() as here, StagingThread(here.receiver) as staging:
        here.join(staging)
        here.nudge()
        sent = here.send()
        assert staging.wait_staged(timeout_s=60)
        here.receiver.invalidate()
        with pytest.raises(CallOrderError):
            staging.commit()
        with pytest.raises(SyncAborted):
            sent.result(60)
        here.join(staging)


def test_leaving_while_waiting_for_a_sync() -> None:
    with engine() as here, within(PROMPT_S), StagingThread(here.receiver) as staging:
        assert not staging.is_staged()


def test_leaving_with_a_staged_version_fails_it_at_the_sender_and_loses_nothing() -> None:
    with engine() as here:
        with StagingThread(here.receiver) as staging:
            here.join(staging)
            old = bits_of(here.replica)
            here.nudge()
            sent = here.send(timeout_s=3)
            assert staging.wait_staged(timeout_s=60)
            began = time.monotonic()
        assert time.monotonic() - began < PROMPT_S
        assert holds(here.replica, old)
        with within(PROMPT_S), pytest.raises(SyncAborted):
            sent.result(60)
        assert holds(here.replica, old)
        assert not here.receiver.is_dirty
        # The version was decided: who comes later may write it still, and then rejoins.
        with StagingThread(here.receiver) as later:
            assert later.wait_staged(timeout_s=60)
            assert later.commit() == 2
            assert bits_equal(here.source, here.replica)
            assert here.send().result(60).full_synced == 0
            assert isinstance(later.last_error, PeerLost)


def test_leaving_after_the_sender_is_gone() -> None:
    with engine() as here:
        with StagingThread(here.receiver) as staging:
            here.join(staging)
            here.sender.close()
            time.sleep(0.05)
            began = time.monotonic()
        assert time.monotonic() - began < PROMPT_S
        assert isinstance(staging.last_error, PeerLost | TransportTimeout)


def test_leaving_within_a_sync_waits_for_the_silence_of_the_sender_at_most() -> None:
    with engine(
        ReceiverOptions(stall_timeout_s=0.3), lambda inner: Meddling(inner, "bucket", silent)
    ) as here:
        with StagingThread(here.receiver):
            sent = here.send(timeout_s=3)
            while here.receiver.state is not ReceiverState.STAGING:
                time.sleep(0.001)
            began = time.monotonic()
        assert time.monotonic() - began < PROMPT_S
        with pytest.raises(SyncAborted):
            sent.result(60)


def test_the_sender_goes_between_stage_and_commit_and_the_decided_version_is_written() -> None:
    with engine() as here, StagingThread(here.receiver) as staging:
        here.join(staging)
        here.nudge()
        sent = here.send(timeout_s=3)
        assert staging.wait_staged(timeout_s=60)
        with pytest.raises(SyncAborted):
            sent.result(60)
        here.sender.close()
        assert staging.commit() == 2
        assert bits_equal(here.source, here.replica)
        assert not here.receiver.is_dirty


def test_a_sync_in_place_is_handed_to_commit() -> None:
    with (
        engine(ReceiverOptions(max_staged_bytes=0, stall_timeout_s=60)) as here,
        StagingThread(here.receiver) as staging,
    ):
        old = bits_of(here.replica)
        sent = here.send()
        assert staging.wait_staged(timeout_s=60)
        time.sleep(0.05)
        assert holds(here.replica, old)
        assert staging.commit() == 1
        assert sent.result(60).full_synced == 1
        assert bits_equal(here.source, here.replica)
        here.nudge()
        sent = here.send()
        assert staging.wait_staged(timeout_s=60)
        assert staging.commit() == 2
        assert sent.result(60).kind == "delta"
        assert bits_equal(here.source, here.replica)
        assert staging.last_error is None


def test_a_sync_in_place_that_nobody_commits_fails_at_the_sender_and_writes_nothing() -> None:
    with engine(ReceiverOptions(max_staged_bytes=0, stall_timeout_s=0.3)) as here:
        old = bits_of(here.replica)
        with StagingThread(here.receiver) as staging:
            sent = here.send(timeout_s=3)
            assert staging.wait_staged(timeout_s=60)
        with within(PROMPT_S), pytest.raises(SyncAborted):
            sent.result(60)
        assert holds(here.replica, old)
        with StagingThread(here.receiver) as staging:
            here.join(staging)
        assert not here.receiver.is_dirty


def test_a_sync_in_place_that_the_sender_gave_up_before_commit_is_dirty_and_heals() -> None:
    with (
        engine(ReceiverOptions(max_staged_bytes=0, stall_timeout_s=0.3)) as here,
        StagingThread(here.receiver) as staging,
    ):
        sent = here.send(timeout_s=3)
        assert staging.wait_staged(timeout_s=60)
        with pytest.raises(SyncAborted):
            sent.result(60)
        with pytest.raises(PeerLost):
            staging.commit()
        assert here.receiver.is_dirty
        here.nudge()
        here.join(staging)
        assert not here.receiver.is_dirty


def test_closing_the_receiver_ends_the_thread_and_tells_who_waits() -> None:
    with engine() as here, StagingThread(here.receiver) as staging:
        here.receiver.close()
        with within(PROMPT_S), pytest.raises(TransportClosed):
            staging.wait_staged(timeout_s=60)
        with pytest.raises(TransportClosed):
            staging.commit()


def test_a_thread_that_does_not_run_is_an_error_and_no_silence() -> None:
    with engine() as here:
        staging = StagingThread(here.receiver)
        for ask in (staging.is_staged, lambda: staging.wait_staged(timeout_s=0), staging.commit):
            with pytest.raises(ConfigError, match="use it as a context manager"):
                ask()
        with staging:
            here.join(staging)
            with pytest.raises(ConfigError, match="once"):
                staging.__enter__()
        with pytest.raises(ConfigError, match="once"):
            staging.__enter__()
        assert not staging.is_staged()


def is_refused(call: Callable[..., object]) -> bool:
    """Whether another thread uses the receiver."""
    try:
        call(timeout_s=0)
    except ConfigError as error:
        return "used by one thread" in str(error)
    except TransportTimeout:
        return False
    return False


def test_a_receiver_is_used_by_one_thread_and_another_costs_it_nothing() -> None:
    with engine() as here, StagingThread(here.receiver) as staging:
        here.join(staging)
        for call in (here.receiver.receive_weights, here.receiver.stage):
            until(partial(is_refused, call))  # the thread lets go between two turns
        here.nudge()
        sent = here.send()
        until(staging.is_staged)
        staging.commit()
        assert sent.result(60).kind == "delta"
        assert bits_equal(here.source, here.replica)
