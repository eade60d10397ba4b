"""The receiver's end of the collective transport; collective.py describes the protocol.

At most two frames wait here to be returned. So one payload can be in flight while the one before
is read, although no code runs between two calls: the reader of a frame calls `progress` meanwhile,
and a frame that has arrived is held back until the next payload has started, if that is imminent.
A GPU may still read the payload before: its memory is a third one, which is made when it is needed.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltasync.errors import PeerLost, TransportTimeout
from deltasync.transports.base import Capabilities, Frame
from deltasync.transports.collective_messages import (
    DEFAULT_MAX_PAYLOAD_BYTES,
    FRAME,
    GRACE_S,
    GROUP,
    MAX_COMPLAINT_BYTES,
    MOMENT_S,
    NO_PAYLOAD,
    TELL_S,
    TICKET,
)
from deltasync.transports.control.connection import (
    BrokenProtocol,
    Kind,
    Message,
    Pace,
    deadline_in,
    left_s,
)
from deltasync.transports.control.tcp import check_network, dial_tcp
from deltasync.transports.process_group import (
    Broadcast,
    GroupSpec,
    Join,
    Membership,
    PayloadBuffer,
    bounded,
    device_of,
)
from deltasync.transports.sockets import SocketReceiver

_KINDS = {Kind.FRAME, Kind.GROUP, Kind.PACKED, Kind.START, Kind.ABANDON}
_ANSWER_TIMEOUT_S = 5.0
# How long a frame that has arrived is held back for a payload that was announced as packed.
_LINGER_S = 0.0005
_NUM_SLOTS, _MAX_ARRIVALS = 3, 2
_MAX_AT_ONCE = 64  # messages that are obeyed by `progress`, or after a deadline


@dataclass(slots=True)
class _Announced:
    """A payload that has not started.

    Attributes:
        num_bytes: Its length.
        patience_s: How long it may be in flight.
        slot: Where it will come, once that is known.
        is_packed: The sender waits only for answers.
        is_answered: It may start at any moment.
    """

    num_bytes: int
    patience_s: float
    slot: PayloadBuffer | None = None
    is_packed: bool = False
    is_answered: bool = False


@dataclass(slots=True)
class _Arrival:
    """A frame that has not been handed out.

    Attributes:
        frame: The frame.
        slot: Where its payload comes; None for a frame that has none.
        deadline: How long to wait for the payload; once it is there, for the next to be packed.
        is_cut_off: No other payload follows, and this one comes soon or never.
    """

    frame: Frame
    slot: PayloadBuffer | None
    deadline: float
    is_cut_off: bool = False

    @property
    def flight(self) -> Broadcast | None:
        """What its payload comes with, until that is there."""
        return None if self.slot is None else self.slot.flight

    def land(self) -> None:
        assert self.slot is not None
        self.slot.flight, self.deadline = None, deadline_in(_LINGER_S)


class Receiver(SocketReceiver):
    """A receiver's end: joins the groups that the sender forms, during `receive`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        backend: str = "gloo",
        device: torch.device | str | None = None,
        secret: bytes | None = None,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        """Connect to the sender at `host`:`port`; arguments as there. No memory is
        allocated for payloads larger than `max_payload_bytes`, whatever the sender declares.
        """
        check_network(host, secret)
        self._backend = backend
        device = device_of(backend, device)
        self._address = host, port
        capabilities = Capabilities((device.type,), max_payload_bytes, is_private=True)
        super().__init__(capabilities, _KINDS, secret=secret)
        self._membership = Membership(device)
        # One to read from, one to arrive in, and one that a GPU has not finished reading.
        self._slots = tuple(PayloadBuffer(device) for _ in range(_NUM_SLOTS))
        self._read: PayloadBuffer | None = None  # the one whose payload was handed out last
        self._ticket = 0
        self._plan: GroupSpec | None = None
        self._announced: _Announced | None = None
        self._arrivals: deque[_Arrival] = deque()
        self._misses = False  # the payload before the next frame

    def receive(self, *, timeout_s: float) -> Frame:
        """What a timeout interrupts, the next call goes on with."""
        deadline, pace, num_late = deadline_in(timeout_s), Pace(self._busy_s), 0
        with self._gate.entered():
            self._take_back()
            while num_late <= _MAX_AT_ONCE:
                num_arrivals = len(self._arrivals)
                self._advance()
                if (message := self._next()) is not None:
                    self._handle(message)
                    num_late += time.monotonic() >= deadline
                    pace = Pace(self._busy_s)
                elif (frame := self._hand_out(deadline)) is not None:
                    return frame
                elif time.monotonic() >= deadline:
                    break
                elif len(self._arrivals) == num_arrivals:  # else there is room for what has come
                    self._gate.wait(self._pause_s(pace, deadline))
        raise TransportTimeout("nothing came in time")

    def progress(self) -> None:
        with self._gate.entered():
            self._advance()
            for _ in range(_MAX_AT_ONCE):
                if (message := self._next()) is None:
                    break
                self._handle(message)
                self._advance()

    def _forget(self) -> None:
        self._client.hang_up()
        self._take_back()
        self._leave()
        self._arrivals.clear()
        self._misses = False

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
        kept = deque[_Arrival]()
        for arrival in self._arrivals:
            if arrival.flight is not None:
                self._misses = True
                continue
            if self._misses:
                arrival.frame, self._misses = replace(arrival.frame, follows_loss=True), False
            kept.append(arrival)
        self._arrivals = kept
        for slot in self._slots:
            slot.abandon()
        self._membership.leave()
        self._ticket = 0
        self._plan = self._announced = None

    def _take_back(self) -> None:
        """The payload that was handed out last is the caller's no more."""
        if self._read is not None:
            self._read.mark.set()
            self._read = None

    def _answer(self, ticket: int, complaint: str = "") -> None:
        """Raises PeerLost, unless something has arrived that is to be handed out first."""
        data = TICKET.pack(ticket) + complaint.encode()[:MAX_COMPLAINT_BYTES]
        try:
            self._client.write(Kind.READY, data, deadline_in(_ANSWER_TIMEOUT_S))
        except PeerLost:
            if not self._arrivals:
                raise
            self._cut_off()

    @property
    def _is_flying(self) -> bool:
        """Whether a payload is on its way."""
        return any(arrival.flight is not None for arrival in self._arrivals)

    def _pause_s(self, pace: Pace, deadline: float) -> float:
        """How long to wait for a message: briefly if no message tells the end of what goes on."""
        is_waiting = self._announced is not None and not self._announced.is_answered
        is_waiting = is_waiting or self._client.is_lost  # which nothing tells a second time
        if is_waiting or self._arrivals or self._membership.join is not None:
            return pace.pause_s(deadline)
        return left_s(deadline)

    def _next(self) -> Message | None:
        """A message that has come; only ABANDON while there is no room for another frame."""
        is_full = len(self._arrivals) >= _MAX_ARRIVALS
        is_full = is_full or any(arrival.is_cut_off for arrival in self._arrivals)
        try:
            return self._client.poll(0.0, Kind.ABANDON if is_full else None)
        except PeerLost:
            if not self._arrivals:
                raise
            self._cut_off()
            return None

    def _handle(self, message: Message) -> None:
        try:
            match message.kind:
                case Kind.FRAME:
                    self._on_frame(message.data)
                case Kind.GROUP:
                    self._on_group(message.data)
                case Kind.PACKED:
                    self._on_packed(message.data)
                case Kind.START:
                    self._on_start(message.data)
                case Kind.ABANDON:
                    self._on_abandon(message.data)
        except BrokenProtocol:
            self._forget()
            raise

    def _on_frame(self, data: bytes) -> None:
        if len(data) < FRAME.size:
            raise BrokenProtocol("a frame of the wrong size")
        ticket, num_bytes, timeout_s = FRAME.unpack_from(data)
        header = data[FRAME.size :]
        if bool(header) == (num_bytes > 0):
            raise BrokenProtocol("a frame without a header, or with one too early")
        limit = self._capabilities.max_payload_bytes
        if num_bytes < NO_PAYLOAD or (limit is not None and num_bytes > limit):
            raise BrokenProtocol(f"a payload of {num_bytes} bytes; this end takes up to {limit}")
        if header:
            self._announced = None  # a payload that was announced is announced again
            payload = None if num_bytes == NO_PAYLOAD else self._slots[0].view(0)
            self._expect(header, payload, None, deadline_in(0.0))
        elif self._membership.group is None:
            self._answer(ticket, "is in no group")
        else:
            self._ticket = ticket
            # It is the sender that gives up first: only it can tell who is to blame.
            patience_s = bounded(2 * timeout_s + GRACE_S)
            self._announced = _Announced(num_bytes, patience_s)

    def _on_group(self, data: bytes) -> None:
        if len(data) <= GROUP.size:
            raise BrokenProtocol("a group without a name")
        if self._is_flying:
            raise BrokenProtocol("a group while a payload is on its way")
        self._leave()
        self._ticket, rank, size, store_port, timeout_s = GROUP.unpack_from(data)
        theirs, _, name = data[GROUP.size :].decode("ascii", errors="replace").partition(" ")
        if not 0 < rank < size or not name:
            raise BrokenProtocol(f"rank {rank} in a group of {size}, named {name!r}")
        if theirs != self._backend:
            self._answer(self._ticket, f"broadcasts over {self._backend}, the sender over {theirs}")
            return
        self._plan = GroupSpec(
            backend=self._backend,
            stream=self._membership.stream,
            store_host=self._address[0],
            store_port=store_port,
            name=name,
            rank=rank,
            size=size,
            timeout_s=bounded(timeout_s),
            own_host=self._client.local_host,
        )
        self._answer(self._ticket)

    def _on_packed(self, data: bytes) -> None:
        if _ticket_in(data) == self._ticket and self._announced is not None:
            self._announced.is_packed = True

    def _on_start(self, data: bytes) -> None:
        header = data[TICKET.size :]
        if _ticket_in(data[: TICKET.size]) != self._ticket:
            raise BrokenProtocol("the start of something unknown")
        announced, self._announced = self._announced, None
        if self._plan is not None:
            self._membership.join, self._plan = Join(self._plan), None
        elif announced is not None and announced.is_answered and header:
            slot = announced.slot
            assert slot is not None
            payload = slot.view(announced.num_bytes)
            slot.flight = self._membership.broadcast(payload, announced.patience_s)
            self._expect(header, payload, slot, deadline_in(announced.patience_s))
        else:
            raise BrokenProtocol("the start of nothing")

    def _expect(
        self, header: bytes, payload: Tensor | None, slot: PayloadBuffer | None, deadline: float
    ) -> None:
        frame, self._misses = Frame(header, payload, follows_loss=self._misses), False
        self._arrivals.append(_Arrival(frame, slot, deadline))

    def _on_abandon(self, data: bytes) -> None:
        ticket = _ticket_in(data)
        if self._is_flying:
            self._cut_off()
        else:
            self._leave()
        self._answer(ticket)

    def _cut_off(self) -> None:
        """What is on its way arrives soon or never, and what was announced does not start."""
        self._announced = None
        for arrival in self._arrivals:
            if arrival.flight is not None:
                arrival.deadline = min(arrival.deadline, deadline_in(MOMENT_S))
                arrival.is_cut_off = True

    def _advance(self) -> None:
        """Go on with what no message tells the end of."""
        if self._announced is not None and not self._announced.is_answered:
            self._answer_announced(self._announced)
        elif (join := self._membership.join) is not None and join.is_done():
            ticket, self._membership.join = self._ticket, None
            self._membership.group = join.group
            self._answer(ticket, join.error or "")

    def _answer_announced(self, announced: _Announced) -> None:
        """Be ready once nobody reads the memory that the payload goes to.

        Who is ready stays until the payload starts, and one that is not packed can take its time.
        """
        if (self._arrivals or self._read is not None) and not announced.is_packed:
            return
        slot = announced.slot = announced.slot or self._free_slot()
        if slot is None:
            return
        if not slot.fits(announced.num_bytes):
            slot.view(announced.num_bytes)  # grows, and is marked again
        elif slot.mark.is_done():
            announced.is_answered = True
            self._answer(self._ticket)

    def _free_slot(self) -> PayloadBuffer | None:
        """The first that nobody reads any more: later ones stay empty while they are not needed."""
        taken = [self._read, *(arrival.slot for arrival in self._arrivals)]
        free = (slot for slot in self._slots if slot not in taken and slot.mark.is_done())
        return next(free, None)

    def _hand_out(self, deadline: float) -> Frame | None:
        """The oldest frame if its payload has arrived. Raises PeerLost if it will not."""
        if not self._arrivals:
            return None
        first = self._arrivals[0]
        if first.flight is not None and not self._land(first, first.flight):
            return None
        if self._expects_start(first) and time.monotonic() < deadline:
            return None
        self._arrivals.popleft()
        self._read = first.slot
        if first.is_cut_off and not self._is_flying:
            self._leave()
        return first.frame

    def _expects_start(self, first: _Arrival) -> bool:
        """Whether `first` is kept back for the next payload."""
        announced, now = self._announced, time.monotonic()
        return announced is not None and (announced.is_answered or now < first.deadline)

    def _land(self, arrival: _Arrival, flight: Broadcast) -> bool:
        """Whether its payload has arrived. Raises PeerLost if it will not."""
        is_done = flight.is_done()
        if is_done and flight.error is None:
            arrival.land()
            return True
        if is_done:  # the sender is to say that somebody was lost; if it does not, we are
            soon = deadline_in(0.0 if arrival.is_cut_off else TELL_S)
            arrival.deadline = min(arrival.deadline, soon)
        if time.monotonic() >= arrival.deadline and arrival.is_cut_off:
            self._leave()
        elif time.monotonic() >= arrival.deadline:
            self._forget()
            raise PeerLost(f"a payload did not arrive: {flight.error or 'it took too long'}")
        return False


def _ticket_in(data: bytes) -> int:
    if len(data) != TICKET.size:
        raise BrokenProtocol("a ticket of the wrong size")
    ticket: int = TICKET.unpack(data)[0]
    return ticket
