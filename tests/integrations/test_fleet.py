"""One sender for many servers: they come, go, fail, hang and lag, and the others do not notice."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from deltasync import ModuleTarget, SenderOptions
from deltasync.errors import (
    ConfigError,
    DirtyReceiver,
    NoReceivers,
    PeerLost,
    SyncAborted,
)
from deltasync.integrations.fleet import Pauses
from deltasync.integrations.trainer_info import TrainerInfo, Work
from deltasync.integrations.worker import Worker
from deltasync.transports import collective
from tests.worlds.fleets import (
    CALLS,
    CPU,
    SHAPES,
    Here,
    OneCall,
    Server,
    Split,
    Watched,
    at,
    fleet_of,
    in_thread,
    interrupt,
    model,
    outcome,
    refuse,
)
from tests.worlds.links import Model, bits_equal, until
from tests.worlds.toy_engines import SHAPES as SPLIT_SHAPES

DONE = ["paused", "updated", "named", "resumed"]
POINTS = {Server: CALLS + DONE, OneCall: ["switch", "switched"], Split: CALLS + DONE}
"""Of an update: calls, and when they are done."""
DEADLY = {"pause", "paused", "update", "updated", "switch"}
"""Where a server that dies has not shown that it holds the version."""
IN_PLACE: dict[str, Any] = {
    "shapes": {"a": (16, 1024), "b": (33,)},
    "max_staged_bytes": 1,
    "options": SenderOptions(bucket_bytes=1 << 12),
    "link": Watched,
    "timeout_s": 6.0,
}


def shapes_of(kind: type[Server]) -> dict[str, tuple[int, ...]]:
    return SPLIT_SHAPES if kind is Split else SHAPES


def change(here: Here) -> None:
    """All of a large tensor, which travels in several buckets."""
    here.source.get_parameter("a").data.mul_(-2)


def restart(server: Server, seed: int = 9, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
    """Kill a server, and start it with other weights."""
    server.die()
    server.module = model(seed, shapes)
    server.start()


@pytest.mark.promise("Time", "In a rolling fleet one server pauses at a time.")
@pytest.mark.parametrize("kind", [Server, OneCall, Split])
@pytest.mark.parametrize("pauses", ["together", "rolling"])
def test_all_servers_follow_one_comparison(
    pauses: Pauses, kind: type[Server], tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 2, kind=kind, shapes=shapes_of(kind), pauses=pauses) as here:
        here.add(Server(model(9, shapes_of(kind))), "one worker")
        number = sum(server.world for server in here.servers.values())
        stats = here.send()
        assert (stats.full_synced, stats.receivers, stats.lost) == (number, number, {})
        here.check()
        paused: list[int] = []
        for server in here.servers.values():
            server.before = lambda call: paused.append(
                sum(other.is_paused for other in here.servers.values())
            )
        for _ in range(3):
            stats = here.train()
            assert (stats.kind, stats.receivers, stats.lost) == ("delta", number, {})
            here.check()
        assert pauses == "together" or max(paused) == 1


@pytest.mark.promise(
    "All or nothing",
    "In a fleet, a server that fails or hangs in any call is dropped from a version and "
    "caught up; the others take it.",
)
@pytest.mark.parametrize(
    ("kind", "pauses"),
    [(Server, "together"), (Server, "rolling"), (OneCall, "together"), (Split, "together")],
)
def test_servers_that_fail_hang_or_die_in_any_call_are_lost_alone_and_caught_up(
    kind: type[Server], pauses: Pauses, tmp_path: Path
) -> None:
    shapes = shapes_of(kind)
    befallen = [("fails", call) for call in POINTS[kind]]
    befallen += [("hangs", call) for call in POINTS[kind] if call not in DONE]
    befallen += [("dies", call) for call in POINTS[kind] if call in DEADLY]
    with fleet_of(tmp_path, 1, kind=kind, shapes=shapes, pauses=pauses, timeout_s=8.0) as here:
        here.add(kind(model(5, shapes)), "fails in connect").fails = "connect"
        here.add(kind(model(5, shapes)), "hangs in connect").hangs = "connect"
        assert set(here.send().lost) == {"fails in connect", "hangs in connect"}
        here.servers["hangs in connect"].goes_on.set()
        for how, call in befallen:
            here.add(kind(model(5, shapes)), f"{how} in {call}")
        here.add(kind(model(6, shapes)), "last")
        here.catch_up()
        for how, call in befallen:
            server = here.servers[f"{how} in {call}"]
            if how == "dies":
                server.before = at(1, call, server.die)
            else:
                setattr(server, how, call)
        stats = here.train()
        assert set(stats.lost) == {f"{how} in {call}" for how, call in befallen}
        here.follow("0", "last", "fails in connect", "hangs in connect")
        assert here.dirty() == []
        for name, server in here.servers.items():
            server.goes_on.set()
            if "dies" in name:
                server.start()
        here.catch_up()
        here.check()


@pytest.mark.promise(
    "Time",
    "An engine resumes when its own ranks have written, whatever another engine does.",
)
@pytest.mark.parametrize("kind", [Server, OneCall, Split])
def test_a_server_resumes_before_another_one_has_answered(
    kind: type[Server], tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 3, kind=kind, shapes=shapes_of(kind), timeout_s=20.0) as here:
        here.send()
        slow, resumed = here.servers["1"], [here.servers["0"], here.servers["2"]]
        slow.hangs = "switch" if kind is OneCall else "pause"
        with in_thread(here.train) as found:
            until(lambda: all(server.version == 2 for server in resumed))
            until(lambda: not any(server.is_paused for server in resumed))
            slow.goes_on.set()
        assert found[0].lost == {}
        here.check()


def loses(here: Here) -> None:
    here.servers["1"].die()
    here.servers["1"].before = refuse


@pytest.mark.parametrize(
    ("befalls", "why"),
    [
        ("gone", "refused"),
        ("asleep", "the engine's weights sleep"),
        (DirtyReceiver("could not be put back"), "DirtyReceiver: could not be put back"),
        (ConfigError("no route in \udcff.bin"), r"ConfigError: no route in \udcff.bin"),
    ],
)
def test_a_server_that_is_away_is_reported_and_costs_the_others_nothing(
    befalls: str | Exception, why: str, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 3) as here:
        here.send()
        away = here.servers["1"]
        held = away.module.get_parameter("a").clone()
        if befalls == "asleep":
            away.workers[0].sleep()
        elif befalls == "gone":
            loses(here)
        else:
            away.die()
            away.declines = befalls  # type: ignore[assignment]
        for _ in range(3):
            stats = here.train()
            assert (stats.kind, stats.receivers, list(stats.lost)) == ("delta", 2, ["1"])
            assert why in stats.lost["1"]
            here.check("0", "2")
            assert away.module.get_parameter("a").equal(held)
        state = here.fleet.servers()["1"]
        assert (state.state, state.version, state.why) == ("lost", 1, stats.lost["1"])
        assert away.is_paused == isinstance(befalls, DirtyReceiver)
        away.declines, away.before = None, lambda call: None
        away.workers[0].wake()
        here.catch_up()
        here.check()


@pytest.mark.parametrize("is_same", [True, False], ids=["the newest weights", "others"])
def test_a_server_that_was_restarted_is_behind_until_the_next_version(
    is_same: bool, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 2, link=Watched) as here:
        here.send()
        restarted = here.servers["1"]
        held = restarted.module
        restart(restarted)
        restarted.version = 0
        if is_same:
            restarted.module = held
        assert here.fleet.connect()["1"].state == "behind"
        here.link.before = at(1, "begin", interrupt)
        with pytest.raises(KeyboardInterrupt):
            here.send()
        state = here.fleet.servers()["1"]
        assert (state.state, state.why) == ("behind", "it has not joined yet")
        assert here.fleet.servers()["0"].state == "current"
        stats = here.send()
        assert (stats.lost, stats.full_synced) == ({}, 0 if is_same else 1)
        here.check()


def test_servers_are_added_and_removed_between_syncs(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2) as here:
        here.send()
        here.add(Server(model(9)), "late")
        stats = here.train()
        assert (stats.kind, stats.receivers, stats.full_synced) == ("delta", 3, 1)
        here.check()
        here.fleet.remove("0").result(60)
        assert here.servers["0"].calls[-1] == "disconnect"
        stats = here.train()  # it was not lost
        assert (stats.receivers, stats.lost) == (2, {})
        here.check("1", "late")
        assert set(here.fleet.servers()) == {"1", "late"}
        here.add(Server(model(8)), "while training goes on")
        here.fleet.refresh_source()
        read: list[int] = []
        stats = here.send(on_source_read=lambda: read.append(1))
        assert (read, stats.kind, stats.receivers) == ([1], "delta", 3)
        here.check("1", "late", "while training goes on")


def test_connect_says_who_is_here(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2) as here:
        here.servers["1"].fails = "connect"
        states = here.fleet.connect()
        assert [states[name].state for name in ("0", "1")] == ["behind", "lost"]
        assert states["1"].why == "EngineFailed: RuntimeError: planted"
        assert here.send().receivers == 2
        here.fleet.disconnect()
        assert [server.calls[-1] for server in here.servers.values()] == ["disconnect"] * 2
        here.servers["0"].module.get_parameter("a").data.zero_()
        stats = here.train()
        assert (stats.receivers, stats.full_synced) == (2, 2)
        here.check()


def cannot_stage(here: Here) -> None:
    """What no sync has written."""
    here.servers["1"].module.get_parameter("a").data[0, 0] += 1


class Replicas(Server):
    """An engine of two workers, each of which holds all weights."""

    world = 2

    def __init__(self, module: Model) -> None:
        self.models = [module, deepcopy(module)]
        super().__init__(module)

    def let_connect(self, worker: Worker, to: TrainerInfo, rank: int) -> None:
        target = ModuleTarget(self.models[rank])
        worker.connect(to, target, CPU, rank=0, world=1, replica=str(rank))

    def holds(self, source: Model) -> bool:
        return all(bits_equal(source, one) for one in self.models)


def replicas_of(here: Here, name: str) -> list[Model]:
    server = here.servers[name]
    assert isinstance(server, Replicas)
    return server.models


def half_cannot_stage(here: Here) -> None:
    replicas_of(here, "1")[1].get_parameter("a").data[0, 0] += 1


def half_joins_first(here: Here) -> None:
    """And so the engine is paused, for a version of which nothing comes."""
    here.servers["0"].workers[1].disconnect()
    for lost in (replicas_of(here, "0")[1], *replicas_of(here, "1")):
        lost.get_parameter("a").data[0, 0] += 1


@pytest.mark.promise(
    "All or nothing",
    "A version that fewer than `min_engines` servers can take is aborted, and no server that "
    "staged it changes.",
)
@pytest.mark.parametrize(
    ("befalls", "kind", "min_engines"),
    [
        (loses, Server, 3),
        (loses, Server, None),
        (cannot_stage, Server, 3),
        (half_cannot_stage, Replicas, 3),
        (half_joins_first, Replicas, 3),
    ],
)
@pytest.mark.parametrize("pauses", ["together", "rolling"])
def test_too_few_servers_abort_a_version_and_nobody_changes(
    pauses: Pauses,
    befalls: Callable[[Here], None],
    kind: type[Server],
    min_engines: int | None,
    tmp_path: Path,
) -> None:
    with fleet_of(tmp_path, 3, kind=kind, min_engines=min_engines, pauses=pauses) as here:
        here.send()
        sound = here.servers["2"]
        before = sound.module.get_parameter("a").clone()
        befalls(here)
        why = r" .*1: .*refused" if befalls is loses else ""
        for _ in range(2 if befalls is loses else 1):
            with pytest.raises(SyncAborted, match=rf"2 of at least 3 servers{why}"):
                here.train()
            assert here.fleet.sender.version == 1
            assert sound.module.get_parameter("a").equal(before)
            assert [server.version for server in here.servers.values()] == [1, 1, 1]
            until(lambda: not any(server.is_paused for server in here.servers.values()))
        here.servers["1"].before = lambda call: None
        here.catch_up()
        here.check()


@pytest.mark.parametrize("needed", [2, 5])
def test_the_first_version_waits_for_enough_servers(needed: int, tmp_path: Path) -> None:
    with fleet_of(tmp_path, 1, min_engines=needed) as here:
        for _ in range(2):
            with pytest.raises(SyncAborted, match=f"1 of at least {needed} servers"):
                here.send()
        assert (here.fleet.sender.version, here.servers["0"].calls) == (0, ["connect"])
        for name in range(1, needed):
            here.add(Server(model(9)), str(name))
        assert here.send().receivers == needed
        here.check()


@pytest.mark.promise(
    "All or nothing",
    "A server lost while others write what arrives leaves none of them dirty, where the "
    "transport outlives losses.",
)
@pytest.mark.parametrize("number", [0, 1, 3], ids=["full sync", "first bucket", "third bucket"])
def test_a_server_lost_while_all_write_what_arrives_leaves_nobody_dirty(
    number: int, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 3, **IN_PLACE) as here:
        if number:
            here.send()
        for server in here.servers.values():
            server.calls.clear()
        change(here)
        here.link.before = at(number or 3, "bucket", here.servers["1"].die)
        stats = here.send()
        assert (stats.receivers, list(stats.lost)) == (2, ["1"])
        assert (stats.num_buckets > 3, here.dirty()) == (True, [])
        here.check("0", "2")
        for name in ("0", "2"):
            assert here.servers[name].calls == ["connect"] * (not number) + CALLS
        here.catch_up()
        here.check()


def test_what_is_written_as_it_arrives_and_too_few_take_is_repaired_in_the_pause(
    tmp_path: Path,
) -> None:
    """It cannot be taken back: they do not generate until the next version."""
    with fleet_of(tmp_path, 3, min_engines=3, **IN_PLACE) as here:
        here.send()
        change(here)
        here.link.before = at(3, "bucket", here.servers["1"].die)
        with pytest.raises(SyncAborted, match="2 of at least 3 servers"):
            here.send()
        assert here.fleet.sender.version == 1
        until(lambda: here.servers["0"].is_paused and here.servers["2"].is_paused)
        here.catch_up()
        here.check()


@pytest.mark.promise(
    "All or nothing",
    "Where a payload travels by way of other receivers and is lost with one of them, those "
    "that miss it stay members, and have the version when the call returns.",
)
@pytest.mark.timeout(300)  # gloo forms groups anew
@pytest.mark.parametrize("dies", ["0", "1", "2"])
def test_who_is_sent_to_by_way_of_one_that_dies_has_the_version(
    dies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ready for the last payload, and passes it on to nobody."""
    receive, doomed = collective.Receiver._on_start, list[object]()

    def start(receiver: collective.Receiver, data: bytes) -> None:
        if receiver in doomed and receiver._announced is not None:
            doomed.clear()
            receiver._forget()
            raise PeerLost("planted")
        receive(receiver, data)

    monkeypatch.setattr(collective.Receiver, "_on_start", start)
    with fleet_of(tmp_path, 3, link=lambda path: collective.Sender(), timeout_s=25) as here:
        here.send()
        (worker,) = here.servers[dies].workers
        assert worker._receiver is not None
        doomed += worker._receiver._links._links
        stats = here.train()
        assert not doomed
        assert (stats.receivers, list(stats.lost), here.dirty()) == (2, [dies], [])
        here.follow(*({"0", "1", "2"} - {dies}))
        here.catch_up()
        here.check()


