"""What the transports have in common whose receivers take payloads from the sender's memory.

A slot is memory of the sender. It is announced to each receiver once, a payload names its place in
a slot (FRAME), and a receiver says when it has no more use for that (RELEASE). There are two slots,
so that the sender packs one while receivers read the other; a slot is written again only when
each receiver it was sent to has released it or is gone. What memory is, and how it is announced, a
transport says in its `Slot` and in its receiver.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltasync.errors import TransportClosed, TransportError
from deltasync.transports.base import Capabilities, Frame, ReceiveTransport, SendTransport
from deltasync.transports.control.connection import (
    BrokenProtocol,
    Gate,
    Kind,
    busy_s,
    check_frame,
    check_size,
    deadline_in,
    failure,
    left_s,
)
from deltasync.transports.control.endpoints import Client, Server

NUM_SLOTS = 2
NO_SLOT = 0xFF  # a frame without a payload
EMPTY_SLOT = 0xFE  # a payload of no bytes
_FRAME = struct.Struct("<BxxxIQQ")  # slot, sequence, payload start and bytes; the header follows
_RELEASE = struct.Struct("<BxxxI")  # slot, sequence


class Slot(ABC):
    """Memory for one payload at a time, and who still reads it.

    Attributes:
        memory: uint8[n], owned by the slot; replaced when it grows.
        known_to: Peers that were told of this memory.
        readers: Peers that may read what was last sent.
        sequence: Number of the frame that was last sent from here.
        announcement: The kind of message that announces the memory.
    """

    announcement: ClassVar[Kind] = Kind.SEGMENT

    def __init__(self, index: int, memory: Tensor) -> None:
        self.index = index
        self.memory = memory
        self.known_to: set[int] = set()
        self.readers: set[int] = set()
        self.sequence = 0

    @abstractmethod
    def open(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes] at the start of the memory, to write to; called while nobody reads.

        Grows if need be: then the memory is another, of which no peer knows.
        """

    @abstractmethod
    def filled(self) -> None:
        """What is to be sent stands here, or is on its way here on the current stream."""

    @abstractmethod
    def settle(self) -> None:
        """Wait, not for ever, until what was sent from here stands here."""

    @abstractmethod
    def announced(self) -> AbstractContextManager[tuple[bytes, int | None]]:
        """The message that tells one peer of the memory, and a descriptor to go with it, if any."""

    @abstractmethod
    def free(self) -> None:
        """Give the memory up. Idempotent."""

    def find(self, tensor: Tensor) -> int | None:
        """Where `tensor` begins in this slot's memory, or None if it lies elsewhere."""
        start = tensor.data_ptr() - self.memory.data_ptr()
        inside = start >= 0 and start + tensor.numel() <= self.memory.numel()
        return start if inside else None


