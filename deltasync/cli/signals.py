"""Ctrl-C, SIGTERM, SIGHUP, closed pipes: commands end silently, as usual tools do."""

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
_DEAF_S = 5.0  # after a Ctrl-C, so that a second one does not interrupt the cleanup


class _Interruption:
    """The handler of Ctrl-C: before the command begins it ends the process, afterwards it raises.

    Raising alone is not enough: imports and C code turn KeyboardInterrupt into other exceptions, or
    print it and continue.

    Attributes:
        has_begun: Whether there may be something to clean up.
        came_at: time.monotonic of the last Ctrl-C; None before the first.
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
        # Python would print an interrupt in a destructor or a thread.
        sys.unraisablehook = lambda _: None
        threading.excepthook = lambda _: None
        raise KeyboardInterrupt


_interruption = _Interruption()


def handle_signals() -> None:
    """Handle signals, except those that this process was started to ignore: nohup ignores SIGHUP,
    background jobs of a script ignore SIGINT.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interruption)
    for number in _ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _terminate)


def begin() -> None:
    """Record that from now on there may be something to clean up."""
    _interruption.has_begun = True


def was_interrupted() -> bool:
    """Whether Ctrl-C came, even if its KeyboardInterrupt was lost."""
    return _interruption.came_at is not None


def silence(stream: TextIO) -> None:
    """Discard what is left in the buffers of a stream that has no reader or cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def tell(text: str) -> None:
    """Write to stderr; if that fails, only the exit code reports the error."""
    try:
        print(text, file=sys.stderr)
    except OSError:
        silence(sys.stderr)


def _terminate(number: int, _: object) -> None:
    """Exit with a cleanup that no second signal interrupts: `timeout` sends two."""
    for ending in _ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(SIGNALLED + number)
