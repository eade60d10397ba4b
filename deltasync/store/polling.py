"""Waiting for what is not in a store yet: less and less often."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from deltasync.errors import (
    RunUnknown,
    StoreError,
    StoreUnavailable,
    TransportTimeout,
    VersionMissing,
    is_permanent,
)

_FIRST_S, _LONGEST_S = 0.1, 5.0
_TICK_S = 0.1
_Found = TypeVar("_Found")


class Poll:
    """Looks again after a pause that doubles until something is found.

    Args:
        url: Of the store, for messages.
        check: Called while waiting; what it raises ends the wait.
    """

    def __init__(self, url: str, check: Callable[[], None]) -> None:
        self._url, self._check = url, check
        self._pause_s, self._next_s = _FIRST_S, 0.0

    def wait(
        self,
        find: Callable[[], _Found | None],
        deadline: float,
        *,
        sought: str,
        is_patient: bool,
    ) -> _Found:
        """What `find` finds. It is called at least once, unless patience says to wait longer.

        Args:
            find: Looks once. That there is no run yet, or no answer, counts as nothing.
            deadline: By the monotonic clock.
            sought: What is wrong if nothing is found, for the message.
            is_patient: Whether calls that found nothing make the pauses longer, and the timeout
                is nothing unusual.

        Raises:
            TransportTimeout: Nothing was found, in a patient call.
            VersionMissing: The same in others.
            RunUnknown, StoreUnavailable: The last look failed so.
        """
        fault: StoreError | None = None
        while not is_patient or self._next_s < deadline:
            if is_patient:
                self._sleep(self._next_s - time.monotonic())
            try:
                fault = None
                if (found := find()) is not None:
                    self._pause_s, self._next_s = _FIRST_S, 0.0
                    return found
            except (RunUnknown, StoreUnavailable) as error:
                if is_permanent(error):
                    raise
                fault = error
            self._next_s = time.monotonic() + self._pause_s
            if self._next_s >= deadline:
                break
            self._sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_S)
        else:
            self._sleep(deadline - time.monotonic())
        self._pause_s = min(2 * self._pause_s, _LONGEST_S)
        if fault is not None:
            raise fault
        if is_patient:
            raise TransportTimeout(f"{self._url}: {sought} within the timeout")
        raise VersionMissing(f"{self._url}: {sought}; deltasync log lists what there is")

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._check()
            time.sleep(min(left_s, _TICK_S))
