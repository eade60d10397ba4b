"""Ctrl-C, SIGTERM, SIGHUP, readers that leave: commands end without a word, as usual tools do."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import TextIO

SIGNALLED = 128
INTERRUPTED, READER_LEFT = SIGNALLED + signal.SIGINT, SIGNALLED + signal.SIGPIPE

_ENDINGS = (signal.SIGHUP, signal.SIGTERM)
_DEAF_S = 5.0  # after a Ctrl-C, so that a second one does not disturb the clearing away


class _Interruption:
    """What Ctrl-C does: as long as nothing has begun it ends the process, later it raises.

    Raising is not enough. Imports and C code turn KeyboardInterrupt into other exceptions, or print
    it and go on.

    Attributes:
        has_begun: Whether there may be something to clear away.
        came_at: When it came last, of time.monotonic; None before.
    """

    has_begun = False
    came_at: float | None = None

    def __call__(self, number: int, _: FrameType | None) -> None:
        if not self.has_begun:
            os._exit(INTERRUPTED)
        now = time.monotonic()
        if self.came_at is not None and now - self.came_at < _DEAF_S:
            return
        self.came_at = now
        # What is interrupted in a destructor or a thread would be printed.
        sys.unraisablehook = lambda _: None
        threading.excepthook = lambda _: None
        raise KeyboardInterrupt


_interruption = _Interruption()


def handle_signals() -> None:
    """Let signals end this process as this module says, but for those that it was started deaf to:
    nohup ignores SIGHUP, background jobs of a script ignore SIGINT.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interruption)
    for number in _ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _terminate)


def begin() -> None:
    """From now on there may be something to clear away."""
    _interruption.has_begun = True


def was_interrupted() -> bool:
    """Whether Ctrl-C came, whatever has become of its KeyboardInterrupt."""
    return _interruption.came_at is not None


def silence(stream: TextIO) -> None:
    """Nobody reads it, or it cannot be written: let what is left in buffers go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def tell(text: str) -> None:
    """Write to stderr; if that cannot be written, the exit code has to do."""
    try:
        print(text, file=sys.stderr)
    except OSError:
        silence(sys.stderr)


def _terminate(number: int, _: object) -> None:
    """What was begun is cleared away, undisturbed by another signal: `timeout` sends two."""
    for ending in _ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(SIGNALLED + number)
