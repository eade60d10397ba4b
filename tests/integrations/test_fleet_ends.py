"""How calls of a fleet end, and who leaves it: who stays paused, is waited for, and is named."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deltasync import SenderOptions, SyncStats, subscribe
from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    SyncAborted,
    TransportClosed,
)
from deltasync.sync.events import SyncEvent
from tests.worlds.fleets import (
    CALLS,
    OneCall,
    Server,
    Watched,
    at,
    fleet_of,
    hung,
    in_thread,
    interrupt,
    model,
    outcome,
)
from tests.worlds.links import until

MANY_BUCKETS: dict[str, Any] = {
    "shapes": {"a": (512, 1024), "b": (33,)},
    "max_staged_bytes": 1,
    "options": SenderOptions(bucket_bytes=1 << 16),
    "link": Watched,
    "min_engines": 2,
}
MOMENTS = ["begin", "bucket", "buffer", "prepare", "replies", "commit", "some replies"]


@pytest.mark.promise(
    "All or nothing",
    "An interrupted trainer leaves no server of a fleet paused for good.",
)
def test_an_interrupted_trainer_goes_on_and_no_server_is_left_paused(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 3, link=Watched, timeout_s=4.0) as here:
        for moment in ("layout", "welcome", *MOMENTS):
            if moment in ("layout", "welcome"):
                here.fleet.disconnect()
            here.link.before = at(1, moment, interrupt)
            with pytest.raises(KeyboardInterrupt):
                here.train()
            here.link.before = lambda kind: None
            here.catch_up()
            here.check()
            assert here.dirty() == []


@pytest.mark.parametrize("kind", [Server, OneCall])
@pytest.mark.parametrize("befalls", ["interrupt", "death of another"])
def test_a_server_that_joined_first_and_then_mixes_versions_stays_paused(
    befalls: str, kind: type[Server], tmp_path: Path
) -> None:
    """It joined with the version before, which says nothing of the delta of the same call."""
    with fleet_of(tmp_path, 2, kind=kind, **MANY_BUCKETS) as here:
        here.send()
        back, other = here.servers["1"], here.servers["0"]
        back.die()
        back.module = model(9, MANY_BUCKETS["shapes"])
        back.start()
        here.source.get_parameter("a").data.mul_(-2)
        strike = interrupt if befalls == "interrupt" else other.die
        in_delta = at(8, "bucket", strike)
        here.link.before = at(2, "begin", lambda: setattr(here.link, "before", in_delta))
        with pytest.raises((KeyboardInterrupt, SyncAborted)):
            here.send()
        here.link.before = lambda kind: None
        until(lambda: back.is_paused)
        assert "1" in here.dirty()
        here.catch_up()
        here.check()


def misuse() -> None:
    raise ConfigError("planted")


@pytest.mark.parametrize("kind", [Server, OneCall])
@pytest.mark.parametrize("sync", ["full", "delta"])
def test_a_mixture_stays_paused_when_the_trainers_configuration_is_wrong(
    sync: str, kind: type[Server], tmp_path: Path
) -> None:
    """As if the weights slept, which is a ConfigError too."""
    with fleet_of(tmp_path, 2, kind=kind, **MANY_BUCKETS) as here:
        if sync == "delta":
            here.send()
            here.source.get_parameter("a").data.mul_(-2)
        here.link.before = at(8, "bucket", misuse)
        with pytest.raises(ConfigError, match="planted"):
            here.send()
        here.link.before = lambda kind: None
        wait(update for engine in here.sync._engines.values() for update in engine.updates)
        assert here.dirty() == ["0", "1"]
        assert all(server.is_paused for server in here.servers.values())
        here.catch_up()
        here.check()


@pytest.mark.parametrize(("is_removed", "max_staged_bytes"), [(False, 1 << 30), (True, 1)])
def test_a_call_that_hangs_costs_later_syncs_of_a_rolling_fleet_nothing(
    is_removed: bool, max_staged_bytes: int, tmp_path: Path
) -> None:
    """Nor does anybody else stay paused, or behind, for it."""
    options: dict[str, Any] = {"pauses": "rolling", "max_staged_bytes": max_staged_bytes}
    with fleet_of(tmp_path, 3, timeout_s=5.0, **options) as here:
        here.send(timeout_s=60)
        here.servers["0"].hangs = "resume"
        began = time.monotonic()
        assert list(here.train().lost) == ["0"]
        assert 4.7 < time.monotonic() - began < 9.5  # it is waited for once
        if is_removed:
            here.fleet.remove("0")
        else:
            here.train()  # waits for it to connect
        for _ in range(2):
            here.source.get_parameter("a").data.mul_(-2)
            began = time.monotonic()
            here.send()
            assert time.monotonic() - began < 4.5
            here.follow("1", "2")


def test_a_rolling_fleet_waits_for_a_server_that_resumes_late_beside_one_that_does_not(
    tmp_path: Path,
) -> None:
    with fleet_of(tmp_path, 3, pauses="rolling", timeout_s=3.0) as here:
        here.send(timeout_s=60)
        here.servers["0"].hangs = here.servers["1"].hangs = "resume"
        late = threading.Timer(4.0, here.servers["1"].goes_on.set)  # its turn comes after 3 s
        late.start()
        assert list(here.train().lost) == ["0"]
        late.join()


@pytest.mark.parametrize("call", ["connect", "update", "resume"])
def test_closing_ends_a_sync_of_another_thread_and_waits_for_nobody_who_hangs(
    call: str, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 3, timeout_s=10.0) as here:
        if call != "connect":
            here.send()
        slow = here.servers["1"]
        slow.hangs = call
        with in_thread(partial(outcome, here.train)) as found:
            hung(slow)
            with in_thread(here.fleet.close, timeout_s=5.0):
                pass
            slow.goes_on.set()
        assert isinstance(found[0], DeltaSyncError) or call == "resume", found
        with pytest.raises(TransportClosed):
            here.send()
        until(lambda: not here.servers["0"].is_paused)


def test_closing_resumes_servers_although_another_one_hangs(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 3, timeout_s=3.0) as here:
        here.send(timeout_s=60)
        for server in here.servers.values():
            server.fails = "resume"
        assert set(here.train().lost) == set(here.servers)
        assert all(state.is_paused for state in here.fleet.servers().values())
        here.servers["0"].hangs = "resume"
        with in_thread(here.fleet.close):
            pass
        assert [server.is_paused for server in here.servers.values()] == [True, False, False]


def test_a_fleet_reports_what_its_call_returns(tmp_path: Path) -> None:
    """Its servers by their own names, with those that are behind."""
    sent: list[SyncEvent] = []
    with fleet_of(tmp_path, 2) as here:
        here.send()
        here.servers["1"].declines = RuntimeError("planted")
        here.servers["1"].die()
        with subscribe(sent.append):
            stats = here.train()
    assert [one for one in sent if isinstance(one, SyncStats)] == [stats]
    assert stats.engines == ("0",)
    assert "planted" in stats.lost["1"]


def test_servers_are_removed_while_a_sync_is_under_way(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2) as here:
        for call in CALLS:
            here.add(Server(model(9)), call)
        here.send()
        for call in CALLS:
            here.servers[call].hangs = call
        here.add(Server(model(8)), "connect").hangs = "connect"
        with in_thread(here.train) as found:
            for call in ("connect", *CALLS):
                hung(here.servers[call])
                here.fleet.remove(call)
                here.servers[call].goes_on.set()
        assert not {"0", "1"} & found[0].lost.keys()
        for call in ("connect", *CALLS):
            gone = here.servers[call]
            until(lambda gone=gone: "disconnect" in gone.calls and not gone.is_paused)  # type: ignore[misc]
        assert here.train().receivers == 2
        here.check("0", "1")


@pytest.mark.parametrize("hangs", ["pause", "resume"])
def test_a_server_that_is_added_again_is_not_written_until_its_earlier_stay_has_resumed_it(
    hangs: str, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 2, timeout_s=3.0) as here:
        here.send(timeout_s=60)
        server = here.servers["1"]
        server.hangs = hangs
        assert list(here.train().lost) == ["1"]
        here.fleet.remove("1")
        here.add(server, "1")
        server.calls.clear()
        assert "has not ended" in here.train().lost["1"]
        assert server.calls == []
        server.goes_on.set()
        here.catch_up()
        here.check()
        resumed = [call for call in server.calls if call in ("connect", "resume")]
        assert resumed.index("connect") == (hangs == "pause")
