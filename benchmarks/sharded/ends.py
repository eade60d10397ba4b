"""The two kinds of ranks. Both do the same things by the same names, each its own part."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks.fused import Fused
from benchmarks.gpu import baselines
from benchmarks.gpu.links import connect, listen
from benchmarks.gpu.workload import Training, mutate
from benchmarks.sharded.group import Group
from benchmarks.sharded.ways import GatheringTrainer, ShardedEngine
from benchmarks.workload import bits_of
from deltasync import (
    CheckpointTensor,
    ModuleSource,
    RoutedTarget,
    SyncStats,
    TrainerGroup,
    TrainerRank,
    WeightReceiver,
    WeightSender,
)
from deltasync.delta.shard import local_of
from deltasync.transports import shared_memory

_TIMEOUT_S = 120.0


class End(Protocol):
    """A rank's part in everything that is timed, and in what lies between.

    Attributes:
        stats: Of every sync; at engine ranks nothing.
    """

    stats: list[SyncStats]

    def sync(self) -> None: ...
    def dense(self) -> None: ...
    def gathered(self) -> None: ...

    def change(self, density: float, seed: int) -> None:
        """Flip bits of what is held here."""
        ...

    def begin_training(self) -> None: ...
    def train(self) -> None: ...

    def check(self) -> None:
        """Raises unless engines hold the trainer's bits, compared outside the library."""
        ...

    def close(self) -> None: ...


class TrainerEnd:
    """A rank of FSDP2."""

    def __init__(self, group: Group) -> None:
        self._group, self.stats = group, list[SyncStats]()
        module = group.plan.model.build(group.device)
        mesh = DeviceMesh.from_group(group.trainers, group.device.type)
        fully_shard(module, mesh=mesh)
        self._shell = nn.Module()  # of the shards as plain tensors
        for name, parameter in module.named_parameters():
            local = nn.Parameter(local_of(parameter))
            self._shell.register_parameter(name.replace(".", "_"), local)
        self._ways = GatheringTrainer(bits_of(self._shell), group.trainers)
        self._base = [bits.clone() for bits in self._ways.shards]
        place = group.folder / f"lane{group.rank}"
        lane, address = listen(group.plan.link, group.device, place)
        group.told(address)
        hub, world = group.folder / "calls", group.plan.trainers
        source = ModuleSource(module)
        self._sender: WeightSender | TrainerRank
        if group.rank == 0:
            ranks = TrainerGroup(shared_memory.Sender(hub), world)
            self._sender = WeightSender(source, lane, group=ranks)
            self._sender.wait_for_receivers(group.plan.engines, timeout_s=_TIMEOUT_S)
        else:
            link = shared_memory.Receiver(hub)
            self._sender = TrainerRank(source, lane, link, rank=group.rank, world=world)
        self.sync()

    def sync(self) -> None:
        stats = self._sender.send_weights(timeout_s=_TIMEOUT_S)
        if stats.lost:
            raise RuntimeError(f"an engine rank left: {stats.lost}")
        self.stats.append(stats)

    def dense(self) -> None:
        self._ways.give_dense(self._group.near)
        self._group.hand_over()

    def gathered(self) -> None:
        found = self._ways.give_sparse(self._base, self._group.first)
        self._group.hand_over()
        baselines.advance(self._base, found)

    def change(self, density: float, seed: int) -> None:
        mutate(self._shell, density, seed * self._group.plan.trainers + self._group.rank)

    def begin_training(self) -> None:
        self._training = Training(self._shell)

    def train(self) -> None:
        self._training.step()

    def check(self) -> None:
        for _ in range(2):
            self.dense()

    def close(self) -> None:
        self._sender.close()


class EngineEnd:
    """A rank of an engine, with a model that deltasync writes and one for the other ways."""

    def __init__(self, group: Group) -> None:
        plan = group.plan
        self._group, shapes = group, plan.model.shapes()
        self.stats: list[SyncStats] = []
        models = [Fused(plan.model, group.device, group.number, plan.engines) for _ in range(2)]
        self._model, self._ways = (ShardedEngine(one, shapes, plan.trainers) for one in models)
        checkpoint = [CheckpointTensor(n, s, torch.bfloat16) for n, s in shapes.items()]
        addresses = group.told(None)[: plan.trainers]
        first, *lanes = [connect(address, group.device) for address in addresses]
        self._receiver = WeightReceiver(
            RoutedTarget(models[0], checkpoint),
            first,
            lanes=lanes,
            rank=group.number,
            world=plan.engines,
        )
        self.sync()

    def sync(self) -> None:
        self._receiver.receive_weights(timeout_s=_TIMEOUT_S)

    def dense(self) -> None:
        self._group.hand_over()
        self._ways.take_dense(self._group.near)

    def gathered(self) -> None:
        self._group.hand_over()
        self._ways.take_sparse(self._group.first)

    def change(self, density: float, seed: int) -> None:
        """That is the trainer's."""

    def begin_training(self) -> None:
        """So is that."""

    def train(self) -> None:
        """And that."""

    def check(self) -> None:
        for model in (self._model, self._ways):
            self._group.hand_over()
            if wrong := model.differing(self._group.near):
                raise RuntimeError(f"{wrong} pieces of the engine are not the trainer's")

    def close(self) -> None:
        self._receiver.close()
