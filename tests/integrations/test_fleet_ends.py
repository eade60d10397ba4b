"""How a fleet's calls end: who stays paused, who is waited for, and who is named."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from deltasync import SenderOptions
from deltasync.errors import SyncAborted, TransportError, TransportTimeout
from deltasync.integrations.fleet import Pauses
from deltasync.testing.links import PROMPT_S, within
from tests.integrations.test_fleet_attacks import Watched, at, interrupt
from tests.worlds.fleets import SHAPES, Here, OneCall, Server, fleet_of, model
from tests.worlds.links import until

MANY_BUCKETS: dict[str, Any] = {
    "shapes": {"a": (512, 1024), "b": (33,)},
    "max_staged_bytes": 1,
    "options": SenderOptions(bucket_bytes=1 << 16),
}


def restart(server: Server, seed: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Kill a server, and start it with other weights."""
    server.die()
    server.module = model(seed, shapes)
    server.start()


def mixed_after(here: Here, befalls: Callable[[], object]) -> None:
    """Let "1" join with the version before, and something befall the delta that follows."""
    restart(here.servers["1"], 9, MANY_BUCKETS["shapes"])
    here.source.get_parameter("a").data.mul_(-2)
    in_delta = at(8, "bucket", befalls)
    here.link.before = at(2, "begin", lambda: setattr(here.link, "before", in_delta))
    with pytest.raises((KeyboardInterrupt, SyncAborted)):
        here.send()
    back = here.servers["1"]
    until(lambda: back.is_paused and not here.fleet._engines["1"]._is_busy)
    assert "1" in here.dirty()


@pytest.mark.parametrize("kind", [Server, OneCall])
@pytest.mark.parametrize("befalls", ["interrupt", "death of another"])
@pytest.mark.parametrize("end", ["close", "remove"])
def test_a_server_that_joined_first_and_then_mixes_versions_stays_paused(
    end: str, befalls: str, kind: type[Server], tmp_path: Path
) -> None:
    """It joined with the version before, which says nothing of the delta of the same call."""
    options = {"link": Watched, "min_engines": 2, "kind": kind, **MANY_BUCKETS}
    with fleet_of(tmp_path, 2, **options) as here:
        here.send()
        mixed_after(here, interrupt if befalls == "interrupt" else here.servers["0"].die)
        back = here.servers["1"]
        engine = here.fleet._engines["1"]
        here.fleet.close() if end == "close" else here.fleet.remove("1")
        until(lambda: engine._is_given_up)
        assert back.is_paused, back.calls
        assert engine.pause.is_on


def test_a_server_that_joined_first_and_then_mixes_versions_is_repaired(tmp_path: Path) -> None:
    options = {"link": Watched, "min_engines": 2, **MANY_BUCKETS}
    with fleet_of(tmp_path, 2, **options) as here:
        here.send()
        mixed_after(here, interrupt)
        here.link.before = lambda kind: None
        here.catch_up()
        here.check("0", "1")