def test_all_servers_asleep_keep_their_places_and_one_that_hangs_keeps_nobody_else_paused(
    tmp_path: Path,
) -> None:
    with fleet_of(tmp_path, 3, timeout_s=4.0) as here:
        here.send(timeout_s=60)
        for hangs in ("", "resume"):
            for server in here.servers.values():
                server.workers[0].sleep()
                server.calls.clear()
            for name in ("1", "2"):
                here.servers[name].hangs = hangs
            with pytest.raises(ConfigError, match="the engine's weights sleep"):
                here.train()
            assert not here.servers["0"].is_paused
            for server in here.servers.values():
                server.workers[0].wake()
                server.goes_on.set()
                server.calls.clear()
            if hangs:
                here.catch_up()
            else:
                stats = here.send()
                assert (stats.kind, stats.receivers, stats.joined) == ("delta", 3, 0)
                assert here.servers["0"].calls == CALLS
            here.check()


def test_servers_that_lie_are_dropped(tmp_path: Path) -> None:
    class Updates(OneCall):
        def switch(self, version: int, work: Work, stays_paused: bool, holder: str, /) -> None:
            self.version = version

    class Connects(Server):
        def connect(self, connection: dict[str, Any], /) -> None:
            self.at("connect")

    class Reaches(OneCall):
        """It is updated in several calls."""

        def reach(self, paused: object, /) -> int:
            return 7

    with fleet_of(tmp_path, 1, shapes=SPLIT_SHAPES, timeout_s=5.0) as here:
        for liar in (Updates, Connects, Reaches):
            here.add(liar(model(8, SPLIT_SHAPES)), liar.__name__)
        for workers in (1, 3):
            here.add(Split(model(3, SPLIT_SHAPES)), f"of {workers}", workers=workers)
        for _ in range(3):
            assert set(here.train().lost) == {"Updates", "Connects", "of 1", "of 3"}
            here.follow("0", "Reaches")
        states = here.fleet.servers()
        assert states["Updates"].version is None
        assert "2 workers have connected" in states["of 1"].why


