"""The two ends of the control plane, less how payloads move: one sender, many receivers.

Each is run by whoever waits.
"""

from __future__ import annotations

import contextlib
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from deltasync.errors import (
    ConfigError,
    PeerLost,
    TransportClosed,
    TransportError,
    TransportTimeout,
    TransportUnavailable,
)
from deltasync.transports.base import Frame, ReceiveTransport, SendTransport
from deltasync.transports.control.connection import (
    DEFAULT_MAX_MESSAGE_BYTES,
    BrokenProtocol,
    Connection,
    Gate,
    Kind,
    Message,
    Pace,
    busy_s,
    check_frame,
    deadline_in,
    failure,
    left_s,
)
from deltasync.transports.control.newcomers import MAX_GREETING_BYTES, Newcomers

_MAX_QUIET_BYTES = 32 << 10  # of one that has greeted, and has nothing more to say yet
_RETRY_S = 0.01
_LEAST_DIAL_S, _LONGEST_DIAL_S = 0.05, 1.0  # a host may swallow packets
_MAX_WAITING = 256  # frames behind one whose payload is not there yet
_MAX_AT_ONCE = 64  # messages that are obeyed after a deadline, or by `progress`


class SocketSender(SendTransport, ABC):
    """The sender's end: accepts connections and numbers those that greet as peers."""

    def __init__(
        self,
        listener: socket.socket,
        device: torch.device,
        kind: Kind,
        *,
        secret: bytes | None = None,
        greeting_timeout_s: float = 30.0,
        admit: Callable[[socket.socket], None] = lambda sock: None,
    ) -> None:
        """Serve on `listener`, which must listen already and belongs to this end from now on.

        Args:
            listener: A stream socket.
            device: Where payloads live.
            kind: What a peer may send besides replies.
            secret: Demand, and give, signed messages.
            greeting_timeout_s: A connection that has not greeted by then is dropped.
            admit: Raises OSError for a connection that is refused; none is by default.
        """
        self.device = device
        self._busy_s = busy_s(device.type)
        self._gate = Gate(self._busy_s)
        self._newcomers = Newcomers(
            listener, self._gate, secret=secret, timeout_s=greeting_timeout_s, admit=admit
        )
        self._kinds = frozenset({Kind.REPLY, kind})
        self._peers: dict[int, Connection] = {}
        self._gone: dict[int, Connection] = {}  # of the epoch: their last replies, and why
        self._greetings: deque[tuple[int, bytes]] = deque()
        self._next_peer = 0
        self._epoch: tuple[int, ...] = ()
        self._members: set[int] = set()
        self._buffer: Tensor | None = None  # that was returned last, and is not sent

    def poll(self, *, timeout_s: float) -> list[tuple[int, bytes]]:
        """Return no more at a time than one of the largest takes: reading them takes time too."""
        deadline = deadline_in(timeout_s)
        with self._gate.entered():
            with self._newcomers.moment() as end:
                while time.monotonic() < end and self._greeting_bytes < MAX_GREETING_BYTES:
                    if not self._pump(left_s(end) if self._newcomers.is_greeting else 0):
                        break
            while not self._greetings and time.monotonic() < deadline:
                self._pump(left_s(deadline))
            greetings: list[tuple[int, bytes]] = []
            while self._greetings and sum(len(data) for _, data in greetings) < MAX_GREETING_BYTES:
                greetings.append(self._greetings.popleft())
            return greetings

    def is_connected(self, peer: int) -> bool:
        with self._gate.entered():
            return peer in self._peers

    def open_epoch(self, peers: Sequence[int], *, timeout_s: float) -> dict[int, TransportError]:
        """Never waits. What others than `peers` have said is forgotten once they are gone."""
        with self._gate.entered():
            self._epoch = tuple(peers)
            for connection in self._peers.values():
                self._allow(connection)
            for peer in self._gone.keys() - set(peers):
                self._gone.pop(peer).close()
            losses = self._losses(peers)
            self._members = set(peers) - losses.keys()
            return losses

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        check_frame(frame, self._buffer)
        deadline, failures = deadline_in(timeout_s), dict[int, TransportError]()
        with self._gate.entered():
            if frame.payload is None or frame.payload.numel() == 0:
                self._post(self._members, frame.header)
            else:
                failures = self._send_payload(frame.header, frame.payload, deadline)
                self._remove(failures)
            self._check(self._flush(self._members, deadline) | failures)

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        with self._gate.entered():
            self._post(peers, header)
            self._check(self._flush(peers, deadline_in(timeout_s)))

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        deadline = deadline_in(timeout_s)
        with self._gate.entered():
            replies = self._early_replies(deadline)
            if missing := [peer for peer in self._epoch if peer not in replies]:
                replies |= self._replies(missing, deadline, len(missing))
            late = [peer for peer in missing if peer not in replies]
            self._remove(late)
            return replies | {peer: self._expire(peer, "did not answer in time") for peer in late}

    def some_replies(
        self, peers: Collection[int], *, timeout_s: float
    ) -> dict[int, bytes | TransportError]:
        with self._gate.entered():
            return self._replies(peers, deadline_in(timeout_s), 1)

    def drop(self, peer: int) -> None:
        with contextlib.suppress(TransportClosed), self._gate.entered():
            self._settle([peer])
            self._end(peer)
            self._remove([peer])

    def reset(self) -> None:
        with contextlib.suppress(TransportClosed), self._gate.entered():
            self._end_all()

    def close(self) -> None:
        self._gate.close(self._dispose)

    def _dispose(self) -> None:
        """Close everything, once."""
        self._settle(self._peers)
        self._end_all()
        self._newcomers.close()

    @abstractmethod
    def _send_payload(
        self, header: bytes, payload: Tensor, deadline: float
    ) -> dict[int, TransportError]:
        """Write a frame with a payload to the members. Returns the peers that failed, and why."""

    def _post(self, peers: Collection[int], header: bytes) -> None:
        """Write a frame without a payload."""
        self._write(peers, Kind.FRAME, header)

    def _early_replies(self, deadline: float) -> dict[int, bytes | TransportError]:
        """Those that come while payloads are still on their way, if that makes a difference."""
        return {}

    def _settle(self, peers: Collection[int]) -> None:
        """Wait, not for ever, until the payloads that were sent can reach `peers`."""

    def _remove(self, peers: Iterable[int]) -> None:
        """These are members no more."""
        self._members.difference_update(peers)

    def _check(self, failures: Mapping[int, TransportError]) -> None:
        """Remove the peers that failed, and raise what they failed with."""
        self._remove(failures)
        if failures:
            raise failure(failures)

    @property
    def _greeting_bytes(self) -> int:
        return sum(len(data) for _, data in self._greetings)

    def _loss(self, peer: int) -> PeerLost:
        """Why `peer` is gone."""
        connection = self._gone.get(peer)
        return PeerLost(str(connection.lost) if connection else "there is no such connection")

    def _losses(self, peers: Iterable[int]) -> dict[int, TransportError]:
        """Those of `peers` that are gone, and why."""
        return {peer: self._loss(peer) for peer in peers if peer not in self._peers}

    def _pump(self, timeout_s: float) -> bool:
        """Do what the sockets are ready for, waiting at most `timeout_s` for one to be.

        Returns whether one was.
        """
        ready = self._gate.wait(min(timeout_s, self._newcomers.patience_s))
        for source in ready:
            if source is self._newcomers.listener:
                for newcomer in self._newcomers.accept():
                    self._serve(newcomer)
            elif isinstance(source, Connection) and source.fileno() >= 0:
                self._serve(source)
        self._newcomers.tend(self._greeting_bytes)
        return bool(ready)

    def _write(
        self, peers: Iterable[int], kind: Kind, data: bytes, descriptor: int | None = None
    ) -> None:
        """Queue a message for each of `peers`; those that are gone are skipped."""
        for peer in peers:
            if connection := self._peers.get(peer):
                connection.write(kind, data, descriptor)
                self._watch(connection)

    def _flush(self, peers: Collection[int], deadline: float) -> dict[int, TransportError]:
        """Wait until `peers` have taken what was written; drop those that do not."""
        while writing := [p for p in peers if p in self._peers and self._peers[p].is_writing]:
            if time.monotonic() >= deadline:
                late = {peer: self._expire(peer, "did not read in time") for peer in writing}
                return self._losses(peers) | late
            self._pump(left_s(deadline))
        return self._losses(peers)

    def _take(self, peer: int, kind: Kind) -> bytes | None:
        """The oldest message of `kind` that came from `peer`, or None."""
        connection = self._peers.get(peer) or self._gone.get(peer)
        message = connection.take(kind) if connection else None
        return message.data if message else None

    def _replies(
        self, peers: Collection[int], deadline: float, num_awaited: int
    ) -> dict[int, bytes | TransportError]:
        """The next reply of each of `peers`, or why it is gone, as soon as so many are there.

        Those that are gone are removed as soon as that is known; nobody is dropped.
        """
        found: dict[int, bytes | TransportError] = {}
        self._pump(0)
        while True:
            for peer in [peer for peer in peers if peer not in found]:
                if (data := self._take(peer, Kind.REPLY)) is not None:
                    found[peer] = data
                elif peer not in self._peers:
                    found[peer] = self._loss(peer)
            self._remove(peer for peer, reply in found.items() if not isinstance(reply, bytes))
            if len(found) >= num_awaited or time.monotonic() >= deadline:
                return found
            self._pump(left_s(deadline))

    def _expire(self, peer: int, complaint: str) -> TransportTimeout:
        """Drop a peer that is late; returns the error that says so."""
        error = TransportTimeout(complaint)
        self._end(peer, error)
        return error

    def _end(self, peer: int, reason: TransportError | None = None) -> None:
        """End the connection to `peer`. Idempotent."""
        if connection := self._peers.get(peer):
            self._let_go(peer, PeerLost(f"was dropped: {reason}" if reason else "was dropped"))
            connection.close()

    def _end_all(self) -> None:
        """End every connection, in whatever state an interrupt has left it."""
        for peer in list(self._peers):
            self._end(peer)
        for connection in self._gone.values():
            connection.close()
        self._greetings.clear()
        self._newcomers.reset()

    def _serve(self, connection: Connection) -> None:
        connection.flush()
        connection.read()
        if connection.peer is None and (greeting := self._newcomers.heard(connection)) is not None:
            connection.peer, self._next_peer = self._next_peer, self._next_peer + 1
            self._allow(connection)
            self._peers[connection.peer] = connection
            self._greetings.append((connection.peer, greeting))
        self._watch(connection)

    def _allow(self, connection: Connection) -> None:
        """Let a peer of the epoch send replies, and another what fits into a few."""
        is_heard = connection.peer in self._epoch
        most = DEFAULT_MAX_MESSAGE_BYTES if is_heard else _MAX_QUIET_BYTES
        connection.allow(self._kinds, most)

    def _watch(self, connection: Connection) -> None:
        """Watch a connection that stands; let go of one that has ended."""
        if connection.lost is None:
            self._gate.watch(connection)
        elif connection.peer is None:
            self._newcomers.turn_away(connection)
        elif connection.peer in self._peers:
            self._let_go(connection.peer, connection.lost)

    def _let_go(self, peer: int, reason: PeerLost) -> None:
        connection = self._peers.pop(peer)
        self._gate.forget(connection)
        connection.hang_up(reason)
        if peer in self._epoch:
            self._gone[peer] = connection
        else:
            connection.close()


