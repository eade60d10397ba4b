"""Receives and stages in a separate thread, while the engine serves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar, Self, TypeAlias

from deltasync.delta.memory import is_lack_of_memory
from deltasync.delta.modes import plain_mode
from deltasync.errors import (
    CallOrderError,
    ConfigError,
    DeltaSyncError,
    TransportClosed,
    TransportTimeout,
    is_permanent,
)
from deltasync.sync.protocol.links import OneCaller, check_seconds
from deltasync.sync.protocol.receiver_session import ReceiverState
from deltasync.sync.receiver_base import BaseReceiver
from deltasync.transports import forks

logger = logging.getLogger(__name__)

Pause: TypeAlias = Callable[[], AbstractContextManager[object]]

_TURN_S = 1.0  # how long one wait for a frame may last before the thread looks whether to stop
_RETRY_S = 0.2  # between a failed sync and rejoining


class StagingThread:
    """Runs `stage` of a receiver in the background; the engine only commits.

    Use it as a context manager. The engine's thread calls `is_staged` (free) or `wait_staged`,
    pauses, calls `commit`, and resumes; or the engine offers a `pause`, and this thread commits in
    it. If a sync fails, its error is kept in `last_error` and the receiver rejoins; the engine
    serves its old version meanwhile. An error that `is_permanent`, such as LayoutMismatch, ends the
    thread, and every call here raises it from then on; but not over a link to an engine that holds
    a version, since another trainer may come.

    Leaving the context waits for the current `stage`, at most until the sender ends it or its
    silence times out; a fetch from a store is broken off. A version that is staged by then can
    still be committed, by the receiver or by another StagingThread. The sender waits for that until
    its own timeout; then it drops this receiver and serves the others. A receiver that commits
    later holds a version that was decided, and rejoins at its next sync.

    Args:
        receiver: Only this object may use it from now on. It is not closed here.
        pause: Returns a context manager in which the engine does not use its weights; None if the
            engine calls `commit`.

    Attributes:
        last_error: The error of the last sync or join that failed here, or None. A lack of memory,
            on a device or on the host, also fails a sync, and the next one retries. Errors of
            `commit` are not kept.
    """

    _turn_s: ClassVar[float] = _TURN_S  # of one `stage`, also to be let in by the trainer

    def __init__(self, receiver: BaseReceiver, pause: Pause | None = None) -> None:
        self.last_error: Exception | None = None
        self._receiver, self._pause, self._logged = receiver, pause, ""
        self._lock = threading.RLock()  # whose `with` no interrupt leaves locked
        self._turn = threading.Condition(self._lock)
        refusal = "a commit is under way; a StagingThread has one thread commit"
        self._caller = OneCaller(refusal, self._committed)
        self._is_staged = self._is_stopping = self._has_joined = False
        self._since_s = 0.0
        self._crash: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="deltasync-staging", daemon=True)
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        """The thread is the parent's."""
        self._lock, self._is_staged = threading.RLock(), False
        self._turn = threading.Condition(self._lock)
        self._crash = TransportClosed(f"nothing is staged here: {forks.PARENTS_OWN}")

    def __enter__(self) -> Self:
        if self._thread.ident is not None:
            raise ConfigError("a StagingThread runs once: make another one")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._is_stopping = True
            self._turn.notify_all()
        if self._thread.ident is not None:
            while self._thread.is_alive():
                self._receiver.break_off()  # again: the thread may just have been about to begin
                self._thread.join(_RETRY_S)

    def is_staged(self) -> bool:
        """Return whether a decided version waits for `commit`. Never blocks.

        Raises the error that ended the thread, if there is one, and ConfigError before it runs.
        """
        return self.wait_staged(timeout_s=0)

    def wait_staged(self, *, timeout_s: float) -> bool:
        """Wait for `is_staged`. Returns False after the timeout. Raises as `is_staged`."""
        check_seconds("timeout_s", timeout_s)
        if self._thread.ident is None:
            raise ConfigError("a StagingThread that does not run: use it as a context manager")
        with self._lock:
            self._turn.wait_for(lambda: self._has_staged or self._crash, timeout_s)
            if self._crash is not None:
                raise self._crash
            return self._has_staged

    @property
    def waits_s(self) -> float:
        """For how many seconds a sync has waited for `commit`; 0 if none does."""
        return time.monotonic() - self._since_s if self._has_staged else 0.0

    def commit(self) -> int:
        """`WeightReceiver.commit` in the calling thread; call it in the engine's pause.

        Raises CallOrderError when nothing is staged, ConfigError when another thread commits.
        """
        with plain_mode(), self._caller.call():
            if not self.is_staged():
                raise CallOrderError("nothing is staged; ask is_staged first")
            try:
                return self._receiver.commit()
            finally:
                self._committed()

    def _committed(self) -> None:
        """Let the thread go on."""
        with self._lock:
            self._is_staged = False
            self._turn.notify_all()

    @property
    def _has_staged(self) -> bool:
        """Whether there is something to commit: not after `detach` or `invalidate`."""
        is_outside = self._receiver.state is ReceiverState.OUTSIDE
        return self._is_staged and (self._caller.is_called or not is_outside)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._take_turn()
        except TransportClosed as error:  # the receiver was closed: nothing to report here
            self._end(error)
        except Exception as error:
            self._end(error)
            raise

    def _end(self, error: Exception) -> None:
        with self._lock:
            self._crash, self._is_stopping = error, True
            self._turn.notify_all()

    def _take_turn(self) -> None:
        try:
            staged = self._receiver.stage(timeout_s=self._turn_s)
        except TransportClosed:
            raise
        except (DeltaSyncError, MemoryError, RuntimeError, OSError) as error:
            if not (isinstance(error, DeltaSyncError) or is_lack_of_memory(error)):
                raise
            is_outside = self._receiver.state is ReceiverState.OUTSIDE
            is_idle = self._receiver.is_detached or not is_outside
            if isinstance(error, TransportTimeout) and is_idle:
                return  # no sync came; silence within one, or no sender, leaves it outside
            self._fail(error)
            return
        with self._lock:
            self._is_staged, self._has_joined, self._logged = staged, True, ""
            self._since_s = time.monotonic()
            self._turn.notify_all()
        if staged and self._pause is not None:
            self._commit_in(self._pause)
        elif staged:
            self._await_commit()

    def _await_commit(self) -> None:
        """Let another thread commit."""
        with self._lock:
            while self._has_staged and not self._is_stopping:
                self._turn.wait(_TURN_S)
            self._is_staged = self._is_staged and self._is_stopping

    def _commit_in(self, pause: Pause) -> None:
        try:
            with pause():
                self.commit()
        except TransportClosed:
            raise
        except DeltaSyncError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Keep an error after which the receiver tries again, soon, unless that is of no use.

        Over a link, with a version to serve, it may be of use: another trainer may come.
        """
        is_alone = self._receiver.version is None or self._receiver.resumes
        is_final = is_alone and is_permanent(error)
        is_new = not (is_final or self._has_joined)
        what = "ends" if is_final else "rejoins"
        self._log(error, "has not joined yet" if is_new else f"{what}, after a sync that failed")
        self.last_error = error
        if is_final:
            self._end(error)
        with self._lock:
            self._turn.wait_for(lambda: self._is_stopping, _RETRY_S)

    def _log(self, error: Exception, what: str) -> None:
        """Once until a sync succeeds: a sender that stays away is one line."""
        why = f"{type(error).__name__}: {error}"
        if why != self._logged:
            logger.warning("%s %s: %s", self._receiver.name, what, why)
        self._logged = why
