"""Follows a store in a thread, while the engine serves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

from deltasync.errors import DeltaSyncError, TransportClosed
from deltasync.sync.staging_thread import Staging, StagingThread

Pause: TypeAlias = Callable[[], AbstractContextManager[object]]


class StoreFollower(StagingThread):
    """A `StagingThread` over a store. It may also commit, in a pause that the engine offers.

    Args:
        receiver: Only this object may use it from now on. It is not closed here.
        pause: Returns a context manager in which the engine does not use its weights; None if the
            engine calls `commit`.
    """

    def __init__(self, receiver: Staging, pause: Pause | None = None) -> None:
        super().__init__(receiver)
        self._pause = pause

    def _await_commit(self) -> None:
        if self._pause is None:
            super()._await_commit()
            return
        try:
            with self._pause():
                self.commit()
        except TransportClosed:
            raise
        except DeltaSyncError as error:
            self._fail(error)