@dataclass(slots=True, eq=False)
class Arrival:
    """A frame that is told of, and not handed out yet.

    Attributes:
        header: The frame's header.
    """

    header: bytes


A = TypeVar("A", bound=Arrival)


class SocketReceiver(ReceiveTransport, ABC, Generic[A]):
    """A receiver's end: one connection at a time.

    Attributes:
        longest_pause_s: Between two looks at what no message tells the end of.
    """

    longest_pause_s: ClassVar[float] = 0.001

    def __init__(
        self, device: torch.device, kinds: Collection[Kind], *, secret: bytes | None = None
    ) -> None:
        """Payloads live on `device`. The sender sends `kinds`."""
        self.device = device
        self._busy_s = busy_s(device.type)
        self._gate = Gate(self._busy_s)
        self._kinds, self._secret = frozenset(kinds), secret
        self._connection: Connection | None = None
        self._waiting: deque[A] = deque()

    def connect(self, greeting: bytes, *, timeout_s: float) -> None:
        """With a secret, waits for the sender to poll. Raises PeerLost if turned away."""
        deadline = deadline_in(timeout_s)
        with self._gate.entered():
            self._forget()
            self._connection = Connection(
                self._dial_until(deadline),
                is_server=False,
                kinds=self._kinds,
                max_message_bytes=DEFAULT_MAX_MESSAGE_BYTES,
                secret=self._secret,
            )
            self._gate.watch(self._connection)
            while not self._connection.can_write:
                if self._next(left_s(deadline)) is None and time.monotonic() >= deadline:
                    raise TransportTimeout("the sender did not answer in time")
            self._write(Kind.GREETING, greeting, deadline)

    def receive(self, *, timeout_s: float) -> Frame:
        """What a timeout interrupts, the next call goes on with."""
        deadline, pace, num_late = deadline_in(timeout_s), self._pace(), 0
        with self._reading():
            self._take_back()
            while num_late <= _MAX_AT_ONCE:
                is_busy = self._advance()
                if self._waiting and (frame := self._hand_out(self._waiting[0])) is not None:
                    return frame
                is_late = time.monotonic() >= deadline
                is_polling = is_busy or self._waiting
                pause_s = pace.pause_s(deadline) if is_polling else left_s(deadline)
                if (message := self._next(pause_s)) is not None:
                    self._obey(message)
                    pace, num_late = self._pace(), num_late + is_late
                elif is_late:
                    break
        raise TransportTimeout("nothing came in time")

    def progress(self) -> None:
        with self._reading():
            self._advance()
            for _ in range(_MAX_AT_ONCE - len(self._waiting)):
                if (message := self._next(0.0)) is None:
                    break
                self._obey(message)
                self._advance()

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        with self._gate.entered():
            self._write(Kind.REPLY, data, deadline_in(timeout_s))

    def disconnect(self) -> None:
        with contextlib.suppress(TransportClosed), self._gate.entered():
            self._forget()

    def close(self) -> None:
        self._gate.close(self._forget)

    @abstractmethod
    def _dial(self, timeout_s: float) -> socket.socket:
        """A connection to the sender. Raises OSError while nobody serves, in so many seconds."""

    @abstractmethod
    def _take_back(self) -> None:
        """The payload that was handed out last is the caller's no more."""

    @abstractmethod
    def _advance(self) -> bool:
        """Go on with what no message tells the end of. Returns whether there is more of that."""

    @abstractmethod
    def _obey(self, message: Message) -> None:
        """Do what a message says. Raises BrokenProtocol."""

    @abstractmethod
    def _hand_out(self, first: A) -> Frame | None:
        """The oldest frame, waiting no more, if its payload is here."""

    def _forget(self) -> None:
        """End the connection, and expect no frame."""
        self._waiting.clear()
        if self._connection is not None:
            self._gate.forget(self._connection)
            self._connection.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Held while frames are read: an end that lost the sender forgets what it had of it."""
        with self._gate.entered():
            try:
                yield
            except (PeerLost, TransportUnavailable):
                self._forget()
                raise

    def _pace(self) -> Pace:
        return Pace(self._busy_s, self.longest_pause_s)

    def _expect(self, arrival: A) -> None:
        """Let a frame wait to be handed out. Raises BrokenProtocol."""
        self._waiting.append(arrival)
        num_bytes = sum(len(one.header) for one in self._waiting)
        if len(self._waiting) > _MAX_WAITING or num_bytes > DEFAULT_MAX_MESSAGE_BYTES:
            raise BrokenProtocol("more frames than can wait for a payload")

    def _next(self, timeout_s: float) -> Message | None:
        """The next message, if one comes. Raises PeerLost once nothing can be handed out."""
        connection = self._current()
        message = connection.take()
        if message is None and connection.lost is None:
            self._run(connection, timeout_s)
            message = connection.take()
        if message is None and connection.lost is not None:
            self._gate.forget(connection)
            connection.hang_up()
            raise PeerLost(str(connection.lost))
        return message

    def _write(self, kind: Kind, data: bytes, deadline: float) -> None:
        """Hand a message to the socket. Raises PeerLost, TransportTimeout."""
        most = MAX_GREETING_BYTES if kind is Kind.GREETING else DEFAULT_MAX_MESSAGE_BYTES
        if len(data) > most:
            raise ConfigError(f"a {kind.name.lower()} of {len(data)} bytes is too large")
        connection = self._current()
        connection.write(kind, data)
        while connection.is_writing:
            if time.monotonic() >= deadline:
                # Half a message may be on its way: nothing can follow it.
                self._gate.forget(connection)
                connection.close()
                raise TransportTimeout("the sender did not read in time")
            self._run(connection, left_s(deadline))
        if connection.lost is not None:
            raise PeerLost(str(connection.lost))

    def _current(self) -> Connection:
        if self._connection is None:
            raise PeerLost("not connected yet")
        return self._connection

    def _run(self, connection: Connection, timeout_s: float) -> None:
        if timeout_s <= 0:  # who looks again and again asks the socket alone
            self._gate.check()
        else:
            self._gate.watch(connection)
        if timeout_s <= 0 or self._gate.wait(timeout_s):
            connection.flush()
            connection.read()

    def _dial_until(self, deadline: float) -> socket.socket:
        """Dial until somebody serves. Raises TransportTimeout with the last refusal."""
        while True:
            try:
                return self._dial(max(_LEAST_DIAL_S, min(_LONGEST_DIAL_S, left_s(deadline))))
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise TransportTimeout(f"no sender appeared: {error}") from error
            self._gate.wait(min(_RETRY_S, left_s(deadline)))
