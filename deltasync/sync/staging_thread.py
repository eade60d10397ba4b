"""Receiving and staging in a thread of its own, while the engine serves."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from deltasync.errors import DeltaSyncError, TransportClosed, TransportTimeout
from deltasync.sync.receiver import WeightReceiver

_TURN_S = 1.0  # how long one wait for a frame may last before the thread looks whether to stop
_RETRY_S = 0.2  # between a failed sync and joining anew


class StagingThread:
    """Runs `stage` of a receiver in the background; the engine only commits.

    Use it as a context manager. The engine's thread asks `is_staged` (free) or waits, pauses, calls
    `commit`, and resumes. A failed sync is kept in `last_error` and the receiver joins anew;
    the engine serves its old version meanwhile.

    Args:
        receiver: Used by this object alone from now on; not closed by it.

    Attributes:
        last_error: Why the last failed sync failed, or None.
    """

    def __init__(self, receiver: WeightReceiver) -> None:
        self.last_error: DeltaSyncError | None = None
        self._receiver = receiver
        self._staged = threading.Event()
        self._go_on = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deltasync-staging", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._go_on.set()
        self._thread.join()

    def is_staged(self) -> bool:
        """Whether a decided version waits for `commit`. Never blocks."""
        return self._staged.is_set()

    def wait_staged(self, *, timeout_s: float) -> bool:
        """Wait for that; False when it did not come in time."""
        return self._staged.wait(timeout_s)

    def commit(self) -> int:
        """`WeightReceiver.commit` in the calling thread; call it in the engine's pause."""
        try:
            return self._receiver.commit()
        finally:
            self._staged.clear()
            self._go_on.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                staged = self._receiver.stage(timeout_s=_TURN_S)
            except TransportClosed:
                return
            except TransportTimeout:
                continue
            except DeltaSyncError as error:
                self.last_error = error
                self._stop.wait(_RETRY_S)
                continue
            if staged:
                self._go_on.clear()
                self._staged.set()
                self._go_on.wait()
