"""One thread at a time runs the sockets of an end, and another one can wake it to close."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

from deltasync.errors import TransportClosed
from deltasync.transports import forks
from deltasync.transports.control.connection import Connection, Deadline

_EPOLL_RESOLUTION_S = 0.001  # shorter waits would be rounded up to it


class Gate:
    """Lets one thread at a time use an end, and `close` from any thread wake it."""

    def __init__(self, busy_s: float = 0.0) -> None:
        """Every wait begins with `busy_s` of looking again and again: waking up takes time."""
        self._busy_s = busy_s
        self._lock = threading.RLock()
        self._closed = ""  # why it is
        with forks.making:
            self._alarm, self._bell = map(forks.closed_in_children, socket.socketpair())
        # Looked up for each message of each peer: the selector takes several times as long.
        self._watched: dict[Connection | socket.socket, int] = {}
        self._watch_anew()
        forks.inert_in_children(self._forked)

    def _watch_anew(self) -> None:
        with forks.making:
            self._selector = forks.closed_in_children(selectors.DefaultSelector())
        self._selector.register(self._alarm, selectors.EVENT_READ)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Held during every public call. Raises TransportClosed after `close`."""
        with self._lock:
            self.check()
            yield

    def check(self) -> None:
        """Raise TransportClosed after `close`."""
        if self._closed:
            raise TransportClosed(self._closed)

    def wait(self, timeout_s: float) -> list[object]:
        """The watched things that became ready, at most after `timeout_s`."""
        self.check()
        if 0 < timeout_s < _EPOLL_RESOLUTION_S:
            time.sleep(timeout_s)
            timeout_s = 0
        deadline, busy = Deadline(timeout_s), Deadline(min(self._busy_s, timeout_s))
        events: list[tuple[selectors.SelectorKey, int]] = []
        while not events and not busy.passed:
            events = self._selector.select(0)
        if not events:
            events = self._selector.select(deadline.remaining_s)
        self.check()
        return [key.fileobj for key, _ in events]

    def watch(self, source: Connection | socket.socket) -> None:
        """Wake when `source` can be read, or written to if something waits to be."""
        events = selectors.EVENT_READ
        if isinstance(source, Connection) and source.is_writing:
            events |= selectors.EVENT_WRITE
        if self._watched.get(source) == events:
            return
        try:
            self._selector.modify(source, events)
        except KeyError:
            self._selector.register(source, events)
        self._watched[source] = events

    def forget(self, source: Connection | socket.socket) -> None:
        """Stop waking for `source`; must be called before it is closed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)
        self._watched.pop(source, None)

    def reset(self, listener: socket.socket) -> None:
        """Close all that is watched but the listener, also what an interrupt has left to nobody."""
        self._selector.close()  # which no longer has what the system has, if it was interrupted
        for source in self._watched:
            if source is not listener:
                source.close()
        self._watched.clear()
        self._watch_anew()
        self.watch(listener)

    def close(self, dispose: Callable[[], None]) -> None:
        """Wake the call in progress, wait until it has left, then `dispose`, once.

        In a forked child there is nothing to dispose of.
        """
        self._closed = self._closed or "this end of the transport was closed"
        with contextlib.suppress(OSError):
            self._bell.send(b"!")
        with self._lock:
            if self._alarm.fileno() == -1:
                return
            dispose()
            self._selector.close()
            self._alarm.close()
            self._bell.close()

    def _forked(self) -> None:
        self._lock = threading.RLock()
        self._closed = f"this end of the transport cannot be used: {forks.PARENTS_OWN}"
