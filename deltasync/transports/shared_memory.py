"""Processes on one host: payloads in shared memory, everything else over a unix socket.

A slot is a memfd, sealed against resizing and passed to each receiver once. `buffer` returns the
slot itself, and every receiver reads that same memory: packing is the only copy. The kernel frees
the memory with the last process, however that process ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from deltasync.errors import TransportUnavailable
from deltasync.transports import forks
from deltasync.transports.control.connection import BrokenProtocol
from deltasync.transports.marks import Mark
from deltasync.transports.slots import MEMORY, NUM_SLOTS, Slot
from deltasync.transports.unix_socket import Segment, UnixReceiver, UnixSender

_CPU = torch.device("cpu")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class _Slot(Slot):
    """A memfd."""

    def __init__(self, index: int) -> None:
        super().__init__(index, _CPU)
        self._descriptor = -1
        forks.inert_in_children(self.free)  # the memory lasts no longer for a child

    def grow(self, num_bytes: int) -> Tensor:
        self.free()
        with forks.making:
            self._descriptor = os.memfd_create("deltasync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, num_bytes)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        return torch.frombuffer(mmap.mmap(self._descriptor, num_bytes), dtype=torch.uint8)

    @contextmanager
    def announced(self) -> Iterator[tuple[bytes, int]]:
        yield MEMORY.pack(self.index, self.memory.numel()), self._descriptor

    def free(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        super().free()


class Sender(UnixSender):
    """The sender's end: payloads in host memory."""

    def __init__(self, path: str | Path | None = None) -> None:
        """As `UnixSender`. Raises TransportUnavailable without memfd."""
        if not hasattr(os, "memfd_create"):
            raise TransportUnavailable("shared memory needs Linux; use the collective transport")
        super().__init__(path, [_Slot(index) for index in range(NUM_SLOTS)])


class Receiver(UnixReceiver):
    """A receiver's end: maps the sender's segments and reads payloads in place."""

    segment = MEMORY

    def __init__(self, path: str | Path) -> None:
        """Connect to a sender that listens on `path`."""
        super().__init__(path, _CPU)

    def _mapped(self, num_bytes: int, handles: tuple[bytes, ...], descriptor: int) -> Segment:
        """A copy-on-write mapping: a receiver that writes to a payload affects only itself.

        If a segment could still shrink, its owner could kill this process with SIGBUS.
        """
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if seals & _SEALS != _SEALS or os.fstat(descriptor).st_size != num_bytes:
                raise BrokenProtocol("a segment that is not sealed or not of the size it should be")
            memory = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise BrokenProtocol(f"a segment that cannot be mapped: {error.strerror}") from error
        os.close(descriptor)
        return Segment(torch.frombuffer(memory, dtype=torch.uint8), Mark(_CPU))
