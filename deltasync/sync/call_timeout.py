"""How long one call may wait."""

from __future__ import annotations

import math
import time

from deltasync.errors import ConfigError


class CallTimeout:
    """The timeout of each wait of a call, and of all of it.

    Args:
        timeout_s: For each wait.
        total_timeout_s: For the whole call, from now on; None for no limit.
    """

    def __init__(self, timeout_s: float, total_timeout_s: float | None = None) -> None:
        if total_timeout_s is not None and not total_timeout_s >= 0:
            raise ConfigError(f"total_timeout_s is {total_timeout_s}; give seconds, or None")
        self._timeout_s = timeout_s
        self._end = math.inf if total_timeout_s is None else time.monotonic() + total_timeout_s

    @property
    def left_s(self) -> float | None:
        """Seconds that are left for the whole call; None for no limit."""
        return None if self._end == math.inf else max(0.0, self._end - time.monotonic())

    @property
    def wait_s(self) -> float:
        """Seconds for the next wait."""
        return min(self._timeout_s, max(0.0, self._end - time.monotonic()))

    @property
    def is_over(self) -> bool:
        """Whether the time for the whole call has passed."""
        return time.monotonic() >= self._end
