"""One sender for many servers: they come, go, restart and lag, and the others do not notice."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from threading import Thread
from typing import get_args

import pytest

from deltasync import ModuleTarget
from deltasync.errors import ConfigError, NoReceivers, ReceiversLost, SyncAborted
from deltasync.integrations.fleet import Pauses
from deltasync.integrations.trainer_info import TrainerInfo
from deltasync.integrations.worker import Worker
from tests.worlds.fleets import CPU, SHAPES, OneCall, Server, Split, fleet_of, model, outcome
from tests.worlds.links import Model, bits_equal, until
from tests.worlds.toy_engines import SHAPES as SPLIT_SHAPES

ALL = ("0", "1", "2")


@pytest.mark.parametrize("kind", [Server, OneCall])
@pytest.mark.parametrize("pauses", ["together", "rolling"])
def test_all_servers_follow_one_comparison(
    pauses: Pauses, kind: type[Server], tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 3, kind=kind, pauses=pauses) as here:
        stats = here.send()
        assert (stats.full_synced, stats.receivers, stats.lost) == (3, 3, {})
        here.check(*ALL)
        for _ in range(3):
            here.step()
            stats = here.send()
            assert (stats.kind, stats.receivers, stats.lost) == ("delta", 3, {})
            here.check(*ALL)


def test_servers_of_several_workers_follow(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2, kind=Split, shapes=SPLIT_SHAPES) as here:
        here.add(Server(model(9, SPLIT_SHAPES)), "whole")
        for _ in range(3):
            assert here.send().receivers == 5
            here.check("0", "1", "whole")
            here.step()


def test_servers_that_hold_the_weights_learn_their_version(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2, is_same=True) as here:
        stats = here.send()
        assert (stats.full_synced, stats.joined) == (0, 2)
        here.check("0", "1")
        assert here.servers["0"].calls == ["connect", "pause", "name", "resume"]


def test_a_server_is_added_and_removed_between_syncs(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2) as here:
        here.send()
        here.add(Server(model(9)), "late")
        here.step()
        stats = here.send()
        assert (stats.kind, stats.receivers, stats.full_synced) == ("delta", 3, 1)
        here.check("0", "1", "late")
        here.fleet.remove("0")
        until(lambda: here.servers["0"].calls[-1] == "disconnect")
        here.step()
        stats = here.send(on_lost="raise")  # it was not lost
        assert (stats.receivers, stats.lost) == (2, {})
        here.check("1", "late")
        assert set(here.fleet.servers()) == {"1", "late"}


def test_a_server_that_was_restarted_on_the_newest_weights_is_named_again(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2) as here:
        here.send()
        here.servers["1"].die()
        here.servers["1"].start()
        here.servers["1"].version = 0
        stats = here.send()
        assert (stats.version, stats.full_synced, stats.lost.keys() & {"1"}) == (2, 0, set())
        here.check("0", "1")


def test_a_server_that_restarts_is_caught_up(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 3) as here:
        here.send()
        gone = here.servers["1"]
        gone.die()
        gone.module = model(9)
        gone.start()
        here.step()
        stats = here.send()
        while "1" in stats.lost:
            here.check("0", "2")
            here.step()
            stats = here.send()
        here.check(*ALL)
        assert stats.kind == "delta"


def test_a_server_that_is_gone_is_reported_and_costs_the_others_nothing(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 3) as here:
        here.send()
        here.servers["1"].die()
        here.servers["1"].before = refuse
        for _ in range(3):
            here.step()
            stats = here.send()
            assert (stats.kind, stats.receivers) == ("delta", 2)
            here.check("0", "2")
            assert set(stats.lost) == {"1"}
        state = here.fleet.servers()["1"]
        assert (state.state, state.version) == ("lost", 1)
        assert "refused" in state.why
        with pytest.raises(ReceiversLost, match="1: EngineFailed"):
            here.send(on_lost="raise")


def refuse(call: str) -> None:
    raise ConnectionError("refused")


@pytest.mark.promise(
    "All or nothing",
    "In a fleet, a server that fails or hangs in any call is dropped from a version and "
    "caught up; the others take it.",
)
@pytest.mark.parametrize("call", ["connect", "pause", "update", "updated", "name", "resume"])
@pytest.mark.parametrize("how", ["fails", "hangs"])
@pytest.mark.parametrize("pauses", ["together", "rolling"])
def test_a_server_that_fails_in_a_call_is_caught_up_and_the_others_go_on(
    pauses: Pauses, how: str, call: str, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 3, pauses=pauses, timeout_s=6.0) as here:
        if call != "connect":
            here.send()
        bad = here.servers["1"]
        setattr(bad, how, call)
        here.step()
        stats = here.send()
        here_now = [name for name in ("0", "2") if here.servers[name].holds(here.source)]
        assert here_now == ["0", "2"]
        assert list(stats.lost) == ["1"], stats.lost
        for name in here_now:
            assert not here.servers[name].is_paused
            assert here.fleet.servers()[name].state == "current"
        bad.goes_on.set()
        here.catch_up()
        here.check(*ALL)


@pytest.mark.promise(
    "All or nothing",
    "In a fleet, a server that fails or hangs in any call is dropped from a version and "
    "caught up; the others take it.",
)
@pytest.mark.parametrize("call", ["switch", "switched"])
@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_server_that_fails_in_its_one_call_is_caught_up(
    how: str, call: str, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 3, kind=OneCall, timeout_s=6.0) as here:
        here.send()
        bad = here.servers["1"]
        setattr(bad, how, call)
        here.step()
        stats = here.send()
        assert list(stats.lost) == ["1"], stats.lost
        assert here.servers["0"].holds(here.source)
        assert here.servers["2"].holds(here.source)
        bad.goes_on.set()
        here.catch_up()
        here.check(*ALL)


@pytest.mark.promise(
    "Time",
    "An engine resumes when its own ranks have written, whatever another engine does.",
)
@pytest.mark.parametrize("kind", [Server, OneCall, Split])
def test_a_server_resumes_before_another_one_has_answered(
    kind: type[Server], tmp_path: Path
) -> None:
    shapes = SPLIT_SHAPES if kind is Split else SHAPES
    with fleet_of(tmp_path, 3, kind=kind, shapes=shapes, timeout_s=20) as here:
        here.send()
        here.step()
        slow, resumed = here.servers["1"], [here.servers["0"], here.servers["2"]]
        slow.hangs = "switch" if kind is OneCall else "pause"

        def release() -> None:
            until(lambda: all(server.version == 2 for server in resumed))
            until(lambda: not any(server.is_paused for server in resumed))
            slow.goes_on.set()

        thread = Thread(target=release)
        thread.start()
        assert here.send().lost == {}
        thread.join()
        here.check(*ALL)


@pytest.mark.promise("Time", "In a rolling fleet one server pauses at a time.")
def test_in_a_rolling_fleet_one_server_pauses_at_a_time(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 3, pauses="rolling") as here:
        here.send()
        seen: list[int] = []
        for server in here.servers.values():
            server.before = lambda call: seen.append(
                sum(other.is_paused for other in here.servers.values())
            )
        for _ in range(3):
            here.step()
            here.send()
        assert max(seen) == 1
        here.check(*ALL)


@pytest.mark.promise(
    "All or nothing",
    "A version that fewer than `min_engines` servers can take is aborted, and no server that "
    "staged it changes.",
)
@pytest.mark.parametrize("needed", [3, None], ids=["three", "all"])
def test_too_few_servers_abort_a_version_and_nobody_changes(
    tmp_path: Path, needed: int | None
) -> None:
    with fleet_of(tmp_path, 3, min_engines=needed, timeout_s=6.0) as here:
        here.send()
        before = here.servers["0"].module.get_parameter("a").clone()
        here.step()
        here.servers["1"].die()
        here.servers["1"].before = refuse
        for _ in range(2):
            with pytest.raises(SyncAborted, match=r"2 of at least 3 servers .*1: .*refused"):
                here.send()
            assert here.fleet.sender.version == 1
            assert here.servers["0"].module.get_parameter("a").equal(before)
            assert not here.servers["0"].is_paused
        here.servers["1"].before = lambda call: None
        stats = here.send()  # it joins first, and then all take the version
        assert (stats.version, stats.receivers, stats.joined) == (2, 3, 1)
        here.check(*ALL)


@pytest.mark.promise(
    "All or nothing",
    "A version that fewer than `min_engines` servers can take is aborted, and no server that "
    "staged it changes.",
)
def test_a_version_that_too_few_could_stage_is_aborted(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 3, min_engines=3, timeout_s=6.0) as here:
        here.send()
        here.servers["1"].module.get_parameter("a").data[0, 0] += 1  # which no sync has written
        here.step()
        with pytest.raises(SyncAborted, match="2 of at least 3 servers"):
            here.send()
        assert here.fleet.sender.version == 1
        assert [server.version for server in here.servers.values()] == [1, 1, 1]
        for _ in range(5):
            if not isinstance(result := outcome(here.send), SyncAborted):
                break
        assert not isinstance(result, SyncAborted)
        assert here.servers["0"].holds(here.source)
        assert here.servers["2"].holds(here.source)


class Replicas(Server):
    """An engine of two workers, each of which holds all weights."""

    world = 2

    def __init__(self, module: Model) -> None:
        self.models = [module, deepcopy(module)]
        super().__init__(module)

    def let_connect(self, worker: Worker, to: TrainerInfo, rank: int) -> None:
        target = ModuleTarget(self.models[rank])
        worker.connect(to, target, CPU, rank=0, world=1, replica=str(rank))


def test_a_server_of_which_one_worker_could_not_stage_is_not_counted(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2, kind=Replicas, min_engines=2) as here:
        here.send()
        half = here.servers["1"]
        assert isinstance(half, Replicas)
        half.models[1].get_parameter("a").data[0, 0] += 1  # which no sync has written
        here.step()
        with pytest.raises(SyncAborted, match="1 of at least 2 servers"):
            here.send()
        assert here.fleet.sender.version == 1
        here.catch_up()
        assert all(bits_equal(here.source, one) for one in half.models)


@pytest.mark.parametrize("pauses", get_args(Pauses))
def test_a_server_of_which_one_worker_joined_first_is_resumed_if_the_next_version_is_aborted(
    pauses: Pauses, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 2, kind=Replicas, min_engines=2, pauses=pauses) as here:
        here.send()
        half, other = here.servers["0"], here.servers["1"]
        assert isinstance(half, Replicas)
        assert isinstance(other, Replicas)
        half.workers[1].disconnect()
        for lost in (half.models[1], *other.models):
            lost.get_parameter("a").data[0, 0] += 1  # which no sync has written
        here.step()
        with pytest.raises(SyncAborted, match="1 of at least 2 servers"):
            here.send()
        until(lambda: half.calls[-1] == "resume" and not half.is_paused, timeout_s=60.0)
        assert (here.fleet.sender.version, half.version) == (1, 1)
        here.catch_up()
        assert all(bits_equal(here.source, one) for one in half.models)


def test_the_first_version_waits_for_enough_servers(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 1, min_engines=2, timeout_s=6.0) as here:
        with pytest.raises(SyncAborted, match="1 of at least 2 servers"):
            here.send()
        assert here.fleet.sender.version == 0
        here.add(Server(model(9)), "1")
        assert here.send().receivers == 2
        here.check("0", "1")


def test_what_is_not_a_fleet_is_said(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 0) as here:
        with pytest.raises(NoReceivers, match="add one"):
            here.send()
        server = here.add(Server(model(9)), "one")
        with pytest.raises(ConfigError, match="the fleet has one already"):
            here.fleet.add(server, name="other")
        with pytest.raises(ConfigError, match="the fleet has one already"):
            here.fleet.add(Server(server.module), name="one")
        with pytest.raises(ConfigError, match="no server 'two'; it has one"):
            here.fleet.remove("two")
        with pytest.raises(ConfigError, match="workers is 0"):
            here.fleet.add(Server(server.module), workers=0)
        assert here.fleet.servers()["one"].state == "lost"
        assert here.send().receivers == 1
        here.check("one")
    with pytest.raises(ConfigError, match="was closed"):
        here.fleet.add(Server(server.module))


def test_two_servers_of_one_url_are_refused(tmp_path: Path) -> None:
    class Reached(Server):
        url = "http://localhost:8000"

    with fleet_of(tmp_path, 0) as here:
        module = model(1)
        assert here.fleet.add(Reached(module)) == Reached.url
        with pytest.raises(ConfigError, match="has http://localhost:8000 already"):
            here.fleet.add(Reached(module))


@pytest.mark.parametrize("told", [1, 3])
def test_a_wrong_number_of_workers_is_said_and_the_others_go_on(told: int, tmp_path: Path) -> None:
    with fleet_of(tmp_path, 1, shapes=SPLIT_SHAPES, timeout_s=6.0) as here:
        wrong = Split(model(3, SPLIT_SHAPES))
        here.fleet.add(wrong, workers=told, paused=wrong.paused, name="wrong")
        here.servers["wrong"] = wrong
        for _ in range(2):
            stats = here.send()
            assert (stats.receivers, list(stats.lost)) == (1, ["wrong"])
            assert here.servers["0"].holds(here.source)
            here.step()
        assert "2 workers have connected" in here.fleet.servers()["wrong"].why or told == 3


def test_a_worker_that_cannot_take_part_says_why(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2) as here:
        here.servers["1"].declines = ConfigError("no route in \udcff.bin")
        stats = here.send()
        assert stats.lost == {"1": r"ConfigError: no route in \udcff.bin"}
        here.check("0")
        here.servers["1"].declines = None
        here.step()
        assert here.send().lost == {}
        here.check("0", "1")


@pytest.mark.parametrize("call", ["pause", "update", "updated", "name", "resume"])
def test_a_server_is_removed_while_a_sync_is_under_way(call: str, tmp_path: Path) -> None:
    with fleet_of(tmp_path, 3, timeout_s=10) as here:
        here.send()
        here.step()
        leaving = here.servers["1"]
        leaving.hangs = call

        def remove() -> None:
            until(lambda: not leaving.hangs)
            here.fleet.remove("1")
            leaving.goes_on.set()

        thread = Thread(target=remove)
        thread.start()
        stats = here.send()
        thread.join()
        assert not {"0", "2"} & stats.lost.keys()
        until(lambda: leaving.calls[-1] == "disconnect")
        until(lambda: not leaving.is_paused)
        here.step()
        assert here.send().receivers == 2
        here.check("0", "2")


def test_servers_that_are_disconnected_reconnect(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2) as here:
        here.send()
        here.fleet.disconnect()
        assert [server.calls[-1] for server in here.servers.values()] == ["disconnect"] * 2
        here.servers["0"].module.get_parameter("a").data.zero_()
        here.step()
        stats = here.send()
        assert (stats.receivers, stats.full_synced) == (2, 2)
        here.check("0", "1")


def test_connect_connects_and_says_who_is_here(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2) as here:
        here.servers["1"].fails = "connect"
        states = here.fleet.connect()
        assert [states[name].state for name in ("0", "1")] == ["behind", "lost"]
        assert states["1"].why == "EngineFailed: RuntimeError: planted"
        assert here.send().receivers == 2
        here.check("0", "1")
