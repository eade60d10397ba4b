"""Waiting for what is not in a store yet: less and less often."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from deltasync.errors import DeltaSyncError, StoreError, StoreUnavailable

_FIRST_S, _LONGEST_S = 0.1, 5.0
_TICK_S = 0.1
_Found = TypeVar("_Found")


class Poll:
    """Looks again after a pause, which doubles until `reset`, also from call to call.

    Args:
        check: Called while waiting; what it raises ends the wait.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._fault: DeltaSyncError | None = None
        self._pause_s, self._next_s = _FIRST_S, 0.0

    def wait(
        self, find: Callable[[], _Found | None], deadline: float, *, at_once: bool
    ) -> _Found | None:
        """What `find` finds; None if the deadline passes before.

        Args:
            find: Looks once. That there is no answer counts as nothing.
            deadline: By the monotonic clock.
            at_once: Whether to look at least once, in spite of the pause of an earlier call.

        Raises:
            StoreError: The last look failed so, or what it found was `put_off` by this.
        """
        while at_once or self._next_s < deadline:
            if not at_once:
                self._sleep_until(self._next_s)
            at_once = False
            try:
                if (found := find()) is not None:
                    return found
                self.put_off()
            except StoreError as error:
                self.put_off(error)
                if not isinstance(error, StoreUnavailable):
                    raise
        self._sleep_until(deadline)
        if self._fault is not None:
            raise self._fault.with_traceback(None)
        return None

    def put_off(self, fault: DeltaSyncError | None = None) -> None:
        """Nothing was found, or nothing of use, for this reason: look again after the pause."""
        self._fault, self._next_s = fault, time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_S)

    def reset(self) -> None:
        """What was found was of use: look at once, and then after short pauses."""
        self._fault, self._pause_s, self._next_s = None, _FIRST_S, 0.0

    def _sleep_until(self, until: float) -> None:
        while (left_s := until - time.monotonic()) > 0:
            self._check()
            time.sleep(min(left_s, _TICK_S))
