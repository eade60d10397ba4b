"""Trainers of several ranks, which serve an engine of two workers, or a fleet of such."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from deltasync import ShardSpec, SyncStats, TrainerGroup, TrainerRank
from deltasync.errors import ConfigError, DeltaSyncError, SyncAborted
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.fleet import EngineFleet
from deltasync.transports import collective, cuda_ipc, inprocess, shared_memory
from deltasync.transports.base import SendTransport
from tests.worlds.fleets import Server, Split, model
from tests.worlds.links import AMPLE_S, bits_equal, random_model, step
from tests.worlds.ranks import run_ranks
from tests.worlds.toy_engines import CHECKPOINT, SHAPES
from tests.worlds.trainers import Boxes, Sharded, rows_of


class Trainer:
    """All ranks of one, with engines that were started on other weights; several are a fleet."""

    def __init__(
        self,
        boxes: list[Boxes],
        link: Callable[[int], SendTransport],
        stack: ExitStack,
        timeout_s: float = AMPLE_S,
        servers: int = 1,
    ) -> None:
        self.model, self._timeout_s = model(0, SHAPES), timeout_s
        self.servers = [Split(model(1 + number, SHAPES)) for number in range(servers)]
        self.engine = self.servers[0]
        self.sources = [Sharded(self.model, held) for held in boxes]
        hub, world = inprocess.Sender(), len(boxes)
        first, lane, group = self.sources[0], link(0), TrainerGroup(hub, world)
        common: dict[str, Any] = {"timeout_s": timeout_s, "group": group}
        if servers > 1:
            self.sync: Any = EngineFleet(first, lane, **common)
            for name, one in enumerate(self.servers):
                self.sync.add(one, workers=2, paused=one.paused, name=str(name))
        else:
            paused = self.engine.paused
            self.sync = EngineSync(first, self.engine, lane, workers=2, paused=paused, **common)
        self.others = [
            TrainerRank(self.sources[rank], link(rank), hub.receiver(), rank=rank, world=world)
            for rank in range(1, world)
        ]
        self._threads = stack.enter_context(ThreadPoolExecutor(world))
        for end in (self.sync, *self.others):
            stack.enter_context(end)
        for one in self.servers:
            stack.callback(one.die)

    def step(self, seed: int) -> None:
        step(self.model, torch.Generator().manual_seed(seed), 0.2)
        for source in self.sources:
            source.step()

    def sending(self) -> list[Future[SyncStats]]:
        """Calls of `send_weights` on the other ranks."""
        return [
            self._threads.submit(rank.send_weights, timeout_s=self._timeout_s)
            for rank in self.others
        ]

    def outcomes(self) -> list[SyncStats | BaseException]:
        """What `send_weights` returns or raises on each rank."""
        calls = [self._threads.submit(self.sync.send_weights), *self.sending()]
        return [call.exception() or call.result() for call in calls]

    def send(self) -> SyncStats:
        """Sync. All ranks are told the same, and the engines have it."""
        found = self.outcomes()
        stats = found[0]
        assert isinstance(stats, SyncStats), found
        assert all(outcome == stats for outcome in found), found
        assert stats.receivers == 2 * len(self.servers)
        assert all(one.version == stats.version for one in self.servers)
        assert all(one.holds(self.model) for one in self.servers)
        return stats

    def aborted(self, reason: str) -> BaseException:
        """Sync, in vain on all ranks. What rank 0 raises."""
        found = self.outcomes()
        assert all(reason in str(outcome) for outcome in found), found
        assert all(isinstance(outcome, SyncAborted) for outcome in found[1:]), found
        assert isinstance(found[0], DeltaSyncError)
        return found[0]


def in_rows(world: int) -> list[Boxes]:
    return list(rows_of(random_model(SHAPES, 1), world))


def in_stages(world: int) -> list[Boxes]:
    """As with pipeline parallelism: no rank knows all names."""
    return [
        {n: ShardSpec.whole(SHAPES[n]) for at, n in enumerate(SHAPES) if at % world == rank}
        for rank in range(world)
    ]


@contextmanager
def trainer(boxes: list[Boxes], folder: Path, **settings: Any) -> Iterator[Trainer]:
    settings.setdefault("link", lambda rank: shared_memory.Sender(folder / f"rank{rank}"))
    with ExitStack() as stack:
        yield Trainer(boxes, stack=stack, **settings)


@pytest.mark.parametrize("boxes", [in_rows(2), in_stages(3)], ids=["2 rows", "3 stages"])
def test_workers_have_a_lane_to_each_rank(boxes: list[Boxes], tmp_path: Path) -> None:
    with trainer(boxes, tmp_path) as here:
        assert here.send().full_synced == 2
        for seed in range(2):
            here.step(seed)
            assert here.send().kind == "delta"
        connection = here.engine.workers[0]._last
        assert connection is not None
        assert sorted(connection.checkpoint(), key=str) == sorted(CHECKPOINT, key=str)
        paths = [address.path for address in connection.addresses]
        assert paths == [str(tmp_path / f"rank{rank}") for rank in range(len(boxes))]


def test_a_rank_whose_lane_has_no_address_is_named(tmp_path: Path) -> None:
    def link(rank: int) -> SendTransport:
        return inprocess.Sender() if rank else shared_memory.Sender(tmp_path / "socket")

    with trainer(in_rows(2), tmp_path, link=link) as here:
        assert isinstance(here.aborted("cannot connect to the transport of rank 1"), ConfigError)


def test_a_server_of_a_fleet_that_fails_is_caught_up_by_all_ranks(tmp_path: Path) -> None:
    with trainer(in_rows(2), tmp_path, timeout_s=8.0, servers=3) as here:
        for server in here.servers:
            server.fails = "connect"
        here.aborted("planted")  # too few servers end the call on all ranks
        here.send()
        here.servers[1].fails, here.servers[2].fails = "pause", "update"
        here.step(1)
        for stats in here.outcomes():
            assert isinstance(stats, SyncStats), stats
            assert here.servers[0].holds(here.model)
        assert {name for name, one in here.sync.servers().items() if one.why} == {"1", "2"}
        for seed in range(2, 12):
            here.step(seed)
            ours = here.outcomes()[0]
            if isinstance(ours, SyncStats) and not ours.lost:
                break
        here.step(12)
        here.send()


def test_connecting_by_hand(tmp_path: Path) -> None:
    with trainer(in_stages(2), tmp_path, timeout_s=4.0) as here:
        with pytest.raises(SyncAborted, match="rank 1 of the trainer did not come"):
            here.sync.connect()
        calls = here.sending()
        here.sync.connect()
        stats = here.sync.send_weights()  # the call that the others are in
        assert [call.result() for call in calls] == [stats]
        here.sync.connect()  # while they are in none
        assert here.send().full_synced == 0


# In processes of their own

LARGE = {"a": (300, 70), "b": (41, 900), "norm": (64,), "odd": (1, 5)}


@pytest.mark.parametrize(
    "link",
    [
        "gloo",
        pytest.param("cuda_ipc", marks=pytest.mark.gpu),
        pytest.param("nccl", marks=pytest.mark.multigpu),
    ],
)
def test_an_engine_follows_two_ranks(link: str, tmp_path: Path) -> None:
    """On GPUs ranks share the first one; with NCCL the engine has one to itself."""
    run_ranks(train, 2, link, tmp_path, timeout_s=150)


def sender(link: str, path: Path) -> SendTransport:
    match link:
        case "nccl":
            return collective.Sender(backend="nccl", device="cuda:0")
        case "cuda_ipc":
            return cuda_ipc.Sender(path, device="cuda:0")
    return collective.Sender()


def train(rank: int, link: str, folder: Path) -> None:
    """A rank; the first one has the engine in its process, too."""
    held = random_model(LARGE, 1)
    device = "cuda:0" if link in ("cuda_ipc", "nccl") else "cpu"
    source = Sharded(held, rows_of(held, 2)[rank], device)
    lane = sender(link, folder / f"rank{rank}")
    engine = Server(random_model(LARGE, 2).to("cuda:1" if link == "nccl" else device))
    engine.device = engine.module.get_parameter("a").device
    sends: EngineSync | TrainerRank
    if rank == 0:
        group = TrainerGroup(shared_memory.Sender(folder / "group"), 2)
        sends = EngineSync(source, engine, lane, paused=engine.paused, group=group)
    else:
        hub = shared_memory.Receiver(folder / "group")
        sends = TrainerRank(source, lane, hub, rank=rank, world=2)
    for version in range(1, 5):
        step(held, torch.Generator().manual_seed(version), 0.3)
        source.step()
        stats = sends.send_weights()
        assert (stats.version, stats.receivers, stats.lost) == (version, 1, {})
        if rank == 0:
            assert bits_equal(held, deepcopy(engine.module).cpu())
            assert engine.version == version
    sends.close()
