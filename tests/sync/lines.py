"""How many lines of the package a thread runs through, however long they take."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import deltasync

PACKAGE = f"{Path(deltasync.__file__).parent}/"


class Lines:
    """Counts the lines of the package that a thread runs, except those of kernels."""

    def __init__(self) -> None:
        self.count = 0

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
        self.count += event == "line"
        return self._ran
