"""A trainer that is tensor parallel in a way of its own, and a model that follows it.

torchrun --nproc-per-node 2 docs/examples/own_sharding.py

As in Megatron, each rank keeps some groups of attention heads, q, k and v of a group one after
another in one tensor, and its parts of the MLP's gate and up projections in another. A checkpoint
has q, k, v, gate and up apart.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deltasync import (
    ModuleTarget,
    NamedTensor,
    ShardSpec,
    TrainerGroup,
    TrainerRank,
    WeightReceiver,
    WeightSender,
)
from deltasync.errors import PeerLost
from deltasync.transports import shared_memory
from deltasync.transports.control.socket_file import private_path

GROUPS, QUERIES, HEAD, HIDDEN, FFN = 4, 3, 8, 64, 96  # query heads of a group share a k and a v
STEPS = 4


class LocalLayer(nn.Module):
    """What one of `world` ranks keeps of a layer."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(GROUPS // world * (QUERIES + 2) * HEAD, HIDDEN))
        self.gate_up = nn.Parameter(torch.randn(2 * FFN // world, HIDDEN))
        self.down = nn.Parameter(torch.randn(HIDDEN, FFN // world))
        self.norm = nn.Parameter(torch.ones(HIDDEN))  # the same on all ranks


class LayerSource:
    """Views of a rank's tensors, and which part of which checkpoint tensor each of them is."""

    def __init__(self, layer: LocalLayer, rank: int, world: int) -> None:
        groups = layer.qkv.data.view(GROUPS // world, QUERIES + 2, HEAD, HIDDEN)
        gate, up = layer.gate_up.data.chunk(2)
        self._tensors = [
            by_group("q", groups[:, :QUERIES], rank),
            by_group("k", groups[:, QUERIES : QUERIES + 1], rank),
            by_group("v", groups[:, QUERIES + 1 :], rank),
            split("gate", gate, rank, (FFN, HIDDEN), dim=0),
            split("up", up, rank, (FFN, HIDDEN), dim=0),
            split("down", layer.down, rank, (HIDDEN, FFN), dim=1),
            NamedTensor(("norm",), layer.norm),
        ]

    def tensors(self) -> list[NamedTensor]:
        return self._tensors


def by_group(name: str, held: Tensor, rank: int) -> NamedTensor:
    """Heads of this rank's groups: (groups, heads, rows, columns) of a tensor (rows, columns)."""
    heads = held.shape[1]
    shard = ShardSpec(
        shape=(GROUPS, heads, HEAD, HIDDEN),
        offset=(rank * len(held), 0, 0, 0),
        size=tuple(held.shape),
    )
    return NamedTensor((name,), held, shard, full_shape=(GROUPS * heads * HEAD, HIDDEN))


def split(name: str, held: Tensor, rank: int, shape: tuple[int, int], *, dim: int) -> NamedTensor:
    """One of equal parts along a dimension."""
    offset = [0, 0]
    offset[dim] = rank * held.shape[dim]
    return NamedTensor((name,), held, ShardSpec(shape, tuple(offset), tuple(held.shape)))


class Layer(nn.Module):
    """The checkpoint's tensors."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "q": (GROUPS * QUERIES * HEAD, HIDDEN),
            "k": (GROUPS * HEAD, HIDDEN),
            "v": (GROUPS * HEAD, HIDDEN),
            "gate": (FFN, HIDDEN),
            "up": (FFN, HIDDEN),
            "down": (HIDDEN, FFN),
            "norm": (HIDDEN,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))


def follow(folder: Path, world: int) -> None:
    first, *lanes = [shared_memory.Receiver(folder / f"rank{n}") for n in range(world)]
    with WeightReceiver(ModuleTarget(Layer()), first, lanes=lanes) as receiver, suppress(PeerLost):
        while True:  # until the trainer ends
            receiver.receive_weights()


def train(folder: Path, rank: int, world: int) -> None:
    torch.manual_seed(rank)
    layer = LocalLayer(world)
    source, lane = LayerSource(layer, rank, world), shared_memory.Sender(folder / f"rank{rank}")
    sender: WeightSender | TrainerRank
    if rank == 0:
        group = TrainerGroup(shared_memory.Sender(folder / "group"), world)
        sender = WeightSender(source, lane, group=group)
        sender.wait_for_receivers(1)
    else:
        hub = shared_memory.Receiver(folder / "group")
        sender = TrainerRank(source, lane, hub, rank=rank, world=world)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4)
    for step in range(STEPS):
        torch.manual_seed(step)  # the same on all ranks
        loss = (layer.norm * torch.randn(HIDDEN)).sum()
        loss += layer.qkv.square().sum() + layer.gate_up.square().sum() + layer.down.square().sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        stats = sender.send_weights()
        if rank == 0:
            print(f"v{stats.version}: {stats.kind}, {stats.density:.1%} of {stats.numel} changed")
    sender.close()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = private_path(f"megatron-{os.environ['MASTER_PORT']}")
    folder.mkdir(exist_ok=True)
    engine = multiprocessing.get_context("spawn").Process(target=follow, args=(folder, world))
    if rank == 0:
        engine.start()
    train(folder, rank, world)
    if rank == 0:
        engine.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
