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
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from deltasync.errors import PeerLost
from deltasync.transports.control.connection import (
    BrokenProtocol,
    Kind,
    Message,
    deadline_in,
)
from deltasync.transports.control.tcp import check_network, dial_tcp, listen_tcp, warn_of_strangers
from deltasync.transports.marks import Mark
from deltasync.transports.nixl_agent import MEMORY_TYPES, Agent, Place, device_of, load_library
from deltasync.transports.slots import (
    NO_SLOT,
    NUM_SLOTS,
    Announcement,
    Slot,
    SlotReceiver,
    SlotSender,
)

# slot, memory type, device, bytes, address; metadata follows. It begins as `MEMORY` of slots.py.
_MEMORY = struct.Struct("<BBxxIQQ")
_STAMP_BYTES = 8
_WRITING = -1
_GRACE_S = 1.0  # for reads under way, when their connection is ended
_POLL_S = 0.0005


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
        super().__init__(index, device)
        self._agent = agent
        self._stamped: list[_Stamped] = []  # the last is in use; the others may still be read

    def open(self, num_bytes: int) -> Tensor:
        memory = super().open(num_bytes)
        self._stamped[-1].stamp.fill_(_WRITING)
        return memory

    def grow(self, num_bytes: int) -> Tensor:
        """To twice the size at least, so that all it gave up is no more than what it has."""
        size = max(num_bytes, 2 * self.memory.numel())
        self._stamped.append(_Stamped(self._agent, size, self.memory.device))
        return self._stamped[-1].memory

    def filled(self) -> None:
        """Wait for the current stream: a network card does not."""
        self._stamped[-1].stamp.fill_(self.sequence)
        if self.memory.device.type == "cuda":
            torch.cuda.current_stream(self.memory.device).synchronize()

    @contextmanager
    def announced(self) -> Iterator[tuple[bytes, None]]:
        place = Place.of(self.memory)
        memory = _MEMORY.pack(
            self.index, place.memory_type, place.device, self.memory.numel(), place.address
        )
        yield memory + self._agent.describe(self._stamped[-1].registered), None

    def free(self) -> None:
        """Its memory is read until the agent is closed."""
        self._agent.close()
        self._stamped.clear()
        super().free()


