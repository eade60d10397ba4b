"""The receiver's end of the collective transport; the protocol is told in collective.py."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

import torch

from deltasync.errors import PeerLost, TransportClosed, TransportTimeout
from deltasync.transports.base import Capabilities, Frame
from deltasync.transports.collective_messages import (
    DEFAULT_MAX_PAYLOAD_BYTES,
    FRAME,
    GRACE_S,
    GROUP,
    MAX_COMPLAINT_BYTES,
    MOMENT_S,
    NO_PAYLOAD,
    TICKET,
)
from deltasync.transports.control import BUSY_S, BrokenProtocol, Deadline, Kind, Message, Pace
from deltasync.transports.endpoints import Client, Gate, check_secret
from deltasync.transports.process_group import (
    BACKENDS,
    Backend,
    Broadcast,
    Join,
    Membership,
    Plan,
    Slot,
    bounded,
    capabilities_of,
    device_of,
)

_ANSWER_TIMEOUT_S = 5.0
_DIAL_TIMEOUT_S = 1.0


@dataclass(slots=True)
class _Announced:
    """A payload that has not started. The sender waits until `is_answered`.

    `patience_s` is how long the payload may then be on its way.
    """

    num_bytes: int
    patience_s: float
    is_answered: bool = False


@dataclass(slots=True)
class _Landing:
    """A frame whose payload is on its way, and how long to wait for it."""

    frame: Frame
    flight: Broadcast
    deadline: Deadline
    is_cut_off: bool = False


class Receiver:
    """A receiver's end: joins the groups that the sender forms, during `receive`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        backend: Backend = "gloo",
        device: torch.device | str | None = None,
        secret: bytes | None = None,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        """Connect to the sender at `host`:`port`; arguments as there. Nothing larger than
        `max_payload_bytes` is allocated, whatever the sender declares.
        """
        check_secret(secret)
        self._backend: Backend = backend
        device = device_of(backend, device)
        self._capabilities = capabilities_of(device, max_payload_bytes)
        self._address = host, port
        self._busy_s = BUSY_S[device.type]
        self._gate = Gate(self._busy_s)
        self._client = Client(
            self._dial,
            self._gate,
            kinds={Kind.FRAME, Kind.GROUP, Kind.START, Kind.ABANDON},
            secret=secret,
        )
        self._membership = Membership(device)
        self._slots = Slot(device), Slot(device)
        self._turn = 0  # the slot of the next payload
        self._read: Slot | None = None  # the one whose payload was handed out last
        self._ticket = 0
        self._plan: Plan | None = None
        self._announced: _Announced | None = None
        self._landing: _Landing | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def connect(self, greeting: bytes, *, timeout_s: float) -> None:
        """With a secret, waits for the sender to poll."""
        with self._gate.entered():
            self._take_back()
            self._leave()
            self._client.connect(greeting, Deadline(timeout_s))

    def receive(self, *, timeout_s: float) -> Frame:
        """What a timeout interrupts, the next call goes on with."""
        deadline, pace = Deadline(timeout_s), Pace(self._busy_s)
        with self._gate.entered():
            self._take_back()
            while True:
                if (frame := self._advance()) is not None:
                    return frame
                wait_s = pace.pause_s(deadline) if self._is_busy else deadline.remaining_s
                is_expired = deadline.passed
                message = self._next(wait_s)
                if message is not None and (frame := self._handle(message)) is not None:
                    return frame
                if message is not None:
                    pace = Pace(self._busy_s)
                elif is_expired:
                    raise TransportTimeout("nothing came in time")

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        with self._gate.entered():
            self._client.write(Kind.REPLY, data, Deadline(timeout_s))

    def disconnect(self) -> None:
        with contextlib.suppress(TransportClosed), self._gate.entered():
            self._dispose()

    def close(self) -> None:
        self._gate.close(self._dispose)

    def _dispose(self) -> None:
        self._client.hang_up()
        self._leave()

    def _dial(self) -> socket.socket:
        # The timeout keeps a host that swallows packets from outlasting the caller's.
        return socket.create_connection(self._address, timeout=_DIAL_TIMEOUT_S)

    def _leave(self) -> None:
        """Be in no group and expect no frame."""
        for slot in self._slots:
            slot.abandon()
        self._membership.leave()
        self._ticket = 0
        self._plan = self._announced = self._landing = None

    def _take_back(self) -> None:
        """The payload that was handed out last is the caller's no more."""
        if self._read is not None:
            self._read.set_mark()
            self._read = None

    def _answer(self, ticket: int, complaint: str = "") -> None:
        data = TICKET.pack(ticket) + complaint.encode()[:MAX_COMPLAINT_BYTES]
        self._client.write(Kind.READY, data, Deadline(_ANSWER_TIMEOUT_S))

    @property
    def _is_busy(self) -> bool:
        """Whether something is under way that no message tells the end of."""
        is_waiting = self._announced is not None and not self._announced.is_answered
        return is_waiting or self._landing is not None or self._membership.join is not None

    def _next(self, wait_s: float) -> Message | None:
        """The next message; all but ABANDON come after the payload that is on its way."""
        if self._landing is None:
            return self._client.poll(wait_s)
        try:
            return self._client.poll(wait_s, Kind.ABANDON)
        except PeerLost:
            self._cut_off(self._landing)
            self._gate.wait(wait_s)
            return None

    def _handle(self, message: Message) -> Frame | None:
        """Act on one message; returns a frame that is complete."""
        try:
            match message.kind:
                case Kind.FRAME:
                    return self._on_frame(message.data)
                case Kind.GROUP:
                    self._on_group(message.data)
                case Kind.START:
                    self._on_start(message.data)
                case Kind.ABANDON:
                    self._on_abandon(message.data)
        except BrokenProtocol:
            self._dispose()
            raise
        return None

    def _on_frame(self, data: bytes) -> Frame | None:
        if len(data) < FRAME.size:
            raise BrokenProtocol("a frame of the wrong size")
        ticket, num_bytes, timeout_s = FRAME.unpack_from(data)
        header = data[FRAME.size :]
        if bool(header) == (num_bytes > 0):
            raise BrokenProtocol("a frame without a header, or with one too early")
        if num_bytes == NO_PAYLOAD:
            return Frame(header)
        limit = self._capabilities.max_payload_bytes
        if num_bytes < 0 or (limit is not None and num_bytes > limit):
            raise BrokenProtocol(f"a payload of {num_bytes} bytes; this end takes up to {limit}")
        if num_bytes == 0:
            return Frame(header, self._slots[self._turn].view(0))
        if self._membership.group is None:
            self._answer(ticket, "is in no group")
        else:
            self._ticket = ticket
            # It is the sender that gives up first: only it can tell who is to blame.
            patience_s = bounded(2 * timeout_s + GRACE_S)
            self._announced = _Announced(num_bytes, patience_s)
        return None

    def _on_group(self, data: bytes) -> None:
        if len(data) <= GROUP.size:
            raise BrokenProtocol("a group without a name")
        self._leave()
        self._ticket, rank, size, store_port, backend, timeout_s = GROUP.unpack_from(data)
        if not 0 < rank < size or backend >= len(BACKENDS):
            raise BrokenProtocol(f"rank {rank} in a group of {size}, back end {backend}")
        if BACKENDS[backend] != self._backend:
            theirs = BACKENDS[backend]
            self._answer(self._ticket, f"broadcasts over {self._backend}, the sender over {theirs}")
            return
        self._plan = Plan(
            backend=self._backend,
            lane=self._membership.lane,
            store_host=self._address[0],
            store_port=store_port,
            name=data[GROUP.size :].decode("ascii", errors="replace"),
            rank=rank,
            size=size,
            timeout_s=bounded(timeout_s),
            own_host=self._client.local_host,
        )
        self._answer(self._ticket)

    def _on_start(self, data: bytes) -> None:
        header = data[TICKET.size :]
        if _ticket_in(data[: TICKET.size]) != self._ticket:
            raise BrokenProtocol("the start of something unknown")
        announced, self._announced = self._announced, None
        if self._plan is not None:
            self._membership.join, self._plan = Join(self._plan), None
        elif announced is not None and announced.is_answered and header:
            slot = self._slots[self._turn]
            payload = slot.view(announced.num_bytes)
            slot.flight = self._membership.broadcast(payload, announced.patience_s)
            deadline = Deadline(announced.patience_s)
            self._landing = _Landing(Frame(header, payload), slot.flight, deadline)
        else:
            raise BrokenProtocol("the start of nothing")

    def _on_abandon(self, data: bytes) -> None:
        ticket = _ticket_in(data)
        if self._landing is not None:
            self._cut_off(self._landing)
        else:
            self._leave()
        self._answer(ticket)

    def _cut_off(self, landing: _Landing) -> None:
        landing.deadline, landing.is_cut_off = landing.deadline.sooner(MOMENT_S), True

    def _advance(self) -> Frame | None:
        """Go on with what is under way; returns a frame that is complete."""
        if self._landing is not None:
            return self._land(self._landing)
        if self._announced is not None and not self._announced.is_answered:
            self._answer_announced(self._announced)
        elif (join := self._membership.join) is not None and join.is_done():
            ticket, self._membership.join = self._ticket, None
            self._membership.group = join.group
            self._answer(ticket, join.error or "")
        return None

    def _answer_announced(self, announced: _Announced) -> None:
        """Be ready once nobody reads the memory that the payload goes to."""
        slot = self._slots[self._turn]
        if not slot.mark.is_done():
            return
        if slot.fits(announced.num_bytes):
            announced.is_answered = True
            self._answer(self._ticket)
        else:
            slot.view(announced.num_bytes)  # grows, and is marked anew

    def _land(self, landing: _Landing) -> Frame | None:
        """The frame if its payload has arrived. Raises PeerLost if it will not."""
        is_done, error = landing.flight.is_done(), landing.flight.error
        if is_done and error is None:
            self._landing, self._read = None, self._slots[self._turn]
            self._read.flight = None
            self._turn = 1 - self._turn
            if landing.is_cut_off:
                self._leave()
            return landing.frame
        if is_done:  # the sender is to say that somebody was lost; if it does not, we are
            landing.deadline = landing.deadline.sooner(0.0 if landing.is_cut_off else GRACE_S)
        if landing.deadline.passed and landing.is_cut_off:
            self._leave()
        elif landing.deadline.passed:
            self._dispose()
            raise PeerLost(f"a payload did not arrive: {error or 'it took too long'}")
        return None


def _ticket_in(data: bytes) -> int:
    if len(data) != TICKET.size:
        raise BrokenProtocol("a ticket of the wrong size")
    ticket: int = TICKET.unpack(data)[0]
    return ticket
