"""Trainers of several ranks, which serve an engine of two workers, or a fleet of such."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

from deltasync import NamedTensor, ShardSpec, SyncStats, TrainerGroup, TrainerRank
from deltasync.errors import ConfigError, DeltaSyncError, EngineFailed, SyncAborted
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.fleet import EngineFleet
from deltasync.integrations.trainer_info import TrainerInfo
from deltasync.transports import collective, cuda_ipc, inprocess, shared_memory
from deltasync.transports.base import SendTransport
from tests.worlds.fleets import Split, engine_of, model
from tests.worlds.links import Model, random_model, step
from tests.worlds.ranks import run_ranks
from tests.worlds.remote import Remote, bits, serve
from tests.worlds.toy_engines import CHECKPOINT, SHAPES
from tests.worlds.trainers import Boxes, Sharded, rows_of

# What is raised where an engine does not do what it is asked.
KINDS = {
    "connect": EngineFailed,
    "decline": ConfigError,  # as its worker says
    "update": SyncAborted,
    "name": EngineFailed,
}


class Noted(Split):
    """Notes whom it was let connect to."""

    def __init__(self, module: Model) -> None:
        super().__init__(module)
        self.connections: list[TrainerInfo] = []

    def connect(self, connection: dict[str, Any], /) -> None:
        self.connections.append(TrainerInfo.model_validate(connection))
        super().connect(connection)


class Trainer:
    """All ranks of one, with servers that are started on other weights.

    Attributes:
        engine: The first one.
    """

    def __init__(
        self,
        boxes: list[Boxes],
        link: Callable[[int], SendTransport],
        stack: ExitStack,
        servers: int = 1,
        timeout_s: float = 5.0,
        is_fleet: bool = False,
    ) -> None:
        self.model = model(0, SHAPES)
        self.servers = [Noted(model(1 + number, SHAPES)) for number in range(servers)]
        self.engine, self._timeout_s = self.servers[0], timeout_s
        self.sources = [Sharded(self.model, held) for held in boxes]
        hub, world = inprocess.Sender(), len(boxes)
        group, first = TrainerGroup(hub, world), link(0)
        if is_fleet:
            fleet = EngineFleet(self.sources[0], first, group=group, timeout_s=timeout_s)
            for name, one in enumerate(self.servers):
                fleet.add(one, workers=2, paused=one.paused, name=str(name))
            self.sync: Any = fleet
        else:
            self.sync = EngineSync(
                self.sources[0],
                self.engine,
                first,
                workers=2,
                paused=self.engine.paused,
                timeout_s=timeout_s,
                group=group,
            )
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
        for server in self.servers:
            assert server.version == stats.version
            assert server.holds(self.model)
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


@pytest.mark.parametrize(
    ("boxes", "options"),
    [
        (in_rows(2), {}),
        (in_rows(3), {}),
        (in_stages(2), {}),
        (in_stages(3), {}),
        (in_rows(2), {"servers": 2, "is_fleet": True}),
        (in_rows(2), {"link": lambda rank: collective.Sender()}),
    ],
    ids=["2 rows", "3 rows", "2 stages", "3 stages", "fleet", "gloo"],
)
def test_workers_have_a_lane_to_each_rank(
    boxes: list[Boxes], options: dict[str, Any], tmp_path: Path
) -> None:
    with trainer(boxes, tmp_path, **options) as here:
        assert here.send().full_synced == 2 * len(here.servers)
        for seed in range(2):
            here.step(seed)
            assert here.send().kind == "delta"
        [connection] = here.engine.connections
        assert sorted(connection.checkpoint(), key=str) == sorted(CHECKPOINT, key=str)
        paths = [address.path for address in connection.addresses]
        if "link" in options:
            assert {address.link for address in connection.addresses} == {"gloo"}
        else:
            assert paths == [str(tmp_path / f"rank{rank}") for rank in range(len(boxes))]


def test_a_rank_whose_lane_has_no_address_is_named(tmp_path: Path) -> None:
    def link(rank: int) -> SendTransport:
        return inprocess.Sender() if rank else shared_memory.Sender(tmp_path / "socket")

    with trainer(in_rows(2), tmp_path, link=link) as here:
        assert isinstance(here.aborted("cannot connect to the transport of rank 1"), ConfigError)


@pytest.mark.parametrize("fails", KINDS)
def test_what_the_engine_fails_in_ends_the_call_on_all_ranks(fails: str, tmp_path: Path) -> None:
    with trainer(in_rows(3), tmp_path, timeout_s=5.0) as here:
        if fails in ("update", "name"):
            here.send()
            here.step(1)
        if fails == "decline":
            here.engine.declines = ConfigError("planted")
        else:
            here.engine.fails = fails
        error = here.aborted("" if fails == "update" else "planted")
        assert isinstance(error, KINDS[fails])
        here.engine.declines = None
        for seed in (2, 3):
            here.step(seed)
            stats = here.send()
        assert stats.kind == "delta"


def test_a_server_of_a_fleet_that_fails_is_caught_up_by_all_ranks(tmp_path: Path) -> None:
    options: dict[str, Any] = {"servers": 3, "is_fleet": True, "timeout_s": 8.0}
    with trainer(in_rows(2), tmp_path, **options) as here:
        for server in here.servers:
            server.fails = "connect"
        here.aborted("planted")  # too few servers end the call on all ranks
        here.send()
        here.servers[1].fails, here.servers[2].fails = "pause", "update"
        here.step(1)
        for stats in here.outcomes():
            assert isinstance(stats, SyncStats), stats
            assert here.engine.holds(here.model)
        assert set(here.sync.servers()) - {"0"} == {
            name for name, one in here.sync.servers().items() if one.why
        }
        for seed in range(2, 12):
            here.step(seed)
            ours = here.outcomes()[0]
            if isinstance(ours, SyncStats) and not ours.lost:
                break
        here.step(12)
        here.send()


def test_a_rank_that_is_late_costs_a_version_and_asks_nothing_of_the_engine(tmp_path: Path) -> None:
    with trainer(in_rows(3), tmp_path, timeout_s=2.0) as here:
        for turn in range(2):  # before the engine has connected, and after
            here.step(turn)
            late = here.others.pop()
            here.aborted("")
            assert (here.engine.version, len(here.engine.connections)) == (turn, turn)
            here.others.append(late)
            with pytest.raises(SyncAborted, match="is gone" if turn else "says nothing"):
                late.send_weights(timeout_s=0.1)
            here.send()
            assert len(here.engine.connections) == 1


def test_connecting_by_hand(tmp_path: Path) -> None:
    with trainer(in_stages(2), tmp_path, timeout_s=4.0) as here:
        with pytest.raises(SyncAborted, match="rank 1 of the trainer did not come"):
            here.sync.connect()
        calls = here.sending()
        here.engine.fails = "connect"
        with pytest.raises(EngineFailed):
            here.sync.connect()
        here.sync.connect()
        stats = here.sync.send_weights()  # the call that the others are in
        assert [call.result() for call in calls] == [stats]
        here.sync.connect()  # while they are in none
        assert here.send().full_synced == 0
        here.sync.disconnect()
        for part in here.engine.models:  # as when it sleeps
            part.get_parameter("norm").data.zero_()
        assert here.send().full_synced == 2
        here.engine.die()  # it is restarted
        here.step(1)
        here.send()


def test_a_checkpoint_has_the_shapes_of_whole_tensors(tmp_path: Path) -> None:
    class Fused:
        """A rank that holds q by groups of heads."""

        held = NamedTensor(("q",), torch.zeros(2, 2, 4), ShardSpec.whole((2, 2, 4)), (4, 4))

        def tensors(self) -> list[NamedTensor]:
            return [self.held]

    server = Noted(model(1, SHAPES))
    server.fails = "connect"
    of: Any = lambda _: Fused()  # noqa: E731
    with engine_of(tmp_path, server=server, source=nn.Module(), of=of) as here:
        with pytest.raises(EngineFailed):
            here.send()
        assert server.connections[0].tensors == ((("q",), "float32", (4, 4)),)


# In processes of their own

LARGE = {"a": (300, 70), "b": (41, 900), "norm": (64,), "odd": (1, 5)}


@pytest.mark.parametrize(
    "link",
    [
        "shared_memory",
        "gloo",
        pytest.param("cuda_ipc", marks=pytest.mark.gpu),
        pytest.param("nccl", marks=pytest.mark.multigpu),
    ],
)
def test_an_engine_follows_two_ranks(link: str, tmp_path: Path) -> None:
    """On GPUs ranks share the first one; with NCCL the engine has one to itself."""
    run_ranks(take_part, 3, link, tmp_path, timeout_s=150)


def take_part(rank: int, link: str, folder: Path) -> None:
    if rank < 2:
        train(rank, link, folder)
        (folder / f"{rank} is done").touch()
        return
    device = {"cuda_ipc": "cuda:0", "nccl": "cuda:1"}.get(link, "cpu")
    engine = Thread(target=serve, args=(str(folder / "calls"), LARGE, 2, device), daemon=True)
    engine.start()
    while not all((folder / f"{rank} is done").exists() for rank in range(2)):
        engine.join(0.05)


def sender(link: str, path: Path) -> SendTransport:
    match link:
        case "nccl":
            return collective.Sender(backend="nccl", device="cuda:0")
        case "gloo":
            return collective.Sender()
        case "cuda_ipc":
            return cuda_ipc.Sender(path, device="cuda:0")
    return shared_memory.Sender(path)


def train(rank: int, link: str, folder: Path) -> None:
    held = random_model(LARGE, 1)
    device = "cuda:0" if link in ("cuda_ipc", "nccl") else "cpu"
    source = Sharded(held, rows_of(held, 2)[rank], device)
    lane = sender(link, folder / f"rank{rank}")
    engine = Remote(folder / "calls").reached()
    sends: EngineSync | TrainerRank
    if rank == 0:
        group = TrainerGroup(shared_memory.Sender(folder / "group"), 2)
        sends = EngineSync(source, engine, lane, group=group)
    else:
        hub = shared_memory.Receiver(folder / "group")
        sends = TrainerRank(source, lane, hub, rank=rank, world=2)
    for version in range(1, 5):
        step(held, torch.Generator().manual_seed(version), 0.3)
        source.step()
        stats = sends.send_weights()
        assert (stats.version, stats.receivers, stats.lost) == (version, 1, {})
        if rank == 0:
            assert engine.ask("state")[:2] == (bits(held), version)
    sends.close()
