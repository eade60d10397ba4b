"""How baselines move bytes to the engine, without deltasync.

On two devices: broadcasts in a group of torch.distributed. On one device NCCL refuses two
ranks, so that the trainer copies into memory that both processes map; nothing is broadcast.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TRAINER = 0


class Broadcasts:
    """Rank 0 is the trainer, which gives in the order in which the engine takes.

    Attributes:
        num_bytes: Memory that it holds on the device.
    """

    num_bytes = 0

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device, self._group = device, group

    def begin(self) -> None:
        """Start over at the beginning of shared memory. Both ends call it ahead of a transfer."""

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Where to put what is sent, so that it need not be moved there."""
        return torch.empty(numel, dtype=dtype, device=self._device)

    def send(self, tensor: Tensor) -> None:
        """Give what was put there, or a flat tensor of one's own if nothing is shared."""
        dist.broadcast(tensor.view(torch.uint8), TRAINER, group=self._group)  # gloo has no int16

    def give(self, *tensors: Tensor) -> None:
        """Flat tensors of one dtype, which are taken as one."""
        self.send(tensors[0] if len(tensors) == 1 else torch.cat(tensors))

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """What was given; valid until the next transfer begins."""
        tensor = self.room(numel, dtype)
        self.send(tensor)
        return tensor


class SharedBuffer:
    """Memory of one device that both processes see. The trainer fills it, then says so."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self.num_bytes = memory, memory.nbytes
        self._used = 0

    def begin(self) -> None:
        self._used = 0

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.take(numel, dtype)

    def send(self, tensor: Tensor) -> None:
        """It is there already."""

    def give(self, *tensors: Tensor) -> None:
        torch.cat(tensors, out=self.take(sum(t.numel() for t in tensors), tensors[0].dtype))

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        item_size = torch.empty(0, dtype=dtype).element_size()
        start = -(-self._used // item_size) * item_size
        self._used = start + numel * item_size
        return self._memory[start : self._used].view(dtype)


Exchange = Broadcasts | SharedBuffer
"""One end of either."""


def share(num_bytes: int, device: torch.device, folder: Path) -> tuple[Tensor, str]:
    """uint8[num_bytes] of memory that another process can map, and how, as text."""
    if device.type == "cpu":
        path = str(folder / "buffer")
        memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        return memory, json.dumps([path, num_bytes])
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    # What torch.multiprocessing sends between processes, as text instead of a pickle.
    handle = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    fields: list[Any] = [{"hex": h.hex()} if isinstance(h, bytes) else h for h in handle]
    return memory, json.dumps([*fields, memory.storage_offset(), num_bytes])


def attach(how: str, device: torch.device) -> Tensor:
    """The memory that `share` described, in this process."""
    fields = json.loads(how)
    if device.type == "cpu":
        path, num_bytes = fields
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    *handle, offset, num_bytes = fields
    torch.cuda.init()  # type: ignore[no-untyped-call]
    arguments = [bytes.fromhex(h["hex"]) if isinstance(h, dict) else h for h in handle]
    storage = torch.UntypedStorage._new_shared_cuda(*arguments)
    memory = torch.empty(0, dtype=torch.uint8, device=device)
    return memory.set_(storage, offset, (num_bytes,), (1,))
