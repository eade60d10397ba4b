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
    EngineTaken,
    SyncAborted,
    TransportClosed,
    TransportTimeout,
)
from deltasync.integrations.fleet import Pauses
from deltasync.sync.events import SyncEvent, SyncFailed
from deltasync.testing.links import PROMPT_S, within
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
from tests.worlds.programs import run

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
@pytest.mark.parametrize("kind", [Server, OneCall])
def test_an_interrupted_trainer_goes_on_and_no_server_is_left_paused(
    kind: type[Server], tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 3, kind=kind, link=Watched, timeout_s=4.0) as here:
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
@pytest.mark.parametrize("end", ["close", "remove", "next sync"])
def test_a_server_that_joined_first_and_then_mixes_versions_stays_paused(
    end: str,
    befalls: str,
    kind: type[Server],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
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
        match end:
            case "close":
                here.fleet.close()
            case "remove":
                here.fleet.remove("1").result(60)
            case "next sync":
                here.catch_up()
                here.check()
                return
        until(lambda: any(one.message.startswith("1 was closed") for one in caplog.records))
        assert back.is_paused, back.calls


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


@pytest.mark.parametrize("kind", [Server, OneCall])
def test_a_mixture_stays_paused_that_joined_as_all_others_slept(
    kind: type[Server], tmp_path: Path
) -> None:
    options = {**MANY_BUCKETS, "min_engines": 1}
    with fleet_of(tmp_path, 1, kind=kind, **options) as here:
        here.send()
        here.servers["0"].workers[0].sleep()
        here.add(kind(model(5, MANY_BUCKETS["shapes"])), "1")
        here.source.get_parameter("a").data.mul_(-2)
        in_full = at(8, "bucket", misuse)
        here.link.before = at(2, "begin", lambda: setattr(here.link, "before", in_full))
        with pytest.raises(ConfigError, match="planted"):
            here.send()
        here.link.before = lambda kind: None
        wait(update for engine in here.sync._engines.values() for update in engine.updates)
        assert (here.dirty(), here.servers["1"].is_paused) == (["1"], True)
        here.servers["0"].workers[0].wake()
        here.catch_up()
        here.check()


@pytest.mark.parametrize("max_staged_bytes", [1 << 30, 1])
@pytest.mark.parametrize("is_removed", [False, True])
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


def test_a_total_that_ends_in_a_full_sync_does_not_hold_up_the_next_call(tmp_path: Path) -> None:
    """Updates end when their workers are dropped, not when they would have given up."""
    with fleet_of(tmp_path, 3, link=Watched, timeout_s=60.0) as here:
        here.fleet.connect()
        here.link.before = at(1, "bucket", lambda: time.sleep(0.4))
        with pytest.raises(TransportTimeout):
            here.send(total_timeout_s=0.3)
        with within(PROMPT_S):
            here.catch_up()
        assert here.dirty() == []
        here.check()


@pytest.mark.parametrize("kind", [Server, OneCall])
def test_nothing_is_decided_when_no_time_is_left_to_write_it(
    kind: type[Server], tmp_path: Path
) -> None:
    """All keep the version that they have, their places, and generate."""
    with fleet_of(tmp_path, 3, link=Watched, kind=kind) as here:
        here.send()
        calls = [list(server.calls) for server in here.servers.values()]
        here.link.before = at(1, "replies", lambda: time.sleep(0.6))
        with pytest.raises(TransportTimeout):
            here.train(total_timeout_s=0.5)
        assert [list(server.calls) for server in here.servers.values()] == calls
        assert here.fleet.sender.version == 1
        stats = here.send()
        assert (stats.kind, stats.receivers, stats.joined, stats.lost) == ("delta", 3, 0, {})
        here.check()


@pytest.mark.parametrize(
    "call", ["connect", "pause", "update", "updated", "name", "resume", "disconnect"]
)
def test_closing_ends_a_sync_of_another_thread_and_waits_for_nobody_who_hangs(
    call: str, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 3, timeout_s=10.0) as here:
        if call != "connect":
            here.send()
        slow = here.servers["1"]
        slow.hangs = call
        if call == "disconnect":
            here.fleet.remove("1")
        with in_thread(partial(outcome, here.train)) as found:
            hung(slow)
            if call == "disconnect":
                until(lambda: bool(found))
            with in_thread(here.fleet.close, timeout_s=5.0):
                pass
            slow.goes_on.set()
        is_over = isinstance(found[0], DeltaSyncError)
        assert is_over or call in ("name", "resume", "updated", "disconnect"), found
        with pytest.raises(TransportClosed):
            here.send()
        until(lambda: not here.servers["0"].is_paused)


def test_closing_resumes_servers_although_another_one_hangs(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 3, timeout_s=3.0) as here:
        here.send(timeout_s=60)
        for server in here.servers.values():
            server.fails = "resume"
        assert set(here.train().lost) == set(here.servers)
        assert all(server.is_paused for server in here.servers.values())
        here.servers["0"].hangs = "resume"
        with in_thread(here.fleet.close, timeout_s=20.0):
            pass
        assert [server.is_paused for server in here.servers.values()] == [True, False, False]


def test_a_fleet_reports_what_its_call_returns_or_raises(tmp_path: Path) -> None:
    """Its servers by their own names, with those that are behind."""
    events: list[SyncEvent] = []
    with fleet_of(tmp_path, 3) as here:
        here.send()
        for behind in ("1", "2"):
            here.servers[behind].declines = RuntimeError("planted")
            here.servers[behind].die()
        with subscribe(events.append):
            returned = [here.train(), here.train()]
            here.fleet._at_least = 2
            outcome(here.train)
    *sent, failed = [one for one in events if isinstance(one, SyncStats | SyncFailed)]
    assert sent == returned
    for stats in returned:
        assert stats.engines == ("0",)
        assert "planted" in stats.lost["1"]
    assert isinstance(failed, SyncFailed)
    assert failed.receivers == 1  # which hold the last version


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


@pytest.mark.parametrize("pauses", ["together", "rolling"])
def test_a_server_that_is_removed_in_its_full_sync_fails_no_call(
    pauses: Pauses, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 2, pauses=pauses, link=Watched) as here:
        here.send()
        here.add(Server(model(9)), "late")
        here.link.before = at(2, "prepare", lambda: here.fleet.remove("late"))
        stats = here.train()
        assert (stats.kind, stats.version, stats.receivers, stats.lost) == ("delta", 2, 2, {})
        here.check("0", "1")
        assert here.train().receivers == 2
        here.check("0", "1")


def test_the_only_member_that_is_removed_in_its_delta_makes_way_for_who_joins(
    tmp_path: Path,
) -> None:
    with fleet_of(tmp_path, 1, link=Watched) as here:
        here.send()
        here.link.before = at(1, "bucket", interrupt)
        with pytest.raises(KeyboardInterrupt):
            here.train()  # from now on the snapshot may mix two versions
        here.add(Server(model(9)), "late")
        here.fleet.connect()
        here.servers["0"].hangs = "disconnect"  # so that it prepares
        here.link.before = at(1, "prepare", lambda: here.fleet.remove("0"))
        stats = here.send()
        assert (stats.kind, stats.receivers) == ("full", 1)
        here.check("late")


@pytest.mark.parametrize("is_same", [True, False], ids=["the-server", "its-name"])
def test_a_server_that_is_added_as_it_leaves_is_not_disconnected_by_that(
    is_same: bool, tmp_path: Path
) -> None:
    """Nor has it to wait for what lets its workers disconnect."""
    with fleet_of(tmp_path, 2) as here:
        here.send()
        server = here.servers["1"]
        server.hangs = "disconnect"
        left = here.fleet.remove("1")
        hung(server)
        if is_same:
            here.add(server, "1")
        else:
            here.add(Server(server.module), "1").workers = server.workers
        assert here.train().lost == {}
        server.goes_on.set()
        with pytest.raises(EngineTaken):
            left.result(60)
        assert here.train().kind == "delta"
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


def test_a_server_whose_workers_did_not_disconnect_connects_by_another_name(
    tmp_path: Path,
) -> None:
    """They still follow this trainer, by the earlier name."""
    with fleet_of(tmp_path, 2) as here:
        here.send()
        server = here.servers.pop("1")
        for name in ("by another", "by a third"):
            server.fails = "disconnect"
            here.fleet.remove("1" if name == "by another" else "by another").result(60)
            assert server.workers[0].is_connected
            here.servers.pop("by another", None)
            here.add(server, name)
            assert here.train().lost == {}
            here.check()


def test_a_server_that_joins_and_leaves_again_and_again_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    with fleet_of(tmp_path, 1, timeout_s=10.0) as here:
        here.send()
        server, threads = Server(model(5)), threading.active_count()
        for _ in range(20):
            here.add(server, "guest")
            outcome(here.train)
            here.follow("0")
            here.fleet.remove("guest")
        until(lambda: threading.active_count() <= threads)
        here.train()
        del here.servers["guest"]
        here.check()


_EXHAUSTED = """
import os, resource, tempfile
from pathlib import Path
from tests.worlds.fleets import Server, fleet_of, model, outcome

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
with tempfile.TemporaryDirectory() as folder, fleet_of(Path(folder), 3, timeout_s=5.0) as here:
    here.send(timeout_s=60)
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    print(outcome(here.train).receivers)  # what it has open is enough
    here.servers["1"].die()
    here.add(Server(model(9)), "late")
    for _ in range(3):
        stats = outcome(here.train)
        here.follow("0")
    print(sorted(stats.lost))
    for descriptor in held:
        os.close(descriptor)
    here.catch_up()
    here.check()
    print("caught up")
"""


def test_servers_that_find_no_descriptor_left_are_caught_up() -> None:
    done = run(_EXHAUSTED)
    assert done.stdout.splitlines() == ["3", "['1', 'late']", "caught up"], done.stderr
