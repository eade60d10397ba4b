"""An FSDP2 trainer, and a model that follows it in a process of its own.

torchrun --nproc-per-node 2 docs/examples/fsdp.py
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from deltasync import (
    ModuleSource,
    ModuleTarget,
    TrainerGroup,
    TrainerRank,
    WeightReceiver,
    WeightSender,
    sync_after_step,
)
from deltasync.errors import PeerLost
from deltasync.transports import shared_memory
from deltasync.transports.control.socket_file import private_path

STEPS = 5


def policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def follow(folder: Path, world: int) -> None:
    """An engine: bfloat16 where the trainer keeps float32, with a link to each of its ranks."""
    first, *lanes = [shared_memory.Receiver(folder / f"rank{n}") for n in range(world)]
    target = ModuleTarget(policy().bfloat16())
    with WeightReceiver(target, first, lanes=lanes) as receiver, suppress(PeerLost):
        while True:  # until the trainer ends
            receiver.receive_weights()


def train(folder: Path, rank: int, world: int) -> None:
    model = policy()
    fully_shard(model)
    source, lane = ModuleSource(model), shared_memory.Sender(folder / f"rank{rank}")
    sender: WeightSender | TrainerRank
    if rank == 0:
        sender = WeightSender(
            source, lane, group=TrainerGroup(shared_memory.Sender(folder / "group"), world)
        )
        sender.wait_for_receivers(1)
    else:
        hub = shared_memory.Receiver(folder / "group")
        sender = TrainerRank(source, lane, hub, rank=rank, world=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    hook = sync_after_step(optimizer, sender, on_error="raise")
    for step in range(STEPS):
        torch.manual_seed(step * world + rank)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and hook.last_stats is not None:
            done = hook.last_stats
            print(f"v{done.version}: {done.kind}, {done.density:.1%}, {done.payload_bytes} bytes")
    sender.close()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = private_path(f"fsdp-{os.environ['MASTER_PORT']}")
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
