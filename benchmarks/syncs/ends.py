"""Both ends of a link. They do the same things by the same names, each its own part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.syncs import baselines
from benchmarks.syncs.fused import Fused
from benchmarks.syncs.group import Group, Watch
from benchmarks.syncs.links import connect, listen
from benchmarks.syncs.serving import served_module, served_source
from benchmarks.syncs.workload import Training, bits_of, mutate
from deltasync import (
    ModuleSource,
    ModuleTarget,
    SenderOptions,
    SyncStats,
    WeightReceiver,
    WeightSender,
)

TIMEOUT_S = 120.0
_DENSE_BYTES, _SPARSE_BYTES = 2, 7
"""Bytes of shared memory for each element: for values, or for indices, values and counts."""


class End:
    """A rank's part in everything that is timed, and in what lies between. This one has none.

    Attributes:
        stats: Of every sync; at engines nothing.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.stats = group, list[SyncStats]()

    def sync(self) -> None:
        """A sync of whatever has changed."""

    def dense(self) -> None:
        """The baseline that sends everything."""

    def sparse(self) -> None:
        """The baseline that sends what has changed since the last time, or since `rebase`."""

    def rebase(self) -> None:
        """Both ends of the baseline hold the same weights now."""

    def change(self, density: float, seed: int) -> None:
        """Flip bits of what is held here."""

    def begin_training(self) -> None:
        """Make an optimizer."""

    def train(self) -> None:
        """A step of it."""

    def check(self, *, baseline: bool = False) -> None:
        """Raises unless engines hold the trainer's bits, compared outside the library."""

    def watch(self) -> None:
        """From now on the memory taken is measured."""

    def taken(self) -> int:
        """Bytes taken since, beside weights and snapshot."""
        return 0

    def close(self) -> None:
        """Leave."""


class Trainer(End):
    """A trainer of one rank.

    Attributes:
        module: Its weights.
        sender: deltasync's end.
    """

    def __init__(self, group: Group, options: SenderOptions | None) -> None:
        super().__init__(group)
        plan = group.plan
        self.module = plan.model.build(group.device)
        self._base: list[Tensor] = []
        source = served_source(self.module) if plan.form else ModuleSource(self.module)
        transport, address = listen(plan.link, group.device, group.folder / "weights.sock")
        group.told(address)
        self.sender = WeightSender(source, transport, options=options)
        self.sender.wait_for_receivers(plan.engines, timeout_s=TIMEOUT_S)
        self.sync()

    def sync(self) -> None:
        stats = self.sender.send_weights(timeout_s=TIMEOUT_S)
        if stats.lost:
            raise RuntimeError(f"an engine left: {stats.lost}")
        self.stats.append(stats)

    def dense(self) -> None:
        baselines.give_dense(
            [p.detach().view(-1) for p in self.module.parameters()], self.group.first
        )
        self.group.hand_over()

    def rebase(self) -> None:
        self._base = [bits.clone() for bits in bits_of(self.module)]

    def sparse(self) -> None:
        found = baselines.find_changes(bits_of(self.module), self._base)
        baselines.give_sparse(found, self.group.first)
        self.group.hand_over()
        baselines.advance(self._base, found)

    def change(self, density: float, seed: int) -> None:
        mutate(self.module, density, seed)

    def begin_training(self) -> None:
        self._training = Training(self.module)

    def train(self) -> None:
        self._training.step()

    def check(self, *, baseline: bool = False) -> None:
        module = served_module(self.module) if self.group.plan.form else self.module
        weights = [p.detach().view(-1).view(torch.uint8) for p in module.parameters()]
        baselines.give_dense(weights, self.group.first)
        self.group.hand_over()

    def watch(self) -> None:
        self._watch = Watch(self.group.device)

    def taken(self) -> int:
        weights = sum(p.nbytes for p in self.module.parameters())
        return self._watch.taken(beside=2 * weights + self.group.first.num_bytes)

    def close(self) -> None:
        self.sender.close()


class Engine(End):
    """A model that deltasync writes and, once it is used, one that the baselines write."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        plan = group.plan
        module = plan.model.build(group.device)
        self._module = served_module(module) if plan.form else module
        del module
        self._fused: Fused | None = None
        address = group.told(None)[0]
        self._receiver = WeightReceiver(
            ModuleTarget(self._module),
            connect(address, group.device),
            engine=f"engine{group.number}",
        )
        self.sync()

    def sync(self) -> None:
        self._receiver.receive_weights(timeout_s=TIMEOUT_S)

    def dense(self) -> None:
        self.group.hand_over()
        baselines.take_dense(list(self._baseline().parts.values()), self.group.first)

    def sparse(self) -> None:
        self.group.hand_over()
        shapes = self.group.plan.model.shapes()
        changes = baselines.take_sparse(len(shapes), self.group.first)
        baselines.apply_through_nan(self._baseline(), shapes, changes)

    def check(self, *, baseline: bool = False) -> None:
        self.group.hand_over()
        held: list[Tensor] = [p.detach() for p in self._module.parameters()]
        if baseline:
            held = list(self._baseline().parts.values())
        weights = [one.reshape(-1).view(torch.uint8) for one in held]
        if wrong := baselines.differing(weights, self.group.first):
            raise RuntimeError(f"{wrong} parameters of the engine are not the trainer's")

    def watch(self) -> None:
        self._watch = Watch(self.group.device)

    def taken(self) -> int:
        return self._watch.taken(beside=sum(p.nbytes for p in self._module.parameters()))

    def close(self) -> None:
        self._receiver.close()

    def _baseline(self) -> Fused:
        if self._fused is None:
            self._fused = Fused(self.group.plan.model, self.group.device)
        return self._fused


@contextmanager
def joined(
    group: Group,
    options: SenderOptions | None = None,
    *,
    is_sparse: bool = False,
    **changes: Any,
) -> Iterator[End]:
    """This rank's end of a link on which all ranks hold the same weights; freed with the block.

    Args:
        group: This rank.
        options: deltasync's, at the trainer.
        is_sparse: Whether the baseline of sparse changes is run, which takes memory.
        changes: To the plan: another model or form, or fewer engines. Others have no part in it.
    """
    whole, group.plan = group.plan, replace(group.plan, **changes)
    group.join(_SPARSE_BYTES if is_sparse else _DENSE_BYTES)
    end: End
    if group.is_trainer:
        end = Trainer(group, options)
    elif group.number < group.plan.engines:
        end = Engine(group)
    else:
        end = End(group)
        group.told(None)
    yield end
    end.close()
    vars(end).clear()  # whoever still has it
    group.leave()
    group.plan = whole
