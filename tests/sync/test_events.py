"""What ends report to listeners: each sync once, when it is over, and never at a sync's cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    StoreReceiver,
    StoreSender,
    SyncStats,
    WeightSender,
    subscribe,
)
from deltasync.delta.bits import as_bits
from deltasync.errors import (
    ConfigError,
    DirtyReceiver,
    EngineFailed,
    NoReceivers,
    SourceChanged,
    SyncAborted,
    TransportTimeout,
)
from deltasync.integrations.engine_sync import EngineSync
from deltasync.store.sender import PublishStats
from deltasync.sync.events import ReceiveStats, Subscription, SyncEvent, SyncFailed, reporting
from deltasync.transports import collective, inprocess
from tests.sync.test_innocent import Fleet as Watching
from tests.sync.test_staging_thread import Engine, engine, replace_storage
from tests.worlds.links import Fleet, Stubborn, fleet, random_model, step, until
from tests.worlds.programs import run

SHAPES = {"a": (8, 4), "b": (6,)}
T = TypeVar("T", bound=SyncEvent)


@contextmanager
def heard() -> Iterator[list[SyncEvent]]:
    events: list[SyncEvent] = []
    with subscribe(events.append):
        yield events


def of(events: list[SyncEvent], kind: type[T]) -> list[T]:
    return [event for event in events if isinstance(event, kind)]


def joined(here: Fleet | Watching, *engines: str) -> SyncStats:
    for number, name in enumerate(engines):
        here.add(random_model(SHAPES, number + 1), engine=name)
    here.wait(len(engines))
    return here.sender.send_weights(timeout_s=5)


def assert_in_order(phases: tuple[tuple[str, float, float], ...], total_s: float) -> None:
    begins = [begin for _, begin, _ in phases]
    assert begins == sorted(begins)
    assert all(0 <= begin <= end <= total_s + 1e-6 for _, begin, end in phases)


@pytest.mark.promise(
    "What operators see",
    "Each end reports each sync once, when it is over; failures too.",
)
def test_each_end_reports_each_sync() -> None:
    source = random_model(SHAPES, 0)
    with heard() as events, fleet(source) as here:
        first = joined(here, "x", "y")
        step(source, torch.Generator().manual_seed(0), 0.5)
        second = here.sender.send_weights(timeout_s=5)
        until(lambda: len(of(events, ReceiveStats)) == 4)
    assert of(events, SyncStats) == [first, second]
    assert (first.engines, first.attempts) == (("x", "y"), 1)
    assert first.stream_id == here.sender.stream_id
    names = [name for name, _, _ in second.phases]
    assert names == ["compare", "send", "wait", "commit"]
    assert [name for name, _, _ in first.phases] == ["capture", "send", "wait", "commit"]
    for stats in (first, second):
        assert_in_order(stats.phases, stats.total_s)
        assert 0 < stats.wait_s <= stats.transfer_s
    received = of(events, ReceiveStats)
    assert sorted((e.name, e.version, e.kind) for e in received) == [
        ("x[0/1]", 1, "full"),
        ("x[0/1]", 2, "delta"),
        ("y[0/1]", 1, "full"),
        ("y[0/1]", 2, "delta"),
    ]
    for event in received:
        assert event.stream_id == here.sender.stream_id
        assert [name for name, _, _ in event.phases] == ["stage", "wait", "ready", "commit"]
        assert_in_order(event.phases, event.total_s)
        assert 0 < event.commit_s <= event.pause_s <= event.total_s
        assert event.num_bytes > 0
    assert of(events, SyncFailed) == []


def test_receivers_that_join_by_digest_are_reported() -> None:
    source = random_model(SHAPES, 0)
    with heard() as events, fleet(source) as here:
        here.add(random_model(SHAPES, 0), engine="same")
        here.wait(1)
        here.sender.send_weights(timeout_s=5)
        until(lambda: bool(of(events, ReceiveStats)))
    (event,) = of(events, ReceiveStats)
    assert (event.kind, event.version, event.name) == ("joined", 1, "same[0/1]")


def test_a_closed_subscription_hears_nothing() -> None:
    events: list[SyncEvent] = []
    source = random_model(SHAPES, 0)
    with fleet(source) as here, heard() as others:
        with subscribe(events.append) as subscription:
            joined(here, "x")
        subscription.close()  # once more
        source.get_parameter("a").data += 1
        here.sender.send_weights(timeout_s=5)
    assert len(of(events, SyncStats)) == 1
    assert len(of(others, SyncStats)) == 2


@pytest.mark.promise("What operators see", "A listener that raises costs no sync.")
def test_a_listener_that_raises_costs_no_sync_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(event: SyncEvent) -> None:
        raise ValueError("planted")

    source = random_model(SHAPES, 0)
    with subscribe(broken), heard() as events, fleet(source) as here:
        joined(here, "x")
        for _ in range(3):
            source.get_parameter("a").data += 1
            here.sender.send_weights(timeout_s=5)
        until(lambda: len(of(events, ReceiveStats)) == 4)
        assert here.serving["x/0"].errors == []
    assert len(of(events, SyncStats)) == 4
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.message for record in told] == [
        "a listener failed at SyncStats; syncs go on"
    ] or [record.message for record in told] == ["a listener failed at ReceiveStats; syncs go on"]
    assert "planted" in str(told[0].exc_info)


def test_a_listener_whose_error_has_no_text_costs_no_sync(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("planted")

    def broken(event: SyncEvent) -> None:
        if isinstance(event, SyncStats):
            raise Mute

    with subscribe(broken), fleet(random_model(SHAPES, 0)) as here:
        joined(here, "x")
        assert here.sender.send_weights(timeout_s=5).version == 2
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 1


def test_a_sync_without_receivers_is_one_failure() -> None:
    with (
        heard() as events,
        WeightSender(ModuleSource(random_model(SHAPES, 0)), inprocess.Sender()) as sender,
    ):
        with pytest.raises(NoReceivers):
            sender.send_weights(timeout_s=1)
        stream_id = sender.stream_id
    (event,) = events
    assert isinstance(event, SyncFailed)
    assert isinstance(event.error, NoReceivers)
    assert (event.role, event.stream_id, event.version) == ("sender", stream_id, 1)
    assert event.reason.startswith("NoReceivers: no receiver is connected")


def test_a_call_that_was_interrupted_as_it_began_does_not_swallow_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, events = random_model(SHAPES, 0), list[SyncEvent]()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with fleet(source) as here, subscribe(events.append):
        here.add(random_model(SHAPES, 1))
        here.wait(1)
        with monkeypatch.context() as patched:
            patched.setattr("deltasync.sync.sender.SenderCall", interrupt)
            with pytest.raises(KeyboardInterrupt):
                here.sender.send_weights(timeout_s=5)
        events.clear()
        here.wait(1)
        here.sender.send_weights(timeout_s=60)
    assert len(of(events, SyncStats)) == 1


def test_receivers_that_sleep_are_not_lost() -> None:
    source, events = random_model(SHAPES, 0), list[SyncEvent]()
    with fleet(source) as here:
        serving = here.add(random_model(SHAPES, 1))
        here.wait(1)
        here.sender.send_weights(timeout_s=5)
        serving.receiver.detach()
        step(source, torch.Generator().manual_seed(0), 0.1)
        with subscribe(events.append), pytest.raises(ConfigError, match="sleep"):
            here.sender.send_weights(timeout_s=5)
        serving.receiver.attach()
    [failed] = [event for event in events if isinstance(event, SyncFailed)]
    assert (failed.lost, failed.receivers) == ({}, 1)


@pytest.mark.promise(
    "What operators see",
    "Each end reports each sync once, when it is over; failures too.",
)
def test_a_sync_that_a_receiver_breaks_is_a_failure_at_both_ends() -> None:
    source, target = random_model(SHAPES, 0), Stubborn(random_model(SHAPES, 1))
    with heard() as events, fleet(source) as here:
        serving = here.add(target)
        here.wait(1)
        here.sender.send_weights(timeout_s=5)
        target.fails = True
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=5)
        until(lambda: bool(serving.errors) and len(of(events, SyncFailed)) == 2)
        here.wait(1)
        stats = here.sender.send_weights(timeout_s=5)
    failed = {event.role: event for event in of(events, SyncFailed)}
    assert list(failed["sender"].lost) == ["engine[0/1]"]
    assert "planted" in failed["sender"].lost["engine[0/1]"]
    assert failed["sender"].version == failed["receiver"].version == 2
    assert failed["receiver"].name == "engine[0/1]"
    assert "planted" in failed["receiver"].reason
    assert not failed["receiver"].is_dirty
    assert stats.lost == {}  # it was told with the failure


def test_what_ended_before_a_listener_came_is_not_reported() -> None:
    """Nor is it kept meanwhile: receivers may rejoin for months."""
    source, replica = random_model(SHAPES, 0), random_model(SHAPES, 0)
    with fleet(source) as here:
        serving = here.add(replica)
        here.wait(1)
        assert here.sender.send_weights(timeout_s=5).full_synced == 0
        until(lambda: serving.receiver.version == here.sender.version)
        with heard() as events:
            source.get_parameter("a").data += 1
            here.sender.send_weights(timeout_s=5)
            until(lambda: bool(of(events, ReceiveStats)))
    assert [event.kind for event in of(events, ReceiveStats)] == ["delta"]


def test_a_receiver_that_fails_before_the_decision_costs_no_attempt() -> None:
    source = random_model(SHAPES, 0)
    with heard() as events, fleet(source) as here:
        joined(here, "stays", "leaves")
        replace_storage(here.serving["leaves/0"].receiver._weights.target._module)  # type: ignore[attr-defined]
        source.get_parameter("a").data += 1
        stats = here.sender.send_weights(timeout_s=5)
        until(lambda: bool(of(events, SyncFailed)))
    assert (stats.attempts, stats.receivers) == (1, 1)
    assert [name for name, _, _ in stats.phases].count("send") == 1
    (failed,) = of(events, SyncFailed)
    assert (failed.role, failed.name) == ("receiver", "leaves[0/1]")


def test_a_second_attempt_is_counted_and_timed() -> None:
    source = random_model(SHAPES, 0)
    here = Watching(source)
    try:
        with heard() as events:
            joined(here, "stays", "leaves")
            source.get_parameter("a").data += 1
            here.link.lose_at("begin", here, "leaves/0")
            stats = here.sender.send_weights(timeout_s=5)
    finally:
        here.close()
    assert (stats.attempts, stats.receivers) == (2, 1)
    names = [name for name, _, _ in stats.phases]
    assert names.count("compare") == 2
    assert names.count("send") == names.count("commit") == 1  # the first one broke off before
    assert [event.version for event in of(events, SyncStats)][-1] == stats.version


@pytest.mark.promise("What operators see", "What the scrub finds is reported.")
def test_what_a_scrub_finds_is_reported_and_so_is_its_repair() -> None:
    source, replica = random_model({"layer": (64,)}, 0), random_model({"layer": (64,)}, 1)
    options = ReceiverOptions(scrub_every=1, chunk_numel=16)
    with heard() as events, fleet(source) as here:
        serving = here.add(replica, options=options)
        here.wait(1)
        here.sender.send_weights(timeout_s=5)
        until(lambda: not serving.receiver._scrub_is_due)
        source.get_parameter("layer").data[:4] += 1
        here.sender.send_weights(timeout_s=5)
        as_bits(replica.get_parameter("layer").data)[63] ^= 1
        serving.receiver._scrub_is_due = True
        until(lambda: any(event.corrupted for event in of(events, SyncFailed)))
        here.wait(1)
        here.sender.send_weights(timeout_s=5)
        until(lambda: of(events, ReceiveStats)[-1].was_dirty)
    found = next(event for event in of(events, SyncFailed) if event.corrupted)
    assert isinstance(found.error, DirtyReceiver)
    assert (found.corrupted, found.is_dirty) == ("layer", True)
    assert of(events, ReceiveStats)[-1].kind == "full"


@pytest.mark.promise(
    "What operators see",
    "What a commit has done is reported after the engine's pause.",
)
def test_a_commit_is_reported_when_the_pause_is_over() -> None:
    with heard() as events, engine() as here:
        sent = here.send()
        assert here.receiver.stage(timeout_s=5)
        here.receiver.commit()
        sent.result(5)
        here.nudge()
        assert len(of(events, ReceiveStats)) == 0
        sent = here.send()
        assert here.receiver.stage(timeout_s=5)
        assert len(of(events, ReceiveStats)) == 1
        here.receiver.commit()
        sent.result(5)
        assert len(of(events, ReceiveStats)) == 1  # the engine may be paused still
        with pytest.raises(TransportTimeout):
            here.receiver.stage(timeout_s=0)
        assert len(of(events, ReceiveStats)) == 2


def test_what_was_committed_last_is_reported_when_the_receiver_is_closed() -> None:
    with heard() as events, engine() as here:
        sent = here.send()
        assert here.receiver.stage(timeout_s=5)
        here.receiver.commit()
        sent.result(5)
        here.receiver.close()
    assert [event.version for event in of(events, ReceiveStats)] == [1]


def test_listeners_may_come_and_go_while_events_are_reported() -> None:
    told: list[str] = []

    def first(event: SyncEvent) -> None:
        told.append("first")
        one.close()
        more.append(subscribe(lambda event: told.append("second")))

    more: list[Subscription] = []
    one = subscribe(first)
    with WeightSender(ModuleSource(random_model(SHAPES, 0)), inprocess.Sender()) as sender:
        for _ in range(2):
            with pytest.raises(NoReceivers):
                sender.send_weights(timeout_s=1)
    more[0].close()
    assert told == ["first", "second"]


def test_errors_that_take_no_attribute_are_reported_as_they_are() -> None:
    class Fixed(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            if name.startswith("_deltasync"):
                raise AttributeError(name)
            super().__setattr__(name, value)

    watched = reporting(lambda error: SyncFailed(role="sender", error=error))
    with heard() as events, pytest.raises(Fixed), watched:
        raise Fixed
    assert len(of(events, SyncFailed)) == 1


def test_a_trainer_that_stays_away_is_no_failure() -> None:
    source = random_model(SHAPES, 0)
    with heard() as events:
        with fleet(source) as here:
            joined(here, "x")
            here.sender.close()
            until(lambda: bool(of(events, SyncFailed)))
            time.sleep(1.0)  # it asks for the trainer again and again
        assert [type(event.error).__name__ for event in of(events, SyncFailed)] == ["PeerLost"]


class Refuses:
    """An engine that lets no worker connect."""

    def __getattr__(self, name: str) -> Any:
        def asked(*_: object) -> None:
            raise AssertionError(f"asked to {name}")

        return asked


@pytest.mark.promise(
    "What operators see",
    "Each end reports each sync once, when it is over; failures too.",
)
def test_what_an_engine_refuses_is_one_failure() -> None:
    source = ModuleSource(random_model(SHAPES, 0))
    with (
        heard() as events,
        EngineSync(source, Refuses(), collective.Sender()) as sync,
        pytest.raises(EngineFailed),
    ):
        sync.send_weights(timeout_s=1)
    (event,) = events
    assert isinstance(event, SyncFailed)
    assert (event.role, type(event.error)) == ("sender", EngineFailed)


def abort_one(here: Engine) -> Future[SyncStats]:
    """A sync that the sender aborts when it has sent some of it, after one that was committed."""

    def stops() -> None:
        raise RuntimeError("planted")

    sent = here.send()
    assert here.receiver.stage(timeout_s=5)
    here.receiver.commit()
    sent.result(5)
    here.nudge()
    return here._trainer.submit(here.sender.send_weights, timeout_s=5, on_source_read=stops)


def test_a_sync_that_the_sender_aborts_is_no_failure_of_its_receiver() -> None:
    """Nor is the wait for the next one, if none comes."""
    with heard() as events, engine() as here:
        sent = abort_one(here)
        with pytest.raises(TransportTimeout):
            here.receiver.stage(timeout_s=0.5)
        with pytest.raises(RuntimeError, match="planted"):
            sent.result(5)
    assert [event.role for event in of(events, SyncFailed)] == ["sender"]


def test_a_receiver_that_an_aborted_sync_leaves_dirty_reports_it() -> None:
    options = ReceiverOptions(max_staged_bytes=1, stall_timeout_s=2)
    with heard() as events, engine(options) as here:
        sent = abort_one(here)
        assert here.receiver.stage(timeout_s=5)
        with pytest.raises(SyncAborted, match="the sender gave up"):
            here.receiver.commit()
        with pytest.raises(RuntimeError, match="planted"):
            sent.result(5)
    (event,) = [event for event in of(events, SyncFailed) if event.role == "receiver"]
    assert (event.version, event.is_dirty) == (2, True)


@pytest.mark.promise(
    "What operators see",
    "Each end reports each sync once, when it is over; failures too.",
)
def test_stores_report_what_is_published_and_fetched(tmp_path: Path) -> None:
    shapes = {"a": (256, 256)}
    source, target = random_model(shapes, 0), random_model(shapes, 1)
    sender = StoreSender(ModuleSource(source), tmp_path)
    with heard() as events, StoreReceiver(ModuleTarget(target), tmp_path) as receiver:
        anchor = sender.publish()
        receiver.fetch(timeout_s=5)
        source.get_parameter("a").data[0] += 1
        delta = sender.publish()
        receiver.fetch(timeout_s=5)
        source.register_parameter("c", torch.nn.Parameter(torch.zeros(1)))
        with pytest.raises(SourceChanged):
            sender.publish()
    assert of(events, PublishStats) == [anchor, delta]
    assert delta.run == sender.run
    assert_in_order(delta.phases, delta.total_s)
    full, changed = of(events, ReceiveStats)
    assert (full.kind, full.version, full.name) == ("full", 1, "store[0/1]")
    assert (changed.kind, changed.base_version, changed.stream_id) == ("delta", 1, sender.run)
    assert changed.num_bytes == delta.delta_bytes
    assert [name for name, _, _ in changed.phases] == ["fetch", "stage", "ready", "commit"]
    (failed,) = of(events, SyncFailed)
    assert (failed.role, failed.version, type(failed.error)) == ("publisher", 3, SourceChanged)


_FORKED = """
import os, sys
from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender, subscribe
from deltasync.errors import DeltaSyncError
from deltasync.transports import inprocess
from tests.worlds.links import fleet, random_model
from tests.sync.test_innocent import Fleet as Watching

subscribe(lambda event: print(os.getpid() == parent, type(event).__name__, flush=True))
parent = os.getpid()
with fleet(random_model({"w": (3,)}, 0)) as here:
    pid = os.fork()
    if pid == 0:
        try:
            here.sender.send_weights(timeout_s=1)
        except DeltaSyncError as error:
            print(type(error).__name__, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_a_child_that_was_forked_reports_what_it_does_itself() -> None:
    done = run(_FORKED)
    assert done.stdout == "False SyncFailed\nTransportClosed\n", done.stderr
