"""What servers and their owners should not do to a fleet, and what does no harm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Thread, active_count
from typing import Any

import pytest

from deltasync import SyncStats
from deltasync.errors import DeltaSyncError, SyncAborted, TransportClosed
from deltasync.integrations.trainer_info import Work
from tests.worlds.fleets import OneCall, Server, fleet_of, model, outcome
from tests.worlds.links import until
from tests.worlds.programs import run


@pytest.mark.parametrize("is_same", [True, False], ids=["the-server", "its-name"])
def test_a_server_that_is_added_as_it_leaves_connects_when_it_has_left(
    is_same: bool, tmp_path: Path
) -> None:
    """Or what lets its workers disconnect would end the new connection."""
    with fleet_of(tmp_path, 2, timeout_s=20) as here:
        here.send()
        server = here.servers["1"]
        server.hangs = "disconnect"
        here.fleet.remove("1")
        until(lambda: not server.hangs)
        if is_same:
            here.add(server, "1")
        else:
            other = here.add(Server(server.module), "1")
            other.workers = server.workers
        here.step()
        stats = here.send()
        assert list(stats.lost) == ["1"]
        assert "connect" not in here.servers["1"].calls[-1:]
        server.goes_on.set()
        until(lambda: not server.workers[0].is_connected)
        here.step()
        assert here.send().lost == {}
        here.check("0", "1")


def test_a_server_that_hangs_as_it_leaves_is_not_waited_for_long(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2, timeout_s=6.0) as here:
        here.send()
        here.servers["1"].hangs = "disconnect"
        here.fleet.remove("1")
        until(lambda: not here.servers["1"].hangs)
        here.add(Server(model(7)), "1")
        end = time.monotonic() + 20
        while here.send().lost:
            assert time.monotonic() < end
            here.step()
        here.check("0", "1")


@pytest.mark.parametrize("min_engines", [1, 2])
def test_a_server_that_is_removed_as_it_connects_is_not_waited_for(
    min_engines: int, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 2, timeout_s=40, min_engines=min_engines) as here:
        here.servers["1"].hangs = "connect"
        found: list[object] = []
        thread = Thread(target=lambda: found.append(outcome(here.send)))
        thread.start()
        until(lambda: not here.servers["1"].hangs)
        here.fleet.remove("1")
        thread.join(20)
        assert not thread.is_alive()
        assert isinstance(found[0], SyncStats if min_engines == 1 else SyncAborted)
        assert here.servers["0"].holds(here.source) == (min_engines == 1)


def test_a_server_that_joins_and_leaves_again_and_again_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    with fleet_of(tmp_path, 1) as here:
        here.send()
        server, threads = Server(model(5)), active_count()
        for _ in range(100):
            here.add(server, "guest")
            here.step()
            outcome(here.send)
            assert here.servers["0"].holds(here.source)
            here.fleet.remove("guest")
        until(lambda: active_count() <= threads)
        here.step()
        here.send()
        assert here.fleet._leaving == []
        del here.servers["guest"]
        here.check("0")


def test_more_servers_than_ever_come_are_not_waited_for(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2, min_engines=5, timeout_s=6.0) as here:
        for _ in range(3):
            with pytest.raises(SyncAborted, match="2 of at least 5 servers"):
                here.send()
        assert [server.calls for server in here.servers.values()] == 2 * [["connect"]]
        assert here.fleet.sender.version == 0


@pytest.mark.parametrize("where", ["paused", "begins", "ends", "is none"])
def test_a_pause_that_raises_is_retried_and_the_others_go_on(where: str, tmp_path: Path) -> None:
    with fleet_of(tmp_path, 1) as here:
        bad, faults = Server(model(9)), {where}

        def fail(at: str) -> None:
            if at in faults:
                faults.remove(at)
                raise ZeroDivisionError

        @contextmanager
        def pausing() -> Iterator[None]:
            fail("begins")
            with bad.paused():
                yield
            fail("ends")

        def paused() -> AbstractContextManager[None]:
            fail("paused")
            if "is none" in faults:
                faults.clear()
                return None  # type: ignore[return-value]
            return pausing()

        here.fleet.add(bad, paused=paused, name="bad")
        here.servers["bad"] = bad
        stats = here.send()
        assert list(stats.lost) == ["bad"]
        assert here.servers["0"].holds(here.source)
        assert not here.servers["0"].is_paused
        here.catch_up()
        here.check("0", "bad")


def test_a_server_that_only_says_that_it_has_updated_is_dropped(tmp_path: Path) -> None:
    class Liar(OneCall):
        def switch(self, version: int, work: Work, stays_paused: bool, holder: str, /) -> None:
            self.version = version

    class Bragger(OneCall):
        def reach(self, paused: object, /) -> int:
            return 7

    with fleet_of(tmp_path, 1, timeout_s=6.0) as here:
        here.add(Liar(model(8)), "liar")
        here.add(Bragger(model(9)), "bragger")  # is updated in several calls
        for _ in range(3):
            stats = here.send()
            assert list(stats.lost) == ["liar"]
            for name in ("0", "bragger"):
                assert here.servers[name].holds(here.source)
                assert here.fleet.servers()[name].state == "current"
            here.step()
        assert here.fleet.servers()["liar"].version is None


def test_a_server_that_says_it_has_connected_is_not_waited_for_twice(tmp_path: Path) -> None:
    class Liar(Server):
        def connect(self, connection: dict[str, Any], /) -> None:
            self.at("connect")

    with fleet_of(tmp_path, 1, timeout_s=6.0) as here:
        here.add(Liar(model(8)), "liar")
        for _ in range(4):
            stats = here.send()
            assert list(stats.lost) == ["liar"]
            assert here.servers["0"].holds(here.source)
            here.step()


@pytest.mark.parametrize("call", ["connect", "pause", "update", "updated", "name", "resume"])
def test_closing_ends_a_sync_of_another_thread(call: str, tmp_path: Path) -> None:
    with fleet_of(tmp_path, 3, timeout_s=10) as here:
        if call != "connect":
            here.send()
        here.step()
        slow = here.servers["1"]
        slow.hangs = call
        found: list[object] = []
        thread = Thread(target=lambda: found.append(outcome(here.send)))
        thread.start()
        until(lambda: not slow.hangs)
        here.fleet.close()
        slow.goes_on.set()
        thread.join(20)
        assert not thread.is_alive()
        is_over = isinstance(found[0], DeltaSyncError)
        assert is_over or call in ("name", "resume", "updated"), found
        with pytest.raises(TransportClosed):
            here.send()


def test_closing_resumes_servers_although_another_one_hangs(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 3, timeout_s=6.0) as here:
        here.send()
        here.step()
        for server in here.servers.values():
            server.fails = "resume"
        assert set(here.send().lost) == set(here.servers)
        assert all(server.is_paused for server in here.servers.values())
        here.servers["0"].hangs = "resume"
        closing = Thread(target=here.fleet.close)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()
        assert [server.is_paused for server in here.servers.values()] == [True, False, False]


_EXHAUSTED = """
import os, resource, tempfile
from pathlib import Path
from deltasync import SyncStats
from deltasync.errors import DeltaSyncError
from tests.worlds.fleets import Server, fleet_of, model, outcome

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
with tempfile.TemporaryDirectory() as folder, fleet_of(Path(folder), 3, timeout_s=6) as here:
    here.send()
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    here.step()
    print(outcome(here.send).receivers)  # what it has open is enough
    here.servers["1"].die()
    here.add(Server(model(9)), "late")
    for _ in range(3):
        here.step()
        stats = outcome(here.send)
        assert here.servers["0"].holds(here.source), stats
        assert not here.servers["0"].is_paused
        assert here.fleet.servers()["0"].state == "current"
    print(sorted(stats.lost))
    for descriptor in held:
        os.close(descriptor)
    here.catch_up()
    here.check("0", "1", "2", "late")
    print("caught up")
"""


def test_servers_that_find_no_descriptor_left_are_caught_up() -> None:
    done = run(_EXHAUSTED)
    assert done.stdout.splitlines() == ["3", "['1', 'late']", "caught up"], done.stderr
