"""Threads of one process: the reference implementation of the contract.

A payload is cloned once on send; all receivers read the same clone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from deltasync.errors import PeerLost, TransportClosed, TransportError, TransportTimeout
from deltasync.transports import forks
from deltasync.transports.base import Capabilities, Frame, ReceiveTransport, SendTransport
from deltasync.transports.control.connection import check_frame, check_size, failure

_CLOSED = "this end of the transport was closed"
_PARENTS_OWN = f"this end of the transport cannot be used: {forks.PARENTS_OWN}"


class _Link:
    """One connection: frames in flight in both directions, and why it ended."""

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque()
        self.replies: deque[bytes] = deque()
        self.lost: PeerLost | None = None


class Sender(SendTransport):
    """The sender's end. `receiver()` makes receivers in the same process."""

    def __init__(
        self, *, device: torch.device | str = "cpu", max_payload_bytes: int | None = None
    ) -> None:
        """Payloads live on `device`; larger ones than `max_payload_bytes` are refused."""
        self._device = torch.device(device)
        self._capabilities = Capabilities(
            (self._device.type,), max_payload_bytes, outlives_losses=True
        )
        self._lock = threading.RLock()  # whose `with` no interrupt leaves locked
        self._changed = threading.Condition(self._lock)
        self._closed = ""  # why it is
        self._links: list[_Link] = []
        self._greetings: deque[tuple[int, bytes]] = deque()
        self._epoch: tuple[int, ...] = ()
        self._members: set[int] = set()
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        self._lock, self._closed = threading.RLock(), _PARENTS_OWN
        self._changed = threading.Condition(self._lock)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def receiver(self) -> Receiver:
        """Return a new receiver's end, not connected yet. May be called from any thread."""
        return Receiver(self)

    def poll(self, *, timeout_s: float) -> list[tuple[int, bytes]]:
        with self._lock:
            self._wait(lambda: bool(self._greetings), timeout_s)
            greetings = list(self._greetings)
            self._greetings.clear()
            return greetings

    def is_connected(self, peer: int) -> bool:
        with self._lock:
            self._check_open()
            return self._loss(peer) is None

    def open_epoch(self, peers: Sequence[int], *, timeout_s: float) -> dict[int, TransportError]:
        """Never waits."""
        with self._lock:
            self._check_open()
            self._epoch = tuple(peers)
            losses = self._losses(peers)
            self._members = set(peers) - losses.keys()
            return losses

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        """Never waits."""
        check_size(num_bytes, self._capabilities)
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer[:num_bytes]

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        """Never waits: frames queue in memory."""
        check_frame(frame, self._capabilities)
        copy = Frame(frame.header, _clone(frame.payload))
        with self._lock:
            self._check_open()
            losses = self._losses(self._members)
            self._members -= losses.keys()
            for peer in self._members:
                self._links[peer].frames.append(copy)
            self._changed.notify_all()
        if losses:
            raise failure(losses)

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        """Never waits."""
        with self._lock:
            self._check_open()
            losses = self._losses(set(peers))
            self._members -= losses.keys()
            for peer in set(peers) - losses.keys():
                self._links[peer].frames.append(Frame(header))
            self._changed.notify_all()
        if losses:
            raise failure(losses)

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        with self._lock:
            self._wait(lambda: all(self._is_settled(peer) for peer in self._epoch), timeout_s)
            return {peer: self._reply(peer) for peer in self._epoch}

    def some_replies(
        self, peers: Collection[int], *, timeout_s: float
    ) -> dict[int, bytes | TransportError]:
        with self._lock:
            self._wait(lambda: any(map(self._is_settled, peers)), timeout_s)
            return {peer: self._reply(peer) for peer in peers if self._is_settled(peer)}

    def drop(self, peer: int) -> None:
        with self._lock:
            self._members.discard(peer)
            if self._loss(peer) is None:
                self._links[peer].lost = PeerLost("was dropped")
                self._links[peer].replies.clear()
                self._changed.notify_all()

    def reset(self) -> None:
        for peer in range(len(self._links)):
            self.drop(peer)

    def close(self) -> None:
        with self._lock:
            self._closed = self._closed or _CLOSED
            for link in self._links:
                link.lost = link.lost or PeerLost("the sender closed")
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosed(self._closed)

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        self._check_open()
        self._changed.wait_for(lambda: bool(self._closed) or condition(), timeout_s)
        self._check_open()

    def _loss(self, peer: int) -> PeerLost | None:
        if not 0 <= peer < len(self._links):
            return PeerLost("there is no such peer")
        return self._links[peer].lost

    def _losses(self, peers: Sequence[int] | set[int]) -> dict[int, TransportError]:
        return {peer: loss for peer in peers if (loss := self._loss(peer)) is not None}

    def _is_settled(self, peer: int) -> bool:
        return self._loss(peer) is not None or bool(self._links[peer].replies)

    def _reply(self, peer: int) -> bytes | TransportError:
        """The reply of `peer`, or why there is none; drops the peer if it is late."""
        loss = self._loss(peer)
        if 0 <= peer < len(self._links) and self._links[peer].replies:
            return self._links[peer].replies.popleft()
        if loss is not None:
            return loss
        self.drop(peer)
        return TransportTimeout("did not answer in time")


