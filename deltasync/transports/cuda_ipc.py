"""Processes on one host: payloads in GPU memory, everything else over a unix socket.

A slot is a buffer from cudaMalloc, outside torch's caching allocator (whose expandable segments
have no handles). Each receiver maps it through CUDA's legacy IPC handles. Each slot has an
interprocess event, which the sender records on its stream when it sends a payload.

    sender                                        receiver
    SEGMENT(GPU, memory, event) + pipe end ---->  map the memory, hold the pipe end
    record event, FRAME(slot, ...) ------------>  poll the event on the host, return the payload
                                                  next receive: record its own event
          <------------------------- RELEASE ---  when that event is done
    EOF of the pipe  <--------------------------  unmapped, or dead: cudaFree is allowed

The receiver never makes a stream wait for an event of the sender, so nothing hangs when a sender
dies. Ownership: the sender owns a slot's memory and event, which live until the last receiver has
unmapped them; a payload belongs to the receiver until its next `receive`. After `connect`,
`disconnect`, `close` or PeerLost the memory behind a payload is unmapped, and touching it is an
illegal access. The driver frees what a dead process allocated. The socket admits only processes of
the same user, or of root, and these must trust each other: a payload is not copied before it is
checked, so a sender that writes to it meanwhile could reach any memory of the receiver's GPU.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from deltasync.errors import TransportError
from deltasync.transports.control.connection import BrokenProtocol, deadline_in
from deltasync.transports.cuda_runtime import HANDLE_BYTES, UUID_BYTES, Gpu
from deltasync.transports.slots import MEMORY, NUM_SLOTS, Announcement, Slot
from deltasync.transports.unix_socket import Segment, UnixReceiver, UnixSender

# as of every slot; UUID of the GPU, handle of the memory, handle of the event
_SEGMENT = struct.Struct(f"{MEMORY.format}{UUID_BYTES}s{HANDLE_BYTES}s{HANDLE_BYTES}s")
_POLL_S = 0.001
_GRACE_S = 1.0  # what closing waits for receivers to unmap


class _Exported:
    """Memory that receivers map, and the event that marks it as filled."""

    def __init__(self, gpu: Gpu, num_bytes: int) -> None:
        self._gpu = gpu
        self.memory = gpu.allocate(num_bytes)
        try:
            self.mark, mark_handle = gpu.exported_mark()
            self.handles = (gpu.uuid, gpu.export(self.memory), mark_handle)
        except TransportError:
            gpu.free(self.memory)
            raise
        self._leases: list[int] = []
        _exported[self.handles] = self

    @contextmanager
    def lease(self) -> Iterator[int]:
        """A descriptor for one receiver to hold for as long as it maps the memory."""
        self.is_mapped()  # forgets the leases of receivers that are gone
        mine, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._leases.append(mine)
        try:
            yield theirs
        finally:
            # Kept no longer than it takes to send: a process forked meanwhile would hold it too.
            os.close(theirs)

    def is_mapped(self) -> bool:
        """Whether a receiver still holds a lease."""
        for lease in list(self._leases):
            with contextlib.suppress(BlockingIOError):
                if os.read(lease, 1) == b"":
                    self._leases.remove(lease)
                    os.close(lease)
        return bool(self._leases)

    def free(self) -> None:
        _exported.pop(self.handles, None)
        self._gpu.free(self.memory)


# CUDA does not open a handle in the process that exported it, so that receivers look here first.
_exported: WeakValueDictionary[tuple[bytes, ...], _Exported] = WeakValueDictionary()
# Given up by slots, but still mapped by a receiver: freeing it now would be undefined.
_retired: list[_Exported] = []
_retired_lock = threading.Lock()


def _free_unmapped() -> bool:
    """Free what no receiver maps any more. Returns whether everything is freed."""
    with _retired_lock:
        for exported in list(_retired):
            if not exported.is_mapped():
                _retired.remove(exported)
                exported.free()
        return not _retired


class _Slot(Slot):
    """A buffer from cudaMalloc. It is replaced only when a larger payload comes."""

    granule_bytes = 32 << 20

    def __init__(self, index: int, gpu: Gpu) -> None:
        super().__init__(index, gpu.device)
        self._gpu = gpu
        self._current: _Exported | None = None

    def open(self, num_bytes: int) -> Tensor:
        _free_unmapped()
        memory = super().open(num_bytes)
        # Another stream may have filled it last, for receivers that were lost since.
        self.mark.wait()
        return memory

    def grow(self, num_bytes: int) -> Tensor:
        self.free()
        self._current = _Exported(self._gpu, num_bytes)
        self.mark = self._current.mark
        return self._current.memory

    @contextmanager
    def announced(self) -> Iterator[tuple[bytes, int]]:
        assert self._current is not None
        segment = _SEGMENT.pack(self.index, self.memory.numel(), *self._current.handles)
        with self._current.lease() as descriptor:
            yield segment, descriptor

    def free(self) -> None:
        """Free it at once if no receiver maps it, otherwise in a later call or with the process."""
        if self._current is not None:
            with _retired_lock:
                _retired.append(self._current)
        self._current = None
        super().free()
        _free_unmapped()


class Sender(UnixSender):
    """The sender's end: payloads in the memory of one GPU."""

    gpu_class: ClassVar[type[Gpu]] = Gpu

    def __init__(
        self, path: str | Path | None = None, *, device: torch.device | str | None = None
    ) -> None:
        """As `UnixSender`, with slots on `device`, by default the current GPU.

        Raises TransportUnavailable without CUDA.
        """
        gpu = self.gpu_class(device)
        slots = [_Slot(index, gpu) for index in range(NUM_SLOTS)]
        super().__init__(path, slots)

    def _dispose(self) -> None:
        super()._dispose()
        deadline = deadline_in(_GRACE_S)
        while not _free_unmapped() and time.monotonic() < deadline:
            time.sleep(_POLL_S)


