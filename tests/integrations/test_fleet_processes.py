"""Engines in processes of their own, several of which stop at once: that costs one timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from deltasync import ModuleSource, SenderOptions, SyncStats
from deltasync.integrations.fleet import EngineFleet, Pauses
from tests.worlds.fleets import Watched, at, outcome
from tests.worlds.links import random_model
from tests.worlds.remote import Remote, bits

SHAPES = {"a": (64, 1024), "b": (33,)}
TIMEOUT_S = 4.0
Moments = Collection[tuple[str, int, Collection[str]]]
"""Before the n-th message of a kind these servers stop."""


class Fleet:
    """A fleet of four engines' processes, its source, and its link."""

    def __init__(self, path: Path, stack: ExitStack, options: dict[str, Any]) -> None:
        self.source, self.link = random_model(SHAPES, 0), Watched(path / "socket")
        made = EngineFleet(ModuleSource(self.source), self.link, timeout_s=TIMEOUT_S, **options)
        self.fleet = stack.enter_context(made)
        self.servers = {name: Remote(path / name, 2 * TIMEOUT_S) for name in "0123"}
        for seed, (name, server) in enumerate(self.servers.items()):
            server.started(SHAPES, seed + 1)
            assert server.child is not None
            stack.callback(server.child.kill)
            self.add(name)

    def add(self, name: str) -> None:
        self.fleet.add(self.servers[name], paused=self.servers[name].paused, name=name)

    def holds(self, name: str) -> bool:
        held, version, is_paused = self.servers[name].ask("state")
        return held == bits(self.source) and version == self.fleet.sender.version and not is_paused

    def stopping(self, moments: Moments) -> Callable[[str], object]:
        def stop(names: Collection[str]) -> None:
            for name in names:
                self.servers[name].stop()

        strikes = [at(n, kind, lambda who=who: stop(who)) for kind, n, who in moments]  # type: ignore[misc]
        return lambda kind: [strike(kind) for strike in strikes]

    def cost(self, moments: Moments) -> tuple[str, ...]:
        """Stop engines in a sync. The others hold the version. Returns the waits that it cost."""
        stopped = {name for _, _, names in moments for name in names}
        self.link.late, self.link.before = (), self.stopping(moments)
        stats = self.fleet.send_weights()
        assert set(stats.lost) == stopped, (moments, stats.lost)
        late = self.link.late
        assert all(map(self.holds, self.servers.keys() - stopped)), moments
        self.catch_up()
        return late

    def cost_of_delta(self, *moments: tuple[str, int, Collection[str]]) -> tuple[str, ...]:
        self.source.get_parameter("a").data.mul_(-2)
        return self.cost(moments)

    def catch_up(self) -> None:
        """Let all engines go on, and sync until none is behind."""
        self.link.before = lambda kind: None
        for server in self.servers.values():
            assert server.child is not None
            server.child.resume()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            stats = outcome(self.fleet.send_weights)
            if isinstance(stats, SyncStats) and not stats.lost:
                assert all(map(self.holds, self.servers))
                return
        raise AssertionError(f"{stats}, {self.fleet.servers()}")


@contextmanager
def fleet_of_four(path: Path, **options: Any) -> Iterator[Fleet]:
    with ExitStack() as stack:
        sizes = SenderOptions(bucket_bytes=1 << 15)
        here = Fleet(path, stack, {"options": sizes, **options})
        assert here.fleet.send_weights().receivers == 4
        yield here


@pytest.mark.promise(
    "Time",
    "Servers that stop at the same time cost one timeout a phase, whatever their number; in a "
    "rolling fleet two.",
)
@pytest.mark.parametrize("pauses", ["together", "rolling"])
def test_engines_that_stop_at_once_cost_one_timeout(pauses: Pauses, tmp_path: Path) -> None:
    with fleet_of_four(tmp_path, pauses=pauses) as here:
        if pauses == "together":
            for kind, number in (("begin", 1), ("bucket", 1), ("bucket", 4), ("prepare", 1)):
                assert len(here.cost_of_delta((kind, number, "012"))) == 1, kind
            assert here.cost_of_delta(("commit", 1, "123")) == ("some replies",)
            # Who has let go of all payloads by the first wait is found out in the second.
            late = here.cost_of_delta(("bucket", 1, "1"), ("bucket", 2, "2"), ("buffer", 3, "3"))
            assert len(late) <= 2, late
        else:
            for stopped in ("123", "012"):  # the turn of the other one comes first, and last
                late = here.cost_of_delta(("commit", 1, stopped))
                assert late == 2 * ("some replies",)
        for moment, number in (("bucket", 2), ("prepare", 2)):  # the first is of the delta
            for name in "123":
                here.fleet.remove(name)
                here.servers[name].ask("spoil")
                here.add(name)
            late = here.cost([(moment, number, "12")])  # nothing has changed: full syncs
            # In turns, the first that is late is waited for alone, and all others together.
            assert len(late) == (2 if pauses == "rolling" else 1), late
