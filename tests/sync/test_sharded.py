"""Trainers that torch shards, in processes of their own: FSDP2, tensor parallelism, both, HSDP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deltasync import (
    CheckpointTensor,
    ModuleSource,
    SenderOptions,
    WeightSource,
    sync_after_step,
)
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import ReplicasDiffer, SyncAborted
from deltasync.sync.group.group import TrainerGroup
from deltasync.sync.group.rank import TrainerRank
from deltasync.sync.sender import WeightSender
from deltasync.sync.source.tensors import Index
from deltasync.sync.target.copied import CopiedTarget
from deltasync.transports import shared_memory
from tests.worlds.links import Receivers
from tests.worlds.ranks import free_port, run_ranks

WIDTH, HIDDEN = 21, 38
EXPERTS, GATE = 5, 6
SHAPES = {
    "0.weight": (HIDDEN, WIDTH),
    "0.bias": (HIDDEN,),
    "1.weight": (WIDTH, HIDDEN),
    "1.bias": (WIDTH,),
    "frozen": (7, 3),
    **{f"experts.{e}.{part}": (GATE, WIDTH) for e in range(EXPERTS) for part in ("gate", "up")},
}
KINDS = {
    2: ["mixed", "tensor", "experts"],
    4: ["replicated", "both", "experts"],
}
OPTIONS = SenderOptions(bucket_bytes=1024, wire_dtypes={"*": "bfloat16"})


@pytest.mark.promise("Bits", "Sharded ranks send what a gather would produce.")
@pytest.mark.parametrize("world", [2, 4])
def test_receivers_hold_what_a_gather_would_give_them(world: int, tmp_path: Path) -> None:
    run_ranks(train, world, world, free_port(), tmp_path, timeout_s=150)


def train(rank: int, world: int, port: int, folder: Path) -> None:
    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    for kind in KINDS[world]:
        (folder / kind).mkdir(exist_ok=True)
        follow(rank, world, folder / kind, kind)
        dist.barrier()
    if world == 2:
        (folder / "meanwhile").mkdir(exist_ok=True)
        train_meanwhile(rank, world, folder / "meanwhile")
        dist.barrier()
    os._exit(0)  # at times torch aborts the process when it destroys groups of gloo


class Net(nn.Sequential):
    """Odd sizes, a bias for each layer, stacked experts, and something that is not trained."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))
        self.frozen = nn.Parameter(torch.ones(7, 3), requires_grad=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 2 * GATE, WIDTH) / 50)

    def forward(self, x: Tensor) -> Tensor:
        experts: Any = self.experts
        local = experts.to_local() if isinstance(experts, DTensor) else experts
        term = local.square().sum()
        out: Tensor = self[1](self[0](x)) + (term - term.detach())  # the same on all ranks
        return out


def by_expert(name: str, shape: tuple[int, ...]) -> dict[str, Index] | None:
    if name != "experts":
        return None
    parts: dict[str, slice] = {"gate": slice(0, GATE), "up": slice(GATE, None)}
    return {f"experts.{e}.{p}": (e, at) for e in range(shape[0]) for p, at in parts.items()}


def sharded(kind: str, world: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = Net()
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    grid = line
    if world == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    match kind:
        case "fsdp":
            fully_shard(model, mesh=line)
        case "mixed":
            half, full = torch.bfloat16, torch.float32
            mixed = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=full)
            fully_shard(model, mesh=line, mp_policy=mixed)
        case "replicated":
            fully_shard(model, mesh=grid)
        case "experts":  # and on four ranks the rows of each once more
            splits = [Shard(0), Shard(1)][: grid.ndim]
            model.experts = nn.Parameter(distribute_tensor(model.experts, grid, splits))
        case _:
            mesh = line if kind == "tensor" else grid["tensor"]
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
            if kind == "both":
                fully_shard(model, mesh=grid["data"])
    return model


