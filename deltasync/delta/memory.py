"""Errors that are a lack of memory, of a device or of the host."""

from __future__ import annotations

import errno
import re

import torch

_TEXTS = (
    "bad_alloc",  # C++, for what a tensor needs besides its elements
    "allocate memory",  # torch on Linux
    "not enough memory",  # torch elsewhere
    "out of memory",  # pinned memory of a CUDA driver
    "_ALLOC_FAILED",  # of cuBLAS and cuDNN
    "INSUFFICIENT_RESOURCES",  # of cuSPARSE
    "start new thread",  # which lacks room for its stack
)
_AMOUNT = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_ABSURD = 1 << 46  # bytes: no machine has them


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether the error is a lack of memory. For torch on the host, only the text says so."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in text for words in _TEXTS
    )


def raise_lack_of_memory(error: BaseException) -> None:
    """Raise an error again that code raised on values that are tried, if it is a lack of memory.

    A tensor that no machine could hold is none: its size was computed of values without sense.
    """
    asked = _AMOUNT.search(str(error))
    is_absurd = asked is not None and float(asked[1]) * _UNITS[asked[2].lower()] >= _ABSURD
    if is_lack_of_memory(error) and not is_absurd:
        raise error
