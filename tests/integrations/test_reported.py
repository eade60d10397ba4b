"""What owners of engines report: of each call its outcome, when engines generate again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from deltasync import ModuleSource, SyncStats, subscribe
from deltasync.errors import DeltaSyncError, TransportTimeout
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.verl_ends import Options, Trainer
from deltasync.sync.events import SyncEvent, SyncFailed
from deltasync.sync.options import SenderOptions
from deltasync.transports import shared_memory
from tests.worlds.fleets import OneCall, Server, fleet_of, model, outcome

KINDS = [Server, OneCall]


@contextmanager
def engine_sync(server: Server, path: Path) -> Iterator[EngineSync]:
    """Of a source that differs from what the server holds. It has had one version."""
    link = shared_memory.Sender(path / "socket")
    source = model(0)
    with EngineSync(
        ModuleSource(source), server, link, paused=server.paused, timeout_s=2.0
    ) as sync:
        sync.send_weights()
        source.get_parameter("a").data[0] *= -2
        yield sync
    server.die()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sync_is_reported_when_the_engine_generates_again(
    tmp_path: Path, kind: type[Server]
) -> None:
    """A listener may be slow: the engine would pause for it."""
    server = kind(model(1))
    with engine_sync(server, tmp_path) as sync:
        server.calls.clear()
        with subscribe(lambda event: server.calls.append(type(event).__name__)):
            sync.send_weights()
    assert server.calls.count("SyncStats") == 1
    last = "switched" if kind is OneCall else "resume"
    assert server.calls.index("SyncStats") > server.calls.index(last)


@pytest.mark.parametrize("fails", ["pause", "update", "updated", "name", "resume"])
def test_a_failure_is_reported_once_and_when_the_engine_was_asked_for_all(
    tmp_path: Path, fails: str
) -> None:
    server = Server(model(1))
    with engine_sync(server, tmp_path) as sync:
        server.calls.clear()
        server.fails = fails
        with subscribe(lambda event: server.calls.append(type(event).__name__)):
            error = outcome(sync.send_weights)
        assert isinstance(error, DeltaSyncError)
        assert server.calls[-1] == "SyncFailed"
        assert server.calls.count("SyncFailed") == 1
        assert "SyncStats" not in server.calls


def test_an_update_that_outlasts_the_sync_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the trainer's thread slept when all workers had written."""
    server = Server(model(1))
    with engine_sync(server, tmp_path) as sync:
        check = sync._check_complete

        def late(stats: SyncStats) -> None:
            server.goes_on.wait(4)
            check(stats)

        monkeypatch.setattr(sync, "_check_complete", late)
        with pytest.raises(TransportTimeout, match="was not named"):
            sync.send_weights()


def test_a_fleet_reports_what_its_call_returns(tmp_path: Path) -> None:
    """Its servers by their own names, with those that are behind."""
    events: list[SyncEvent] = []
    with fleet_of(tmp_path, 3, timeout_s=5.0) as here:
        here.send()
        behind = here.servers["1"]
        behind.declines = RuntimeError("planted")
        behind.die()
        with subscribe(events.append):
            here.step()
            returned = [here.send()]
            here.step()
            returned.append(here.send())
    sent = [event for event in events if isinstance(event, SyncStats)]
    assert sent == returned
    for stats in sent:
        assert stats.engines == ("0", "2")
        assert "planted" in stats.lost["1"]


def test_a_failure_says_how_many_still_hold_the_last_version(tmp_path: Path) -> None:
    events: list[SyncEvent] = []
    with fleet_of(tmp_path, 2, timeout_s=5.0, min_engines=2) as here:
        here.send()
        here.servers["1"].declines = RuntimeError("planted")
        here.servers["1"].die()
        with subscribe(events.append):
            here.step()
            outcome(here.send)
    [failed] = [event for event in events if isinstance(event, SyncFailed)]
    assert failed.receivers == 1


def test_a_rollout_that_does_not_come_is_a_failure() -> None:
    events: list[SyncEvent] = []
    trainer = Trainer(Options(link="shared_memory", timeout_s=0.2), SenderOptions())
    with subscribe(events.append):
        error = outcome(lambda: trainer.send([("a", torch.ones(3))], ["rollout"]))
    trainer.close()
    assert isinstance(error, TransportTimeout)
    assert [event.error for event in events if isinstance(event, SyncFailed)] == [error]
