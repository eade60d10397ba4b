"""CUDA streams of our own, beside the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


class OwnStream:
    """A stream beside the one that a caller uses; nothing at all where there are no streams.

    Memory that was allocated on a stream is used again on that stream only: so there is one for as
    long as its device stays the same.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._callers: torch.cuda.Stream | None = None  # while this one is entered

    def move_to(self, device: torch.device | None) -> None:
        """Be a stream of `device`; none if that is None or no GPU."""
        if device is None or device.type != "cuda":
            self._stream = None
        elif self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make it the current stream: behind what the caller's holds now."""
        entered = self._stream
        if entered is not None:
            self._callers = torch.cuda.current_stream(entered.device)
            entered.wait_stream(self._callers)
        with nullcontext() if entered is None else torch.cuda.stream(entered):
            try:
                yield
            finally:
                self._callers = None
                if self._stream is not None and self._stream is not entered:  # it moved meanwhile
                    self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def synchronize(self) -> None:
        """Wait on the host until its work is done."""
        if self._stream is not None:
            self._stream.synchronize()

    def join(self) -> None:
        """Let what the caller's stream is given from now on come after this stream's work."""
        if self._stream is not None:
            callers = self._callers or torch.cuda.current_stream(self._stream.device)
            callers.wait_stream(self._stream)