class _Imported(Segment):
    """Memory of the sender as mapped here, and its mark; owns `lease`, a descriptor."""

    def __init__(self, gpu: Gpu, handles: tuple[bytes, ...], num_bytes: int, lease: int) -> None:
        """Raises TransportUnavailable, and leaves `lease` to the caller, if it cannot be."""
        here = _exported.get(handles)
        if here is None:
            owner, exported, event = handles
            super().__init__(*gpu.open(owner, exported, event, num_bytes))
        elif num_bytes <= here.memory.numel():
            super().__init__(here.memory[:num_bytes], here.mark)
        else:
            raise BrokenProtocol("a segment larger than its memory")
        self._gpu, self._is_opened, self._lease = gpu, here is None, lease

    def _forked(self) -> None:
        """Close the lease, so that the sender does not wait for a child. CUDA is not touched."""
        lease, self._lease = self._lease, -1
        if lease >= 0:
            os.close(lease)

    def close(self) -> None:
        try:
            if self.memory.is_cuda:
                torch.cuda.synchronize(self.memory.device)
            if self._is_opened:
                self._gpu.close(self.memory)
        finally:
            self._forked()


class Receiver(UnixReceiver):
    """A receiver's end: maps the sender's memory, and reads it in place on the same GPU."""

    gpu_class: ClassVar[type[Gpu]] = Gpu
    segment = _SEGMENT

    def __init__(self, path: str | Path, *, device: torch.device | str | None = None) -> None:
        """Connect to a sender that listens on `path`.

        Payloads are on `device`, by default the current GPU: the sender's own memory if that is
        its GPU, else a copy. The sender's GPU must be visible to this process.
        Raises TransportUnavailable without CUDA; so does `receive` if IPC is not possible.
        """
        self._gpu = self.gpu_class(device)
        super().__init__(path, self._gpu.device)
        self._copy = torch.empty(0, dtype=torch.uint8, device=self.device)

    def _mapped(self, num_bytes: int, handles: tuple[bytes, ...], descriptor: int) -> Segment:
        return _Imported(self._gpu, handles, num_bytes, descriptor)

    def _payload(self, told: Announcement) -> Tensor | None:
        """Of another GPU a copy, once: patches are read several times."""
        payload = super()._payload(told)
        if payload is None or payload.device == self.device:
            return payload
        if self._copy.numel() < payload.numel():
            self._copy = self._copy.new_empty(payload.numel())
        copy = self._copy[: payload.numel()].copy_(payload)
        self._take_back()
        return copy