class Receiver(ReceiveTransport):
    """A receiver's end; made by `Sender.receiver`."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._link: _Link | None = None
        self._closed = ""  # why it is
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        self._closed = _PARENTS_OWN

    @property
    def capabilities(self) -> Capabilities:
        return self._sender.capabilities

    def connect(self, greeting: bytes, *, timeout_s: float) -> None:
        """Never waits."""
        with self._sender._lock:
            self._check_open()
            self._hang_up()
            if self._sender._closed:
                raise TransportTimeout("the sender was closed")
            self._link = _Link()
            self._sender._links.append(self._link)
            self._sender._greetings.append((len(self._sender._links) - 1, greeting))
            self._sender._changed.notify_all()

    def receive(self, *, timeout_s: float) -> Frame:
        with self._sender._lock:
            link = self._current()
            self._sender._changed.wait_for(
                lambda: self._closed or link.frames or link.lost, timeout_s
            )
            self._check_open()
            if link.frames:
                return _followed(link.frames.popleft())
            if link.lost is not None:
                raise PeerLost(str(link.lost))
            raise TransportTimeout("nothing came in time")

    def progress(self) -> None:
        """Do nothing."""

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        """Never waits."""
        with self._sender._lock:
            link = self._current()
            if link.lost is not None:
                raise PeerLost(str(link.lost))
            link.replies.append(data)
            self._sender._changed.notify_all()

    def disconnect(self) -> None:
        with self._sender._lock:
            self._hang_up()
            self._link = None

    def close(self) -> None:
        with self._sender._lock:
            self._closed = self._closed or _CLOSED
            self._hang_up()
            self._sender._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosed(self._closed)

    def _current(self) -> _Link:
        self._check_open()
        if self._link is None:
            raise PeerLost("not connected yet")
        return self._link

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.lost = self._link.lost or PeerLost("the receiver hung up")
            self._link.frames.clear()
            self._sender._changed.notify_all()


def _followed(frame: Frame) -> Frame:
    """A frame whose payload is not given to others before the current stream has read it."""
    if frame.payload is not None and frame.payload.is_cuda:
        frame.payload.record_stream(torch.cuda.current_stream(frame.payload.device))
    return frame


def _clone(payload: Tensor | None) -> Tensor | None:
    """A copy that another thread may read at once, on another stream."""
    if payload is None:
        return None
    copy = payload.detach().clone()
    if copy.is_cuda:
        torch.cuda.current_stream(copy.device).synchronize()
    return copy
