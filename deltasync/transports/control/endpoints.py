"""The two ends of the control plane: one server, many clients, each run by whoever waits."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator

from deltasync.errors import ConfigError, PeerLost, TransportError, TransportTimeout
from deltasync.transports import forks
from deltasync.transports.control.connection import (
    DEFAULT_MAX_MESSAGE_BYTES,
    Connection,
    Gate,
    Kind,
    Message,
)

MAX_GREETING_BYTES = 16 << 20  # a hello names every parameter: 100,000 take about 10 MB
_MAX_NEWCOMERS = 128
_MAX_BYTES = 256 << 20  # of greetings: half of them here, or whole and not asked for
_MAX_ACCEPTED = 16  # in a row, before those that are here are served
_SPARE_DESCRIPTORS = 64  # left to the rest of the process
_REST_S = 0.1  # without accepting, when there are no descriptors
_LONGEST_TICK_S = 1.0
_MOMENT_S = 0.2  # of a call, beyond its timeout, for greetings that have begun to arrive,
_LEAST_S, _SHARE = 0.005, 0.02  # or this share of the time, if calls take it again and again
_MAX_QUIET_BYTES = 32 << 10  # of one that has greeted, and has nothing more to say yet
_RETRY_S = 0.01
_LEAST_DIAL_S, _LONGEST_DIAL_S = 0.05, 1.0  # a host may swallow packets


logger = logging.getLogger(__name__)


class Newcomers:
    """Connections that have not greeted: bounded in number, bytes, descriptors and time.

    Whoever reaches the listener can make one, so that nothing here is kept for long or costs a call
    more than its share. With a secret a connection is heard only once it has proved that it knows
    it. Not thread-safe: its owner holds the gate.
    """

    def __init__(
        self,
        listener: socket.socket,
        gate: Gate,
        *,
        secret: bytes | None,
        timeout_s: float,
        admit: Callable[[socket.socket], None],
    ) -> None:
        """Accept on `listener`, which must listen and belongs to this object from now on.

        One that has not greeted after `timeout_s` of listening is turned away, and one that
        `admit` raises OSError for before a byte of it is read.
        """
        listener.setblocking(False)
        self.listener, self._gate, self._secret = listener, gate, secret
        self._timeout_s, self._admit = timeout_s, admit
        self._arrived: socket.socket | None = None  # last, perhaps not a connection yet
        self._ends_at: dict[Connection, float] = {}  # on our clock, in order of arrival
        self._clock_s, self._ticked_at = 0.0, time.monotonic()
        self._saved_s, self._spent_at = _MOMENT_S, self._ticked_at
        self._rest_until: float | None = None
        self._has_warned = False
        gate.watch(listener)

    @contextlib.contextmanager
    def moment(self) -> Iterator[float]:
        """Until when this call may go on for newcomers: for `_MOMENT_S` now and then.

        So an engine that has begun to greet comes in with this call, and whoever keeps sending
        takes `_SHARE` of the time, or `_LEAST_S` a call.
        """
        began = time.monotonic()
        saved_s = min(_MOMENT_S, self._saved_s + _SHARE * (began - self._spent_at))
        yield began + max(_LEAST_S, saved_s)
        self._spent_at = time.monotonic()
        self._saved_s = max(0.0, saved_s - (self._spent_at - began))

    @property
    def is_greeting(self) -> bool:
        """Whether part of a greeting is here."""
        return any(c.has_part for c in self._ends_at)

    @property
    def patience_s(self) -> float:
        """Seconds until `tend` has something to do; at most a minute."""
        ends = [self._rest_until - time.monotonic()] if self._rest_until else []
        return min([60.0, *ends, *(end - self._clock_s for end in self._ends_at.values())])

    def accept(self) -> list[Connection]:
        """Take in who has connected."""
        accepted: list[Connection] = []
        while len(accepted) < _MAX_ACCEPTED:
            try:
                with forks.making:
                    self._arrived = forks.closed_in_children(self.listener.accept()[0])
            except (BlockingIOError, ConnectionError):
                break
            except OSError as error:  # no descriptor, or no memory, for one more
                self._take_a_rest(str(error.strerror))
                break
            if self._arrived.fileno() >= _most_descriptors():
                self._arrived.close()
                self._take_a_rest("few file descriptors are left")
                break
            if (connection := self._opened(self._arrived)) is not None:
                accepted.append(connection)
        return accepted

    def heard(self, connection: Connection) -> bytes | None:
        """The greeting of one that was just read, if it is whole: it is no newcomer then."""
        greeting = connection.take(Kind.GREETING)
        if greeting is None:
            return None
        self._ends_at.pop(connection, None)
        return greeting.data

    def tend(self, bytes_elsewhere: int) -> None:
        """Turn away who is late and, oldest first, what takes too many bytes; listen again.

        The clock stands still while nobody listens, or a trainer that is busy would lose those
        that connect meanwhile.
        """
        now = time.monotonic()
        self._clock_s += min(now - self._ticked_at, _LONGEST_TICK_S)
        self._ticked_at = now
        for connection, end in list(self._ends_at.items()):
            if self._clock_s >= end:
                self.turn_away(connection)
        excess = bytes_elsewhere + sum(c.num_part_bytes for c in self._ends_at) - _MAX_BYTES
        for connection in [c for c in self._ends_at if c.has_part]:
            if excess > 0:
                excess -= connection.num_part_bytes
                self.turn_away(connection)
        if self._rest_until is not None and now >= self._rest_until:
            self._rest_until = None
            self._gate.watch(self.listener)

    def turn_away(self, connection: Connection) -> None:
        """End the connection of a newcomer. Idempotent."""
        self._ends_at.pop(connection, None)
        self._gate.forget(connection)
        connection.close()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._gate.forget(self.listener)
        self.listener.close()

    def reset(self) -> None:
        """Turn all away, also one that an interrupt kept from becoming a connection."""
        for connection in list(self._ends_at):
            self.turn_away(connection)
        if self._arrived is not None:
            self._arrived.close()
        self._gate.reset(self.listener)

    def _opened(self, sock: socket.socket) -> Connection | None:
        try:
            self._admit(sock)
            connection = Connection(
                sock,
                is_server=True,
                kinds={Kind.GREETING},
                max_message_bytes=MAX_GREETING_BYTES,
                secret=self._secret,
            )
        except OSError:  # it is refused, or has gone
            sock.close()
            return None
        if len(self._ends_at) >= _MAX_NEWCOMERS:
            self.turn_away(next(iter(self._ends_at)))
        self._ends_at[connection] = self._clock_s + self._timeout_s
        self._gate.watch(connection)
        return connection

    def _take_a_rest(self, why: str) -> None:
        """Make room for one, and look again later: the listener would wake every call at once."""
        if self._ends_at:
            self.turn_away(next(iter(self._ends_at)))
        self._gate.forget(self.listener)
        self._rest_until = time.monotonic() + _REST_S
        if not self._has_warned:
            self._has_warned = True
            logger.warning("cannot accept connections: %s; raise the limit `ulimit -n`", why)


def _most_descriptors() -> int:
    """Connections get descriptors below this number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 30
    return limit - min(_SPARE_DESCRIPTORS, limit // 4)


class Server:
    """The sender's end: accepts connections and numbers those that greet as peers.

    Not thread-safe: its owner holds the gate.
    """

    def __init__(
        self,
        listener: socket.socket,
        gate: Gate,
        *,
        kinds: Collection[Kind],
        secret: bytes | None = None,
        greeting_timeout_s: float = 30.0,
        admit: Callable[[socket.socket], None] = lambda sock: None,
    ) -> None:
        """Serve on `listener`, which must listen already and belongs to the server from now on.

        Args:
            listener: A stream socket.
            gate: Runs the sockets.
            kinds: What a peer may send once it has greeted.
            secret: Demand, and give, signed messages.
            greeting_timeout_s: A connection that has not greeted by then is dropped.
            admit: Raises OSError for a connection that is refused; none is by default.
        """
        self._gate = gate
        self._kinds = frozenset(kinds)
        self._newcomers = Newcomers(
            listener,
            gate,
            secret=secret,
            timeout_s=greeting_timeout_s,
            admit=admit,
        )
        self._peers: dict[int, Connection] = {}
        self._heard: frozenset[int] = frozenset()
        self._greetings: deque[tuple[int, bytes]] = deque()
        self._gone: dict[int, Connection] = {}  # of those heard: their last replies, and why
        self._next_peer = 0

    def poll(self, deadline: float) -> list[tuple[int, bytes]]:
        """Greetings that came since the last call; waits for one until the deadline.

        No more at a time than one of the largest takes: reading them takes time too.
        """
        with self._newcomers.moment() as end:
            while time.monotonic() < end and self._greeting_bytes < MAX_GREETING_BYTES:
                if not self.pump(end - time.monotonic() if self._newcomers.is_greeting else 0):
                    break
        while not self._greetings and time.monotonic() < deadline:
            self.pump(deadline - time.monotonic())
        greetings: list[tuple[int, bytes]] = []
        while self._greetings and sum(len(data) for _, data in greetings) < MAX_GREETING_BYTES:
            greetings.append(self._greetings.popleft())
        return greetings

    @property
    def _greeting_bytes(self) -> int:
        return sum(len(data) for _, data in self._greetings)

    def hear(self, peers: Iterable[int]) -> None:
        """Take what these peers say from now on, and keep nothing of others that are gone."""
        self._heard = frozenset(peers)
        for peer, connection in self._peers.items():
            self._allow(connection, is_heard=peer in self._heard)
        for peer in self._gone.keys() - self._heard:
            self._gone.pop(peer).close()

    def is_connected(self, peer: int) -> bool:
        """Whether the connection of `peer` stood when the sockets were last looked at."""
        return peer in self._peers

    def loss(self, peer: int) -> PeerLost:
        """Why `peer` is gone."""
        connection = self._gone.get(peer)
        return PeerLost(str(connection.lost) if connection else "there is no such connection")

    def local_host(self, peer: int) -> str:
        """The address by which `peer` reaches this machine."""
        return self._peers[peer].local_host

    def pump(self, timeout_s: float) -> bool:
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

    def read(self, peers: Iterable[int]) -> None:
        """Take in what has come from `peers`, also while this end closes. Never waits."""
        for peer in peers:
            if connection := self._peers.get(peer):
                self._serve(connection)

    def write(
        self, peers: Iterable[int], kind: Kind, data: bytes, descriptor: int | None = None
    ) -> None:
        """Queue a message for each of `peers`; those that are gone are skipped."""
        for peer in peers:
            if connection := self._peers.get(peer):
                connection.write(kind, data, descriptor)
                self._settle(connection)

    def flush(self, peers: Collection[int], deadline: float) -> dict[int, TransportError]:
        """Wait until `peers` have taken what was written; drop those that do not."""
        while writing := [p for p in peers if p in self._peers and self._peers[p].is_writing]:
            if time.monotonic() >= deadline:
                late = {peer: self.expire(peer, "did not read in time") for peer in writing}
                return self.losses(peers) | late
            self.pump(deadline - time.monotonic())
        return self.losses(peers)

    def losses(self, peers: Iterable[int]) -> dict[int, TransportError]:
        """Those of `peers` that are gone, and why."""
        return {peer: self.loss(peer) for peer in peers if peer not in self._peers}

    def take(self, peer: int, kind: Kind) -> bytes | None:
        """The oldest message of `kind` that came from `peer`, or None."""
        connection = self._peers.get(peer) or self._gone.get(peer)
        message = connection.take(kind) if connection else None
        return message.data if message else None

    def gather(
        self, peers: Collection[int], kind: Kind, deadline: float
    ) -> dict[int, bytes | TransportError]:
        """The next message of `kind` from each of `peers`; drops those that are late."""
        found = self.arrived(peers, kind, deadline)
        late = [peer for peer in peers if peer not in found]
        return found | {peer: self.expire(peer, "did not answer in time") for peer in late}

    def arrived(
        self,
        peers: Collection[int],
        kind: Kind,
        deadline: float,
        on_lost: Callable[[Collection[int]], object] = lambda peers: None,
    ) -> dict[int, bytes | TransportError]:
        """The next message of `kind` from each of `peers`, or why it is gone, without the late.

        Drops nobody. `on_lost` is told of those that are gone as soon as that is known.
        """
        found: dict[int, bytes | TransportError] = {}
        is_late = False
        while not is_late and (missing := [peer for peer in peers if peer not in found]):
            is_late = time.monotonic() >= deadline
            more = self.some(missing, kind, deadline)
            if lost := [peer for peer, reply in more.items() if not isinstance(reply, bytes)]:
                on_lost(lost)
            found |= more
        return found

    def some(
        self, peers: Collection[int], kind: Kind, deadline: float
    ) -> dict[int, bytes | TransportError]:
        """The next message of `kind` of those of `peers` that have one, or why they are gone.

        Waits for the first of them. Drops nobody.
        """
        self.pump(0)
        while True:
            found: dict[int, bytes | TransportError] = {}
            for peer in peers:
                data = self.take(peer, kind)
                if data is not None:
                    found[peer] = data
                elif peer not in self._peers:
                    found[peer] = self.loss(peer)
            if found or time.monotonic() >= deadline:
                return found
            self.pump(deadline - time.monotonic())

    def drop(self, peer: int, reason: TransportError | None = None) -> None:
        """End the connection to `peer`. Idempotent."""
        if connection := self._peers.get(peer):
            self._let_go(peer, PeerLost(f"was dropped: {reason}" if reason else "was dropped"))
            connection.close()

    def expire(self, peer: int, complaint: str) -> TransportTimeout:
        """Drop a peer that is late; returns the error that says so."""
        error = TransportTimeout(complaint)
        self.drop(peer, error)
        return error

    def close(self) -> None:
        """End every connection and stop listening. Idempotent."""
        self.reset()
        self._newcomers.close()

    def reset(self) -> None:
        """End every connection, in whatever state an interrupt has left it."""
        for peer in list(self._peers):
            self.drop(peer)
        for connection in self._gone.values():
            connection.close()
        self._greetings.clear()
        self._newcomers.reset()

    def _serve(self, connection: Connection) -> None:
        connection.flush()
        connection.read()
        if connection.peer is None:
            greeting = self._newcomers.heard(connection)
            if greeting is not None:
                self._welcome(connection, greeting)
        self._settle(connection)

    def _welcome(self, connection: Connection, greeting: bytes) -> None:
        """Make a newcomer that has greeted a peer."""
        self._allow(connection, is_heard=False)
        connection.peer, self._next_peer = self._next_peer, self._next_peer + 1
        self._peers[connection.peer] = connection
        self._greetings.append((connection.peer, greeting))

    def _allow(self, connection: Connection, *, is_heard: bool) -> None:
        """Let a peer send replies, or what fits into a few."""
        most = DEFAULT_MAX_MESSAGE_BYTES if is_heard else _MAX_QUIET_BYTES
        connection.allow(self._kinds, max_message_bytes=most, max_waiting_bytes=2 * most)

    def _settle(self, connection: Connection) -> None:
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
        if peer in self._heard:
            self._gone[peer] = connection
        else:
            connection.close()


class Client:
    """A receiver's end: one connection at a time. Not thread-safe: its owner holds the gate."""

    def __init__(
        self,
        dial: Callable[[float], socket.socket],
        gate: Gate,
        *,
        kinds: Collection[Kind],
        secret: bytes | None = None,
    ) -> None:
        """Connect with `dial`, which raises OSError while nobody serves, in so many seconds."""
        self._dial = dial
        self._gate = gate
        self._kinds = frozenset(kinds)
        self._secret = secret
        self._connection: Connection | None = None

    @property
    def is_lost(self) -> bool:
        """Whether there was a connection and it has ended; what arrived before can be taken."""
        return self._connection is not None and self._connection.lost is not None

    @property
    def local_host(self) -> str:
        """The address by which the server reaches this machine."""
        return self._current().local_host

    def connect(self, greeting: bytes, deadline: float) -> None:
        """Reconnect and greet. Raises TransportTimeout, or PeerLost if turned away."""
        self.hang_up()
        self._connection = Connection(
            self._dial_until(deadline),
            is_server=False,
            kinds=self._kinds,
            max_message_bytes=DEFAULT_MAX_MESSAGE_BYTES,
            secret=self._secret,
        )
        self._gate.watch(self._connection)
        while not self._connection.can_write:
            if self.poll(deadline - time.monotonic()) is None and time.monotonic() >= deadline:
                raise TransportTimeout("the sender did not answer in time")
        self.write(Kind.GREETING, greeting, deadline)

    def poll(self, timeout_s: float, kind: Kind | None = None) -> Message | None:
        """The next message (of `kind`), or None if nothing came. Raises PeerLost."""
        connection = self._current()
        message = connection.take(kind)
        if message is None and connection.lost is None:
            self._run(connection, timeout_s)
            message = connection.take(kind)
        if message is None and connection.lost is not None:
            self._gate.forget(connection)
            connection.hang_up()
            raise PeerLost(str(connection.lost))
        return message

    def next(self, deadline: float) -> Message:
        """The next message. Raises TransportTimeout, PeerLost."""
        while True:
            expired = time.monotonic() >= deadline
            if message := self.poll(deadline - time.monotonic()):
                return message
            if expired:
                raise TransportTimeout("nothing came in time")

    def write(self, kind: Kind, data: bytes, deadline: float) -> None:
        """Hand a message to the socket. Raises PeerLost, TransportTimeout."""
        most = MAX_GREETING_BYTES if kind is Kind.GREETING else DEFAULT_MAX_MESSAGE_BYTES
        if len(data) > most:
            raise ConfigError(f"a {kind.name.lower()} of {len(data)} bytes is too large")
        connection = self._current()
        connection.write(kind, data)
        while connection.is_writing:
            if time.monotonic() >= deadline:
                # Half a message may be on its way: nothing can follow it.
                self.hang_up()
                raise TransportTimeout("the sender did not read in time")
            self._run(connection, deadline - time.monotonic())
        if connection.lost is not None:
            raise PeerLost(str(connection.lost))

    def hang_up(self) -> None:
        """End the connection, if there is one."""
        if self._connection is not None:
            self._gate.forget(self._connection)
            self._connection.close()

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
                left_s = deadline - time.monotonic()
                return self._dial(max(_LEAST_DIAL_S, min(_LONGEST_DIAL_S, left_s)))
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise TransportTimeout(f"no sender appeared: {error}") from error
            self._gate.wait(min(_RETRY_S, deadline - time.monotonic()))
