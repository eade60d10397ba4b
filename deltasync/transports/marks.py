"""Places in streams of GPUs."""

from __future__ import annotations

from typing import Self

import torch


class Mark:
    """A place in a stream, once it is set; before that, and on a CPU, it is passed.

    As with every CUDA call of torch, errors are RuntimeErrors.
    """

    error: str | None = None

    def __init__(self, device: torch.device, event: torch.cuda.Event | None = None) -> None:
        """On `device`; `event` is one that other processes know."""
        self._device, self._event = device, event
        if event is None and device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def set(self) -> Self:
        """Move to the end of the calling thread's current stream."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
        return self

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let a stream, by default the calling thread's current one, go on only from there."""
        if self._event is not None:
            self._event.wait(stream or torch.cuda.current_stream(self._device))

    def is_done(self) -> bool:
        """Whether everything that was enqueued before it is done. Never blocks."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]