class Sender(SlotSender):
    """The sender's end: payloads in memory that receivers read.

    Attributes:
        address: Host and port that receivers connect to.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        device: torch.device | str | None = None,
        secret: bytes | None = None,
    ) -> None:
        """Listen on `host`, which receivers must be able to reach.

        UCX opens ports of its own, on every network that it uses: `UCX_NET_DEVICES` limits them.

        Args:
            host: Address of the interface to listen on.
            port: 0 chooses a free port; see `address`.
            device: Where payloads live, by default the CPU; receivers may have theirs elsewhere.
            secret: Signs the control plane; receivers must have the same secret. Without one, an
                address that is not loopback issues a Python warning.

        Raises TransportUnavailable without NIXL, or where UCX cannot run.
        """
        check_network(host, secret)
        device = device_of(device)
        self._agent = Agent(device, serves=True)
        listener = listen_tcp(host, port)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        if secret is None:
            warn_of_strangers(*self.address)
        slots = [_Slot(index, self._agent, device) for index in range(NUM_SLOTS)]
        super().__init__(listener, slots, secret=secret)

    def _is_settled(self, slot: Slot) -> bool:
        """It has been read."""
        for peer in slot.readers & self._peers.keys():
            self._serve(self._peers[peer])  # also while this end closes
        self._take_releases(slot.readers)
        return not slot.readers


class _Buffer:
    """Memory of a receiver that payloads are read into.

    Attributes:
        told: The frame whose payload comes or is here; None if nothing uses it.
        mark: When its last reader is done.
        read: What the payload, then its stamp, comes with, until both are here.
        is_checking: The payload is here.
        error: Why it does not come.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.mark = Mark(device)
        self.forget()

    def forget(self) -> None:
        """Called when the agent has been closed."""
        self._stamped: _Stamped | None = None
        self.told: Announcement | None = None
        self.read: int | None = None
        self.is_checking = False
        self.error: PeerLost | None = None

    def open(self, agent: Agent, told: Announcement) -> Tensor:
        """Memory for its payload, which nothing uses at the moment."""
        old, num_bytes = self._stamped, told.num_bytes
        if old is None or old.memory.numel() < num_bytes:
            size = -(-num_bytes // _Slot.granule_bytes) * _Slot.granule_bytes
            if old is not None:
                size = max(size, old.memory.numel() * 5 // 4)
                agent.unregister(old.registered)
                self._stamped = old = None
            self._stamped = _Stamped(agent, size, self._device)
        self.told, self.is_checking = told, False
        return self.payload

    @property
    def payload(self) -> Tensor:
        assert self._stamped is not None
        assert self.told is not None
        return self._stamped.memory[: self.told.num_bytes]

    @property
    def stamp(self) -> Tensor:
        assert self._stamped is not None
        return self._stamped.stamp


class Receiver(SlotReceiver):
    """A receiver's end: reads payloads into memory of its own."""

    longest_pause_s = 0.0001  # payloads come while it looks

    def __init__(
        self,
        host: str,
        port: int,
        *,
        device: torch.device | str | None = None,
        secret: bytes | None = None,
    ) -> None:
        """Connect to the sender at `host`:`port`; arguments as there."""
        check_network(host, secret)
        load_library()
        self._address = host, port
        super().__init__(device_of(device), Kind.MEMORY, secret=secret)
        self._agent: Agent | None = None
        self._buffers = _Buffer(self.device), _Buffer(self.device)
        self._segments: dict[int, tuple[str, Place]] = {}  # slots: whose they are, and where
        self._held: _Buffer | None = None  # whose payload was handed out last
        self._cut_off: float | None = None  # the connection has ended; reads may end until then

    def _dial(self, timeout_s: float) -> socket.socket:
        """Raises TransportUnavailable without UCX."""
        self._agent = self._agent or Agent(self.device, serves=False)
        return dial_tcp(*self._address, timeout_s=timeout_s)

    def _forget(self) -> None:
        super()._forget()
        self._segments.clear()
        self._held = self._cut_off = None
        if self._agent is not None:
            self._agent.close()  # what is on its way does not arrive any more
            self._agent = None
        for buffer in self._buffers:
            buffer.forget()

    def _take_back(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.mark.set()
            held.told = None

    def _next(self, timeout_s: float) -> Message | None:
        """Raises PeerLost, but not while payloads may still come."""
        try:
            return super()._next(timeout_s)
        except PeerLost:
            self._cut_off = self._cut_off or deadline_in(_GRACE_S)
            if not self._waiting or time.monotonic() >= self._cut_off:
                raise
            self._gate.wait(_POLL_S)
            return None

    def _map(self, slot: int, num_bytes: int, message: Message) -> None:
        if len(message.data) <= _MEMORY.size:
            raise BrokenProtocol("memory without metadata")
        _, memory_type, device, _, address = _MEMORY.unpack_from(message.data)
        if memory_type >= len(MEMORY_TYPES):
            raise BrokenProtocol(f"memory of type {memory_type}")
        assert self._agent is not None  # as long as the connection lasts
        owner = self._agent.meet(message.data[_MEMORY.size :])
        self._segments[slot] = owner, Place(memory_type, device, address)

    def _buffer_of(self, told: Announcement) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.told is told), None)

    def _advance(self) -> bool:
        """Go on with reading payloads, in order, as far as there are buffers."""
        for told in self._waiting:
            if told.slot == NO_SLOT:
                continue
            buffer = self._buffer_of(told)
            free = [one for one in self._buffers if one.told is None and one.mark.is_done()]
            if buffer is None and not free:
                break
            try:
                if buffer is None:
                    buffer = free[0]
                    self._begin(buffer, told)
                self._go_on(buffer, told)
            except PeerLost as error:
                assert buffer is not None
                buffer.error = error
        return bool(self._waiting)

    def _begin(self, buffer: _Buffer, told: Announcement) -> None:
        """Begin to read a payload."""
        assert self._agent is not None
        payload = buffer.open(self._agent, told)
        buffer.read = self._agent.read(*self._segments[told.slot], payload)

    def _go_on(self, buffer: _Buffer, told: Announcement) -> None:
        """Read the stamp once the payload is here, and release it once that is right."""
        assert self._agent is not None
        if buffer.error or buffer.read is None or not self._agent.is_done(buffer.read):
            return
        if not buffer.is_checking:
            buffer.is_checking = True
            (owner, place), stamp = self._segments[told.slot], buffer.stamp.view(torch.uint8)
            buffer.read = self._agent.read(owner, place.after(self._sizes[told.slot]), stamp)
            return
        buffer.read = None
        if int(buffer.stamp.item()) != told.sequence:
            raise PeerLost("the sender has replaced a payload that was read too late")
        self._release(told)

    def _payload(self, told: Announcement) -> Tensor | None:
        buffer = self._buffer_of(told)
        if buffer is not None and buffer.error is not None:
            raise buffer.error
        if buffer is None or buffer.read is not None:
            return None
        self._held = buffer
        return buffer.payload
