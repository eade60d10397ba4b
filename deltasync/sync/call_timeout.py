"""How long one call may wait."""

from __future__ import annotations

from deltasync.errors import ConfigError
from deltasync.transports.control.connection import Deadline


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
        self._total = None if total_timeout_s is None else Deadline(total_timeout_s)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left for the whole call; None for no limit."""
        return None if self._total is None else self._total.remaining_s

    @property
    def wait_s(self) -> float:
        """Seconds for the next wait."""
        total = self._total
        return self._timeout_s if total is None else min(self._timeout_s, total.remaining_s)

    @property
    def is_over(self) -> bool:
        """Whether the time for the whole call has passed."""
        return self._total is not None and self._total.passed
