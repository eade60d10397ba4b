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
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from deltasync.errors import PeerLost, TransportError, TransportTimeout, TransportUnavailable
from deltasync.transports import forks
from deltasync.transports.base import Frame
from deltasync.transports.control.connection import (
    DEFAULT_MAX_MESSAGE_BYTES,
    BrokenProtocol,
    Kind,
    Message,
    Pace,
    busy_s,
    deadline_in,
    left_s,
)
from deltasync.transports.cuda_runtime import HANDLE_BYTES, UUID_BYTES, Gpu, IpcEvent
from deltasync.transports.slots import EMPTY_SLOT, NO_SLOT, NUM_SLOTS, Announcement, Slot
from deltasync.transports.unix_socket import UnixReceiver, UnixSender

# slot, bytes, UUID of the GPU, handle of the memory, handle of the event
_SEGMENT = struct.Struct(f"<BxxxxxxxQ{UUID_BYTES}s{HANDLE_BYTES}s{HANDLE_BYTES}s")
_GRANULE_BYTES = 32 << 20
_MIN_POLL_S, _MAX_POLL_S = 0.00002, 0.001
_MAX_WAITING = 256  # frames behind one whose payload is not there yet
_RELEASE_TIMEOUT_S = 5.0
_GRACE_S = 1.0  # what closing waits for payloads to be filled, and for receivers to unmap


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
_exported: WeakValueDictionary[tuple[bytes, bytes, bytes], _Exported] = WeakValueDictionary()
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

    def __init__(self, index: int, gpu: Gpu) -> None:
        super().__init__(index, gpu.empty(0))
        self._gpu = gpu
        self._current: _Exported | None = None

    def open(self, num_bytes: int) -> Tensor:
        _free_unmapped()
        if self._current is None or self.memory.numel() < num_bytes:
            self.free()
            size = -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
            self._current = _Exported(self._gpu, size)
            self.memory = self._current.memory
        # Another stream may have filled it last, for receivers that were lost since.
        self._current.mark.wait()
        return self.memory[:num_bytes]

    def filled(self) -> None:
        assert self._current is not None  # it was opened to be filled
        self._current.mark.record()

    def settle(self) -> None:
        deadline = deadline_in(_GRACE_S)
        while self._current and not self._current.mark.query() and time.monotonic() < deadline:
            time.sleep(_MIN_POLL_S)

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
        self.memory = self._gpu.empty(0)
        self.known_to.clear()
        _free_unmapped()


class Sender(UnixSender):
    """The sender's end: payloads in the memory of one GPU."""

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        device: torch.device | str | None = None,
        max_payload_bytes: int | None = None,
    ) -> None:
        """As `UnixSender`, with slots on `device`, by default the current GPU.

        Payloads from `buffer()` are sent as they are; others, of this or another GPU, are copied.
        Raises TransportUnavailable without CUDA.
        """
        gpu = self._open_gpu(device)
        slots = [_Slot(index, gpu) for index in range(NUM_SLOTS)]
        super().__init__(path, slots, max_payload_bytes=max_payload_bytes)

    @staticmethod
    def _open_gpu(device: torch.device | str | None) -> Gpu:
        return Gpu(device)

    def _dispose(self) -> None:
        super()._dispose()
        deadline = deadline_in(_GRACE_S)
        while not _free_unmapped() and time.monotonic() < deadline:
            time.sleep(_MAX_POLL_S)


class _Imported:
    """Memory of the sender as mapped here, and its event; owns `lease`, a descriptor."""

    def __init__(
        self, gpu: Gpu, handles: tuple[bytes, bytes, bytes], num_bytes: int, lease: int
    ) -> None:
        """Raises TransportUnavailable, and leaves `lease` to the caller, if it cannot be."""
        self._gpu = gpu
        self.memory: Tensor
        self.mark: IpcEvent
        here = _exported.get(handles)
        self._is_opened = here is None
        if here is None:
            self.memory, self.mark = gpu.open(*handles, num_bytes)
        elif num_bytes <= here.memory.numel():
            self.memory, self.mark = here.memory[:num_bytes], here.mark
        else:
            raise BrokenProtocol("a segment larger than its memory")
        self._lease = lease
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        """Close the lease, so that the sender does not wait for a child. CUDA is not touched."""
        lease, self._lease = self._lease, -1
        if lease >= 0:
            os.close(lease)

    def close(self) -> None:
        """Unmap, after the reads that were enqueued here."""
        try:
            self._gpu.synchronize(self.memory)
            if self._is_opened:
                self._gpu.close(self.memory)
        finally:
            if self._lease >= 0:
                os.close(self._lease)


