"""All ranks of a run: where they meet, and how bytes reach engines without deltasync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.gpu.engine import synchronize
from benchmarks.gpu.exchange import Broadcasts, Exchange, SharedBuffer, attach, share
from benchmarks.sharded.plan import ShardedPlan


class Group:
    """One rank's view.

    Attributes:
        plan: What the run measures.
        rank: Trainers come first.
        number: Among the trainers, or among the engine's ranks.
        device: Where the rank keeps its weights.
        trainers: The process group of all trainer ranks.
        near: Joins a trainer to the engine rank on the same GPU; one to all if each has its own.
        first: Joins the first trainer to all engine ranks.
    """

    near: Exchange
    first: Exchange

    def __init__(self, plan: ShardedPlan, rank: int, folder: Path) -> None:
        self.plan, self.rank, self.folder = plan, rank, folder
        self.device = plan.device(rank)
        self.is_trainer = rank < plan.trainers
        self.number = rank if self.is_trainer else rank - plan.trainers
        init = f"file://{folder / 'group'}"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=plan.world)
        backend = "gloo" if plan.device_type == "cpu" else "nccl"
        self.trainers: Any = dist.new_group(list(range(plan.trainers)), backend=backend)
        if plan.link == "local":
            self.near, self.first = self._shared()
        else:
            ranks = [0, *range(plan.trainers, plan.world)]
            group: Any = dist.new_group(ranks, backend=backend)
            self.near = self.first = Broadcasts(self.device, group)

    def meet(self) -> None:
        """Return when all ranks have come here, and their GPUs are done."""
        synchronize(self.device)
        dist.barrier()

    def hand_over(self) -> None:
        """Between giving and taking. Broadcasts meet by themselves."""
        if self.plan.link == "local":
            self.meet()

    def told(self, one: Any) -> list[Any]:
        """What each rank says."""
        every = [None] * self.plan.world
        dist.all_gather_object(every, one)
        return every

    def _shared(self) -> tuple[Exchange, Exchange]:
        how = None
        if self.is_trainer:
            folder = self.folder / str(self.rank)
            folder.mkdir()
            memory, how = share(2 * self.plan.model.numel, self.device, folder)
            own = SharedBuffer(memory)
        hows = self.told(how)
        if self.is_trainer:
            return own, own
        places = (self.number, 0)
        near, first = (SharedBuffer(attach(hows[n], self.plan.device(n))) for n in places)
        return near, first
