"""Trainers that torch shards, in processes of their own: FSDP2, tensor parallelism, both, HSDP."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deltasync import (
    CheckpointTensor,
    ModuleSource,
    ModuleTarget,
    SenderOptions,
    WeightReceiver,
    WeightSource,
    sync_after_step,
)
from deltasync.delta.policy import Policy
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import SyncAborted
from deltasync.sync.group.group import TrainerGroup
from deltasync.sync.group.rank import TrainerRank
from deltasync.sync.sender import WeightSender
from deltasync.sync.source.tensors import Index
from deltasync.transports import shared_memory
from tests.worlds.links import Serving
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
    2: ["fsdp", "mixed", "offload", "tensor", "experts"],
    4: ["fsdp", "replicated", "both", "experts"],
}
OPTIONS = SenderOptions(policy=Policy(chunk_numel=64), bucket_bytes=1024)


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
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
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
        case "offload":
            fully_shard(model, mesh=line, offload_policy=CPUOffloadPolicy(pin_memory=False))
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


class Half(nn.Module):
    """A tensor parallel rank of two."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        rows = len(torch.empty(HIDDEN).chunk(2)[rank])
        self.up = nn.Parameter(torch.zeros(rows, WIDTH, dtype=torch.bfloat16))
        self.down = nn.Parameter(torch.zeros(WIDTH, rows, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.zeros(HIDDEN, dtype=torch.bfloat16))
        self.other = nn.Parameter(torch.zeros(WIDTH, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.zeros(7, 3, dtype=torch.bfloat16))
        self.experts = nn.Parameter(torch.zeros(EXPERTS, 2, GATE, WIDTH, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            match name:
                case "0.weight":
                    self.up.data.copy_(tensor.chunk(2)[self.rank])
                case "1.weight":
                    self.down.data.copy_(tensor.chunk(2, dim=1)[self.rank])
                case "0.bias":
                    self.bias.data.copy_(tensor)
                case "1.bias":
                    self.other.data.copy_(tensor)
                case "frozen":
                    self.frozen.data.copy_(tensor)
                case _:
                    _, expert, part = name.split(".")
                    self.experts.data[int(expert), int(part == "up")].copy_(tensor)


def follow(rank: int, world: int, folder: Path, kind: str) -> None:
    """Steps, syncs, and a rank that fails; after each sync receivers hold what was gathered."""
    import torch.distributed as dist

    model = sharded(kind, world)
    source = Failing(ModuleSource(model, name_map=by_expert))
    sender, engines = joined(source, rank, world, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    full_syncs = 0
    for number in range(5):
        torch.manual_seed(number)
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 3:
            source.fails = rank == 1
            with pytest.raises((SyncAborted, RuntimeError), match="planted"):
                sender.send_weights(timeout_s=30)
            source.fails = False
            continue
        stats = sender.send_weights(timeout_s=30)
        full_syncs += stats.full_synced
        assert stats.receivers == 3
        assert stats.lost == {}
        gathered = gather(model)
        if engines is not None:
            engines.assert_hold(gathered)
            assert engines.sender._group is not None
            assert 0 < engines.sender._group.exchanged_bytes < 64 << 10
        if number:
            assert (stats.kind, stats.base_version) == ("delta", stats.version - 1)
            assert stats.parameters == {"changed": 14, "unchanged": 0, "frozen": 1}
    assert full_syncs == 3
    dist.barrier()
    if engines is not None:
        engines.close()
    sender.close()


def train_meanwhile(rank: int, world: int, folder: Path) -> None:
    """FSDP2 gathers, computes and reduces while the weights of the last step are sent."""
    import torch.distributed as dist

    model = sharded("fsdp", world)
    sender, engines = joined(ModuleSource(model, name_map=by_expert), rank, world, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    hook = sync_after_step(optimizer, sender, on_busy="wait", on_error="raise", timeout_s=30)
    for number in range(8):
        torch.manual_seed(number)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    hook.wait()
    assert (hook.syncs, hook.failures) == (8, 0)
    gathered = gather(model)
    if engines is not None:
        engines.assert_hold(gathered)
    dist.barrier()
    hook.remove()
    if engines is not None:
        engines.close()
    sender.close()


def joined(
    source: WeightSource, rank: int, world: int, folder: Path
) -> tuple[WeightSender | TrainerRank, Engines | None]:
    """A rank's sender, and on rank 0 the receivers, which have greeted it."""
    import torch.distributed as dist

    lane = shared_memory.Sender(folder / f"lane{rank}")
    dist.barrier()  # all listen
    if rank:
        link = shared_memory.Receiver(folder / "group")
        return TrainerRank(source, lane, link, rank=rank, world=world, options=OPTIONS), None
    group = TrainerGroup(shared_memory.Sender(folder / "group"), world)
    sender = WeightSender(source, lane, options=OPTIONS, group=group)
    engines = Engines(folder, sender)
    sender.wait_for_receivers(3)
    return sender, engines


def gather(model: nn.Module) -> dict[str, Tensor]:
    """The checkpoint, on every rank."""
    gathered = {name: whole(p).bfloat16() for name, p in model.named_parameters()}
    experts = gathered.pop("experts")
    return gathered | {n: experts[i] for n, i in (by_expert("experts", (EXPERTS,)) or {}).items()}


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


class Engines:
    """One that holds the whole model, and one of two ranks, in threads."""

    def __init__(self, folder: Path, sender: WeightSender) -> None:
        self.sender = sender
        tensors = {n: torch.zeros(shape, dtype=torch.bfloat16) for n, shape in SHAPES.items()}
        self.plain = Dotted(tensors)
        self.halves = [Half(rank) for rank in range(2)]
        checkpoint = [CheckpointTensor(n, s, torch.bfloat16) for n, s in SHAPES.items()]
        self._folder, self._world = folder, sender.world
        self._serving = [self._start(ModuleTarget(self.plain), "plain", 0, 1)]
        for rank, half in enumerate(self.halves):
            self._serving.append(self._start(RoutedTarget(half, checkpoint), "halves", rank, 2))

    def assert_hold(self, gathered: dict[str, Tensor]) -> None:
        for name, tensor in self.plain.state_dict().items():
            assert torch.equal(tensor, gathered[name]), name
        for half in self.halves:
            expected = Half(half.rank)
            expected.load_weights(gathered.items())
            for name, tensor in expected.state_dict().items():
                assert torch.equal(half.state_dict()[name], tensor), name

    def close(self) -> None:
        for serving in self._serving:
            serving.stop()

    def _start(self, target: Any, engine: str, rank: int, world: int) -> Serving:
        first, *lanes = [
            shared_memory.Receiver(self._folder / f"lane{n}") for n in range(self._world)
        ]
        receiver = WeightReceiver(target, first, lanes=lanes, engine=engine, rank=rank, world=world)
        return Serving(receiver).start()


class Dotted(nn.Module):
    """Parameters by their full names."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, key = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
