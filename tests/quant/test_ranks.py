"""Trainers that torch shards, in processes of their own, and engines that serve quantized weights.

Borders of ranks lie within blocks, so that ranks agree on maxima in each sync.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
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
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.nvfp4 import CompressedNvfp4
from deltasync.quant.served import ServedSource, served_weights
from deltasync.sync.group.rank import TrainerRank
from deltasync.transports import shared_memory
from tests.quant.served import assert_holds, engine
from tests.worlds.links import Serving
from tests.worlds.ranks import free_port, run_ranks

WIDTH, HIDDEN = 160, 416
FORMS: dict[str, Form] = {"block": BlockFp8(), "nvfp4": CompressedNvfp4()}
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


def sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
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

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    for name, form in FORMS.items():
        (folder / name).mkdir(exist_ok=True)
        dist.barrier()
        follow(rank, folder / name, sharded(), form)
    os._exit(0)  # at times torch aborts the process when it destroys groups of gloo


def follow(rank: int, folder: Path, model: nn.Module, form: Form) -> None:
    """Two steps of one rank; rank 0 also has an engine, and compares it with what all gather."""
    import torch.distributed as dist

    source = ServedSource(ModuleSource(model), forms(form))
    lane = shared_memory.Sender(folder / f"lane{rank}")
    replica = engine(dict(served_weights(gather(model).items(), forms(form))))
    group = TrainerGroup(shared_memory.Sender(folder / "group"), WORLD) if rank == 0 else None
    dist.barrier()  # all listen
    with ExitStack() as stack:
        sender: WeightSender | TrainerRank
        if group is None:
            link = shared_memory.Receiver(folder / "group")
            sender = stack.enter_context(TrainerRank(source, lane, link, rank=rank, world=WORLD))
        else:
            sender = stack.enter_context(WeightSender(source, lane, group=group))
            first, *lanes = [shared_memory.Receiver(folder / f"lane{n}") for n in range(WORLD)]
            serving = Serving(WeightReceiver(ModuleTarget(replica), first, lanes=lanes)).start()
            stack.callback(serving.stop)
            sender.wait_for_receivers(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        for number in range(2):
            torch.manual_seed(number)
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            stats = sender.send_weights(timeout_s=30)
            expected = dict(served_weights(gather(model).items(), forms(form)))
            if rank == 0:
                assert stats.lost == {}
                assert_holds(replica, expected)
