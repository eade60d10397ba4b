"""All ranks of a run: where they meet, how bytes reach engines without deltasync, and memory."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.syncs.exchange import Broadcasts, Exchange, SharedBuffer, attach, share
from benchmarks.syncs.plan import Plan


class Group:
    """One rank's view.

    Attributes:
        plan: What the run measures.
        rank: Trainers come first.
        number: Among the trainers, or among the engines' ranks.
        device: Where the rank keeps its weights.
        trainers: The process group of all trainer ranks.
        near: Joins a trainer to the engine rank on the same GPU; one to all if each has its own.
        first: Joins the first trainer to all engine ranks.
    """

    near: Exchange
    first: Exchange

    def __init__(self, plan: Plan, rank: int, folder: Path) -> None:
        self.plan, self.rank, self.folder = plan, rank, folder
        self.device = plan.device(rank)
        self.is_trainer = rank < plan.trainers
        self.number = rank if self.is_trainer else rank - plan.trainers
        init = f"file://{folder / 'group'}"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=plan.world)
        backend = "gloo" if plan.device_type == "cpu" else "nccl"
        self.trainers: Any = dist.new_group(list(range(plan.trainers)), backend=backend)
        self._ends: Any = None
        if plan.link == "collective":
            self._ends = dist.new_group([0, *range(plan.trainers, plan.world)], backend=backend)

    def join(self, bytes_each: int) -> None:
        """Make `near` and `first`, with so many bytes for an element where memory is shared."""
        if self.plan.link == "collective":
            self.near = self.first = Broadcasts(self.device, self._ends)
            return
        how = None
        if self.is_trainer:
            folder = self.folder / f"memory{self.rank}"
            folder.mkdir(exist_ok=True)
            memory, how = share(bytes_each * self.plan.model.numel, self.device, folder)
            own = SharedBuffer(memory)
        hows = self.told(how)
        if self.is_trainer:
            self.near = self.first = own
            return
        places = (self.number % self.plan.trainers, 0)
        self.near, self.first = (SharedBuffer(attach(hows[n], self.plan.device(n))) for n in places)

    def leave(self) -> None:
        """Let go of what `join` made, everywhere."""
        self.meet()
        del self.near, self.first
        free_memory(self.device)
        self.meet()

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
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, one)
        return every


class Watch:
    """The most memory that this process takes: on a GPU torch's allocator, else resident."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        free_memory(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:  # the kernel's high-water mark begins here
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._resident = _status_bytes("VmRSS")

    def taken(self, *, beside: int) -> int:
        """Bytes since the beginning: on a GPU beside so many that are meant to be there."""
        if self._device.type != "cuda":
            return _status_bytes("VmHWM") - self._resident
        return torch.cuda.max_memory_allocated(self._device) - beside


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cpu":  # what was freed and is kept would hide what a sync takes
        ctypes.CDLL(None).malloc_trim(0)
    else:
        torch._C._cuda_clearCublasWorkspaces()  # of products in what was measured before
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call] # what another process let go of
        torch.cuda.empty_cache()


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