class SlotSender(SendTransport):
    """The sender's end, over any stream socket."""

    def __init__(
        self,
        listener: socket.socket,
        slots: Sequence[Slot],
        capabilities: Capabilities,
        *,
        secret: bytes | None = None,
        admit: Callable[[socket.socket], None] = lambda sock: None,
    ) -> None:
        """Serve on `listener`, with payloads in `slots`; `secret` and `admit` as in `Server`."""
        self._slots = slots
        self._empty = slots[0].memory[:0]
        self._capabilities = capabilities
        self._gate = Gate(busy_s(self._empty.device.type))
        self._server = Server(
            listener, self._gate, kinds={Kind.REPLY, Kind.RELEASE}, secret=secret, admit=admit
        )
        self._lent: Slot | None = None
        self._sequence = 0
        self._epoch: tuple[int, ...] = ()
        self._members: set[int] = set()

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def poll(self, *, timeout_s: float) -> list[tuple[int, bytes]]:
        with self._gate.entered():
            return self._server.poll(deadline_in(timeout_s))

    def is_connected(self, peer: int) -> bool:
        with self._gate.entered():
            return self._server.is_connected(peer)

    def open_epoch(self, peers: Sequence[int], *, timeout_s: float) -> dict[int, TransportError]:
        """Never waits."""
        with self._gate.entered():
            self._server.hear(peers)
            losses = self._server.losses(peers)
            self._epoch, self._members = tuple(peers), set(peers) - losses.keys()
            return losses

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        """The tensor is the memory that receivers read."""
        check_size(num_bytes, self._capabilities)
        with self._gate.entered():
            if num_bytes == 0:
                return self._empty
            self._lent = self._lent or self._free_slot(deadline_in(timeout_s))
            return self._lent.open(num_bytes)

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        """Copies only a payload that was not packed into `buffer`."""
        check_frame(frame, self._capabilities)
        deadline = deadline_in(timeout_s)
        with self._gate.entered():
            failures: dict[int, TransportError] = {}
            if frame.payload is None:
                self._post(frame.header, NO_SLOT)
            elif frame.payload.numel() == 0:
                self._post(frame.header, EMPTY_SLOT)
            else:
                failures = self._post_payload(frame.header, frame.payload, deadline)
            self._raise_losses(self._server.flush(self._members, deadline) | failures)

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        with self._gate.entered():
            self._post(header, NO_SLOT, peers=peers)
            self._raise_losses(self._server.flush(peers, deadline_in(timeout_s)))

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        with self._gate.entered():
            replies = self._server.gather(self._epoch, Kind.REPLY, deadline_in(timeout_s))
            self._members -= {peer for peer, r in replies.items() if not isinstance(r, bytes)}
            return replies

    def some_replies(
        self, peers: Collection[int], *, timeout_s: float
    ) -> dict[int, bytes | TransportError]:
        with self._gate.entered():
            replies = self._server.some(peers, Kind.REPLY, deadline_in(timeout_s))
            self._members -= {peer for peer, r in replies.items() if not isinstance(r, bytes)}
            return replies

    def drop(self, peer: int) -> None:
        with contextlib.suppress(TransportClosed), self._gate.entered():
            self._settle([slot for slot in self._slots if peer in slot.readers])
            self._members.discard(peer)
            self._server.drop(peer)

    def reset(self) -> None:
        with contextlib.suppress(TransportClosed), self._gate.entered():
            self._server.reset()

    def close(self) -> None:
        self._gate.close(self._dispose)

    def _dispose(self) -> None:
        self._settle(self._slots)
        self._server.close()
        for slot in self._slots:
            slot.free()

    def _settle(self, slots: Sequence[Slot]) -> None:
        """Wait, not for ever, until what was sent from `slots` can reach its readers."""
        for slot in slots:
            slot.settle()

    def _post_payload(
        self, header: bytes, payload: Tensor, deadline: float
    ) -> dict[int, TransportError]:
        """Post a frame with a payload. Returns the peers that could not be told of its slot."""
        slot = self._lent or self._free_slot(deadline)
        start = slot.find(payload) if slot is self._lent else None
        if start is None:
            slot.open(payload.numel()).copy_(payload)
        self._sequence = slot.sequence = (self._sequence + 1) & 0xFFFFFFFF
        slot.filled()
        self._lent = None
        failures = self._announce(slot, deadline)
        slot.readers = set(self._members)
        self._post(header, slot.index, start or 0, payload.numel())
        return failures

    def _announce(self, slot: Slot, deadline: float) -> dict[int, TransportError]:
        """Tell members of memory that is new to them. Returns those that did not listen."""
        failures: dict[int, TransportError] = {}
        for peer in self._members - slot.known_to:
            with slot.announced() as (segment, descriptor):
                self._server.write([peer], slot.announcement, segment, descriptor)
                failures |= self._server.flush([peer], deadline)
        slot.known_to |= self._members
        return failures

    def _post(
        self,
        header: bytes,
        slot: int,
        start: int = 0,
        num_bytes: int = 0,
        *,
        peers: Collection[int] | None = None,
    ) -> None:
        data = _FRAME.pack(slot, self._sequence, start, num_bytes) + header
        self._server.write(self._members if peers is None else peers, Kind.FRAME, data)

    def _free_slot(self, deadline: float) -> Slot:
        """A slot that nobody reads. Drops the peers that have not let go by the deadline."""
        self._server.pump(0)
        before: Counter[int] | None = None
        while True:
            for slot in self._slots:
                self._take_releases(slot.readers)
                slot.readers -= self._server.losses(slot.readers).keys()
                if not slot.readers:
                    return slot
            before = before or self._held()
            if time.monotonic() >= deadline:
                self._raise_losses(self._expire_readers(before))
            self._server.pump(left_s(deadline))

    def _held(self) -> Counter[int]:
        """How many slots each peer reads."""
        return Counter(peer for slot in self._slots for peer in slot.readers)

    def _expire_readers(self, before: Counter[int]) -> dict[int, TransportError]:
        """Drop the peers that hold the older slot, or as many as before: none costs a wait more."""
        oldest = min(self._slots, key=lambda slot: slot.sequence)
        now = self._held()
        late = oldest.readers | {peer for peer in now if now[peer] == before[peer]}
        complaint = "did not let go of a payload in time"
        return {peer: self._server.expire(peer, complaint) for peer in late}

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
        if index >= NUM_SLOTS or self._slots[index].sequence != sequence:
            return False
        self._slots[index].readers.discard(peer)
        return True

    def _raise_losses(self, losses: dict[int, TransportError]) -> None:
        self._members -= losses.keys()
        if losses:
            raise failure(losses)


