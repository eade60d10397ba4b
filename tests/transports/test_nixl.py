"""The NIXL transport keeps the contract, over the transports of UCX that a CPU has.

Between processes of one host UCX reads memory through the kernel. With UCX_TLS=tcp in the
environment it does what it does between hosts without RDMA: see `make test-nixl`.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from deltasync.errors import PeerLost, TransportTimeout
from deltasync.testing.links import (
    PATIENCE_S,
    PROMPT_S,
    Ends,
    Link,
    background,
    greeted,
    payload_of,
    same_frame,
    send_for_ever,
    within,
)
from deltasync.testing.processes import Child
from deltasync.testing.transport import TransportContract
from deltasync.transports.base import Frame, ReceiveTransport
from deltasync.transports.control.connection import Connection, Kind
from tests.worlds.ranks import free_port

pytest.importorskip("nixl", reason="needs NIXL: pip install nixl")

from deltasync.transports.nixl import Receiver, Sender
from deltasync.transports.nixl_agent import Agent, Place

MEMORY = struct.Struct("<BBxxIQQ")  # slot, memory type, device, bytes, address; metadata follows
FRAME = struct.Struct("<BxxxIQ")  # slot, sequence, payload bytes; the header follows
LARGE = 48 << 20


def make_ends(*, secret: bytes | None = None) -> Ends:
    port = free_port()
    sender = partial(Sender, port=port, secret=secret)
    receiver = partial(Receiver, "127.0.0.1", port, secret=secret)
    return Ends(sender, receiver, crosses_processes=True)


class TestNixl(TransportContract):
    def ends(self, tmp_path: Path) -> Ends:
        return make_ends()


@pytest.fixture
def link() -> Iterator[Link]:
    with ExitStack() as stack:
        yield Link(make_ends(), stack)


# What it promises of peers


def test_a_shared_secret_is_wanted() -> None:
    with ExitStack() as stack:
        signed = make_ends(secret=b"secret")
        link = Link(signed, stack)
        link.add(1)
        link.open()
        frame = Frame(b"x", payload_of(1000))
        assert same_frame(link.exchange(frame)[0], frame)
        port = link.sender.address[1]  # type: ignore[attr-defined]
        stranger = stack.enter_context(closing(Receiver("127.0.0.1", port, secret=b"other")))
        background(lambda: stranger.connect(b"let me in", timeout_s=2))
        assert link.sender.poll(timeout_s=1) == []
        with pytest.raises(PeerLost):
            stranger.receive(timeout_s=PATIENCE_S)


# Ownership


@pytest.mark.promise(
    "Time",
    "Over NIXL, a receiver that was dropped as late never gets bytes of two payloads. `make "
    "test-nixl`",
)
def test_reads_that_are_overtaken_are_never_returned(link: Link) -> None:
    """A sender that has no patience overwrites what is being read, again and again."""
    got, stop = [0], threading.Event()

    def receive() -> None:
        receiver = link.receiver()
        while not stop.is_set():
            with suppress(PeerLost, TransportTimeout):
                receiver.connect(b"hello", timeout_s=1)
                while True:
                    payload = receiver.receive(timeout_s=1).payload
                    assert payload is not None
                    assert len(set(payload[:: 1 << 12].tolist())) == 1
                    assert payload.eq(payload[0]).all()
                    got[0] += 1

    received = background(receive)
    lost = number = 0
    deadline = time.monotonic() + 15
    peers: set[int] = set()
    while time.monotonic() < deadline:
        peers |= {peer for peer, _ in link.sender.poll(timeout_s=0)}
        peers = {peer for peer in peers if link.sender.is_connected(peer)}
        link.sender.open_epoch(sorted(peers), timeout_s=1)
        number += 1
        try:
            patience_s = random.Random(number).choice([0.0, 0.002, 0.01, 1.0])
            buffer = link.sender.buffer(LARGE, timeout_s=patience_s).fill_(number % 256)
            link.sender.send(Frame(b"x", buffer), timeout_s=1)
        except (PeerLost, TransportTimeout):
            lost += 1
    stop.set()
    link.sender.close()
    received.result(PATIENCE_S)
    assert lost > 3
    assert got[0] > 0


# Kills


def endless_receiver(make: Callable[[], ReceiveTransport]) -> None:
    receiver = make()
    receiver.connect(b"child", timeout_s=PATIENCE_S)
    while True:
        assert receiver.receive(timeout_s=PATIENCE_S).payload is not None


@pytest.mark.promise(
    "Time",
    "Over NIXL, ends killed while a payload is read are lost, and the others get every frame. "
    "`make test-nixl`",
)
def test_receivers_killed_while_they_read_are_lost_and_others_get_all(link: Link) -> None:
    good = link.add_echo()
    for delay_s in (0.0, 0.02, 0.1):
        with Child(endless_receiver, link.ends.receiver) as child:
            (peer,) = greeted(link.sender, 1)
            assert link.sender.open_epoch([good, peer], timeout_s=1) == {}
            killer = threading.Timer(delay_s, child.kill)
            killer.start()
            with pytest.raises(PeerLost):
                send_for_ever(link, Frame(b"x", payload_of(LARGE)))
            killer.join()
            assert not link.sender.is_connected(peer)
        link.check([good])


# Strangers, and peers that lie


class Liar:
    """A sender that says anything, with real memory behind it."""

    def __init__(self, connection: Connection, agent: Agent) -> None:
        self.connection = connection
        self._whole = torch.zeros(4104, dtype=torch.uint8)
        self._whole[4096] = 1  # the stamp of frame 1
        registered = agent.register(self._whole)
        self.metadata = agent.describe(registered)
        self.address = Place.of(self._whole).address

    def announce(
        self,
        index: int = 0,
        num_bytes: int = 4096,
        metadata: bytes | None = None,
        offset: int = 0,
    ) -> None:
        said = self.metadata if metadata is None else metadata
        place = MEMORY.pack(index, 0, 0, num_bytes, self.address + offset)
        self.connection.write(Kind.MEMORY, place + said)

    def frame(self, slot: int, num_bytes: int, sequence: int = 1) -> None:
        self.connection.write(Kind.FRAME, FRAME.pack(slot, sequence, num_bytes) + b"header")


@pytest.fixture
def liar() -> Iterator[tuple[Liar, Receiver]]:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        agent = stack.enter_context(closing(Agent(torch.device("cpu"), serves=True)))
        receiver = Receiver("127.0.0.1", listener.getsockname()[1])
        stack.enter_context(closing(receiver))
        receiver.connect(b"", timeout_s=PATIENCE_S)
        connection = Connection(
            listener.accept()[0], is_server=True, kinds=set(Kind), max_message_bytes=1 << 20
        )
        stack.callback(connection.close)
        yield Liar(connection, agent), receiver


def announced(liar: Liar, *frame: int, num_bytes: int = 4096, offset: int = 0) -> None:
    liar.announce(num_bytes=num_bytes, offset=offset)
    liar.frame(*frame)


LIES: dict[str, Callable[[Liar], object]] = {
    "a third slot": lambda liar: liar.announce(2),
    "no metadata": lambda liar: liar.announce(metadata=b""),
    "other metadata": lambda liar: liar.announce(metadata=b"nixl" * 100),
    "a short announcement": lambda liar: liar.connection.write(Kind.MEMORY, b"short"),
    "of another frame": lambda liar: announced(liar, 0, 10, 2),
    "memory that is not registered": lambda liar: announced(liar, 0, 1 << 20, num_bytes=1 << 20),
    "memory elsewhere": lambda liar: announced(liar, 0, 10, offset=1 << 40),
    "over the limit": lambda liar: announced(liar, 0, (2 << 30) + 1, num_bytes=1 << 40),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_sender_that_lies_is_lost(
    liar: tuple[Liar, Receiver], lie: Callable[[Liar], object]
) -> None:
    lie(liar[0])
    for _ in range(2):
        with within(PROMPT_S), pytest.raises(PeerLost):
            liar[1].receive(timeout_s=PATIENCE_S)


def test_what_is_no_lie_is_read(liar: tuple[Liar, Receiver]) -> None:
    announced(liar[0], 0, 4096)
    frame = liar[1].receive(timeout_s=PATIENCE_S)
    assert same_frame(frame, Frame(b"header", torch.zeros(4096, dtype=torch.uint8)))
