"""The receiver's end of the collective transport; collective.py describes the protocol.

One payload can be in flight while the one before is read, although no code runs between two calls:
the reader calls `progress` meanwhile. A third buffer is granted for the one after that.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from deltasync.errors import PeerLost
from deltasync.transports.base import Frame
from deltasync.transports.control.connection import (
    MAX_PAYLOAD_BYTES,
    BrokenProtocol,
    Kind,
    Message,
    deadline_in,
)
from deltasync.transports.control.tcp import check_network, dial_tcp
from deltasync.transports.process_group import (
    Join,
    Membership,
    PayloadBuffer,
    bounded,
    device_of,
)
from deltasync.transports.sockets import Arrival, SocketReceiver

# Of everything but FRAME, which is a header alone, first. READY repeats that of what it answers;
# what is wrong follows.
TICKET = struct.Struct("<Q")
# Rank, size, store port, timeout; the back end follows, a space and the group's name.
GROUP = struct.Struct("<IIHxd")
# The longest payload that is to come.
ROOM = struct.Struct("<Q")
# Payload bytes, how long it may be in flight; the frame's header follows.
START = struct.Struct("<Qd")
MAX_COMPLAINT_BYTES = 2000
# What is under way when a group is abandoned, or the connection ends, may still arrive.
MOMENT_S = 0.1
# How long the loss that made a broadcast fail may take to be told: the sender may be packing.
_TELL_S = 5.0
_KINDS = {Kind.FRAME, Kind.GROUP, Kind.ROOM, Kind.START, Kind.ABANDON}
_ANSWER_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class _Arrival(Arrival):
    """A frame that has not been handed out.

    Attributes:
        payload: None for a frame that has none.
        slot: Where its payload comes.
        deadline: How long to wait for the payload.
        follows_loss: As in `Frame`.
    """

    payload: Tensor | None = None
    slot: PayloadBuffer | None = None
    deadline: float = 0.0
    follows_loss: bool = False


class Receiver(SocketReceiver[_Arrival]):
    """A receiver's end: joins the groups that the sender forms, during `receive`."""

    is_private = True

    def __init__(
        self,
        host: str,
        port: int,
        *,
        backend: str = "gloo",
        device: torch.device | str | None = None,
        secret: bytes | None = None,
    ) -> None:
        """Connect to the sender at `host`:`port`; arguments as there."""
        check_network(host, secret)
        self._backend = backend
        device = device_of(backend, device)
        self._address = host, port
        super().__init__(device, _KINDS, secret=secret)
        # One to read from, one to arrive in, and one for the next.
        self._membership = Membership(device, num_slots=3)
        self._read: PayloadBuffer | None = None  # the one whose payload was handed out last
        self._ticket = 0  # of the last question
        self._room = 0  # bytes to grant
        self._granted: PayloadBuffer | None = None
        self._calls_progress = False  # whether the reader does,
        self._grants_ahead = False  # and is done with a payload since
        self._misses = False  # the payload before the next frame

    def progress(self) -> None:
        self._calls_progress = True
        super().progress()

    def _forget(self) -> None:
        super()._forget()
        self._take_back()
        self._leave()
        self._misses = self._calls_progress = self._grants_ahead = False

    def sender_address(self) -> tuple[str, int]:
        """Return the host and port to connect to. Asked before each attempt.

        A subclass may know better than the constructor, and raises OSError while nobody knows.
        """
        return self._address

    def _dial(self, timeout_s: float) -> socket.socket:
        self._address = self.sender_address()
        return dial_tcp(*self._address, timeout_s=timeout_s)

    def _leave(self) -> None:
        """Be in no group; what is on its way does not arrive."""
        waiting, self._waiting = self._waiting, deque()
        was_last, self._misses = self._misses, False  # it came after all of them
        for one in waiting:
            if one.slot is not None and one.slot.flight is not None:
                self._misses = True
            else:
                self._expect(one)
        self._misses |= was_last
        self._membership.leave()
        self._room, self._granted = 0, None

    def _expect(self, one: _Arrival) -> None:
        """Let it wait to be handed out."""
        if self._misses:
            one.follows_loss, self._misses = True, False
        super()._expect(one)

    def _take_back(self) -> None:
        """The payload that was handed out last is the caller's no more."""
        if self._read is not None:
            self._read.mark.set()
            self._read, self._grants_ahead = None, self._calls_progress

    def _answer(self, complaint: str = "") -> None:
        data = TICKET.pack(self._ticket) + complaint.encode()[:MAX_COMPLAINT_BYTES]
        with contextlib.suppress(PeerLost):  # of a sender that is gone; what has come is handed out
            self._write(Kind.READY, data, deadline_in(_ANSWER_TIMEOUT_S))

    def _next(self, timeout_s: float) -> Message | None:
        try:
            return super()._next(timeout_s)
        except PeerLost:
            self._end_flights()
            if not self._waiting:
                raise
            return None

    def _end_flights(self) -> None:
        """What is on its way arrives in a moment, or never."""
        self._membership.finish(MOMENT_S)
        for one in self._waiting:
            self._has_landed(one)
        self._leave()

    def _obey(self, message: Message) -> None:
        if message.kind is Kind.FRAME:
            self._on_frame(message.data)
            return
        if len(message.data) < TICKET.size:
            raise BrokenProtocol("a message without a ticket")
        (self._ticket,), data = TICKET.unpack_from(message.data), message.data[TICKET.size :]
        match message.kind:
            case Kind.GROUP:
                self._on_group(data)
            case Kind.ROOM:
                self._on_room(data)
            case Kind.START:
                self._on_start(data)
            case _:
                self._end_flights()
                self._answer()

    def _on_frame(self, header: bytes) -> None:
        if not header:
            raise BrokenProtocol("a frame without a header")
        self._room, self._granted = 0, None
        self._expect(_Arrival(header))

    def _on_group(self, data: bytes) -> None:
        if len(data) <= GROUP.size:
            raise BrokenProtocol("a group without a name")
        self._end_flights()
        rank, size, store_port, timeout_s = GROUP.unpack_from(data)
        theirs, _, name = data[GROUP.size :].decode("ascii", errors="replace").partition(" ")
        if not 0 < rank < size or not name:
            raise BrokenProtocol(f"rank {rank} in a group of {size}, named {name!r}")
        if theirs != self._backend:
            self._answer(f"broadcasts over {self._backend}, the sender over {theirs}")
            return
        self._membership.join = Join(
            self._backend,
            self._membership.stream,
            (self._address[0], store_port),
            name,
            rank=rank,
            size=size,
            timeout_s=bounded(timeout_s),
            own_host=self._current().local_host,
        )

    def _on_room(self, data: bytes) -> None:
        if len(data) != ROOM.size:
            raise BrokenProtocol("room of the wrong size")
        (num_bytes,) = ROOM.unpack(data)
        if not 0 < num_bytes <= MAX_PAYLOAD_BYTES:
            raise BrokenProtocol(f"a payload of {num_bytes} bytes")
        self._room, self._granted = num_bytes, None
        if self._membership.group is None:
            self._room = 0
            self._answer("is in no group")

    def _on_start(self, data: bytes) -> None:
        slot, self._granted = self._granted, None
        if slot is None or len(data) <= START.size:
            raise BrokenProtocol("the start of nothing")
        num_bytes, patience_s = START.unpack_from(data)
        if not 0 < num_bytes <= self._room:
            raise BrokenProtocol(f"{num_bytes} bytes where there is room for {self._room}")
        patience_s, payload = bounded(patience_s), slot.view(num_bytes)
        self._membership.broadcast(slot, payload, patience_s)
        self._expect(_Arrival(data[START.size :], payload, slot, deadline_in(patience_s)))

    def _advance(self) -> bool:
        if (join := self._membership.join) is not None and join.is_done():
            self._membership.group, self._membership.join = join.group, None
            self._answer(join.error or "")
        elif self._room and self._granted is None:
            self._grant()
        is_granting = bool(self._room) and self._granted is None
        return is_granting or self._membership.join is not None

    def _grant(self) -> None:
        """Promise a buffer that nobody reads any more, and to be here when its payload starts.

        Nobody knows when the reader comes back who has a frame without a payload to come. Beside a
        payload, nothing is known of one that does not call `progress`, nor of one's first: kernels
        are compiled for that.
        """
        slots = [one.slot for one in self._waiting]
        if None in slots or not (self._grants_ahead or (self._read is None and not slots)):
            return
        taken = [self._read, *slots]
        free = [one for one in self._membership.slots if one not in taken and one.mark.is_done()]
        if free and not free[0].fits(self._room):
            free[0].view(self._room)  # grows, and is marked again
        if free and free[0].mark.is_done():
            self._granted = free[0]
            self._answer()

    def _hand_out(self, first: _Arrival) -> Frame | None:
        """The oldest frame if its payload has arrived. Raises PeerLost if it will not."""
        if not self._has_landed(first):
            if time.monotonic() < first.deadline:
                return None
            flight = first.slot.flight if first.slot is not None else None
            why = flight.error if flight is not None else None
            raise PeerLost(f"a payload did not arrive: {why or 'it took too long'}")
        self._waiting.popleft()
        self._read = first.slot
        return Frame(first.header, first.payload, first.follows_loss)

    def _has_landed(self, one: _Arrival) -> bool:
        slot = one.slot
        if slot is None or slot.flight is None:
            return True
        if slot.flight.is_done() and slot.flight.error is None:
            slot.flight = None
            return True
        if slot.flight.error is not None:  # the sender is to say that somebody was lost
            one.deadline = min(one.deadline, deadline_in(_TELL_S))
        return False
