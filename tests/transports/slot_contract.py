"""What every transport of `unix_socket` keeps: `TransportContract`, and the protocol of slots."""

from __future__ import annotations

import gc
import socket
import struct
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import pytest

from deltasync.errors import PeerLost, TransportTimeout
from deltasync.testing.links import (
    PATIENCE_S,
    PROMPT_S,
    Link,
    background,
    greeted,
    same_frame,
    within,
)
from deltasync.testing.transport import TransportContract
from deltasync.transports.base import Frame, ReceiveTransport
from deltasync.transports.control.connection import Connection, Kind
from deltasync.transports.slots import NUM_SLOTS
from tests.descriptors import open_links

FRAME = struct.Struct("<BxxxIQ")  # slot, sequence, payload bytes; the header follows
SEGMENT = struct.Struct("<BxxxxxxxQ")  # slot, bytes; what else a transport says follows
MEMORY_BYTES = 4096  # behind a `Liar`


class Memory(Protocol):
    """Memory that receivers of one transport can map."""

    def announced(self) -> AbstractContextManager[tuple[bytes, int]]:
        """What a SEGMENT message says after slot and size, and its descriptor."""

    def close(self) -> None:
        """Free the memory. Fails if a receiver still maps it."""


@dataclass(frozen=True)
class Liar:
    """A sender that says anything, with real memory behind it."""

    connection: Connection
    memory: Memory

    def announce(
        self,
        index: int = 0,
        num_bytes: int = MEMORY_BYTES,
        rest: bytes | None = None,
        cut: int | None = None,
    ) -> Self:
        """Announce the memory; `rest` stands in for what the transport says of it."""
        with self.memory.announced() as (real_rest, descriptor):
            segment = SEGMENT.pack(index, num_bytes) + (real_rest if rest is None else rest)
            self.connection.write(Kind.SEGMENT, segment[:cut], descriptor)
        return self

    def frame(self, slot: int, num_bytes: int) -> Self:
        return self.write(Kind.FRAME, FRAME.pack(slot, 1, num_bytes) + b"header")

    def write(self, kind: Kind, data: bytes) -> Self:
        self.connection.write(kind, data)
        return self


LIES: dict[str, Callable[[Liar], object]] = {
    "a third slot": lambda liar: liar.announce(2),
    "2**63 bytes": lambda liar: liar.announce(0, 1 << 63),
    "more than there is": lambda liar: liar.announce(0, MEMORY_BYTES + 1),
    "a short segment": lambda liar: liar.announce(cut=-1),
    "no memory": lambda liar: liar.write(Kind.SEGMENT, SEGMENT.pack(0, MEMORY_BYTES)),
    "a payload before its memory": lambda liar: liar.frame(0, 10),
    "a payload larger than its slot": lambda liar: liar.announce().frame(0, MEMORY_BYTES + 1),
    "a payload in the other slot": lambda liar: liar.announce().frame(1, 10),
    "an empty payload": lambda liar: liar.announce().frame(0, 0),
    "a short frame": lambda liar: liar.write(Kind.FRAME, b"short"),
    "a reply": lambda liar: liar.write(Kind.REPLY, b""),
}


