"""How many lines of the package a thread runs through, however long they take."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import deltasync

PACKAGE = f"{Path(deltasync.__file__).parent}/"


class Lines:
    """The lines of the package that a thread runs, except those of kernels, and how often."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()

    @property
    def count(self) -> int:
        return self.counts.total()

    def __enter__(self) -> Lines:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        path = frame.f_code.co_filename
        is_ours = path.startswith(PACKAGE) and not path.startswith(f"{PACKAGE}delta/kernels/")
        return self._ran if is_ours else None

    def _ran(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.counts[frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_lineno] += 1
        return self._ran
