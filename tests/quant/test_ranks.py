"""Trainers that torch shards, in processes of their own, and engines that serve quantized weights.

Borders of ranks lie within blocks, so that ranks agree on maxima in each sync.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deltasync import (
    ModuleSource,
    ModuleTarget,
    TrainerGroup,
    WeightReceiver,
    WeightSender,
)
from deltasync.errors import SyncAborted
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from deltasync.quant.nvfp4 import CompressedNvfp4
from deltasync.quant.served import ServedSource, served_weights
from deltasync.sync.group import agreement
from deltasync.sync.group.rank import TrainerRank
from deltasync.transports import shared_memory
from tests.quant.served import assert_holds, engine
from tests.worlds.links import Serving
from tests.worlds.ranks import free_port, run_ranks

WIDTH, HIDDEN = 160, 416
FORMS: dict[str, Form] = {
    "block": BlockFp8(),
    "channel": Fp8("channel"),
    "tensor": Fp8("tensor"),
    "int4": Int4(32),
    "nvfp4": CompressedNvfp4(),
}
WORLD = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_proj(x).sigmoid() * self.up_proj(x))
        return out


def sharded(world: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model


def forms(form: Form) -> Callable[[str, tuple[int, ...]], Form | None]:
    return lambda name, shape: form if len(shape) == 2 else None


def gather(model: nn.Module) -> dict[str, Tensor]:
    """The checkpoint, on every rank."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().bfloat16()
        for name, p in model.named_parameters()
    }


@pytest.mark.promise(
    "Bits",
    "Ranks that quantize what they hold send what a gather would produce, also where blocks "
    "lie on several ranks.",
)
def test_engines_hold_what_a_gather_would_give_them(tmp_path: Path) -> None:
    run_ranks(train, WORLD, free_port(), tmp_path, timeout_s=200)


def train(rank: int, port: int, folder: Path) -> None:
    import torch.distributed as dist

    started(rank, WORLD, port)
    for name, form in FORMS.items():
        (folder / name).mkdir(exist_ok=True)
        follow(rank, WORLD, folder / name, sharded(WORLD), form)
        dist.barrier()
    os._exit(0)  # at times torch aborts the process when it destroys groups of gloo


def started(rank: int, world: int, port: int) -> None:
    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)


def follow(rank: int, world: int, folder: Path, model: nn.Module, form: Form) -> None:
    sender, replica, serving = joined(rank, world, folder, model, form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for number in range(2):
        torch.manual_seed(number)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stats = sender.send_weights(timeout_s=30)
        expected = dict(served_weights(gather(model).items(), forms(form)))
        if replica is not None:
            assert stats.lost == {}
            assert_holds(replica, expected)
    if serving is not None:
        serving.stop()
    sender.close()


def joined(
    rank: int,
    world: int,
    folder: Path,
    model: nn.Module,
    form: Form,
) -> tuple[WeightSender | TrainerRank, nn.Module | None, Serving | None]:
    """A rank's sender; on rank 0 also an engine that has greeted it."""
    import torch.distributed as dist

    gathered = gather(model)
    source = ServedSource(ModuleSource(model), forms(form))
    lane = shared_memory.Sender(folder / f"lane{rank}")
    dist.barrier()  # all listen
    if rank:
        link = shared_memory.Receiver(folder / "group")
        ranked = TrainerRank(source, lane, link, rank=rank, world=world)
        return ranked, None, None
    group = TrainerGroup(shared_memory.Sender(folder / "group"), world)
    sender = WeightSender(source, lane, group=group)
    replica = engine(dict(served_weights(gathered.items(), forms(form))))
    first, *lanes = [shared_memory.Receiver(folder / f"lane{n}") for n in range(world)]
    serving = Serving(WeightReceiver(ModuleTarget(replica), first, lanes=lanes)).start()
    sender.wait_for_receivers(1)
    return sender, replica, serving


@pytest.mark.promise(
    "Bits",
    "A rank that is lost while ranks agree on maxima ends the sync as a failure that the next "
    "one covers.",
)
def test_a_rank_that_dies_while_maxima_are_exchanged_ends_the_sync(tmp_path: Path) -> None:
    run_ranks(lose, 2, free_port(), tmp_path, timeout_s=90)


def lose(rank: int, port: int, folder: Path) -> None:
    started(rank, 2, port)
    model = sharded(2)
    sender, replica, serving = joined(rank, 2, folder, model, BlockFp8())
    sender.send_weights(timeout_s=30)
    before = {} if replica is None else {n: t.clone() for n, t in replica.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    if rank == 0:
        die = lambda *_: os._exit(0)  # noqa: E731
        agreement.Agreement.found = die  # type: ignore[method-assign]
    with pytest.raises(SyncAborted, match="trainer is gone"):
        sender.send_weights(timeout_s=20)
    if replica is not None:
        assert_holds(replica, before)
    if serving is not None:
        serving.stop()
    os._exit(0)
