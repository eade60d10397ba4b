"""Ctrl-C, SIGTERM, SIGHUP, closed pipes: commands end silently, as usual tools do."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import TextIO

SIGNALLED = 128
INTERRUPTED, READER_LEFT = SIGNALLED + signal.SIGINT, SIGNALLED + signal.SIGPIPE
_ENDINGS = (signal.SIGHUP, signal.SIGTERM)


class _Interruption:
    """The handler of Ctrl-C: it ends the process before the command begins, and raises afterwards.

    Raising alone is not enough: imports and C code turn KeyboardInterrupt into other exceptions, or
    print it and continue. A second Ctrl-C ends the process at once.

    Attributes:
        has_begun: Whether there may be something to clean up.
        has_come: Whether Ctrl-C came, even if its KeyboardInterrupt was lost.
    """

    has_begun = has_come = False

    def __call__(self, *_: object) -> None:
        if not self.has_begun:
            os._exit(INTERRUPTED)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.has_come = True
        # Python would print an interrupt in a destructor or a thread.
        sys.unraisablehook = lambda _: None
        threading.excepthook = lambda _: None
        raise KeyboardInterrupt


interruption = _Interruption()


def handle_signals() -> None:
    """Handle signals, except those that this process was started to ignore: nohup ignores SIGHUP,
    background jobs of a script ignore SIGINT.
    """
    for number in (signal.SIGINT, *_ENDINGS):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interruption if number == signal.SIGINT else _terminate)


def silence(stream: TextIO) -> None:
    """Discard what is left in the buffers of a stream that has no reader or cannot be written."""
    with suppress(OSError):  # no descriptor may be left
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
