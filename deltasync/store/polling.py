"""Waiting for what is not in a store yet: less and less often."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from deltasync.errors import RunUnknown, StoreError, StoreUnavailable, is_permanent

_FIRST_S, _LONGEST_S = 0.1, 5.0
_TICK_S = 0.1
_Found = TypeVar("_Found")


class Poll:
    """Looks again after a pause, which doubles until something is found, also from call to call.

    Args:
        check: Called while waiting; what it raises ends the wait.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._pause_s, self._next_s = _FIRST_S, 0.0

    def wait(
        self, find: Callable[[], _Found | None], deadline: float, *, at_once: bool
    ) -> _Found | None:
        """What `find` finds; None if the deadline passes before.

        Args:
            find: Looks once. That there is no run yet, or no answer, counts as nothing.
            deadline: By the monotonic clock.
            at_once: Whether to look at least once, in spite of the pause of an earlier call.

        Raises:
            RunUnknown, StoreUnavailable: The last look failed so.
        """
        fault: StoreError | None = None
        while at_once or self._next_s < deadline:
            if not at_once:
                self._sleep_until(self._next_s)
            at_once, fault = False, None
            try:
                if (found := find()) is not None:
                    self._pause_s, self._next_s = _FIRST_S, 0.0
                    return found
            except (RunUnknown, StoreUnavailable) as error:
                if is_permanent(error):
                    raise
                fault = error
            self._next_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_S)
        self._sleep_until(deadline)
        if fault is not None:
            raise fault
        return None

    def _sleep_until(self, until: float) -> None:
        while (left_s := until - time.monotonic()) > 0:
            self._check()
            time.sleep(min(left_s, _TICK_S))
