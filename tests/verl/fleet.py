"""Checkpoint engines of a trainer and of rollouts in threads, driven as verl's manager does it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from deltasync.delta.bits import as_bits
from deltasync.integrations.verl import DeltaSyncEngine

Weights = dict[str, Tensor]
TIMEOUT_S = 20.0


class Bag(nn.Module):
    """An inference engine's model: parameters of any name, empty until they are loaded."""

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {name: f"p{number}" for number, name in enumerate(like)}
        for name, tensor in like.items():
            parameter = nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
            self.register_parameter(self._names[name], parameter)

    def __getitem__(self, name: str) -> Tensor:
        return self.get_parameter(self._names[name])

    def load(self, name: str, tensor: Tensor) -> None:
        self[name].copy_(tensor)

    def holds(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether it has these bits."""
        return all(
            torch.equal(as_bits(self[name]), as_bits(tensor.contiguous()))
            for name, tensor in weights.items()
        )


class LoadsByName:
    """What verl's rollout adapters do: load whole tensors by name.

    Args:
        load: Takes one of them.

    Attributes:
        handed: Names that it was given in the last update.
        fails_after: Tensors that it loads before it fails, once; None for never.
    """

    def __init__(self, load: Callable[[str, Tensor], None]) -> None:
        self._load = load
        self.handed: list[str] = []
        self.steps: int | None = None
        self.fails_after: int | None = None
        self.replica_rank, self.is_leader_rank = 0, True

    async def update_weights(
        self,
        weights: AsyncIterator[tuple[str, Tensor]],
        global_steps: int | None = None,
        wire_format: str = "",
    ) -> None:
        assert wire_format == "named_tensors"
        self.handed = []
        async for name, tensor in weights:
            if len(self.handed) == self.fails_after:
                self.fails_after = None
                raise RuntimeError("planted: out of memory")
            self._load(name, tensor)
            self.handed.append(name)
        self.steps = global_steps


class Replica:
    """A rollout worker."""

    def __init__(self, like: Weights, **kwargs: Any) -> None:
        self.engine = DeltaSyncEngine(1 << 20, **kwargs)
        self.model = Bag(like)
        self.adapter = LoadsByName(self.model.load)

    def update(self, step: int) -> None:
        adapter, engine = self.adapter, self.engine
        weights = engine.receive_weights(global_steps=step)
        call = adapter.update_weights(weights, step, engine.wire_format)
        asyncio.run(asyncio.wait_for(call, TIMEOUT_S))


class Fleet:
    """A trainer of `ranks` ranks, all of which gather the same weights, and rollouts."""

    def __init__(
        self,
        weights: Weights,
        *,
        replicas: int = 2,
        ranks: int = 1,
        bucket: int = 1 << 20,
        **kwargs: Any,
    ) -> None:
        self.weights = weights
        self._kwargs = {"link": "shared_memory", "timeout_s": TIMEOUT_S / 2} | kwargs
        self.trainers = [
            DeltaSyncEngine(bucket, is_master=rank == 0, **self._kwargs) for rank in range(ranks)
        ]
        self.replicas: list[Replica] = []
        for _ in range(replicas):
            self.add()
        self.drained = 0
        self.step = 0

    def add(self) -> Replica:
        replica = Replica(self.weights, **self._kwargs)
        self.replicas.append(replica)
        return replica

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        """As verl does it: gathered into memory that is used again for the next tensor."""
        for name, tensor in self.weights.items():
            gathered = tensor.clone(memory_format=torch.preserve_format)
            yield name, gathered
            if gathered.is_floating_point():
                gathered.fill_(-1)
        self.drained += 1

    def update(self, export: Iterable[tuple[str, Tensor]] | None = None) -> dict[str, float]:
        """One `CheckpointEngineManager.update_weights`. Returns the metrics of all ranks."""
        self.step += 1
        engines = [*self.trainers, *(replica.engine for replica in self.replicas)]
        metadata = [engine.prepare() for engine in engines]
        ranks = len(self.trainers)
        told = DeltaSyncEngine.build_topology(ranks, len(self.replicas), metadata)
        for group, kwargs in ((engines[:ranks], told[0]), (engines[ranks:], told[1])):
            for number, engine in enumerate(group):
                engine.init_process_group(**{key: each[number] for key, each in kwargs.items()})
        metrics: dict[str, float] = {}
        with ThreadPoolExecutor(len(engines)) as pool:
            sends = [
                pool.submit(asyncio.run, engine.send_weights(export or self.exported(), self.step))
                for engine in self.trainers
            ]
            updates = [pool.submit(replica.update, self.step) for replica in self.replicas]
            problems = [call.exception() for call in sends]
            problems += [call.exception() for call in updates]
        for problem in problems:
            if problem is not None:
                raise problem
        for send in sends:
            metrics |= send.result() or {}
        for engine in engines:
            engine.finalize()
        return metrics

    def close(self) -> None:
        for engine in (*self.trainers, *(replica.engine for replica in self.replicas)):
            engine.close()

    @property
    def is_in_sync(self) -> bool:
        return all(replica.model.holds(self.weights) for replica in self.replicas)
