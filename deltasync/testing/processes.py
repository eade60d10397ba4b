"""Functions in other processes, always bounded in time, failing with the child's traceback."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, Self

import torch


class ChildFailed(AssertionError):
    """A child raised, was killed or did not end in time; the text is its traceback."""


class Child:
    """One process, alive at most as long as the `with` block.

    It is spawned; after `multiprocessing.set_start_method("forkserver")` it is forked from there,
    where imports can be done ahead. `function` and its arguments must be importable and picklable.
    """

    def __init__(self, function: Callable[..., object], *args: Any) -> None:
        context = _start_method()
        self._report, report = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(report, function, args), daemon=True)
        self._process.start()
        report.close()
        self._text: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def traceback(self) -> str | None:
        """What the child raised, as text; None if nothing (yet)."""
        if self._text is None and self._report.poll():
            try:
                self._text = self._report.recv_bytes().decode()
            except EOFError:
                return None
        return self._text

    def wait(self, *, timeout_s: float) -> None:
        """Wait for the child to end well. Raises ChildFailed."""
        self._process.join(timeout_s)
        if self.traceback is not None:
            raise ChildFailed(f"the child raised:\n{self.traceback}")
        if self._process.is_alive():
            raise ChildFailed(f"the child still runs after {timeout_s} s")
        if self._process.exitcode:
            raise ChildFailed(f"the child ended with {self._process.exitcode}")

    def kill(self) -> None:
        """Kill -9, and wait until it is gone. Idempotent."""
        self._process.kill()
        self._process.join()

    def pause(self) -> None:
        """SIGSTOP: alive, connected, and doing nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)


def _start_method() -> SpawnContext | ForkServerContext:
    if multiprocessing.get_start_method(allow_none=True) == "forkserver":
        return multiprocessing.get_context("forkserver")
    return multiprocessing.get_context("spawn")


def _run(report: Connection, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        function(*args)
    except BaseException:
        report.send_bytes(traceback.format_exc().encode())
        raise
