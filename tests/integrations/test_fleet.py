"""One sender for many servers: they come, go, fail, hang and lag, and the others do not notice."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from deltasync import ModuleTarget, SenderOptions
from deltasync.errors import (
    ConfigError,
    NoReceivers,
    SyncAborted,
)
from deltasync.integrations.fleet import Pauses
from deltasync.integrations.trainer_info import TrainerInfo
from deltasync.integrations.worker import Worker
from deltasync.transports import shared_memory
from deltasync.transports.base import Frame
from tests.worlds.fleets import (
    CALLS,
    CPU,
    Here,
    OneCall,
    Server,
    Split,
    Watched,
    at,
    fleet_of,
    in_thread,
    model,
    refuse,
)
from tests.worlds.links import AMPLE_S, Model, bits_equal, until
from tests.worlds.toy_engines import SHAPES as SPLIT_SHAPES

DONE = ["paused", "updated", "named", "resumed"]
POINTS = {Server: CALLS + DONE, OneCall: ["switch", "switched"]}
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


def change(here: Here) -> None:
    """All of a large tensor, which travels in several buckets."""
    here.source.get_parameter("a").data.mul_(-2)


@pytest.mark.promise("Time", "In a rolling fleet one server pauses at a time.")
@pytest.mark.parametrize("kind", [Server, OneCall, Split])
@pytest.mark.parametrize("pauses", ["together", "rolling"])
def test_all_servers_follow_one_comparison(
    pauses: Pauses, kind: type[Server], tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 2, kind=kind, shapes=SPLIT_SHAPES, pauses=pauses) as here:
        here.add(Server(model(9, SPLIT_SHAPES)), "one worker")
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
@pytest.mark.parametrize(("kind", "pauses"), [(Server, "rolling"), (OneCall, "together")])
def test_servers_that_fail_hang_or_die_in_any_call_are_lost_alone_and_caught_up(
    kind: type[Server], pauses: Pauses, tmp_path: Path
) -> None:
    befallen = [("fails", call) for call in POINTS[kind]]
    befallen += [("hangs", call) for call in POINTS[kind] if call not in DONE]
    befallen += [("dies", call) for call in POINTS[kind] if call in DEADLY]
    with fleet_of(tmp_path, 1, kind=kind, pauses=pauses, timeout_s=6.0) as here:
        here.add(kind(model(5)), "fails in connect").fails = "connect"
        here.add(kind(model(5)), "hangs in connect").hangs = "connect"
        assert set(here.send().lost) == {"fails in connect", "hangs in connect"}
        here.servers["hangs in connect"].goes_on.set()
        for how, call in befallen:
            here.add(kind(model(5)), f"{how} in {call}")
        here.add(kind(model(6)), "last")
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
@pytest.mark.parametrize("kind", [Server, OneCall])
def test_a_server_resumes_before_another_one_has_answered(
    kind: type[Server], tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 3, kind=kind, timeout_s=20.0) as here:
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


class Stopping:
    """Servers that stop, as processes do: they answer nothing, and their workers do nothing with
    what they are sent.
    """

    def __init__(self, here: Here, patch: pytest.MonkeyPatch) -> None:
        self.here, self._stopped = here, dict[object, Event]()
        receive = shared_memory.Receiver.receive

        def received(link: shared_memory.Receiver, *, timeout_s: float) -> Frame:
            frame = receive(link, timeout_s=timeout_s)
            if link in self._stopped:
                self._stopped[link].wait(AMPLE_S)
            return frame

        patch.setattr(shared_memory.Receiver, "receive", received)

    def _stop(self, names: str) -> None:
        for server in map(self.here.servers.__getitem__, names):
            goes_on = server.goes_on
            goes_on.clear()
            server.before = lambda call, goes_on=goes_on: goes_on.wait(AMPLE_S)  # type: ignore[misc]
            assert server.workers[0]._receiver is not None
            self._stopped |= dict.fromkeys(server.workers[0]._receiver._links._links, goes_on)

    def cost(self, *moments: tuple[str, int, str]) -> tuple[str, ...]:
        """Stop servers in a sync, each before the n-th message of a kind; then let them catch up.

        The others hold the version. Returns the waits that it cost.
        """
        here, stopped = self.here, {name for _, _, names in moments for name in names}
        strikes = [at(n, kind, partial(self._stop, names)) for kind, n, names in moments]
        here.link.late, here.link.before = (), lambda kind: [strike(kind) for strike in strikes]
        stats = here.send()
        late: tuple[str, ...] = here.link.late
        assert set(stats.lost) == stopped, (moments, stats.lost)
        here.follow(*(here.servers.keys() - stopped))
        here.link.before = lambda kind: None
        for name in stopped:
            here.servers[name].before = lambda call: None
            here.servers[name].goes_on.set()
        here.catch_up()
        here.check()
        return late

    def cost_of_delta(self, *moments: tuple[str, int, str]) -> tuple[str, ...]:
        change(self.here)
        return self.cost(*moments)


@pytest.mark.promise(
    "Time",
    "Servers that stop at the same time cost one timeout a phase, whatever their number; in a "
    "rolling fleet two.",
)
@pytest.mark.parametrize("pauses", ["together", "rolling"])
def test_servers_that_stop_at_once_cost_one_timeout(
    pauses: Pauses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = IN_PLACE | {"max_staged_bytes": 1 << 30, "timeout_s": 6.0}
    with fleet_of(tmp_path, 4, pauses=pauses, **options) as here:
        stopping = Stopping(here, monkeypatch)
        here.send(timeout_s=60)
        if pauses == "together":
            for kind, number in (("begin", 1), ("bucket", 4), ("prepare", 1)):
                assert len(stopping.cost_of_delta((kind, number, "012"))) == 1, kind
            assert stopping.cost_of_delta(("commit", 1, "123")) == ("some replies",)
            # Who has let go of all payloads by the first wait is found out in the second.
            late = stopping.cost_of_delta(
                ("bucket", 1, "1"), ("bucket", 2, "2"), ("buffer", 3, "3")
            )
            assert len(late) <= 2, late
        else:
            for stopped in ("123", "012"):  # the turn of the other one comes first, and last
                late = stopping.cost_of_delta(("commit", 1, stopped))
                assert late == 2 * ("some replies",)
        for name in "123":
            here.fleet.remove(name)
            here.servers[name].die()
            here.servers[name].module.get_parameter("a").data.add_(1)
            here.add(here.servers[name], name)
        late = stopping.cost(("bucket", 2, "12"))  # nothing has changed: full syncs
        # In turns, the first that is late is waited for alone, and all others together.
        assert len(late) == (2 if pauses == "rolling" else 1), late


def test_connect_says_who_is_here(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2, shapes=SPLIT_SHAPES) as here:
        here.servers["1"].fails = "connect"
        here.add(Split(model(3, SPLIT_SHAPES)), "of more workers", workers=1)
        states = here.fleet.connect()
        assert [state.state for state in states.values()] == ["behind", "lost", "lost"]
        assert states["1"].why == "EngineFailed: RuntimeError: planted"
        assert "2 workers have connected, and workers=1" in states["of more workers"].why
        here.fleet.remove("of more workers")
        del here.servers["of more workers"]
        assert here.send().receivers == 2
        here.fleet.disconnect()
        assert [server.calls[-1] for server in here.servers.values()] == ["disconnect"] * 2
        here.servers["0"].module.get_parameter("norm").data.zero_()
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


def half_cannot_stage(here: Here) -> None:
    server = here.servers["1"]
    assert isinstance(server, Replicas)
    server.models[1].get_parameter("a").data[0, 0] += 1


@pytest.mark.promise(
    "All or nothing",
    "A version that fewer than `min_engines` servers can take is aborted, and no server that "
    "staged it changes.",
)
@pytest.mark.parametrize(
    ("befalls", "kind", "min_engines"),
    [(loses, Server, None), (cannot_stage, Server, 3), (half_cannot_stage, Replicas, 3)],
)
def test_too_few_servers_abort_a_version_and_nobody_changes(
    befalls: Callable[[Here], None],
    kind: type[Server],
    min_engines: int | None,
    tmp_path: Path,
) -> None:
    with fleet_of(tmp_path, 3, kind=kind, min_engines=min_engines) as here:
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


def test_what_is_not_a_fleet_is_said(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 0) as here:
        with pytest.raises(NoReceivers, match="add one"):
            here.send()
        server = here.add(Server(model(9)), "one")
        for refused, why in (
            (lambda: here.fleet.add(server, name="other"), "the fleet has one already"),
            (lambda: here.fleet.add(Server(model(9)), name="one"), "the fleet has one already"),
            (lambda: here.fleet.remove("two"), "no server 'two'; it has one"),
            (lambda: here.fleet.add(Server(model(9)), workers=0), "workers is 0"),
            (lambda: here.fleet.add(Server(model(9))), "give it a name"),
        ):
            with pytest.raises(ConfigError, match=why):
                refused()
        assert here.fleet.servers()["one"].state == "lost"
    with pytest.raises(ConfigError, match="was closed"):
        here.fleet.add(Server(model(9)))
