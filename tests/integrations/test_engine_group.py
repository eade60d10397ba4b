"""Engines of several workers, of trainers of several ranks."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from deltasync import NamedTensor, ShardSpec, SyncStats, TrainerGroup, TrainerRank
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import ConfigError, DeltaSyncError, EngineFailed, SyncAborted
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.trainer_info import TrainerInfo
from deltasync.integrations.worker import Worker
from deltasync.transports import collective, inprocess, shared_memory
from deltasync.transports.base import SendTransport
from tests.worlds.links import Model, bits_equal, random_model, step
from tests.worlds.toy_engines import CHECKPOINT, SHAPES, rank_of
from tests.worlds.trainers import Boxes, Sharded, rows_of

CPU = torch.device("cpu")
# What is raised where an engine does not do what it is asked.
KINDS = {
    "connect": EngineFailed,
    "decline": ConfigError,  # as its worker says
    "update": SyncAborted,
    "name": EngineFailed,
}


class Engine:
    """A server of two workers, which hold parts. `fails` is the call that does."""

    def __init__(self, model: Model) -> None:
        self.models = [rank_of(model, rank) for rank in range(2)]
        self.workers = [Worker() for _ in self.models]
        self.fails, self.version = "", 0
        self.connections: list[TrainerInfo] = []
        self._calls = ThreadPoolExecutor(len(self.models))

    def connect(self, connection: dict[str, Any], /) -> None:
        to = TrainerInfo.model_validate_json(json.dumps(connection))
        self.connections.append(to)
        self._attempt("connect")
        self.die()
        if self.fails == "decline":
            self.workers[1].decline(to, CPU, ConfigError("planted"))
        for rank, (worker, model) in enumerate(zip(self.workers, self.models, strict=True)):
            if self.fails != "decline" or rank == 0:
                worker.connect(to, RoutedTarget(model, to.checkpoint()), CPU, rank=rank, world=2)

    def update(self, version: int, holder: str, /) -> None:
        self._attempt("update")
        list(self._calls.map(lambda worker: worker.commit(version, holder), self.workers))

    def name(self, version: int, holder: str, /) -> None:
        self._attempt("name")
        self.version = version

    def disconnect(self, holder: str, /) -> None:
        for worker in self.workers:
            worker.disconnect(holder)

    def die(self) -> None:
        for worker in self.workers:
            worker.disconnect()

    def holds(self, model: Model) -> bool:
        return all(bits_equal(rank_of(model, n), here) for n, here in enumerate(self.models))

    def _attempt(self, call: str) -> None:
        if self.fails == call:
            raise EngineFailed("planted")


class Trainer:
    """All ranks of one, with an engine that is started on other weights."""

    def __init__(
        self,
        boxes: list[Boxes],
        link: Callable[[int], SendTransport],
        *,
        timeout_s: float = 5.0,
    ) -> None:
        self.model, self.engine = random_model(SHAPES, 1), Engine(random_model(SHAPES, 2))
        for weights in self.model.parameters():
            weights.data = weights.data.bfloat16()
        self.sources = [Sharded(self.model, held) for held in boxes]
        hub, world = inprocess.Sender(), len(boxes)
        self.sync = EngineSync(
            self.sources[0],
            self.engine,
            link(0),
            workers=2,
            timeout_s=timeout_s,
            group=TrainerGroup(hub, world),
        )
        self.others = [
            TrainerRank(self.sources[rank], link(rank), hub.receiver(), rank=rank, world=world)
            for rank in range(1, world)
        ]
        self._timeout_s, self._threads = timeout_s, ThreadPoolExecutor(world)

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
        """Sync. All ranks are told the same, and the engine has it."""
        found = self.outcomes()
        stats = found[0]
        assert isinstance(stats, SyncStats), found
        assert all(outcome == stats for outcome in found), found
        assert (stats.receivers, self.engine.version) == (2, stats.version)
        assert self.engine.holds(self.model)
        return stats

    def aborted(self, reason: str) -> BaseException:
        """Sync, in vain on all ranks. What rank 0 raises."""
        found = self.outcomes()
        assert all(reason in str(outcome) for outcome in found), found
        assert all(isinstance(outcome, SyncAborted) for outcome in found[1:]), found
        assert isinstance(found[0], DeltaSyncError)
        return found[0]

    def close(self) -> None:
        self.engine.die()
        self.sync.close()
        for rank in self.others:
            rank.close()
        self._threads.shutdown()


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
    here = Trainer(boxes, **settings)
    try:
        yield here
    finally:
        here.close()


@pytest.mark.parametrize("boxes", [in_rows(2), in_rows(3), in_stages(2), in_stages(3)])
def test_workers_have_a_lane_to_each_rank(boxes: list[Boxes], tmp_path: Path) -> None:
    with trainer(boxes, tmp_path) as here:
        assert here.send().full_synced == 2
        for seed in range(2):
            here.step(seed)
            assert here.send().kind == "delta"
        [connection] = here.engine.connections
        assert sorted(connection.checkpoint(), key=str) == sorted(CHECKPOINT, key=str)
        paths = [address.path for address in connection.addresses]
        assert paths == [str(tmp_path / f"rank{rank}") for rank in range(len(boxes))]


def test_lanes_over_torch_distributed(tmp_path: Path) -> None:
    with trainer(in_rows(2), tmp_path, link=lambda rank: collective.Sender()) as here:
        assert here.send().full_synced == 2
        here.step(1)
        assert here.send().kind == "delta"
        assert {address.link for address in here.engine.connections[0].addresses} == {"gloo"}


def test_a_rank_whose_lane_has_no_address_is_named(tmp_path: Path) -> None:
    def link(rank: int) -> SendTransport:
        return inprocess.Sender() if rank else shared_memory.Sender(tmp_path / "socket")

    with trainer(in_rows(2), tmp_path, link=link) as here:
        assert isinstance(here.aborted("cannot connect to the transport of rank 1"), ConfigError)


@pytest.mark.parametrize("fails", ["connect", "decline", "update", "name"])
def test_what_the_engine_fails_in_ends_the_call_on_all_ranks(fails: str, tmp_path: Path) -> None:
    with trainer(in_rows(3), tmp_path, timeout_s=3.0) as here:
        if fails in ("update", "name"):
            here.send()
            here.step(1)
        here.engine.fails = fails
        error = here.aborted("" if fails == "update" else "planted")
        assert isinstance(error, KINDS[fails])
        here.engine.fails = ""
        here.step(2)
        here.send()
        here.step(3)
        assert here.send().kind == "delta"


def test_a_rank_that_is_late_costs_a_version_and_asks_nothing_of_the_engine(tmp_path: Path) -> None:
    with trainer(in_rows(3), tmp_path, timeout_s=0.5) as here:
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


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_aborts_the_version(failing: int, tmp_path: Path) -> None:
    with trainer(in_rows(2), tmp_path) as here:
        for turn in range(2):  # in telling what it holds, and in comparing
            here.step(turn)
            here.sources[failing].fails = RuntimeError("planted")
            found = here.outcomes()
            here.sources[failing].fails = None
            assert all("planted" in str(outcome) for outcome in found)
            assert isinstance(found[1 - failing], SyncAborted)
            assert here.engine.version == turn
            assert here.send().full_synced == 2 * (turn == 0)


def test_a_rank_that_has_lost_its_snapshot_starts_over_with_all(tmp_path: Path) -> None:
    with trainer(in_rows(2), tmp_path) as here:
        here.send()
        here.step(1)
        here.sources[1].fails = KeyboardInterrupt("planted")
        found = here.outcomes()
        assert isinstance(found[0], SyncAborted)
        assert isinstance(found[1], KeyboardInterrupt)
        here.sources[1].fails = None
        here.aborted("has lost its snapshot")
        here.send()
        here.step(2)
        assert here.send().kind == "delta"


def test_connecting_by_hand(tmp_path: Path) -> None:
    with trainer(in_stages(2), tmp_path, timeout_s=2.0) as here:
        with pytest.raises(SyncAborted, match="rank 1 of the trainer did not come"):
            here.sync.connect()
        calls = here.sending()
        here.engine.fails = "connect"
        with pytest.raises(EngineFailed):
            here.sync.connect()
        here.engine.fails = ""
        here.sync.connect()
        stats = here.sync.send_weights()  # the call that the others are in
        assert [call.result() for call in calls] == [stats]
        here.sync.connect()  # while they are in none
        assert here.send().full_synced == 0
        here.sync.disconnect()
        for model in here.engine.models:  # as when it sleeps
            model.get_parameter("norm").data.zero_()
        assert here.send().full_synced == 2
        here.engine.die()  # it is restarted
        here.step(1)
        here.send()


def test_workers_get_in_where_many_have_tried(tmp_path: Path) -> None:
    """As they do who are left behind by an earlier trainer."""
    with trainer(in_rows(2), tmp_path) as here:
        path, left = str(tmp_path / "rank1"), []
        with suppress(BlockingIOError):  # no more are let in
            while True:
                left.append(socket.socket(socket.AF_UNIX))
                left[-1].setblocking(False)
                left[-1].connect(path)
        for one in left:
            one.close()
        here.send()


def test_a_checkpoint_has_the_shapes_of_whole_tensors(tmp_path: Path) -> None:
    class Fused:
        """A rank that holds q by groups of heads."""

        held = NamedTensor(("q",), torch.zeros(2, 2, 4), ShardSpec.whole((2, 2, 4)), (4, 4))

        def tensors(self) -> list[NamedTensor]:
            return [self.held]

    asked = list[dict[str, Any]]()

    class Server(Engine):
        def connect(self, connection: dict[str, Any], /) -> None:
            asked.append(connection)
            raise EngineFailed("enough")

    link = shared_memory.Sender(tmp_path / "socket")
    with EngineSync(Fused(), Server(random_model(SHAPES, 1)), link) as sync:
        with pytest.raises(EngineFailed):
            sync.connect()
        assert asked[0]["tensors"] == [[["q"], "float32", [4, 4]]]
