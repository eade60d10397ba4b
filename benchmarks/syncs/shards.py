"""Both ends where trainer and engine have several ranks each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from benchmarks.syncs import baselines
from benchmarks.syncs.ends import TIMEOUT_S, End
from benchmarks.syncs.fused import Fused
from benchmarks.syncs.gathering import GatheringTrainer, ShardedEngine
from benchmarks.syncs.geometry import assembled
from benchmarks.syncs.group import Group
from benchmarks.syncs.links import connect, listen
from benchmarks.syncs.plan import Plan
from benchmarks.syncs.workload import Training, bits_of, mutate
from deltasync import (
    CheckpointTensor,
    ModuleSource,
    RoutedTarget,
    TrainerGroup,
    TrainerRank,
    WeightReceiver,
    WeightSender,
)
from deltasync.delta.shard import local_of
from deltasync.transports import shared_memory
from deltasync.transports.base import SendTransport


class Trainer(End):
    """A rank of the trainer."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        group.join(2)
        self._module = module = sharded(group.plan, group.device, group.trainers)
        self._shell = shell_of(module)
        self._replicas = shell_of(module, replicated=True)
        self._ways = GatheringTrainer(bits_of(self._shell), group.trainers)
        self._base = [bits.clone() for bits in self._ways.shards if group.plan.gathers]
        place = group.folder / f"lane{group.rank}"
        lane, address = listen(group.plan.link, group.device, place)
        group.told(address)
        self._sender = sender_of(group.plan, group.rank, module, lane, group.folder / "calls")
        if isinstance(self._sender, WeightSender):
            self._sender.wait_for_receivers(group.plan.engines, timeout_s=TIMEOUT_S)
        self.sync()

    def sync(self) -> None:
        stats = self._sender.send_weights(timeout_s=TIMEOUT_S)
        if stats.lost:
            raise RuntimeError(f"an engine rank left: {stats.lost}")
        self.stats.append(stats)

    def dense(self) -> None:
        self._ways.give_dense(self.group.near)
        self.group.hand_over()

    def sparse(self) -> None:
        found = self._ways.give_sparse(self._base, self.group.first)
        self.group.hand_over()
        baselines.advance(self._base, found)

    def change(self, density: float, seed: int) -> None:
        change_shards(self._shell, self._replicas, density, seed, self.group.rank)

    def begin_training(self) -> None:
        self._training = Training(self._shell)

    def train(self) -> None:
        self._training.step()

    def check(self, *, baseline: bool = False) -> None:
        exchange = self.group.first
        exchange.begin()
        for whole in wholes(self._module):
            if self.group.number == 0:
                exchange.give(whole.view(-1))
        self.group.hand_over()

    def close(self) -> None:
        self._sender.close()


class Engine(End):
    """A rank of an engine, with a model that deltasync writes and one for other ways, if any."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        group.join(2)
        plan = group.plan
        shapes = plan.model.shapes()
        self._models = [part_of(plan, group.number, group.device) for _ in range(1 + plan.gathers)]
        self._ways = ShardedEngine(self._models[-1], shapes, plan.trainers)
        addresses = group.told(None)[: plan.trainers]
        model, device = self._models[0], group.device
        self._receiver = receiver_of(plan, group.number, model, addresses, device)
        self.sync()

    def sync(self) -> None:
        self._receiver.receive_weights(timeout_s=TIMEOUT_S)

    def dense(self) -> None:
        self.group.hand_over()
        self._ways.take_dense(self.group.near)

    def sparse(self) -> None:
        self.group.hand_over()
        self._ways.take_sparse(self.group.first)

    def check(self, *, baseline: bool = False) -> None:
        exchange = self.group.first
        self.group.hand_over()
        exchange.begin()
        for name, shape in self.group.plan.model.shapes().items():
            whole = exchange.take(prod(shape), torch.bfloat16).view(shape)
            if not all(holds(model, name, whole) for model in self._models):
                raise RuntimeError(f"{name} of the engine is not the trainer's")

    def close(self) -> None:
        self._receiver.close()


def sharded(plan: Plan, device: torch.device, trainers: Any) -> nn.Module:
    """The model of a trainer's rank, whose parameters are DTensors over all of `trainers`."""
    mesh = DeviceMesh.from_group(trainers, device.type)
    if plan.parallel == "fsdp2":
        module = plan.model.build(device)
        fully_shard(module, mesh=mesh)
        return module
    return assembled(
        (name, distribute_tensor(tensor, mesh, [_placement(name, tensor)]))
        for name, tensor in plan.model.tensors(device)
    )


def sender_of(
    plan: Plan, rank: int, module: nn.Module, lane: SendTransport, hub: Path
) -> WeightSender | TrainerRank:
    """What a trainer's rank sends with; its ranks meet at the socket `hub`."""
    source = ModuleSource(module)
    if rank == 0:
        ranks = TrainerGroup(shared_memory.Sender(hub), plan.trainers)
        return WeightSender(source, lane, group=ranks)
    return TrainerRank(source, lane, shared_memory.Receiver(hub), rank=rank, world=plan.trainers)


def receiver_of(
    plan: Plan,
    number: int,
    model: Fused,
    addresses: Sequence[dict[str, Any]],
    device: torch.device,
) -> WeightReceiver:
    """What an engine's rank receives with, connected to all ranks of the trainer."""
    shapes = plan.model.shapes()
    checkpoint = [CheckpointTensor(name, shape, torch.bfloat16) for name, shape in shapes.items()]
    first, *lanes = [connect(address, device) for address in addresses]
    target = RoutedTarget(model, checkpoint)
    return WeightReceiver(target, first, lanes=lanes, rank=number, world=plan.engines)


def _placement(name: str, tensor: Tensor) -> Placement:
    """Of Megatron's kind: columns of what projects back, rows of the rest."""
    if tensor.dim() == 1 or name.endswith("mlp.gate.weight"):
        return Replicate()
    return Shard(1 if re.search(r"(o|down)_proj", name) else 0)


def shell_of(module: nn.Module, *, replicated: bool = False) -> nn.Module:
    """The shards of a module's parameters as plain tensors, or those that all ranks hold whole."""
    shell = nn.Module()
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        if parameter.placements[0].is_replicate() == replicated:
            local = nn.Parameter(local_of(parameter))
            shell.register_parameter(name.replace(".", "_"), local)
    return shell


def wholes(module: nn.Module) -> Iterator[Tensor]:
    """Its parameters as they are on all ranks together, which have to ask for them together."""
    for parameter in module.parameters():
        assert isinstance(parameter, DTensor)
        yield parameter.full_tensor().detach()


def change_shards(
    shards: nn.Module, replicas: nn.Module, density: float, seed: int, rank: int
) -> None:
    """Flip bits of a rank's shards, and the same ones everywhere of what all ranks hold."""
    mutate(shards, density, (seed << 8) + rank)
    if any(True for _ in replicas.parameters()):
        mutate(replicas, density, seed)


def part_of(plan: Plan, number: int, device: torch.device) -> Fused:
    """The model of an engine's rank."""
    return Fused(plan.model, device, number, plan.engines, spreads_experts=True)


def holds(model: Fused, name: str, whole: Tensor) -> bool:
    """Whether an engine's rank has the bits of its part of a checkpoint tensor."""
    dim, start, stop = model.cut(name, tuple(whole.shape))
    live, given = model.parts[name], whole.narrow(dim, start, stop - start)
    return torch.equal(live.view(torch.int16), given.to(live.device).view(torch.int16))
