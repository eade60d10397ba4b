"""Links under test: a sender, and its receivers in threads and processes."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from deltasync.errors import DeltaSyncError, PeerLost, TransportClosed, TransportTimeout
from deltasync.testing.processes import Child
from deltasync.transports.base import Frame, ReceiveTransport, SendTransport
from deltasync.transports.control.connection import deadline_in

T = TypeVar("T")

PATIENCE_S = 90.0  # for what must succeed, on a busy machine
PROMPT_S = 30.0  # for what must be noticed at once, well before PATIENCE_S


@dataclass(frozen=True, slots=True)
class Ends:
    """How to make the two ends of one link.

    Attributes:
        sender: Makes the sender.
        receiver: Makes a receiver of that sender, any number of times.
        crosses_processes: Whether both can be pickled and called in other processes.
    """

    sender: Callable[[], SendTransport]
    receiver: Callable[[], ReceiveTransport]
    crosses_processes: bool


def payload_of(num_bytes: int, seed: int = 0) -> Tensor:
    """uint8[num_bytes], the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator)


def answer_to(frame: Frame) -> bytes:
    """What an `Echo` replies: the header and a checksum of the payload."""
    if frame.payload is None:
        return frame.header
    return frame.header + zlib.crc32(frame.payload.cpu().numpy().tobytes()).to_bytes(4, "little")


