"""What ends report to listeners: each sync once, when it is over, and never at a sync's cost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from deltasync import (
    ModuleSource,
    ModuleTarget,
    StoreReceiver,
    StoreSender,
    SyncStats,
    subscribe,
)
from deltasync.errors import (
    SourceChanged,
    SyncAborted,
    TransportTimeout,
)
from deltasync.store.sender import PublishStats
from deltasync.sync.events import ReceiveStats, SyncEvent, SyncFailed
from tests.worlds.engines import engine
from tests.worlds.links import Fleet, Stubborn, fleet, random_model, until

SHAPES = {"a": (8, 4), "b": (6,)}
T = TypeVar("T", bound=SyncEvent)


@contextmanager
def heard() -> Iterator[list[SyncEvent]]:
    events: list[SyncEvent] = []
    with subscribe(events.append):
        yield events


def of(events: list[SyncEvent], kind: type[T]) -> list[T]:
    return [event for event in events if isinstance(event, kind)]


def send_step(here: Fleet, source: torch.nn.Module) -> SyncStats:
    source.get_parameter("a").data += 1
    return here.sender.send_weights(timeout_s=60)


def assert_in_order(
    phases: tuple[tuple[str, float, float], ...], total_s: float, *names: str
) -> None:
    begins = [begin for _, begin, _ in phases]
    assert begins == sorted(begins)
    assert all(0 <= begin <= end <= total_s + 1e-6 for _, begin, end in phases)
    assert [name for name, _, _ in phases] == list(names)


@pytest.mark.promise(
    "What operators see",
    "Each end reports each sync once, when it is over; failures too.",
)
def test_each_end_reports_each_sync() -> None:
    source = random_model(SHAPES, 0)
    with heard() as events, fleet(source) as here:
        here.join({"same": random_model(SHAPES, 0)})
        until(lambda: bool(of(events, ReceiveStats)))
        here.serving.pop("same/0").stop()
        first = here.join({"x": random_model(SHAPES, 1), "y": random_model(SHAPES, 2)})
        second = send_step(here, source)
        until(lambda: len(of(events, ReceiveStats)) == 5)
    assert of(events, SyncStats)[1:] == [first, second]
    assert (first.engines, first.attempts) == (("x", "y"), 1)
    assert_in_order(first.phases, first.total_s, "capture", "send", "wait", "commit")
    assert_in_order(second.phases, second.total_s, "compare", "send", "wait", "commit")
    assert all(0 < stats.wait_s <= stats.transfer_s for stats in (first, second))
    same, *received = of(events, ReceiveStats)
    assert (same.kind, same.version, same.name) == ("joined", 1, "same[0/1]")
    assert sorted((e.name, e.version, e.kind) for e in received) == [
        ("x[0/1]", 2, "full"),
        ("x[0/1]", 3, "delta"),
        ("y[0/1]", 2, "full"),
        ("y[0/1]", 3, "delta"),
    ]
    for event in received:
        assert_in_order(event.phases, event.total_s, "stage", "wait", "ready", "commit")
        assert 0 < event.commit_s <= event.pause_s <= event.total_s
        assert event.num_bytes > 0
    assert {e.stream_id for e in [*received, same]} | {first.stream_id, second.stream_id} == {
        here.sender.stream_id
    }
    assert of(events, SyncFailed) == []


@pytest.mark.promise("What operators see", "A listener that raises costs no sync.")
def test_a_listener_that_raises_costs_no_sync_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = ValueError("planted")

    def broken(event: SyncEvent) -> None:
        if isinstance(event, SyncStats):
            raise error

    source = random_model(SHAPES, 0)
    with subscribe(broken), heard() as events, fleet(source) as here:
        here.join({"x": random_model(SHAPES, 1)})
        for version in range(2, 5):
            assert send_step(here, source).version == version
        until(lambda: len(of(events, ReceiveStats)) == 4)
        assert here.serving["x/0"].errors == []
    assert len(of(events, SyncStats)) == 4
    (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert told.message == "a listener failed at SyncStats; syncs go on"
    assert told.exc_info is not None
    assert told.exc_info[1] is error


@pytest.mark.promise(
    "What operators see",
    "Each end reports each sync once, when it is over; failures too.",
)
def test_a_sync_that_a_receiver_breaks_is_a_failure_at_both_ends() -> None:
    source, target = random_model(SHAPES, 0), Stubborn(random_model(SHAPES, 1))
    with heard() as events, fleet(source) as here:
        here.join(target)
        serving = here.serving["engine/0"]
        target.fails = True
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=60)
        until(lambda: bool(serving.errors) and len(of(events, SyncFailed)) == 2)
        here.wait(1)
        stats = here.sender.send_weights(timeout_s=60)
    failed = {event.role: event for event in of(events, SyncFailed)}
    assert "planted" in failed["sender"].lost["engine[0/1]"]
    assert failed["sender"].version == failed["receiver"].version == 2
    assert failed["receiver"].name == "engine[0/1]"
    assert "planted" in failed["receiver"].reason
    assert not failed["receiver"].is_dirty
    assert stats.lost == {}  # it was told with the failure


@pytest.mark.promise(
    "What operators see",
    "What a commit has done is reported after the engine's pause.",
)
def test_a_commit_is_reported_when_the_pause_is_over() -> None:
    """With the receiver's next call, be it `close`."""
    with heard() as events, engine() as here:
        for syncs in range(3):
            sent = here.send_step()
            assert here.receiver.stage(timeout_s=60)
            assert len(of(events, ReceiveStats)) == syncs
            here.receiver.commit()
            sent.result(60)
            assert len(of(events, ReceiveStats)) == syncs  # the engine may be paused still
        with pytest.raises(TransportTimeout):
            here.receiver.stage(timeout_s=0)
        assert len(of(events, ReceiveStats)) == 3
        sent = here.send_step()
        assert here.receiver.stage(timeout_s=60)
        here.receiver.commit()
        sent.result(60)
        here.receiver.close()
    assert [event.version for event in of(events, ReceiveStats)] == [1, 2, 3, 4]


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
        receiver.fetch(timeout_s=60)
        source.get_parameter("a").data[0] += 1
        delta = sender.publish()
        receiver.fetch(timeout_s=60)
        source.register_parameter("c", torch.nn.Parameter(torch.zeros(1)))
        with pytest.raises(SourceChanged):
            sender.publish()
    assert of(events, PublishStats) == [anchor, delta]
    assert delta.run == sender.run
    assert_in_order(delta.phases, delta.total_s, *[name for name, _, _ in delta.phases])
    full, changed = of(events, ReceiveStats)
    assert (full.kind, full.version, full.name) == ("full", 1, "store[0/1]")
    assert (changed.kind, changed.base_version, changed.stream_id) == ("delta", 1, sender.run)
    assert changed.num_bytes == delta.delta_bytes
    assert_in_order(changed.phases, changed.total_s, "fetch", "stage", "ready", "commit")
    (failed,) = of(events, SyncFailed)
    assert (failed.role, failed.version, type(failed.error)) == ("publisher", 3, SourceChanged)
