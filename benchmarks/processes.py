"""Processes of the benchmarks: each runs one of their modules, and is spoken to by lines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def start(
    module: str, *words: str, is_told: bool = False, own_session: bool = False
) -> subprocess.Popen[str]:
    """Run `module` with `words` as its arguments; stdout is a pipe, and stdin if it `is_told`."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        stdin=subprocess.PIPE if is_told else None,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=own_session,
    )


@contextmanager
def seeing_gpu(number: int) -> Iterator[None]:
    """Processes that begin in this context see one of the GPUs that this process sees."""
    before = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = before.split(",")[number] if before else str(number)
    try:
        yield
    finally:
        os.environ.pop(_VISIBLE)
        if before is not None:
            os.environ[_VISIBLE] = before
