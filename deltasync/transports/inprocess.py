"""Threads of one process: the reference implementation of the contract.

Each `buffer` is a new one, which all receivers read.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltasync.errors import PeerLost, TransportClosed, TransportError, TransportTimeout
from deltasync.transports import forks
from deltasync.transports.base import Closing, Frame, ReceiveTransport, SendTransport
from deltasync.transports.control.connection import check_frame, failure


@dataclass(slots=True)
class _Link:
    """One connection: frames in flight in both directions, and why it ended."""

    frames: deque[Frame] = field(default_factory=deque)
    replies: deque[bytes] = field(default_factory=deque)
    lost: PeerLost | None = None


class _End(Closing):
    """What both ends are: closed or not, and held by one thread at a time."""

    def __init__(self, lock: threading.RLock, device: torch.device) -> None:
        """`lock` is an RLock, whose `with` no interrupt leaves locked."""
        self._lock, self._changed, self.device = lock, threading.Condition(lock), device
        self._closed = ""  # why it is
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = f"this end of the transport cannot be used: {forks.PARENTS_OWN}"

    def close(self) -> None:
        with self._lock:
            self._closed = self._closed or "this end of the transport was closed"
            self._hang_up()
            self._changed.notify_all()

    @abstractmethod
    def _hang_up(self) -> None:
        """End every connection."""

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosed(self._closed)

    def _wait(self, condition: Callable[[], object], timeout_s: float) -> None:
        self._check_open()
        self._changed.wait_for(lambda: self._closed or condition(), timeout_s)
        self._check_open()


class Sender(_End, SendTransport):
    """The sender's end. `receiver()` makes receivers in the same process."""

    outlives_losses = True

    def __init__(self, *, device: torch.device | str = "cpu") -> None:
        """Payloads live on `device`."""
        super().__init__(threading.RLock(), torch.device(device))
        self._buffer: Tensor | None = None  # that was returned last, and is not sent
        self._links: list[_Link] = []
        self._greetings: list[tuple[int, bytes]] = []
        self._epoch: tuple[int, ...] = ()
        self._members: set[int] = set()

    def receiver(self) -> Receiver:
        """Return a new receiver's end, not connected yet. May be called from any thread."""
        return Receiver(self)

    def poll(self, *, timeout_s: float) -> list[tuple[int, bytes]]:
        with self._lock:
            self._wait(lambda: self._greetings, timeout_s)
            greetings, self._greetings = self._greetings, []
            return greetings

    def is_connected(self, peer: int) -> bool:
        with self._lock:
            self._check_open()
            return not self._losses([peer])

    def open_epoch(self, peers: Sequence[int], *, timeout_s: float) -> dict[int, TransportError]:
        """Never waits."""
        with self._lock:
            self._check_open()
            losses = self._losses(peers)
            self._epoch, self._members = tuple(peers), set(peers) - losses.keys()
            return losses

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        """Never waits."""
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        """Never waits: frames queue in memory."""
        check_frame(frame, self._buffer)
        payload, self._buffer = frame.payload, None
        if payload is None or payload.numel() == 0:
            frame = Frame(frame.header)
        elif payload.is_cuda:  # another thread may read it at once
            torch.cuda.current_stream(payload.device).synchronize()
        self._post(self._members, frame)

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        """Never waits."""
        self._post(peers, Frame(header))

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        with self._lock:
            self._wait(lambda: all(map(self._is_settled, self._epoch)), timeout_s)
            replies = self._replies(self._epoch)
            for peer in self._epoch:
                if peer not in replies:
                    self.drop(peer)
                    replies[peer] = TransportTimeout("did not answer in time")
            return replies

    def some_replies(
        self, peers: Collection[int], *, timeout_s: float
    ) -> dict[int, bytes | TransportError]:
        with self._lock:
            self._wait(lambda: any(map(self._is_settled, peers)), timeout_s)
            return self._replies(peers)

    def drop(self, peer: int) -> None:
        with self._lock:
            self._members.discard(peer)
            if not self._losses([peer]):
                self._links[peer].lost = PeerLost("was dropped")
                self._links[peer].replies.clear()
                self._changed.notify_all()

    def reset(self) -> None:
        for peer in range(len(self._links)):
            self.drop(peer)

    def _hang_up(self) -> None:
        for link in self._links:
            link.lost = link.lost or PeerLost("the sender closed")

    def _post(self, peers: Collection[int], frame: Frame) -> None:
        with self._lock:
            self._check_open()
            losses = self._losses(peers)
            self._members.difference_update(losses)
            for peer in set(peers) - losses.keys():
                self._links[peer].frames.append(frame)
            self._changed.notify_all()
        if losses:
            raise failure(losses)

    def _link(self, peer: int) -> _Link:
        if 0 <= peer < len(self._links):
            return self._links[peer]
        return _Link(lost=PeerLost("there is no such peer"))

    def _losses(self, peers: Iterable[int]) -> dict[int, TransportError]:
        return {peer: loss for peer in peers if (loss := self._link(peer).lost) is not None}

    def _is_settled(self, peer: int) -> bool:
        link = self._link(peer)
        return bool(link.replies or link.lost)

    def _replies(self, peers: Collection[int]) -> dict[int, bytes | TransportError]:
        """The next reply of those that have one, or why they are lost."""
        found: dict[int, bytes | TransportError] = {**self._losses(peers)}
        replied = [peer for peer in peers if self._link(peer).replies]
        return found | {peer: self._links[peer].replies.popleft() for peer in replied}


class Receiver(_End, ReceiveTransport):
    """A receiver's end; made by `Sender.receiver`."""

    def __init__(self, sender: Sender) -> None:
        super().__init__(sender._lock, sender.device)
        self._changed = sender._changed
        self._sender = sender
        self._link: _Link | None = None

    def connect(self, greeting: bytes, *, timeout_s: float) -> None:
        """Never waits."""
        with self._lock:
            self._check_open()
            self._hang_up()
            if self._sender._closed:
                raise TransportTimeout("the sender was closed")
            self._link = _Link()
            self._sender._links.append(self._link)
            self._sender._greetings.append((len(self._sender._links) - 1, greeting))
            self._changed.notify_all()

    def receive(self, *, timeout_s: float) -> Frame:
        with self._lock:
            link = self._current()
            self._wait(lambda: link.frames or link.lost, timeout_s)
            if link.frames:
                frame = link.frames.popleft()
                if frame.payload is not None and frame.payload.is_cuda:
                    # Its memory is not given to others before the current stream has read it.
                    frame.payload.record_stream(torch.cuda.current_stream(frame.payload.device))
                return frame
            if link.lost is not None:
                raise PeerLost(str(link.lost))
            raise TransportTimeout("nothing came in time")

    def progress(self) -> None:
        """Do nothing."""

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        """Never waits."""
        with self._lock:
            link = self._current()
            if link.lost is not None:
                raise PeerLost(str(link.lost))
            link.replies.append(data)
            self._changed.notify_all()

    def disconnect(self) -> None:
        with self._lock:
            self._hang_up()
            self._link = None

    def _current(self) -> _Link:
        self._check_open()
        if self._link is None:
            raise PeerLost("not connected yet")
        return self._link

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.lost = self._link.lost or PeerLost("the receiver hung up")
            self._link.frames.clear()
            self._changed.notify_all()