class Receiver(UnixReceiver):
    """A receiver's end: maps the sender's memory, and reads it in place on the same GPU."""

    def __init__(
        self,
        path: str | Path,
        *,
        device: torch.device | str | None = None,
        max_payload_bytes: int | None = None,
    ) -> None:
        """Connect to a sender that listens on `path`; larger segments are refused.

        Payloads are on `device`, by default the current GPU: the sender's own memory if that is
        its GPU, else a copy. The sender's GPU must be visible to this process.
        Raises TransportUnavailable without CUDA; so does `receive` if IPC is not possible.
        """
        self._gpu = self._open_gpu(device)
        super().__init__(path, self._gpu.device.type, max_payload_bytes=max_payload_bytes)
        self._segments: dict[int, _Imported] = {}
        self._waiting: deque[Announcement] = deque()  # told of, not handed out yet
        self._held: Announcement | None = None  # handed out
        self._releases: deque[tuple[IpcEvent, Announcement]] = (
            deque()
        )  # let go of, maybe still read
        self._copy = self._gpu.empty(0)

    @staticmethod
    def _open_gpu(device: torch.device | str | None) -> Gpu:
        return Gpu(device)

    def receive(self, *, timeout_s: float) -> Frame:
        """The payload is the sender's memory if that is of this GPU: no copy is made then.

        What the current stream was given before this call may still read the last payload.
        """
        deadline = deadline_in(timeout_s)
        with self._gate.entered():
            self._let_go()
            try:
                return self._next(deadline)
            except (PeerLost, TransportUnavailable):
                self._forget()
                raise

    def progress(self) -> None:
        """Release to the sender what nothing on the GPU reads any more."""
        with self._gate.entered():
            self._send_releases(deadline_in(_RELEASE_TIMEOUT_S))

    def _next(self, deadline: float) -> Frame:
        pace = Pace(busy_s("cuda"))
        while True:
            self._send_releases(deadline)
            if (frame := self._take_ready()) is not None:
                return frame
            expired = time.monotonic() >= deadline
            wait_s = left_s(deadline)
            if self._waiting or self._releases:  # on the GPU, which wakes no socket
                wait_s = pace.pause_s(deadline)
            message = self._client.poll(wait_s)
            if message is not None:
                self._handle(message)
            elif expired:
                raise TransportTimeout("nothing came in time")

    def _let_go(self) -> None:
        """IpcEvent where the reads of the last payload end on the current stream."""
        held, self._held = self._held, None
        if held is not None:
            self._release_later(held)

    def _release_later(self, told: Announcement) -> None:
        mark = self._gpu.mark()
        mark.record()
        self._releases.append((mark, told))

    def _send_releases(self, deadline: float) -> None:
        """Release slots whose reads are done."""
        while self._releases and self._releases[0][0].query():
            _, told = self._releases.popleft()
            # A sender that is gone may have sent more, which is still handed out.
            with contextlib.suppress(PeerLost):
                self._client.write(Kind.RELEASE, told.release, deadline)

    def _take_ready(self) -> Frame | None:
        """The oldest waiting frame, if its payload has arrived."""
        if not self._waiting:
            return None
        told = self._waiting[0]
        if told.slot in self._segments and not self._segments[told.slot].mark.query():
            return None
        self._waiting.popleft()
        if told.slot == NO_SLOT:
            return Frame(told.header)
        if told.slot == EMPTY_SLOT:
            return Frame(told.header, self._gpu.empty(0))
        memory = self._segments[told.slot].memory
        payload = memory[told.start : told.start + told.num_bytes]
        if self._gpu.is_near(memory):
            self._held = told
            return Frame(told.header, payload)
        return Frame(told.header, self._fetch(payload, told))

    def _fetch(self, payload: Tensor, told: Announcement) -> Tensor:
        """A copy on this GPU. Patches are read several times; this way they cross the bus once."""
        if self._copy.numel() < payload.numel():
            self._copy = self._gpu.empty(payload.numel())
        copy = self._copy[: payload.numel()].copy_(payload)
        self._release_later(told)
        return copy

    def _forget(self) -> None:
        """Unmap, after the reads that were enqueued, then close the connection."""
        self._held = None
        self._waiting.clear()
        self._releases.clear()
        try:
            while self._segments:
                self._segments.popitem()[1].close()
        finally:
            self._client.hang_up()

    def _handle(self, message: Message) -> None:
        if message.kind is Kind.SEGMENT:
            self._map(message)
            return
        sizes = {index: segment.memory.numel() for index, segment in self._segments.items()}
        self._waiting.append(Announcement.parse(message.data, sizes))
        num_bytes = sum(len(told.header) for told in self._waiting)
        if len(self._waiting) > _MAX_WAITING or num_bytes > DEFAULT_MAX_MESSAGE_BYTES:
            raise BrokenProtocol("more frames than can wait for a payload")

    def _map(self, message: Message) -> None:
        if message.descriptor is None:
            raise BrokenProtocol("a segment without a lease")
        try:
            index, num_bytes, handles = self._parse_segment(message.data)
            if index in self._segments:
                self._segments.pop(index).close()
            imported = _Imported(self._gpu, handles, num_bytes, message.descriptor)
        except BaseException:
            os.close(message.descriptor)
            raise
        self._segments[index] = imported

    def _parse_segment(self, data: bytes) -> tuple[int, int, tuple[bytes, bytes, bytes]]:
        """Slot, bytes and handles of a SEGMENT message. Raises BrokenProtocol."""
        if len(data) != _SEGMENT.size:
            raise BrokenProtocol("a segment message of the wrong size")
        index, num_bytes, uuid, memory, event = _SEGMENT.unpack(data)
        self._check_segment(index, num_bytes, _GRANULE_BYTES)
        in_use = [*self._waiting, *(told for _, told in self._releases)]
        if any(told.slot == index for told in in_use):
            raise BrokenProtocol("a segment in place of one that is in use")
        return index, num_bytes, (uuid, memory, event)
