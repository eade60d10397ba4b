"""Errors that are a lack of memory, of a device or of the host."""

from __future__ import annotations

import errno

import torch

_TEXTS = (
    "allocate memory",  # torch on Linux
    "not enough memory",  # torch elsewhere
    "out of memory",  # pinned memory of a CUDA driver
    "_ALLOC_FAILED",  # of cuBLAS and cuDNN
    "start new thread",  # which lacks room for its stack
)


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether the error is a lack of memory. For torch on the host, only the text says so."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in text for words in _TEXTS
    )


def raise_lack_of_memory(error: BaseException) -> None:
    """Raise an error again that was caught, if it is a lack of memory: another try may do."""
    if is_lack_of_memory(error):
        raise error