@dataclass(frozen=True, slots=True)
class Announcement:
    """A frame whose payload, if any, stands in a slot of the sender.

    Attributes:
        header: The frame's header.
        slot: Its slot, or NO_SLOT or EMPTY_SLOT.
        start: Where the payload begins, in bytes.
        num_bytes: Its length.
        sequence: Number of the last frame with a payload, which this is if it has one.
        release: The message that lets go of it.
    """

    header: bytes
    slot: int
    start: int
    num_bytes: int
    sequence: int
    release: bytes

    @classmethod
    def parse(cls, data: bytes, segments: Mapping[int, int]) -> Announcement:
        """Read a FRAME message; `segments` are the bytes in each slot. Raises BrokenProtocol."""
        if len(data) <= _FRAME.size:
            raise BrokenProtocol("a frame without a header")
        slot, sequence, start, num_bytes = _FRAME.unpack_from(data)
        if slot not in (NO_SLOT, EMPTY_SLOT):
            segment = segments.get(slot)
            if segment is None or start + num_bytes > segment:
                raise BrokenProtocol(f"{num_bytes} bytes at {start} in segment {slot}")
        release = _RELEASE.pack(slot, sequence)
        return cls(data[_FRAME.size :], slot, start, num_bytes, sequence, release)


class SlotReceiver(ReceiveTransport, ABC):
    """A receiver's end, less its memory and the way to the sender."""

    def __init__(
        self, capabilities: Capabilities, announcement: Kind, *, secret: bytes | None = None
    ) -> None:
        """Memory is announced in messages of the kind `announcement`."""
        self._capabilities = capabilities
        self._gate = Gate(busy_s(capabilities.devices[0]))
        self._client = Client(
            self._dial, self._gate, kinds={Kind.FRAME, announcement}, secret=secret
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def connect(self, greeting: bytes, *, timeout_s: float) -> None:
        with self._gate.entered():
            self._forget()
            self._client.connect(greeting, deadline_in(timeout_s))

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        with self._gate.entered():
            self._client.write(Kind.REPLY, data, deadline_in(timeout_s))

    def disconnect(self) -> None:
        with contextlib.suppress(TransportClosed), self._gate.entered():
            self._forget()

    def close(self) -> None:
        self._gate.close(self._forget)

    @abstractmethod
    def _dial(self, timeout_s: float) -> socket.socket:
        """A connection to the sender. Raises OSError while nobody serves, in so many seconds."""

    @abstractmethod
    def _forget(self) -> None:
        """End the connection, which lets go of everything."""

    def _check_segment(self, index: int, num_bytes: int, granule_bytes: int) -> None:
        """Raise BrokenProtocol for memory that no slot of this transport has."""
        limit = self._capabilities.max_payload_bytes
        too_large = limit is not None and num_bytes > limit + granule_bytes
        if index >= NUM_SLOTS or num_bytes == 0 or too_large:
            raise BrokenProtocol(f"segment {index} of {num_bytes} bytes")
