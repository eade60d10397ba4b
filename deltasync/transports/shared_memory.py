"""Processes on one host: payloads in shared memory, everything else over a unix socket.

A slot is a memfd, sealed against resizing and passed to each receiver once. `buffer` returns the
slot itself, and every receiver reads that same memory: packing is the only copy. The kernel frees
the memory with the last process, however that process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from deltasync.errors import PeerLost, TransportUnavailable
from deltasync.transports import forks
from deltasync.transports.base import Frame
from deltasync.transports.control.connection import BrokenProtocol, Kind, Message, deadline_in
from deltasync.transports.slots import EMPTY_SLOT, NO_SLOT, NUM_SLOTS, Announcement, Slot
from deltasync.transports.unix_socket import UnixReceiver, UnixSender

_SEGMENT = struct.Struct("<BxxxxxxxQ")  # slot, segment bytes
_GRANULE_BYTES = 1 << 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class _Slot(Slot):
    """A memfd."""

    def __init__(self, index: int) -> None:
        super().__init__(index, torch.empty(0, dtype=torch.uint8, device="cpu"))
        self._descriptor = -1
        forks.inert_in_children(self._forked)

    def open(self, num_bytes: int) -> Tensor:
        if self.memory.numel() < num_bytes:
            size = -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
            self.free()
            with forks.making:
                self._descriptor = _create_segment(size)
            self.memory = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)
        return self.memory[:num_bytes]

    def filled(self) -> None:
        """Do nothing: host memory is written at once."""

    def settle(self) -> None:
        """Do nothing: there is nothing to wait for."""

    @contextmanager
    def announced(self) -> Iterator[tuple[bytes, int]]:
        yield _SEGMENT.pack(self.index, self.memory.numel()), self._descriptor

    def free(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.known_to.clear()

    def _forked(self) -> None:
        """The memory lasts no longer for a child."""
        self.free()


class Sender(UnixSender):
    """The sender's end: payloads in host memory."""

    def __init__(
        self, path: str | Path | None = None, *, max_payload_bytes: int | None = None
    ) -> None:
        """As `UnixSender`. Raises TransportUnavailable without memfd."""
        if not hasattr(os, "memfd_create"):
            raise TransportUnavailable("shared memory needs Linux; use the collective transport")
        slots = [_Slot(index) for index in range(NUM_SLOTS)]
        super().__init__(path, slots, max_payload_bytes=max_payload_bytes)


class Receiver(UnixReceiver):
    """A receiver's end: maps the sender's segments and reads payloads in place."""

    def __init__(self, path: str | Path, *, max_payload_bytes: int | None = None) -> None:
        """Connect to a sender that listens on `path`; larger segments are refused."""
        super().__init__(path, "cpu", max_payload_bytes=max_payload_bytes)
        self._segments: dict[int, Tensor] = {}
        self._held: bytes | None = None  # the release message of the payload in use
        forks.inert_in_children(self._forked)

    def receive(self, *, timeout_s: float) -> Frame:
        """Return the next frame. Its payload is shared memory, not a copy."""
        deadline = deadline_in(timeout_s)
        with self._gate.entered():
            self._let_go(deadline)
            try:
                for _ in range(NUM_SLOTS + 1):
                    message = self._client.next(deadline)
                    if message.kind is Kind.FRAME:
                        return self._frame(message.data)
                    self._map(message)
                raise BrokenProtocol("segments without a frame")
            except BrokenProtocol:
                self._forget()
                raise

    def progress(self) -> None:
        """Do nothing: payloads arrive without work at this end."""

    def _let_go(self, deadline: float) -> None:
        """Release the payload of the last frame to the sender."""
        held, self._held = self._held, None
        if held is not None:
            # A sender that is gone may have sent more, which `next` still gives out.
            with contextlib.suppress(PeerLost):
                self._client.write(Kind.RELEASE, held, deadline)

    def _forget(self) -> None:
        self._client.hang_up()
        self._segments.clear()
        self._held = None

    def _forked(self) -> None:
        """The memory lasts no longer for a child."""
        self._segments.clear()
        self._held = None

    def _map(self, message: Message) -> None:
        if message.descriptor is None:
            raise BrokenProtocol("a segment without memory")
        try:
            if len(message.data) != _SEGMENT.size:
                raise BrokenProtocol("a segment message of the wrong size")
            index, size = _SEGMENT.unpack(message.data)
            self._check_segment(index, size, _GRANULE_BYTES)
            self._segments[index] = _map_segment(message.descriptor, size)
        finally:
            os.close(message.descriptor)

    def _frame(self, data: bytes) -> Frame:
        sizes = {index: segment.numel() for index, segment in self._segments.items()}
        told = Announcement.parse(data, sizes)
        if told.slot == NO_SLOT:
            return Frame(told.header)
        if told.slot == EMPTY_SLOT:
            return Frame(told.header, torch.empty(0, dtype=torch.uint8, device="cpu"))
        self._held = told.release
        part = slice(told.start, told.start + told.num_bytes)
        return Frame(told.header, self._segments[told.slot][part])


def _create_segment(size: int) -> int:
    """Create a segment of `size` zero bytes that can neither grow nor shrink; its descriptor."""
    descriptor = os.memfd_create("deltasync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _map_segment(descriptor: int, size: int) -> Tensor:
    """Return uint8[size]: the memory behind `descriptor`, whose size and seals are checked.

    If a segment could still shrink, its owner could kill this process with SIGBUS. The mapping is
    copy-on-write, so a receiver that writes to a payload affects only itself.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if seals & _SEALS != _SEALS or os.fstat(descriptor).st_size != size:
            raise BrokenProtocol("a segment that is not sealed or not of the size it should be")
        memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise BrokenProtocol(f"a segment that cannot be mapped: {error.strerror}") from error
    return torch.frombuffer(memory, dtype=torch.uint8)
