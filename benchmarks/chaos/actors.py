"""Processes that are killed and started again, and the file in which they write what they do."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")


class Diary:
    """What one process reports: a line of JSON at a time, whole or not at all.

    Args:
        events: The file.
        who: Is in every line.
    """

    def __init__(self, events: Path, **who: Any) -> None:
        self._who, self._parent = who, os.getppid()
        self._file = os.open(events, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, event: str, **facts: Any) -> None:
        """Add a line."""
        os.write(self._file, f"\n{json.dumps({**self._who, 'event': event, **facts})}\n".encode())

    @property
    def is_orphan(self) -> bool:
        """Whether the process that started this one is gone."""
        return os.getppid() != self._parent


class Actor:
    """A process of one name, one life after another.

    Attributes:
        process: Of this life; None between two.
        life: Number of the last one, from 1.
    """

    def __init__(self, name: str) -> None:
        self.name, self.life = name, 0
        self.process: ForkServerProcess | None = None

    def start(self, target: Callable[..., object], *arguments: object) -> None:
        """Begin a life."""
        self.life += 1
        self.process = CONTEXT.Process(target=target, args=arguments, daemon=True)
        self.process.start()

    def kill(self) -> None:
        """End it, or what is left of it."""
        if self.process is not None:
            self.process.kill()
            self.process.join(30)
            self.process.close()
            self.process = None

    def signal(self, number: int) -> None:
        assert self.process is not None
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