def follow(rank: int, world: int, folder: Path, kind: str) -> None:
    """Steps, syncs, and a rank that fails; after each sync receivers hold what was gathered."""
    model = sharded(kind, world)
    source = Failing(ModuleSource(model, name_map=by_expert))
    with joined(source, rank, world, folder) as (sender, engines):
        if kind == "replicated":
            refuse_what_drifted(sender, model, is_apart=rank == 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        full_syncs = 0
        for number in range(4):
            train_once(model, optimizer, number)
            if number == 2:
                source.fails = rank == 1
                with pytest.raises((SyncAborted, RuntimeError), match="planted"):
                    sender.send_weights(timeout_s=30)
                source.fails = False
                continue
            stats = sender.send_weights(timeout_s=30)
            full_syncs += stats.full_synced
            assert (stats.receivers, stats.lost) == (3, {})
            if number:
                assert (stats.kind, stats.base_version) == ("delta", stats.version - 1)
                assert stats.parameters == {"changed": 14, "unchanged": 0, "frozen": 1}
            check(engines, model)
        assert full_syncs == 3
        if engines is not None:
            assert engines.sender._group is not None
            assert 0 < engines.sender._group.exchanged_bytes < 64 << 10


def refuse_what_drifted(
    sender: WeightSender | TrainerRank, model: nn.Module, *, is_apart: bool
) -> None:
    """Replicas of a mesh of torch are compared; nothing was sent before."""
    bias: Any = model.get_parameter("0.bias").data
    bias.to_local().add_(int(is_apart))
    with pytest.raises((SyncAborted, ReplicasDiffer), match=r"'0\.bias'"):
        sender.send_weights(timeout_s=30)
    bias.to_local().sub_(int(is_apart))


def train_meanwhile(rank: int, world: int, folder: Path) -> None:
    """FSDP2 gathers, computes and reduces while the weights of the last step are sent."""
    model = sharded("fsdp", world)
    source = ModuleSource(model, name_map=by_expert)
    with joined(source, rank, world, folder) as (sender, engines):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        hook = sync_after_step(optimizer, sender, on_busy="wait", on_error="raise", timeout_s=30)
        for number in range(6):
            train_once(model, optimizer, number)
        hook.wait()
        assert (hook.syncs, hook.failures) == (6, 0)
        check(engines, model)
        hook.remove()


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def joined(
    source: WeightSource, rank: int, world: int, folder: Path
) -> Iterator[tuple[WeightSender | TrainerRank, Engines | None]]:
    """A rank's sender, and on rank 0 the receivers, which have greeted it."""
    import torch.distributed as dist

    lane = shared_memory.Sender(folder / f"lane{rank}")
    dist.barrier()  # all listen
    if rank:
        link = shared_memory.Receiver(folder / "group")
        with TrainerRank(source, lane, link, rank=rank, world=world, options=OPTIONS) as other:
            yield other, None
            dist.barrier()
        return
    group = TrainerGroup(shared_memory.Sender(folder / "group"), world)
    sender = WeightSender(source, lane, options=OPTIONS, group=group)
    with closing(Engines(folder, sender)) as engines:
        engines.wait(3)
        yield sender, engines
        dist.barrier()


def check(engines: Engines | None, model: nn.Module) -> None:
    """The engines hold what every rank gathers."""
    gathered = {name: whole(p).bfloat16() for name, p in model.named_parameters()}
    experts = gathered.pop("experts")
    names = by_expert("experts", (EXPERTS,)) or {}
    if engines is not None:
        engines.assert_hold(gathered | {n: experts[i] for n, i in names.items()})


def whole(parameter: Any) -> Tensor:
    gathered: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return gathered.detach()


class Failing:
    """A source that fails when it is told to."""

    fails = False

    def __init__(self, source: ModuleSource) -> None:
        self._source = source

    def tensors(self) -> Any:
        if self.fails:
            raise RuntimeError("planted")
        return self._source.tensors()


class Lane:
    """A rank's link, to which receivers connect by its path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def receiver(self) -> shared_memory.Receiver:
        return shared_memory.Receiver(self._path)


class Engines(Receivers):
    """One that takes the whole model, and one of two ranks that hold half the rows of each."""

    def __init__(self, folder: Path, sender: WeightSender) -> None:
        lanes: Any = [Lane(folder / f"lane{n}") for n in range(sender.world)]
        super().__init__(lanes)
        self.sender, self.whole = sender, CopiedTarget()
        self.halves = [nn.ParameterDict(), nn.ParameterDict()]
        self.add(self.whole, engine="whole")
        for rank, half in enumerate(self.halves):
            for name, shape in SHAPES.items():
                rows = torch.zeros(shape, dtype=torch.bfloat16).chunk(2)[rank]
                half[name.replace(".", "_")] = nn.Parameter(rows.clone())
            self.add(routed(half, rank), engine="halves", rank=rank, world=2)

    def assert_hold(self, gathered: dict[str, Tensor]) -> None:
        assert self.whole.tensors.keys() == gathered.keys()
        for name, tensor in gathered.items():
            assert torch.equal(self.whole.tensors[name], tensor), name
            for half, rows in zip(self.halves, tensor.chunk(2), strict=True):
                assert torch.equal(half[name.replace(".", "_")], rows), name


def routed(half: nn.ParameterDict, rank: int) -> RoutedTarget:
    def load(weights: Any) -> None:
        for name, tensor in weights:
            half[name.replace(".", "_")].data.copy_(tensor.chunk(2)[rank])

    checkpoint = [CheckpointTensor(n, s, torch.bfloat16) for n, s in SHAPES.items()]
    return RoutedTarget(half, checkpoint, load=load)
