"""Calls to an engine, and the pause of its generation."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

from deltasync.errors import DeltaSyncError, EngineFailed, EngineTaken
from deltasync.transports import forks
from deltasync.wire.messages import as_text

_TAKEN = re.compile(r"EngineTaken: (.*?take_over=True)", re.DOTALL)  # ends so, in any text


def asked(call: Callable[..., object], *arguments: object) -> object:
    """Call the engine. Raises EngineFailed for an error that is no DeltaSyncError, and EngineTaken
    for one whose text says so: engines pass on no types.
    """
    try:
        return call(*arguments)
    except EngineTaken:
        raise
    except Exception as error:
        if taken := _TAKEN.search(str(error)):
            raise EngineTaken(taken[1]) from error
        if isinstance(error, DeltaSyncError):
            raise
        raise EngineFailed(f"{type(error).__name__}: {as_text(error)}") from error


class Pause:
    """The pause of an engine's generation.

    Args:
        paused: Makes the context in which generation is paused.

    Attributes:
        is_on: Whether it may be paused: what was asked for counts as done until that is known not
            to be so.
        pauses: Whether `paused` pauses at all.
    """

    def __init__(self, paused: Callable[[], AbstractContextManager[object]]) -> None:
        self.paused, self.pauses = paused, paused is not nullcontext
        self._open = ExitStack()
        forks.keep(self._open)  # its end, or the process's, must not resume mixed weights
        self.is_on = self._is_entered = False

    def forget(self) -> None:
        """Whether the engine is paused is another's affair: a parent's, or another trainer's."""
        forks.keep(self._open.pop_all())
        self.is_on = self._is_entered = False

    def begin(self) -> None:
        """Pause, unless that is known to be so. Raises as the engine does, or EngineFailed."""
        if not self._is_entered:
            if self.is_on:
                forks.keep(self._open.pop_all())  # what was entered before is left once, not twice
            self.is_on = True
            asked(lambda: self._open.enter_context(self.paused()))
            self._is_entered = True

    def renew(self) -> None:
        """Pause again when `begin` is called: the engine may have been restarted."""
        self._is_entered = False

    def end(self) -> None:
        """Resume, if paused. If that fails, the engine stays paused and the next call retries."""
        if self.is_on:
            self.begin()  # after a pause or a resume that failed: enter again, to exit again
            self._is_entered = False
            asked(self._open.close)
            self.is_on = False