def test_one_engine_under_two_names_harms_nobody_else(tmp_path: Path) -> None:
    """Its workers follow whichever asked last; a URL spelt in two ways cannot be told apart."""
    with fleet_of(tmp_path, 2, timeout_s=3.0) as here:
        twin = here.servers["1"]
        other = Server(twin.module)
        other.workers = twin.workers
        here.fleet.add(other, paused=twin.paused, name="twin")
        for _ in range(4):
            outcome(here.train)
            here.follow("0")
            assert here.dirty() == []
        here.fleet.remove("twin")
        here.catch_up()
        here.check()


def test_what_is_not_a_fleet_is_said(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 0) as here:
        with pytest.raises(NoReceivers, match="add one"):
            here.send()
        server, other = here.add(Server(model(9)), "one"), Server(model(9))
        vars(other)["url"] = "http://localhost:8000"
        assert here.fleet.add(other) == "http://localhost:8000"
        again = Server(model(9))
        vars(again)["url"] = "http://localhost:8000"
        for refused, why in (
            (lambda: here.fleet.add(server, name="other"), "the fleet has one already"),
            (lambda: here.fleet.add(Server(model(9)), name="one"), "the fleet has one already"),
            (lambda: here.fleet.add(again), "has http://localhost:8000 already"),
            (lambda: here.fleet.remove("two"), "no server 'two'; it has one"),
            (lambda: here.fleet.add(Server(model(9)), workers=0), "workers is 0"),
            (lambda: here.fleet.add(Server(model(9))), "give it a name"),
        ):
            with pytest.raises(ConfigError, match=why):
                refused()
        assert here.fleet.servers()["one"].state == "lost"
    with pytest.raises(ConfigError, match="was closed"):
        here.fleet.add(Server(model(9)))
