"""Refusing calls while another one is under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deltasync.errors import ConfigError


class OneCaller:
    """Lets one call in at a time, and refuses others, of whichever thread.

    Args:
        refusal: What a refused call raises as ConfigError.
    """

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal
        self._calls: list[object] = []  # appending is atomic, and the first one has it

    @contextmanager
    def call(self) -> Iterator[None]:
        """While a call is under way. Raises ConfigError if one is already."""
        mine = object()
        try:
            self._calls.append(mine)
            if self._calls[0] is not mine:
                raise ConfigError(self._refusal)
            yield
        finally:
            if mine in self._calls:  # else it was interrupted before
                self._calls.remove(mine)

    def forked(self) -> None:
        """No call is under way in a child."""
        self._calls = []
