"""NIXL between hosts: receivers read payloads from the sender's memory (RDMA), the rest is TCP.

    sender                                     receiver
    MEMORY(slot, place, NIXL's metadata) --->  the right to read this slot
    pack; stamp; FRAME(slot, ...) ---------->  read the payload, then its stamp
          <------------------------ RELEASE --  the stamp was right: return the payload

Each slot ends in a stamp: the number of the frame that stands there, or -1 while the sender writes.
A receiver reads it after the payload. So one that was dropped as too slow, but still reads while
the next payload is packed, finds another stamp, and loses its connection instead of returning
bytes of two payloads.

The sender never waits for a receiver, except for a free slot. Its memory stays registered until it
closes: where UCX has no RDMA, reads are served by a thread of the sender, from any address, and one
of memory that was freed would end the process. The sender reads nothing from receivers but control
messages. A receiver has an agent for each connection; it is closed before its buffers are freed,
so that nothing arrives in memory that is another's by now.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from deltasync.errors import PeerLost, TransportTimeout, TransportUnavailable
from deltasync.transports.base import Capabilities, Frame
from deltasync.transports.control.connection import (
    BrokenProtocol,
    Kind,
    Message,
    Pace,
    busy_s,
    deadline_in,
    left_s,
)
from deltasync.transports.control.tcp import check_network, dial_tcp, listen_tcp, warn_of_strangers
from deltasync.transports.nixl_agent import (
    MEMORY_TYPES,
    Agent,
    Place,
    Read,
    device_of,
    load_library,
)
from deltasync.transports.process_group import StreamEvent
from deltasync.transports.slots import (
    EMPTY_SLOT,
    NO_SLOT,
    NUM_SLOTS,
    Announcement,
    Slot,
    SlotReceiver,
    SlotSender,
)

DEFAULT_MAX_PAYLOAD_BYTES = 4 << 30
_MEMORY = struct.Struct("<BBxxIQQ")  # slot, memory type, device, bytes, address; metadata follows
_STAMP_BYTES = 8
_WRITING = -1
_GRANULE_BYTES = 1 << 16
_GRACE_S = 1.0  # for reads under way, when their connection is ended
_POLL_S = 0.0005
_READING_S = 0.0001
_MAX_WAITING = 64  # frames that are not handed out
_MAX_AT_ONCE = 64  # messages that are obeyed by `progress`
_RELEASE_TIMEOUT_S = 5.0


class _Stamped:
    """Memory that ends in a stamp, on its device: uint8[num_bytes], then int64."""

    def __init__(self, agent: Agent, num_bytes: int, device: torch.device) -> None:
        whole = torch.empty(num_bytes + _STAMP_BYTES, dtype=torch.uint8, device=device)
        self.memory, self.stamp = whole[:num_bytes], whole[num_bytes:].view(torch.int64)
        self.registered = agent.register(whole)


class _Slot(Slot):
    """Memory of the sender that receivers read from afar."""

    announcement = Kind.MEMORY

    def __init__(self, index: int, agent: Agent, device: torch.device) -> None:
        super().__init__(index, torch.empty(0, dtype=torch.uint8, device=device))
        self._agent = agent
        self._stamped: list[_Stamped] = []  # the last is in use; the others may still be read
        self._description = b""

    def open(self, num_bytes: int) -> Tensor:
        """Grows to twice the size at least, so that all it gave up is no more than what it has."""
        if self.memory.numel() < num_bytes:
            size = max(num_bytes, 2 * self.memory.numel())
            size = -(-size // _GRANULE_BYTES) * _GRANULE_BYTES
            stamped = _Stamped(self._agent, size, self.memory.device)
            self._description = self._agent.describe(stamped.registered)
            self._stamped.append(stamped)
            self.memory = stamped.memory
            self.known_to.clear()
        self._stamped[-1].stamp.fill_(_WRITING)
        return self.memory[:num_bytes]

    def filled(self) -> None:
        """Wait for the current stream: a network card does not."""
        self._stamped[-1].stamp.fill_(self.sequence)
        if self.memory.device.type == "cuda":
            torch.cuda.current_stream(self.memory.device).synchronize()

    def settle(self) -> None:
        """Do nothing: it stands here."""

    @contextmanager
    def announced(self) -> Iterator[tuple[bytes, None]]:
        place = Place.of(self.memory)
        memory = _MEMORY.pack(
            self.index, place.memory_type, place.device, self.memory.numel(), place.address
        )
        yield memory + self._description, None

    def free(self) -> None:
        """Called when the agent has been closed."""
        self._stamped.clear()
        self.memory = self.memory.new_empty(0)
        self.known_to.clear()


class Sender(SlotSender):
    """The sender's end: payloads in memory that receivers read."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        device: torch.device | str | None = None,
        secret: bytes | None = None,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        """Listen on `host`, which receivers must be able to reach.

        UCX opens ports of its own, on every network that it uses: `UCX_NET_DEVICES` limits them.

        Args:
            host: Address of the interface to listen on.
            port: 0 chooses a free port; see `address`.
            device: Where payloads live, by default the CPU; receivers may have theirs elsewhere.
            secret: Signs the control plane; receivers must have the same secret. Without one, an
                address that is not loopback logs a warning.
            max_payload_bytes: Larger payloads are refused.

        Raises TransportUnavailable without NIXL, or where UCX cannot run.
        """
        check_network(host, secret)
        device = device_of(device)
        self._agent = Agent(device, serves=True)
        listener = listen_tcp(host, port)
        self._host, self._port = listener.getsockname()[:2]
        if secret is None:
            warn_of_strangers(self._host, self._port)
        slots = [_Slot(index, self._agent, device) for index in range(NUM_SLOTS)]
        capabilities = Capabilities((device.type,), max_payload_bytes, outlives_losses=True)
        super().__init__(listener, slots, capabilities, secret=secret)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that receivers connect to."""
        return self._host, self._port

    def _settle(self, slots: Sequence[Slot]) -> None:
        """Wait, not for ever, until what was sent from `slots` has been read."""
        deadline = deadline_in(_GRACE_S)
        while time.monotonic() < deadline and any(slot.readers for slot in slots):
            for slot in slots:
                self._server.read(slot.readers)
                self._take_releases(slot.readers)
                slot.readers -= self._server.losses(slot.readers).keys()
            time.sleep(_POLL_S)

    def _dispose(self) -> None:
        self._settle(self._slots)
        self._server.close()
        self._agent.close()
        for slot in self._slots:
            slot.free()


class _Buffer:
    """Memory of a receiver that payloads are read into.

    Attributes:
        mark: When its last reader is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamped: _Stamped | None = None
        self.mark = StreamEvent(device)

    def open(self, agent: Agent, num_bytes: int) -> _Stamped:
        """Memory for `num_bytes`, which nothing uses at the moment."""
        old = self._stamped
        if old is None or old.memory.numel() < num_bytes:
            size = -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
            if old is not None:
                size = max(size, old.memory.numel() * 5 // 4)
                agent.unregister(old.registered)
                self._stamped = old = None
            self._stamped = _Stamped(agent, size, self._device)
        return self._stamped  # type: ignore[return-value]  # made just now

    def forget(self) -> None:
        """Called when the agent has been closed."""
        self._stamped = None


@dataclass(slots=True, eq=False)
class _Arrival:
    """A frame that has not been handed out.

    Attributes:
        told: What the sender said of it.
        buffer: Where its payload comes, once there is a buffer for it.
        stamped: The memory of that.
        read: What its payload, then its stamp, comes with, until both are here.
        is_checking: The payload is here.
        error: Why it does not come.
    """

    told: Announcement
    buffer: _Buffer | None = None
    stamped: _Stamped | None = None
    read: Read | None = None
    is_checking: bool = False
    error: PeerLost | None = None

    @property
    def is_here(self) -> bool:
        if self.told.slot in (NO_SLOT, EMPTY_SLOT):
            return True
        return self.stamped is not None and self.read is None

    @property
    def payload(self) -> Tensor:
        assert self.stamped is not None
        return self.stamped.memory[: self.told.num_bytes]


@dataclass(frozen=True, slots=True)
class _Segment:
    """A slot of the sender: whose it is, where, and how many bytes it has."""

    owner: str
    place: Place
    num_bytes: int


class Receiver(SlotReceiver):
    """A receiver's end: reads payloads into memory of its own."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        device: torch.device | str | None = None,
        secret: bytes | None = None,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        """Connect to the sender at `host`:`port`; arguments as there. No memory is
        allocated for payloads larger than `max_payload_bytes`, whatever the sender declares.
        """
        check_network(host, secret)
        load_library()
        self._address = host, port
        self._device = device_of(device)
        super().__init__(
            Capabilities((self._device.type,), max_payload_bytes), Kind.MEMORY, secret=secret
        )
        self._agent: Agent | None = None
        self._buffers = _Buffer(self._device), _Buffer(self._device)
        self._segments: dict[int, _Segment] = {}
        self._arrivals: deque[_Arrival] = deque()
        self._held: _Buffer | None = None  # whose payload was handed out last
        self._cut_off: float | None = None  # the connection has ended; reads may end until then

    def connect(self, greeting: bytes, *, timeout_s: float) -> None:
        """With a secret, waits for the sender to poll. Raises TransportUnavailable without UCX."""
        with self._gate.entered():
            self._forget()
            self._agent = Agent(self._device, serves=False)
            self._client.connect(greeting, deadline_in(timeout_s))

    def receive(self, *, timeout_s: float) -> Frame:
        """What a timeout interrupts, the next call goes on with."""
        deadline, pace = deadline_in(timeout_s), Pace(busy_s(self._device.type))
        with self._gate.entered():
            self._take_back()
            try:
                while True:
                    self._advance()
                    if self._arrivals and (frame := self._hand_out()) is not None:
                        return frame
                    is_late = time.monotonic() >= deadline
                    pause_s = self._pause_s(pace, deadline)
                    if not self._take_message(pause_s) and is_late:
                        raise TransportTimeout("nothing came in time")
            except (PeerLost, TransportUnavailable):
                self._forget()
                raise

    def progress(self) -> None:
        with self._gate.entered():
            try:
                self._advance()
                for _ in range(_MAX_AT_ONCE):
                    if not self._take_message(0.0):
                        break
                    self._advance()
            except (PeerLost, TransportUnavailable):
                self._forget()
                raise

    def _dial(self, timeout_s: float) -> socket.socket:
        return dial_tcp(*self._address, timeout_s=timeout_s)

    def _forget(self) -> None:
        self._client.hang_up()
        self._arrivals.clear()
        self._segments.clear()
        self._held = self._cut_off = None
        if self._agent is not None:
            self._agent.close()  # what is on its way does not arrive any more
            self._agent = None
        for buffer in self._buffers:
            buffer.forget()

    def _take_back(self) -> None:
        """The payload that was handed out last is the caller's no more."""
        if self._held is not None:
            self._held.mark = StreamEvent(self._device)
            self._held = None

    def _pause_s(self, pace: Pace, deadline: float) -> float:
        """How long to wait for a message: briefly while payloads come, of which none tells."""
        if any(arrival.read is not None for arrival in self._arrivals):
            return min(_READING_S, left_s(deadline))
        return pace.pause_s(deadline) if self._arrivals else left_s(deadline)

    def _take_message(self, pause_s: float) -> bool:
        """Obey a message, if one comes. Raises PeerLost, but not while payloads may still come."""
        is_full = len(self._arrivals) >= _MAX_WAITING
        try:
            message = self._client.poll(pause_s, Kind.MEMORY if is_full else None)
        except PeerLost:
            self._cut_off = self._cut_off or deadline_in(_GRACE_S)
            if not self._arrivals or time.monotonic() >= self._cut_off:
                raise
            self._gate.wait(_POLL_S)
            return False
        if message is not None:
            self._handle(message)
        return message is not None

    def _handle(self, message: Message) -> None:
        if message.kind is Kind.MEMORY:
            self._on_memory(message.data)
            return
        sizes = {index: segment.num_bytes for index, segment in self._segments.items()}
        told = Announcement.parse(message.data, sizes)
        limit = self._capabilities.max_payload_bytes
        if told.slot < NUM_SLOTS and not 0 < told.num_bytes <= (limit or told.num_bytes):
            raise BrokenProtocol(f"a payload of {told.num_bytes} bytes; this end takes {limit}")
        self._arrivals.append(_Arrival(told))

    def _on_memory(self, data: bytes) -> None:
        if len(data) <= _MEMORY.size:
            raise BrokenProtocol("memory without metadata")
        index, memory_type, device, num_bytes, address = _MEMORY.unpack_from(data)
        if index >= NUM_SLOTS or memory_type >= len(MEMORY_TYPES):
            raise BrokenProtocol(f"memory of type {memory_type} for slot {index}")
        if any(arrival.told.slot == index and not arrival.is_here for arrival in self._arrivals):
            raise BrokenProtocol("memory in place of some that is in use")
        assert self._agent is not None  # as long as the connection lasts
        owner = self._agent.meet(data[_MEMORY.size :])
        self._segments[index] = _Segment(owner, Place(memory_type, device, address), num_bytes)

    def _advance(self) -> None:
        """Go on with reading payloads, in order, as far as there are buffers."""
        for arrival in self._arrivals:
            if arrival.is_here or arrival.error is not None:
                continue
            try:
                if arrival.buffer is None and not self._begin(arrival):
                    return
                self._go_on(arrival)
            except PeerLost as error:
                arrival.error = error

    def _begin(self, arrival: _Arrival) -> bool:
        """Begin to read a payload; False if there is no buffer for it yet."""
        taken = [self._held, *(other.buffer for other in self._arrivals)]
        free = [one for one in self._buffers if one not in taken and one.mark.is_done()]
        if not free:
            return False
        assert self._agent is not None
        arrival.stamped = free[0].open(self._agent, arrival.told.num_bytes)
        arrival.buffer = free[0]
        segment = self._segments[arrival.told.slot]
        place = segment.place.after(arrival.told.start)
        arrival.read = self._agent.read(segment.owner, place, arrival.payload)
        return True

    def _go_on(self, arrival: _Arrival) -> None:
        """Read the stamp once the payload is here, and release it once that is right."""
        if arrival.read is None or not arrival.read.is_done():
            return
        assert self._agent is not None
        assert arrival.stamped is not None
        if not arrival.is_checking:
            arrival.is_checking = True
            segment = self._segments[arrival.told.slot]
            stamp = arrival.stamped.stamp.view(torch.uint8)
            place = segment.place.after(segment.num_bytes)
            arrival.read = self._agent.read(segment.owner, place, stamp)
            return
        arrival.read = None
        if int(arrival.stamped.stamp.item()) != arrival.told.sequence:
            raise PeerLost("the sender has replaced a payload that was read too late")
        with suppress(PeerLost):  # of a sender that is gone; what it sent is still handed out
            self._client.write(Kind.RELEASE, arrival.told.release, deadline_in(_RELEASE_TIMEOUT_S))

    def _hand_out(self) -> Frame | None:
        """The oldest frame if it is here. Raises PeerLost if it does not come."""
        first = self._arrivals[0]
        if first.error is not None:
            raise first.error
        if not first.is_here:
            return None
        self._arrivals.popleft()
        if first.told.slot == NO_SLOT:
            return Frame(first.told.header)
        if first.told.slot == EMPTY_SLOT:
            empty = torch.empty(0, dtype=torch.uint8, device=self._device)
            return Frame(first.told.header, empty)
        self._held = first.buffer
        return Frame(first.told.header, first.payload)
