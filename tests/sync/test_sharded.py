"""Trainers that torch shards, each rank a process: HSDP, FSDP2 with tensor parallelism, experts,
and quantized weights, whose blocks lie on several ranks.

`test_group.py` has what becomes of failures, and engines of several ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource, SenderOptions, WeightSource
from deltasync.delta.bits import as_bits
from deltasync.errors import ReplicasDiffer, SyncAborted
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.served import ServedSource, served_weights
from deltasync.store.copied import CopiedTarget
from deltasync.sync.group.group import TrainerGroup
from deltasync.sync.group.rank import TrainerRank
from deltasync.sync.sender import WeightSender
from deltasync.transports import shared_memory
from tests.worlds.links import Receivers
from tests.worlds.ranks import free_port, run_ranks
from tests.worlds.trainers import by_expert

WORLD = 4
WIDTH, HIDDEN = 21, 38
EXPERTS, GATE = 5, 6
AS_THEY_ARE = ("*.bias", "frozen", "experts.*")  # where weights are quantized


def blocks(name: str, shape: tuple[int, ...]) -> BlockFp8 | None:
    return BlockFp8() if name.endswith(".weight") else None


@pytest.mark.promise("Bits", "Sharded ranks send what a gather would produce.")
@pytest.mark.promise(
    "Bits",
    "Ranks that quantize what they hold send what a gather would produce, also where blocks "
    "lie on several ranks.",
)
def test_receivers_hold_what_a_gather_would_give_them(tmp_path: Path) -> None:
    run_ranks(train, WORLD, free_port(), tmp_path, timeout_s=150)


def train(rank: int, port: int, folder: Path) -> None:
    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    for kind in ("replicated", "both", "experts", "quantized"):
        (folder / kind).mkdir(exist_ok=True)
        follow(rank, folder / kind, kind)
        dist.barrier()
    os._exit(0)  # at times torch aborts the process when it destroys groups of gloo


class Net(nn.Sequential):
    """Odd sizes, a bias for each layer, stacked experts, and something that is not trained."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))
        self.frozen = nn.Parameter(torch.ones(7, 3), requires_grad=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 2 * GATE, WIDTH) / 50)


def sharded(kind: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = Net()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    match kind:
        case "replicated":
            fully_shard(model, mesh=grid)
        case "experts":  # and the rows of each once more
            experts = distribute_tensor(model.experts, grid, [Shard(0), Shard(1)])
            model.experts = nn.Parameter(experts)
        case _:
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            parallelize_module(model, grid["tensor"], plan)
            fully_shard(model, mesh=grid["data"])
    return model


def follow(rank: int, folder: Path, kind: str) -> None:
    """Steps and syncs; after each sync the receiver holds what was gathered."""
    model, is_quantized = sharded(kind), kind == "quantized"
    source: WeightSource = ModuleSource(model, name_map=by_expert)
    source = ServedSource(source, blocks) if is_quantized else source
    wired = dict.fromkeys(AS_THEY_ARE if is_quantized else ["*"], "bfloat16")
    options = SenderOptions(bucket_bytes=1024, wire_dtypes=wired)
    with joined(source, options, rank, folder) as (sender, target):
        if kind == "replicated":
            refuse_what_drifted(sender, model, is_apart=rank == 2)
        for number in range(3):
            step(model)
            stats = sender.send_weights(timeout_s=30)
            assert (stats.full_synced, stats.receivers) == (int(number == 0), 1)
            if number:
                assert stats.changed == (16 if is_quantized else 14)
            check(target, model, is_quantized=is_quantized)


def refuse_what_drifted(
    sender: WeightSender | TrainerRank, model: nn.Module, *, is_apart: bool
) -> None:
    """Replicas of a mesh of torch are compared; nothing was sent before."""
    bias: Any = model.get_parameter("0.bias").data
    bias.to_local().add_(int(is_apart))
    with pytest.raises((SyncAborted, ReplicasDiffer), match=r"'0\.bias'"):
        sender.send_weights(timeout_s=30)
    bias.to_local().sub_(int(is_apart))


def step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.03).add_(1e-3)


class Lane:
    """A rank's link, to which receivers connect by its path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def receiver(self) -> shared_memory.Receiver:
        return shared_memory.Receiver(self._path)


@contextmanager
def joined(
    source: WeightSource, options: SenderOptions, rank: int, folder: Path
) -> Iterator[tuple[WeightSender | TrainerRank, CopiedTarget | None]]:
    """A rank's sender, and on rank 0 the target of a receiver that has greeted it."""
    import torch.distributed as dist

    lane = shared_memory.Sender(folder / f"lane{rank}")
    dist.barrier()  # all listen
    if rank:
        link = shared_memory.Receiver(folder / "group")
        with TrainerRank(source, lane, link, rank=rank, world=WORLD, options=options) as other:
            yield other, None
            dist.barrier()
        return
    group, target = TrainerGroup(shared_memory.Sender(folder / "group"), WORLD), CopiedTarget()
    lanes: Any = [Lane(folder / f"lane{number}") for number in range(WORLD)]
    receivers = Receivers(lanes)
    receivers.sender = WeightSender(source, lane, options=options, group=group)
    with closing(receivers):
        receivers.add(target)
        receivers.wait(1)
        yield receivers.sender, target
        dist.barrier()


def check(target: CopiedTarget | None, model: nn.Module, *, is_quantized: bool) -> None:
    """The receiver holds what every rank gathers, quantized if it is."""
    gathered = {name: whole(p).bfloat16() for name, p in model.named_parameters()}
    experts = gathered.pop("experts")
    names = by_expert("experts", tuple(experts.shape)) or {}
    gathered |= {name: experts[index] for name, index in names.items()}
    if is_quantized:
        gathered = dict(served_weights(gathered.items(), blocks))
    if target is not None:
        assert target.tensors.keys() == gathered.keys()
        for name, tensor in gathered.items():
            assert torch.equal(as_bits(target.tensors[name]), as_bits(tensor)), name


def whole(parameter: Any) -> Tensor:
    gathered: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return gathered.detach()