@pytest.mark.parametrize("options", [{}, {"max_staged_bytes": 1}])
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_call_that_hangs_costs_later_syncs_of_a_rolling_fleet_nothing(
    is_removed: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """Nor does anybody else stay paused, or behind, for it."""
    with fleet_of(tmp_path, 3, pauses="rolling", timeout_s=10.0, **options) as here:
        here.send()
        here.servers["1"].hangs = "resume"
        here.step()
        here.send()
        if is_removed:
            here.fleet.remove("1")
        else:
            here.step()
            here.send()  # waits for it to connect
        for _ in range(2):
            here.source.get_parameter("a").data.mul_(-2)
            began = time.monotonic()
            here.send()
            assert time.monotonic() - began < 9
            for name in ("0", "2"):
                assert here.fleet.servers()[name].state == "current", here.fleet.servers()
                assert here.servers[name].holds(here.source)
                assert not here.servers[name].is_paused


def test_a_rolling_fleet_waits_once_for_a_server_that_does_not_resume(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 3, pauses="rolling", timeout_s=10.0) as here:
        here.send()
        here.servers["0"].hangs = "resume"
        here.step()
        began = time.monotonic()
        assert list(here.send().lost) == ["0"]
        assert 9.3 < time.monotonic() - began < 18


def test_a_rolling_fleet_waits_for_a_server_that_resumes_late_beside_one_that_does_not(
    tmp_path: Path,
) -> None:
    with fleet_of(tmp_path, 3, pauses="rolling", timeout_s=3.0) as here:
        here.send()
        here.servers["0"].hangs = here.servers["1"].hangs = "resume"
        here.step()
        late = threading.Timer(4.0, here.servers["1"].goes_on.set)  # its turn comes after 3 s
        late.start()
        assert list(here.send().lost) == ["0"]
        late.join()


@pytest.mark.parametrize("pauses", ["together", "rolling"])
def test_a_server_that_is_removed_in_its_full_sync_fails_no_call(
    pauses: Pauses, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 2, pauses=pauses, link=Watched) as here:
        here.send()
        here.step()
        here.add(Server(model(9)), "late")
        here.link.before = at(2, "prepare", lambda: here.fleet.remove("late"))
        stats = here.send()
        assert (stats.kind, stats.version, stats.receivers, stats.lost) == ("delta", 2, 2, {})
        here.check("0", "1")
        here.step()
        assert here.send().receivers == 2
        here.check("0", "1")


def test_the_only_member_that_is_removed_in_its_delta_makes_way_for_who_joins(
    tmp_path: Path,
) -> None:
    with fleet_of(tmp_path, 1, link=Watched) as here:
        here.send()
        here.step()
        here.link.before = at(1, "bucket", interrupt)
        with pytest.raises(KeyboardInterrupt):
            here.send()  # from now on the snapshot may mix two versions
        here.add(Server(model(9)), "late")
        here.fleet.connect()
        here.servers["0"].hangs = "disconnect"  # so that it prepares
        here.link.before = at(1, "prepare", lambda: here.fleet.remove("0"))
        stats = here.send()
        assert (stats.kind, stats.receivers) == ("full", 1)
        here.check("late")


def is_busy(here: Here) -> bool:
    return any(engine._is_busy for engine in here.fleet._engines.values())


def test_a_total_that_ends_in_a_full_sync_does_not_hold_up_the_next_call(tmp_path: Path) -> None:
    """Updates end when their workers are dropped, not when they would have given up."""
    with fleet_of(tmp_path, 3, link=Watched, timeout_s=60.0) as here:
        here.fleet.connect()
        here.link.before = at(1, "bucket", lambda: time.sleep(0.4))
        with pytest.raises(TransportTimeout):
            here.send(total_timeout_s=0.3)
        with within(PROMPT_S):
            until(lambda: not is_busy(here))
            assert here.dirty() == []
            assert here.send().receivers == 3
        here.check("0", "1", "2")


@pytest.mark.parametrize("kind", [Server, OneCall])
def test_nothing_is_decided_when_no_time_is_left_to_write_it(
    kind: type[Server], tmp_path: Path
) -> None:
    """All keep the version that they have, their places, and generate."""
    with fleet_of(tmp_path, 3, link=Watched, kind=kind, timeout_s=5.0) as here:
        here.send()
        here.step()
        calls = [list(server.calls) for server in here.servers.values()]
        workers = [server.workers[0] for server in here.servers.values()]

        def pass_time() -> None:
            until(lambda: all(w._receiver.state.name == "PREPARED" for w in workers))  # type: ignore[union-attr]
            until(lambda: here.fleet._limit.is_over)

        here.link.before = at(1, "replies", pass_time)
        with pytest.raises(TransportTimeout):
            here.send(total_timeout_s=0.5)
        assert [list(server.calls) for server in here.servers.values()] == calls
        assert here.fleet.sender.version == 1
        stats = here.send()
        assert (stats.kind, stats.receivers, stats.joined, stats.lost) == ("delta", 3, 0, {})
        here.check("0", "1", "2")


@pytest.mark.parametrize("is_lost_before", [True, False])
def test_a_worker_whose_trainer_is_gone_does_not_wait_for_its_version(
    is_lost_before: bool, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 1, timeout_s=90.0) as here:
        here.send()
        worker = here.servers["0"].workers[0]
        staging, last = worker._staging, worker._last
        assert staging is not None
        assert last is not None
        began = time.monotonic()
        if is_lost_before:
            here.fleet.sender.close()
            until(lambda: staging.last_error is not None)
        else:
            Timer(0.2, here.fleet.sender.close).start()
        with pytest.raises(TransportError):
            worker.commit(2, last.holder)
        assert time.monotonic() - began < PROMPT_S


def test_a_server_that_was_restarted_and_is_current_is_not_lost(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 3) as here:
        here.send()
        restart(here.servers["1"], 9, SHAPES)
        here.step()
        assert here.send(on_lost="raise").lost == {}
        here.check("0", "1", "2")


def test_a_server_that_was_restarted_is_not_lost_by_a_call_that_sends_nothing(
    tmp_path: Path,
) -> None:
    with fleet_of(tmp_path, 2, link=Watched) as here:
        here.send()
        restart(here.servers["1"], 9, SHAPES)
        here.step()
        here.link.before = at(1, "begin", interrupt)
        with pytest.raises(KeyboardInterrupt):
            here.send()
        state = here.fleet.servers()["1"]
        assert (state.state, state.why) == ("behind", "it has not joined yet"), state
        assert here.fleet.servers()["0"].state == "current"


def test_a_server_that_was_restarted_is_behind_until_it_has_joined(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2) as here:
        here.send()
        restart(here.servers["1"], 9, SHAPES)
        assert here.fleet.connect()["1"].state == "behind"
        here.send()
        here.check("0", "1")


def test_a_number_that_names_a_server_is_not_given_to_another(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 0) as here:
        here.fleet.add(Server(model(1)), name="server-2")
        assert here.fleet.add(Server(model(2))) == "server-3"
