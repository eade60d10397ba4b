"""Errors that are a lack of memory, of a device or of the host."""

from __future__ import annotations

import errno

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


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether the error is a lack of memory. For torch on the host, only the text says so."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in text for words in _TEXTS
    )
