"""What the transports have in common whose receivers take payloads from the sender's memory.

A slot is memory of the sender. It is announced to each receiver once, a payload names its place in
a slot (FRAME), and a receiver says when it has no more use for that (RELEASE). There are two slots,
so that the sender packs one while receivers read the other; a slot is written again only when
each receiver it was sent to has released it or is gone. What memory is, and how it is announced, a
transport says in its `Slot` and in its receiver.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltasync.errors import PeerLost, TransportError
from deltasync.transports.base import Frame
from deltasync.transports.control.connection import (
    MAX_PAYLOAD_BYTES,
    BrokenProtocol,
    Kind,
    Message,
    deadline_in,
    left_s,
)
from deltasync.transports.marks import Mark
from deltasync.transports.sockets import Arrival, SocketReceiver, SocketSender

NUM_SLOTS = 2
NO_SLOT = 0xFF  # a frame without a payload
MEMORY = struct.Struct("<BxxxxxxxQ")
"""How an announcement of memory begins: slot, bytes."""
_FRAME = struct.Struct("<BxxxIQ")  # slot, sequence, payload bytes; the header follows
_RELEASE = struct.Struct("<BxxxI")  # slot, sequence
_GRACE_S = 1.0  # what ending connections on purpose waits for payloads on their way
_POLL_S = 0.0001
_RELEASE_TIMEOUT_S = 5.0


class Slot(ABC):
    """Memory for one payload at a time, and who still reads it.

    Attributes:
        memory: uint8[n], owned by the slot; replaced when it grows.
        mark: What was last sent stands here once it is passed.
        known_to: Peers that were told of this memory.
        readers: Peers that may read what was last sent.
        sequence: Number of the frame that was last sent from here.
        announcement: The kind of message that announces the memory.
        granule_bytes: Memory has a multiple of it.
    """

    announcement: ClassVar[Kind] = Kind.SEGMENT
    granule_bytes: ClassVar[int] = 1 << 16

    def __init__(self, index: int, device: torch.device) -> None:
        self.index = index
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.mark = Mark(device)
        self.known_to: set[int] = set()
        self.readers: set[int] = set()
        self.sequence = 0

    def open(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes] at the start of the memory, to write to; called while nobody reads."""
        if self.memory.numel() < num_bytes:
            self.memory = self.grow(-(-num_bytes // self.granule_bytes) * self.granule_bytes)
            self.known_to.clear()
        return self.memory[:num_bytes]

    def filled(self) -> None:
        """What is to be sent stands here, or is on its way here on the current stream."""
        self.mark.set()

    @abstractmethod
    def grow(self, num_bytes: int) -> Tensor:
        """Other memory, of at least so many bytes."""

    @abstractmethod
    def announced(self) -> AbstractContextManager[tuple[bytes, int | None]]:
        """The message that tells one peer of the memory, and a descriptor to go with it, if any."""

    def free(self) -> None:
        """Give the memory up. Idempotent."""
        self.memory = self.memory.new_empty(0)
        self.known_to.clear()


class SlotSender(SocketSender):
    """The sender's end, over any stream socket."""

    outlives_losses = True

    def __init__(
        self,
        listener: socket.socket,
        slots: Sequence[Slot],
        *,
        secret: bytes | None = None,
        admit: Callable[[socket.socket], None] = lambda sock: None,
    ) -> None:
        """Serve on `listener`, with payloads in `slots`; the rest as of `SocketSender`."""
        self._slots = slots
        device = slots[0].memory.device
        super().__init__(listener, device, Kind.RELEASE, secret=secret, admit=admit)
        self._lent: Slot | None = None
        self._sequence = 0

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        """The tensor is the memory that receivers read."""
        with self._gate.entered():
            self._lent = self._lent or self._free_slot(deadline_in(timeout_s))
            self._buffer = self._lent.open(max(1, num_bytes))[:num_bytes]
            return self._buffer

    def _dispose(self) -> None:
        super()._dispose()
        self._buffer = None
        for slot in self._slots:
            slot.free()

    def _settle(self, peers: Collection[int]) -> None:
        slots = [slot for slot in self._slots if not slot.readers.isdisjoint(peers)]
        deadline = deadline_in(_GRACE_S)
        while not all(map(self._is_settled, slots)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _is_settled(self, slot: Slot) -> bool:
        """Whether what was sent from `slot` reaches its readers, although connections end."""
        return slot.mark.is_done()

    def _send_payload(
        self, header: bytes, payload: Tensor, deadline: float
    ) -> dict[int, TransportError]:
        self._buffer = None
        slot, self._lent = self._lent, None
        assert slot is not None
        self._sequence = slot.sequence = (self._sequence + 1) & 0xFFFFFFFF
        slot.filled()
        failures = self._announce(slot, deadline)
        slot.readers = set(self._members)
        place = _FRAME.pack(slot.index, slot.sequence, payload.numel())
        self._write(self._members, Kind.FRAME, place + header)
        return failures

    def _announce(self, slot: Slot, deadline: float) -> dict[int, TransportError]:
        """Tell members of memory that is new to them. Returns those that did not listen."""
        failures: dict[int, TransportError] = {}
        for peer in self._members - slot.known_to:
            with slot.announced() as (segment, descriptor):
                self._write([peer], slot.announcement, segment, descriptor)
                failures |= self._flush([peer], deadline)
        slot.known_to |= self._members
        return failures

    def _post(self, peers: Collection[int], header: bytes) -> None:
        super()._post(peers, _FRAME.pack(NO_SLOT, 0, 0) + header)

    def _free_slot(self, deadline: float) -> Slot:
        """A slot that nobody reads. Drops the peers that have not let go by the deadline."""
        self._pump(0)
        before: Counter[int] | None = None
        while True:
            for slot in self._slots:
                self._take_releases(slot.readers)
                if not slot.readers:
                    return slot
            before = before or self._held()
            if time.monotonic() >= deadline:
                self._check(self._expire_readers(before))
            self._pump(left_s(deadline))

    def _held(self) -> Counter[int]:
        """How many slots each peer reads."""
        return Counter(peer for slot in self._slots for peer in slot.readers)

    def _expire_readers(self, before: Counter[int]) -> dict[int, TransportError]:
        """Drop the peers that hold the older slot, or as many as before: none costs a wait more."""
        oldest = min(self._slots, key=lambda slot: slot.sequence)
        now = self._held()
        late = oldest.readers | {peer for peer in now if now[peer] == before[peer]}
        complaint = "did not let go of a payload in time"
        return {peer: self._expire(peer, complaint) for peer in late}

    def _take_releases(self, readers: set[int]) -> None:
        """Take those out that have let go, or are gone."""
        for peer in list(readers):
            while (data := self._take(peer, Kind.RELEASE)) is not None:
                is_whole = len(data) == _RELEASE.size
                index, sequence = _RELEASE.unpack(data) if is_whole else (NUM_SLOTS, 0)
                if index < NUM_SLOTS and self._slots[index].sequence == sequence:
                    self._slots[index].readers.discard(peer)
                else:
                    self._end(peer, BrokenProtocol("it let go of what it did not hold"))
        readers.difference_update(self._losses(readers))


@dataclass(slots=True, eq=False)
class Announcement(Arrival):
    """A frame whose payload, if any, stands in a slot of the sender.

    Attributes:
        slot: Its slot, or NO_SLOT.
        num_bytes: The payload's length.
        sequence: Its number, if it has a payload.
    """

    slot: int
    num_bytes: int
    sequence: int


class SlotReceiver(SocketReceiver[Announcement]):
    """A receiver's end, less its memory and the way to the sender."""

    def __init__(
        self, device: torch.device, announcement: Kind, *, secret: bytes | None = None
    ) -> None:
        """Memory is announced in messages of the kind `announcement`."""
        super().__init__(device, {Kind.FRAME, announcement}, secret=secret)
        self._sizes: dict[int, int] = {}  # bytes of the slots that are known
        self._in_use: Counter[int] = Counter()  # payloads in each that are told of, not released

    def _forget(self) -> None:
        super()._forget()
        self._sizes.clear()
        self._in_use.clear()

    @abstractmethod
    def _payload(self, told: Announcement) -> Tensor | None:
        """What is told of, for the caller to read from now on; None if it is not here yet."""

    @abstractmethod
    def _map(self, slot: int, num_bytes: int, message: Message) -> None:
        """Take in memory that nobody uses. Owns its descriptor, if it does not raise.

        Raises BrokenProtocol, TransportUnavailable.
        """

    def _obey(self, message: Message) -> None:
        if message.kind is Kind.FRAME:
            self._expect(self._parsed(message.data))
            return
        try:
            self._on_memory(message)
        except BaseException:
            if message.descriptor is not None:
                os.close(message.descriptor)
            raise

    def _on_memory(self, message: Message) -> None:
        if len(message.data) < MEMORY.size:
            raise BrokenProtocol("memory of nothing")
        slot, num_bytes = MEMORY.unpack_from(message.data)
        if slot >= NUM_SLOTS or num_bytes == 0:
            raise BrokenProtocol(f"memory of {num_bytes} bytes for slot {slot}")
        if self._in_use[slot]:
            raise BrokenProtocol("memory in place of some that is in use")
        self._sizes.pop(slot, None)
        self._map(slot, num_bytes, message)
        self._sizes[slot] = num_bytes

    def _parsed(self, data: bytes) -> Announcement:
        """Read a FRAME message. Raises BrokenProtocol."""
        if len(data) <= _FRAME.size:
            raise BrokenProtocol("a frame without a header")
        slot, sequence, num_bytes = _FRAME.unpack_from(data)
        most = min(MAX_PAYLOAD_BYTES, self._sizes.get(slot, 0))
        if slot != NO_SLOT and not 0 < num_bytes <= most:
            raise BrokenProtocol(f"a payload of {num_bytes} bytes in slot {slot}")
        self._in_use[slot] += 1
        return Announcement(data[_FRAME.size :], slot, num_bytes, sequence)

    def _hand_out(self, first: Announcement) -> Frame | None:
        payload = None if first.slot == NO_SLOT else self._payload(first)
        if payload is None and first.slot != NO_SLOT:
            return None
        self._waiting.popleft()
        return Frame(first.header, payload)

    def _release(self, told: Announcement) -> None:
        """Let go of a slot."""
        self._in_use[told.slot] -= 1
        data = _RELEASE.pack(told.slot, told.sequence)
        with contextlib.suppress(PeerLost):  # of a sender that is gone; what it sent is handed out
            self._write(Kind.RELEASE, data, deadline_in(_RELEASE_TIMEOUT_S))
