"""The receiver's end of the collective transport; collective.py describes the protocol.

One payload can be in flight while the one before is read, although no code runs between two calls:
the reader calls `progress` meanwhile. A third buffer is granted for the one after that.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from dataclasses import dataclass, replace

import torch

from deltasync.errors import PeerLost, TransportTimeout
from deltasync.transports.base import Frame
from deltasync.transports.collective_messages import (
    GROUP,
    MAX_COMPLAINT_BYTES,
    MOMENT_S,
    ROOM,
    START,
    TELL_S,
    TICKET,
)
from deltasync.transports.control.connection import (
    DEFAULT_MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    BrokenProtocol,
    Kind,
    Message,
    Pace,
    deadline_in,
    left_s,
)
from deltasync.transports.control.tcp import check_network, dial_tcp
from deltasync.transports.process_group import (
    Join,
    Membership,
    PayloadBuffer,
    bounded,
    device_of,
)
from deltasync.transports.sockets import SocketReceiver

_KINDS = {Kind.FRAME, Kind.GROUP, Kind.ROOM, Kind.START, Kind.ABANDON}
_ANSWER_TIMEOUT_S = 5.0
_MAX_WAITING = 256  # frames behind one whose payload is not there yet
_MAX_AT_ONCE = 64  # messages that are obeyed by `progress`, or after a deadline


@dataclass(slots=True)
class _Arrival:
    """A frame that has not been handed out.

    Attributes:
        frame: The frame.
        slot: Where its payload comes; None for a frame that has none.
        deadline: How long to wait for the payload.
    """

    frame: Frame
    slot: PayloadBuffer | None
    deadline: float


class Receiver(SocketReceiver):
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
        self._waiting: deque[_Arrival] = deque()
        self._read: PayloadBuffer | None = None  # the one whose payload was handed out last
        self._ticket = 0  # of the last question
        self._room = 0  # bytes to grant
        self._granted: PayloadBuffer | None = None
        self._calls_progress = False  # whether the reader does,
        self._grants_ahead = False  # and is done with a payload since
        self._misses = False  # the payload before the next frame

    def receive(self, *, timeout_s: float) -> Frame:
        """What a timeout interrupts, the next call goes on with."""
        deadline, pace, num_late = deadline_in(timeout_s), Pace(self._busy_s), 0
        with self._gate.entered():
            self._take_back()
            while num_late <= _MAX_AT_ONCE:
                self._advance()
                if self._waiting and (frame := self._hand_out(self._waiting[0])) is not None:
                    return frame
                is_late = time.monotonic() >= deadline
                if (message := self._next(self._pause_s(pace, deadline))) is not None:
                    self._obey(message)
                    num_late += is_late
                    pace = Pace(self._busy_s)
                elif is_late:
                    break
        raise TransportTimeout("nothing came in time")

    def progress(self) -> None:
        with self._gate.entered():
            self._calls_progress = True
            for _ in range(_MAX_AT_ONCE):
                self._advance()
                if (message := self._next(0.0)) is None:
                    break
                self._obey(message)

    def _forget(self) -> None:
        self._client.hang_up()
        self._take_back()
        self._leave()
        self._waiting.clear()
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
            one.frame, self._misses = replace(one.frame, follows_loss=True), False
        self._waiting.append(one)

    def _take_back(self) -> None:
        """The payload that was handed out last is the caller's no more."""
        if self._read is not None:
            self._read.mark.set()
            self._read, self._grants_ahead = None, self._calls_progress

    def _answer(self, complaint: str = "") -> None:
        data = TICKET.pack(self._ticket) + complaint.encode()[:MAX_COMPLAINT_BYTES]
        with contextlib.suppress(PeerLost):  # of a sender that is gone; what has come is handed out
            self._client.write(Kind.READY, data, deadline_in(_ANSWER_TIMEOUT_S))

    def _pause_s(self, pace: Pace, deadline: float) -> float:
        """How long to wait for a message: briefly if no message tells the end of what goes on."""
        is_granting = self._room and self._granted is None
        if self._waiting or is_granting or self._membership.join is not None:
            return pace.pause_s(deadline)
        return left_s(deadline)

    def _next(self, pause_s: float) -> Message | None:
        """A message, if one comes. Raises PeerLost once all that has come is handed out."""
        try:
            return self._client.poll(pause_s)
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
        try:
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
        except BrokenProtocol:
            self._forget()
            raise

    def _on_frame(self, header: bytes) -> None:
        if not header:
            raise BrokenProtocol("a frame without a header")
        num_bytes = sum(len(one.frame.header) for one in self._waiting)
        if len(self._waiting) >= _MAX_WAITING or num_bytes > DEFAULT_MAX_MESSAGE_BYTES:
            raise BrokenProtocol("more frames than can wait for a payload")
        self._room, self._granted = 0, None
        self._expect(_Arrival(Frame(header), None, deadline_in(0.0)))

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
            own_host=self._client.local_host,
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
        frame = Frame(data[START.size :], payload)
        self._expect(_Arrival(frame, slot, deadline_in(patience_s)))

    def _advance(self) -> None:
        """Go on with what no message tells the end of."""
        if (join := self._membership.join) is not None and join.is_done():
            self._membership.group, self._membership.join = join.group, None
            self._answer(join.error or "")
        elif self._room and self._granted is None:
            self._grant()

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
            self._forget()
            raise PeerLost(f"a payload did not arrive: {why or 'it took too long'}")
        self._waiting.popleft()
        self._read = first.slot
        return first.frame

    def _has_landed(self, one: _Arrival) -> bool:
        slot = one.slot
        if slot is None or slot.flight is None:
            return True
        if slot.flight.is_done() and slot.flight.error is None:
            slot.flight = None
            return True
        if slot.flight.error is not None:  # the sender is to say that somebody was lost
            one.deadline = min(one.deadline, deadline_in(TELL_S))
        return False