class SlotContract(TransportContract):
    """The socket of `ends` is `tmp_path / "socket"`."""

    @abstractmethod
    def memory(self) -> Memory:
        """MEMORY_BYTES that no slot owns."""

    @abstractmethod
    def num_held(self) -> int:
        """Pieces of memory for slots that this process has allocated, mapped or has open."""

    @pytest.fixture
    def unchanged(self) -> Iterator[None]:
        """Fails if the test leaves memory behind."""
        before = self.num_held()
        yield
        give_up = time.monotonic() + PROMPT_S
        while self.num_held() > before and time.monotonic() < give_up:  # threads are on their way
            gc.collect()
            time.sleep(0.01)
        assert self.num_held() <= before

    @pytest.fixture
    def link(self, unchanged: None, tmp_path: Path) -> Iterator[Link]:
        with ExitStack() as stack:
            yield Link(self.ends(tmp_path), stack)

    @pytest.fixture
    def liar(self, unchanged: None, tmp_path: Path) -> Iterator[tuple[Liar, ReceiveTransport]]:
        """A sender that lies, and a receiver that is connected to it."""
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(tmp_path / "socket"))
            listener.listen()
            receiver = stack.enter_context(closing(self.ends(tmp_path).receiver()))
            receiver.connect(b"", timeout_s=PATIENCE_S)
            sock, _ = listener.accept()
            connection = Connection(
                sock, is_server=True, kinds=set(Kind), max_message_bytes=1 << 20
            )
            memory = self.memory()
            yield Liar(connection, memory), receiver
            connection.close()
            memory.close()

    # Memory

    def test_the_buffer_is_what_receivers_read(self, link: Link) -> None:
        link.add(2)
        link.open()
        addresses = []
        for _ in range(NUM_SLOTS):  # each buffer is taken while both receivers hold the one before
            buffer = link.sender.buffer(1000, timeout_s=PATIENCE_S)
            received = link.receive_later()
            link.sender.send(Frame(b"x", buffer.fill_(1)), timeout_s=PATIENCE_S)
            first, second = (future.result(PATIENCE_S) for future in received)
            assert first.payload is not None
            assert second.payload is not None
            buffer.fill_(2)  # against the rules, to see that the memory is one
            assert int(first.payload[0]) == int(second.payload[999]) == 2
            addresses.append(buffer.data_ptr())
        link.exchange(Frame(b"header only"))
        assert link.sender.buffer(1000, timeout_s=PATIENCE_S).data_ptr() == addresses[0]

    # Readers

    def test_who_holds_a_payload_for_ever_is_dropped(self, link: Link) -> None:
        link.add(1)
        good = link.add_echo()
        holder = link.peers[0]
        assert link.sender.open_epoch([holder, good], timeout_s=PATIENCE_S) == {}
        link.send(Frame(b"hold this", link.payload_of(100)))
        assert link.receivers[0].receive(timeout_s=PATIENCE_S).header == b"hold this"
        link.send(Frame(b"and this", link.payload_of(100)))
        with within(PROMPT_S), pytest.raises(TransportTimeout):
            link.sender.buffer(100, timeout_s=1)  # the good one has to let go within it
        assert not link.sender.is_connected(holder)
        link.check([good])

    def test_what_was_sent_arrives_after_the_sender_has_closed(self, link: Link) -> None:
        link.add(1)
        link.open()
        frames = [Frame(b"%d" % number, link.payload_of(100, seed=number)) for number in range(2)]
        for frame in frames:
            link.send(frame)
        link.sender.close()
        for frame in frames:
            assert same_frame(link.receivers[0].receive(timeout_s=PATIENCE_S), frame)
        with pytest.raises(PeerLost):
            link.receivers[0].receive(timeout_s=PATIENCE_S)

    # Peers that lie

    @pytest.mark.parametrize("data", [b"", bytes(8), bytes(9), b"\xff" * 8])
    def test_letting_go_of_nothing_ends_the_connection(
        self, link: Link, tmp_path: Path, data: bytes
    ) -> None:
        good = link.add_echo()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(tmp_path / "socket"))
            liar = Connection(sock, is_server=False, kinds=set(Kind), max_message_bytes=1 << 20)
            liar.write(Kind.GREETING, b"")
            (peer,) = greeted(link.sender, 1)
            assert link.sender.open_epoch([peer, good], timeout_s=PATIENCE_S) == {}
            for _ in range(2):
                link.send(Frame(b"x", link.payload_of(10)))
            liar.write(Kind.RELEASE, data)
            with within(PROMPT_S):
                link.sender.buffer(10, timeout_s=PATIENCE_S)
            assert not link.sender.is_connected(peer)
            liar.read()  # the descriptors of what it was told of, to be closed with the rest
            liar.close()
        link.check([good])

    @pytest.mark.promise("Time", "A call returns after its timeout, whatever keeps sending.")
    def test_a_sender_that_keeps_sending_does_not_hold_a_receiver(
        self, liar: tuple[Liar, ReceiveTransport]
    ) -> None:
        sender, receiver = liar
        receiving = background(lambda: receiver.receive(timeout_s=0.3))
        with within(PROMPT_S):
            while not receiving.done():
                sender.connection.flush()
                if not sender.connection.is_writing:
                    sender.announce()
        receiver.close()
        assert isinstance(receiving.exception(0), TransportTimeout)

    @pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
    def test_a_sender_that_lies_is_lost(
        self, liar: tuple[Liar, ReceiveTransport], lie: Callable[[Liar], object]
    ) -> None:
        lie(liar[0])
        with within(PROMPT_S), pytest.raises(PeerLost):
            liar[1].receive(timeout_s=PATIENCE_S)
        with pytest.raises(PeerLost):
            liar[1].receive(timeout_s=PATIENCE_S)


def num_descriptors(prefix: str) -> int:
    """Descriptors of this process whose target begins with `prefix`."""
    return sum(link.startswith(prefix) for link in open_links())