def background(function: Callable[[], T]) -> Future[T]:
    """Run `function` in a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except (DeltaSyncError, AssertionError, OSError, RuntimeError, ValueError) as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def echo(receiver: ReceiveTransport, greeting: bytes) -> None:
    """Connect, then answer frames until the connection ends or a frame says "end"."""
    receiver.connect(greeting, timeout_s=PATIENCE_S)
    answer_frames(receiver)


def answer_frames(receiver: ReceiveTransport) -> None:
    """Answer frames until the connection ends or a frame says "end"."""
    header = b""
    while header != b"end":
        try:
            frame = receiver.receive(timeout_s=60)
            header = frame.header
            receiver.reply(answer_to(frame), timeout_s=PATIENCE_S)
        except (PeerLost, TransportClosed):
            return


def echo_process(make: Callable[[], ReceiveTransport], greeting: bytes) -> None:
    """An `echo` for a process of its own."""
    echo(make(), greeting)


def sender_process(make: Callable[[], SendTransport], num_receivers: int) -> None:
    """Send one frame to `num_receivers`, then nothing until killed."""
    sender = make()
    peers = greeted(sender, num_receivers)
    assert sender.open_epoch(list(peers), timeout_s=PATIENCE_S) == {}
    send_copy(sender, Frame(b"first", payload_of(1000)))
    time.sleep(60)


def send_copy(sender: SendTransport, frame: Frame, *, timeout_s: float = PATIENCE_S) -> None:
    """Send a frame whose payload may be any tensor."""
    payload = frame.payload
    if payload is not None:
        payload = sender.buffer(len(payload), timeout_s=timeout_s).copy_(payload)
    sender.send(Frame(frame.header, payload), timeout_s=timeout_s)


def greeted(sender: SendTransport, count: int) -> dict[int, bytes]:
    """The next `count` greetings by peer."""
    found: dict[int, bytes] = {}
    deadline = deadline_in(PATIENCE_S)
    while len(found) < count and time.monotonic() < deadline:
        found.update(sender.poll(timeout_s=1))
    assert len(found) == count, found
    return found


class Link:
    """A sender and receivers that are connected and in its epoch.

    Attributes:
        peers: The receivers' peer numbers, in their order.
    """

    def __init__(self, ends: Ends, stack: ExitStack) -> None:
        self.ends = ends
        self._stack = stack
        self.sender = ends.sender()
        stack.callback(self.sender.close)
        self.receivers: list[ReceiveTransport] = []
        self.peers: list[int] = []

    def payload_of(self, num_bytes: int, seed: int = 0) -> Tensor:
        """As the function, on a device that the transport takes."""
        return payload_of(num_bytes, seed).to(self.sender.device)

    def connect(self, receiver: ReceiveTransport) -> int:
        """Connect `receiver` (again); its new peer number."""
        connected = background(lambda: receiver.connect(b"hello", timeout_s=PATIENCE_S))
        (peer,) = greeted(self.sender, 1)
        connected.result(PATIENCE_S)
        return peer

    def add(self, count: int = 1) -> None:
        """Connect `count` more receivers."""
        for _ in range(count):
            receiver = self.receiver()
            self.peers.append(self.connect(receiver))
            self.receivers.append(receiver)

    def receiver(self) -> ReceiveTransport:
        """A receiver that is not connected, closed at the end of the test."""
        receiver = self.ends.receiver()
        self._stack.callback(receiver.close)
        return receiver

    def add_process(self) -> tuple[Child, int]:
        """An echoing receiver in a process of its own, and its peer number."""
        child = self._stack.enter_context(Child(echo_process, self.ends.receiver, b"child"))
        (peer,) = greeted(self.sender, 1)
        return child, peer

    def add_echo(self) -> int:
        """An echoing receiver in a thread; its peer number."""
        receiver = self.receiver()
        background(lambda: echo(receiver, b"echo"))
        (peer,) = greeted(self.sender, 1)
        return peer

    def open(self) -> None:
        """Open an epoch with all receivers."""
        received = self.receive_later()
        assert self.sender.open_epoch(self.peers, timeout_s=PATIENCE_S) == {}
        self.sender.send(Frame(b"open"), timeout_s=PATIENCE_S)
        assert {future.result(PATIENCE_S).header for future in received} == {b"open"}

    def receive_later(self, delay_s: float = 0.0) -> list[Future[Frame]]:
        """Let each receiver receive, after `delay_s`."""

        def receive(receiver: ReceiveTransport) -> Frame:
            time.sleep(delay_s)
            return receiver.receive(timeout_s=PATIENCE_S)

        return [background(lambda r=receiver: receive(r)) for receiver in self.receivers]  # type: ignore[misc]

    def send(self, frame: Frame, *, timeout_s: float = PATIENCE_S) -> None:
        """As `send_copy`."""
        send_copy(self.sender, frame, timeout_s=timeout_s)

    def exchange(self, frame: Frame) -> list[Frame]:
        """Send `frame`; what each receiver got."""
        received = self.receive_later()
        self.send(frame)
        return [future.result(PATIENCE_S) for future in received]

    def check(self, peers: list[int]) -> None:
        """Open an epoch with `peers`, which echo, and see a payload through."""
        for peer in peers:
            self._skip_old_replies(peer)
        assert self.sender.open_epoch(peers, timeout_s=PATIENCE_S) == {}
        frame = Frame(b"check", self.payload_of(10_000, seed=7))
        self.send(frame)
        replies = self.sender.collect_replies(timeout_s=PATIENCE_S)
        assert replies == dict.fromkeys(peers, answer_to(frame))

    def _skip_old_replies(self, peer: int) -> None:
        """A send that failed may have reached `peer`, whose reply is still to come."""
        assert self.sender.open_epoch([peer], timeout_s=PATIENCE_S) == {}
        self.sender.send(Frame(b"skip"), timeout_s=PATIENCE_S)
        reply: object = None
        while reply != b"skip":
            reply = self.sender.collect_replies(timeout_s=PATIENCE_S)[peer]
            assert isinstance(reply, bytes)


def same_frame(got: Frame, sent: Frame) -> bool:
    """Whether two frames are equal, bit by bit."""
    if got.payload is None or sent.payload is None:
        return got.header == sent.header and got.payload is sent.payload
    payload = got.payload.to(sent.payload.device)
    return got.header == sent.header and torch.equal(payload, sent.payload)


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Fail if the block takes longer."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < limit_s


def send_for_ever(link: Link, frame: Frame, *, timeout_s: float = PATIENCE_S) -> None:
    """Send `frame` until that fails."""
    while True:
        link.send(frame, timeout_s=timeout_s)


def lost_peers(link: Link, peers: list[int], frame: Frame, *, timeout_s: float) -> set[int]:
    """Send `frame` and collect replies until one of `peers` is lost or late; who.

    One without a payload follows each time: others can answer that whatever became of the first.
    """
    frames = frame, Frame(b"after it")
    while True:
        try:
            for one in frames:
                link.send(one, timeout_s=timeout_s)
        except (PeerLost, TransportTimeout):
            return {peer for peer in peers if not link.sender.is_connected(peer)}
        for _ in frames:
            replies = link.sender.collect_replies(timeout_s=timeout_s)
            if late := {peer for peer, reply in replies.items() if not isinstance(reply, bytes)}:
                return late
