"""An engine's weights that follow a trainer by themselves, while the engine's own threads serve."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from deltasync.errors import DeltaSyncError, TransportTimeout, is_permanent
from deltasync.sync.receiver import WeightReceiver
from deltasync.sync.staging_thread import StagingThread
from deltasync.transports import forks
from deltasync.transports.base import Closing

_PATIENCE_S = 3600.0  # a trainer lets receivers in when it syncs, which may be seldom
_LOOK_S = 0.05


class Follower(Closing):
    """Stages versions while the engine serves, and writes them between two forward passes.

    After a sync that failed it rejoins. While the trainer is away the engine serves what it holds.

    Args:
        receiver: Of the engine's weights. Owned: `close` closes it.
    """

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver, self._turns = receiver, _Turns()
        self._thread = _PatientThread(receiver, self._turns.writing).__enter__()

    @property
    def version(self) -> int | None:
        """The version held; None before the first one."""
        return self._receiver.version

    @property
    def last_error(self) -> Exception | None:
        """The error of the last sync or join that failed, or None."""
        return self._thread.last_error

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The context of a forward pass: nothing writes the weights within it.

        Any number of threads may be in it, and may enter it again. A version that waits to be
        written goes before those that enter: leave it often, as after each batch.

        Raises DirtyReceiver while the weights must not serve, and what has ended the thread, unless
        that is a trainer that does not fit: `last_error` and `wait_joined` say so.
        """
        with self._turns.serving():
            try:
                self._thread.is_staged()  # raises if it has ended
            except DeltaSyncError as error:
                if not is_permanent(error):  # else a trainer does not fit
                    raise
            self._receiver.check_serving()
            yield

    def wait_joined(self, *, timeout_s: float | None = None) -> None:
        """Return when the weights are the trainer's; None for no limit.

        Raises TransportTimeout, what `is_permanent`, such as LayoutMismatch, and what has ended the
        thread. The thread goes on after a TransportTimeout.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self.version is None or self._receiver.is_dirty:
            self._thread.is_staged()  # raises if it has ended
            error = self.last_error
            if end is not None and time.monotonic() > end:
                why = "" if error is None else f"; the last error was {error}"
                raise TransportTimeout(f"no version came in {timeout_s} s{why}") from error
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Follow no more. The weights stay as they are."""
        self._receiver.close()
        self._thread.__exit__(None, None, None)


class _PatientThread(StagingThread):
    """It lets the trainer take its time to let the receiver in. Closing that ends the wait."""

    _turn_s = _PATIENCE_S


class _Turns:
    """Many may serve at once, or one writes. Who wants to write goes before those that come."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # whose `with` no interrupt leaves locked
        self._changed = threading.Condition(self._lock)
        self._serving: list[tuple[int, object]] = []  # by thread, once for each time it has entered
        self._is_wanted = False  # by the one that writes
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        """In a forked child nobody serves or writes yet."""
        self._lock, self._is_wanted = threading.RLock(), False
        self._changed, self._serving = threading.Condition(self._lock), []

    @contextmanager
    def serving(self) -> Iterator[None]:
        me = threading.get_ident(), object()
        try:
            with self._lock:
                self._changed.wait_for(lambda: not self._is_wanted or self._is_serving(me[0]))
                self._serving.append(me)
            yield
        finally:
            with self._lock:
                self._serving = [one for one in self._serving if one is not me]
                self._changed.notify_all()

    def _is_serving(self, thread: int) -> bool:
        return any(one == thread for one, _ in self._serving)

    @contextmanager
    def writing(self) -> Iterator[None]:
        try:
            with self._lock:
                self._is_wanted = True
                self._changed.wait_for(lambda: not self._serving)
            yield
        finally:
            with self._lock:
                self._is_wanted = False
                self._changed.notify_all()
