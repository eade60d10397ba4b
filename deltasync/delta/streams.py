"""CUDA streams of our own, beside the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class OwnStream:
    """A stream of one GPU, beside the one that a caller uses. `own_stream` makes it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._callers: torch.cuda.Stream | None = None  # while this one is entered
        # The call in which this stream is made goes on there.
        self._makers: torch.cuda.Stream | None = torch.cuda.current_stream(device)

    @property
    def device(self) -> torch.device:
        return self._stream.device

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make it the current stream: behind what the caller's holds now."""
        self._follow_makers()
        self._makers, self._callers = None, torch.cuda.current_stream(self.device)
        self._stream.wait_stream(self._callers)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._callers = None

    def synchronize(self) -> None:
        """Wait on the host until its work is done."""
        self._follow_makers()
        self._stream.synchronize()

    def join(self) -> None:
        """Let what the caller's stream is given from now on come after this stream's work."""
        self._follow_makers()
        callers = self._callers or torch.cuda.current_stream(self.device)
        callers.wait_stream(self._stream)

    def _follow_makers(self) -> None:
        if self._makers is not None:
            self._stream.wait_stream(self._makers)


def own_stream(device: torch.device | None, last: OwnStream | None) -> OwnStream | None:
    """The stream for weights that kernels work on at `device`; None unless that is a GPU.

    Memory that was allocated on a stream is used again on that stream only: `last` is kept for as
    long as the device stays the same.
    """
    if device is None or device.type != "cuda":
        return None
    return last if last is not None and last.device == device else OwnStream(device)
