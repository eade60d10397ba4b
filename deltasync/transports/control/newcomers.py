"""Who connects to a sender and has not greeted."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import time
from collections.abc import Callable, Iterator

from deltasync.transports import forks
from deltasync.transports.control.connection import Connection, Gate, Kind

MAX_GREETING_BYTES = 16 << 20  # a hello names every parameter: 100,000 take about 10 MB
_MAX_NEWCOMERS = 128
_MAX_BYTES = 256 << 20  # of greetings: half of them here, or whole and not asked for
_MAX_ACCEPTED = 16  # in a row, before those that are here are served
_SPARE_DESCRIPTORS = 64  # left to the rest of the process
_REST_S = 0.1  # without accepting, when there are no descriptors
_LONGEST_TICK_S = 1.0
_MOMENT_S = 0.2  # of a call, beyond its timeout, for greetings that have begun to arrive,
_LEAST_S, _SHARE = 0.005, 0.02  # or this share of the time, if calls take it again and again

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
        return any(c.num_part_bytes for c in self._ends_at)

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
        for connection in [c for c in self._ends_at if c.num_part_bytes]:
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
