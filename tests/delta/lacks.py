"""What a lack of memory raises, on a device and on the host."""

from __future__ import annotations

import re

import torch


def _on_the_host() -> Exception:
    """Torch's own: a RuntimeError, of which only the text tells."""
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as error:
        return RuntimeError(re.sub(str(1 << 60), str(1 << 40), str(error)))
    raise AssertionError("this host has an exbibyte")


_ON_A_GPU = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79 GiB"
LACKS = [
    torch.OutOfMemoryError(_ON_A_GPU),
    MemoryError("planted"),
    RuntimeError("std::bad_alloc"),
    _on_the_host(),
]
