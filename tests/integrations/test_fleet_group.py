"""A trainer of several ranks that serves a fleet."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from deltasync import SyncStats, TrainerGroup, TrainerRank
from deltasync.errors import SyncAborted
from deltasync.integrations.fleet import EngineFleet
from deltasync.transports import inprocess, shared_memory
from tests.worlds.fleets import Split, model, outcome
from tests.worlds.links import step
from tests.worlds.toy_engines import SHAPES
from tests.worlds.trainers import Sharded, rows_of


class Trainer:
    """Two ranks, and a fleet of two servers of two workers each."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.model = model(0, SHAPES)
        self.sources = [Sharded(self.model, held) for held in rows_of(self.model, 2)]
        hub = inprocess.Sender()
        links = [shared_memory.Sender(folder / f"rank{rank}") for rank in range(2)]
        group = TrainerGroup(hub, 2)
        fleet = EngineFleet(self.sources[0], links[0], group=group, timeout_s=4)
        other = TrainerRank(self.sources[1], links[1], hub.receiver(), rank=1, world=2)
        self.fleet, self.other = stack.enter_context(fleet), stack.enter_context(other)
        self.servers = [Split(model(seed, SHAPES)) for seed in (1, 2)]
        for number, server in enumerate(self.servers):
            self.fleet.add(server, workers=2, paused=server.paused, name=str(number))
        self._threads = stack.enter_context(ThreadPoolExecutor(1))

    def step(self, seed: int) -> None:
        step(self.model, torch.Generator().manual_seed(seed), 0.2)
        for source in self.sources:
            source.step()

    def send(self) -> tuple[object, object]:
        """What both ranks return or raise."""
        theirs = self._threads.submit(self.other.send_weights, timeout_s=4)
        ours = outcome(self.fleet.send_weights)
        return ours, theirs.exception() or theirs.result()


@contextmanager
def trainer(folder: Path) -> Iterator[Trainer]:
    with ExitStack() as stack:
        here = Trainer(folder, stack)
        yield here
        for server in here.servers:
            server.goes_on.set()
            server.die()


def test_all_ranks_send_to_all_servers(tmp_path: Path) -> None:
    with trainer(tmp_path) as here:
        for seed in range(3):
            ours, theirs = here.send()
            assert isinstance(ours, SyncStats), ours
            assert ours == theirs
            assert (ours.receivers, ours.lost) == (4, {})
            assert all(server.holds(here.model) for server in here.servers)
            here.step(seed)


@pytest.mark.parametrize("call", ["pause", "update"])
def test_a_server_that_fails_is_caught_up_by_all_ranks(call: str, tmp_path: Path) -> None:
    with trainer(tmp_path) as here:
        here.send()
        here.servers[1].fails = call
        here.step(1)
        ours, theirs = here.send()
        assert isinstance(ours, SyncStats), ours
        assert isinstance(theirs, SyncStats), theirs
        assert list(ours.lost) == ["1"]
        assert here.servers[0].holds(here.model)
        for seed in range(2, 12):
            here.step(seed)
            ours, theirs = here.send()
            if isinstance(ours, SyncStats) and not ours.lost:
                break
        assert all(server.holds(here.model) for server in here.servers), here.fleet.servers()


def test_too_few_servers_end_the_call_on_all_ranks(tmp_path: Path) -> None:
    with trainer(tmp_path) as here:
        for server in here.servers:
            server.fails = "connect"
        ours, theirs = here.send()
        assert isinstance(ours, SyncAborted)
        assert isinstance(theirs, SyncAborted)
        ours, theirs = here.send()
        assert isinstance(ours, SyncStats), ours
        assert ours == theirs
