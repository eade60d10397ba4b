"""Processes on one host: payloads in shared memory, everything else over a unix socket.

A slot is a memfd, sealed against resizing and handed to each receiver once. `buffer` gives out
the slot itself, and every receiver reads that same memory: packing is the only copy. There are
two slots, so that the sender packs one while receivers read the other; a slot is written again
only when each receiver it was sent to has let go of it. The kernel frees it all with the last
process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from deltasync.errors import ConfigError, TransportClosed, TransportError, TransportUnavailable
from deltasync.transports.base import Capabilities, Frame
from deltasync.transports.control import (
    BrokenProtocol,
    Deadline,
    Kind,
    Message,
    check_frame,
    check_size,
    failure,
)
from deltasync.transports.endpoints import Client, Gate, Server

_NUM_SLOTS = 2
_NO_SLOT = 0xFF  # a frame without a payload
_EMPTY_SLOT = 0xFE  # a payload of no bytes
_FRAME = struct.Struct("<BxxxIQQ")  # slot, sequence, payload start and bytes; the header follows
_SEGMENT = struct.Struct("<BxxxxxxxQ")  # slot, segment bytes
_RELEASE = struct.Struct("<BxxxI")  # slot, sequence
_GRANULE_BYTES = 1 << 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class _Slot:
    """Memory for one payload at a time, and who still reads it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.descriptor = -1
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.known_to: set[int] = set()
        self.readers: set[int] = set()
        self.sequence = 0

    def grow(self, num_bytes: int) -> None:
        """Make room for `num_bytes`, in a new segment if need be."""
        if self.memory.numel() >= num_bytes:
            return
        size = -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
        self.free()
        self.descriptor = _create_segment(size)
        self.memory = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)

    def find(self, tensor: Tensor) -> int | None:
        """Where `tensor` begins in this slot's memory, or None if it lies elsewhere."""
        start = tensor.data_ptr() - self.memory.data_ptr()
        inside = start >= 0 and start + tensor.numel() <= self.memory.numel()
        return start if inside else None

    def free(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.known_to.clear()


class Sender:
    """The sender's end: listens on a unix socket that only its own user may connect to."""

    def __init__(self, path: str | Path, *, max_payload_bytes: int | None = None) -> None:
        """Listen on `path`, in a directory that exists.

        The socket file of a sender that is dead is replaced. Raises ConfigError if another
        sender listens there or `path` is something else, TransportUnavailable without memfd.
        """
        if not hasattr(os, "memfd_create"):
            raise TransportUnavailable("shared memory needs Linux; use the collective transport")
        self._path = Path(path)
        self._capabilities = Capabilities(
            devices=("cpu",),
            max_payload_bytes=max_payload_bytes,
            zero_copy=True,
            detects_loss=True,
        )
        listener = _listen(self._path)
        self._inode = self._path.stat().st_ino
        self._gate = Gate()
        self._server = Server(listener, self._gate, kinds={Kind.REPLY, Kind.RELEASE})
        self._slots = [_Slot(index) for index in range(_NUM_SLOTS)]
        self._lent: _Slot | None = None
        self._sequence = 0
        self._epoch: tuple[int, ...] = ()
        self._members: set[int] = set()

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def poll(self, *, timeout_s: float) -> list[tuple[int, bytes]]:
        with self._gate.entered():
            return self._server.poll(Deadline(timeout_s))

    def is_connected(self, peer: int) -> bool:
        with self._gate.entered():
            return self._server.is_connected(peer)

    def open_epoch(self, peers: Sequence[int], *, timeout_s: float) -> dict[int, TransportError]:
        """Never waits."""
        with self._gate.entered():
            self._epoch = tuple(peers)
            self._members = {peer for peer in peers if self._server.is_connected(peer)}
            return self._server.losses(peers)

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        """The tensor is the shared memory itself."""
        check_size(num_bytes, self._capabilities)
        with self._gate.entered():
            if num_bytes == 0:
                return torch.empty(0, dtype=torch.uint8)
            self._lent = self._lent or self._free_slot(Deadline(timeout_s))
            self._lent.grow(num_bytes)
            return self._lent.memory[:num_bytes]

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        """Copies only a payload that was not packed into `buffer`."""
        check_frame(frame, self._capabilities)
        deadline = Deadline(timeout_s)
        with self._gate.entered():
            if frame.payload is None:
                self._post(frame.header, _NO_SLOT)
            elif frame.payload.numel() == 0:
                self._post(frame.header, _EMPTY_SLOT)
            else:
                self._post_payload(frame.header, frame.payload, deadline)
            self._raise_losses(self._server.flush(self._members, deadline))

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        with self._gate.entered():
            replies = self._server.gather(self._epoch, Kind.REPLY, Deadline(timeout_s))
            self._members -= {peer for peer, r in replies.items() if not isinstance(r, bytes)}
            return replies

    def drop(self, peer: int) -> None:
        self._members.discard(peer)
        self._server.drop(peer)

    def close(self) -> None:
        """Removes the socket file."""
        self._gate.close(self._dispose)

    def _dispose(self) -> None:
        self._server.close()
        for slot in self._slots:
            slot.free()
        try:
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        except FileNotFoundError:
            pass

    def _post_payload(self, header: bytes, payload: Tensor, deadline: Deadline) -> None:
        slot = self._lent or self._free_slot(deadline)
        start = slot.find(payload) if slot is self._lent else None
        if start is None:
            slot.grow(payload.numel())
            slot.memory[: payload.numel()].copy_(payload)
        self._lent = None
        segment = _SEGMENT.pack(slot.index, slot.memory.numel())
        newcomers = self._members - slot.known_to
        self._server.write(newcomers, Kind.SEGMENT, segment, slot.descriptor)
        slot.known_to |= newcomers
        self._sequence = slot.sequence = (self._sequence + 1) & 0xFFFFFFFF
        slot.readers = set(self._members)
        self._post(header, slot.index, start or 0, payload.numel())

    def _post(self, header: bytes, slot: int, start: int = 0, num_bytes: int = 0) -> None:
        data = _FRAME.pack(slot, self._sequence, start, num_bytes) + header
        self._server.write(self._members, Kind.FRAME, data)

    def _free_slot(self, deadline: Deadline) -> _Slot:
        """A slot that nobody reads. Drops the peers that have not let go by the deadline."""
        self._server.pump(0)
        while True:
            for slot in self._slots:
                self._take_releases(slot.readers)
                slot.readers -= self._server.losses(slot.readers).keys()
                if not slot.readers:
                    return slot
            if deadline.passed:
                self._raise_losses(self._expire_readers())
            self._server.pump(deadline.remaining_s)

    def _expire_readers(self) -> dict[int, TransportError]:
        """Drop who holds the slot that has been read for longest."""
        oldest = min(self._slots, key=lambda slot: slot.sequence)
        complaint = "did not let go of a payload in time"
        return {peer: self._server.expire(peer, complaint) for peer in oldest.readers}

    def _take_releases(self, peers: set[int]) -> None:
        for peer in list(peers):
            while (data := self._server.take(peer, Kind.RELEASE)) is not None:
                if not self._release(peer, data):
                    self._server.drop(peer, BrokenProtocol("it let go of what it did not hold"))

    def _release(self, peer: int, data: bytes) -> bool:
        """Note that `peer` let go of a slot; False if it cannot have held it."""
        if len(data) != _RELEASE.size:
            return False
        index, sequence = _RELEASE.unpack(data)
        if index >= _NUM_SLOTS or self._slots[index].sequence != sequence:
            return False
        self._slots[index].readers.discard(peer)
        return True

    def _raise_losses(self, losses: dict[int, TransportError]) -> None:
        self._members -= losses.keys()
        if losses:
            raise failure(losses)


class Receiver:
    """A receiver's end: maps the sender's segments and reads payloads in place."""

    def __init__(self, path: str | Path, *, max_payload_bytes: int | None = None) -> None:
        """Connect to a sender that listens on `path`; larger segments are refused."""
        self._path = Path(path)
        self._capabilities = Capabilities(
            devices=("cpu",),
            max_payload_bytes=max_payload_bytes,
            zero_copy=True,
            detects_loss=True,
        )
        self._gate = Gate()
        self._client = Client(self._dial, self._gate, kinds={Kind.FRAME, Kind.SEGMENT})
        self._segments: dict[int, Tensor] = {}
        self._held: bytes | None = None  # the release message of the payload in use

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def connect(self, greeting: bytes, *, timeout_s: float) -> None:
        with self._gate.entered():
            self._forget()
            self._client.connect(greeting, Deadline(timeout_s))

    def receive(self, *, timeout_s: float) -> Frame:
        """The payload is shared memory: no copy is made."""
        deadline = Deadline(timeout_s)
        with self._gate.entered():
            self._let_go(deadline)
            try:
                while (message := self._client.next(deadline)).kind is Kind.SEGMENT:
                    self._map(message)
                return self._frame(message.data)
            except BrokenProtocol:
                self._forget()
                raise

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        with self._gate.entered():
            self._client.write(Kind.REPLY, data, Deadline(timeout_s))

    def disconnect(self) -> None:
        with contextlib.suppress(TransportClosed), self._gate.entered():
            self._forget()

    def close(self) -> None:
        self._gate.close(self._forget)

    def _dial(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(self._path))
        except OSError:
            sock.close()
            raise
        return sock

    def _let_go(self, deadline: Deadline) -> None:
        """Give the payload of the last frame back to the sender."""
        held, self._held = self._held, None
        if held is not None:
            self._client.write(Kind.RELEASE, held, deadline)

    def _forget(self) -> None:
        """End the connection, which lets go of everything."""
        self._client.hang_up()
        self._segments.clear()
        self._held = None

    def _map(self, message: Message) -> None:
        if message.descriptor is None:
            raise BrokenProtocol("a segment without memory")
        try:
            if len(message.data) != _SEGMENT.size:
                raise BrokenProtocol("a segment message of the wrong size")
            index, size = _SEGMENT.unpack(message.data)
            limit = self._capabilities.max_payload_bytes
            if index >= _NUM_SLOTS or (limit is not None and size > limit + _GRANULE_BYTES):
                raise BrokenProtocol(f"segment {index} of {size} bytes")
            self._segments[index] = _map_segment(message.descriptor, size)
        finally:
            os.close(message.descriptor)

    def _frame(self, data: bytes) -> Frame:
        if len(data) <= _FRAME.size:
            raise BrokenProtocol("a frame without a header")
        index, sequence, start, num_bytes = _FRAME.unpack_from(data)
        header = data[_FRAME.size :]
        if index == _NO_SLOT:
            return Frame(header)
        if index == _EMPTY_SLOT:
            return Frame(header, torch.empty(0, dtype=torch.uint8))
        segment = self._segments.get(index)
        if segment is None or start + num_bytes > segment.numel():
            raise BrokenProtocol(f"{num_bytes} bytes at {start} in segment {index}")
        self._held = _RELEASE.pack(index, sequence)
        return Frame(header, segment[start : start + num_bytes])


def _create_segment(size: int) -> int:
    """The descriptor of `size` zero bytes that can neither grow nor shrink."""
    descriptor = os.memfd_create("deltasync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _map_segment(descriptor: int, size: int) -> Tensor:
    """uint8[size]: the memory behind `descriptor`, of which nothing is believed unchecked.

    A segment that could still shrink would let its owner kill this process with SIGBUS.
    Mapped copy-on-write, so that a receiver that writes to a payload harms only itself.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if seals & _SEALS != _SEALS or size == 0 or os.fstat(descriptor).st_size != size:
            raise BrokenProtocol("a segment that is not sealed or not of the size it should be")
        memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise BrokenProtocol(f"a segment that cannot be mapped: {error.strerror}") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other senders from claiming a path in `directory` at the same moment."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _listen(path: Path) -> socket.socket:
    """A socket that listens on `path`, for this user alone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked(path.parent):
            _remove_stale(path)
            listener.bind(str(path))
            # Nobody can connect before `listen`, so the mode is right from the start.
            path.chmod(0o600)
            listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a sender that is dead."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} exists and is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # Not blocking: a live sender with a full backlog answers EAGAIN, which is life too.
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass
    raise ConfigError(f"another sender listens on {path}")
