"""What a lack of memory raises, on a device and on the host."""

from __future__ import annotations

import torch


def _on_the_host() -> Exception:
    """Torch's own: a RuntimeError, of which only the text tells."""
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as error:
        return RuntimeError(str(error))
    raise AssertionError("this host has an exbibyte")


LACKS = [torch.OutOfMemoryError("planted"), MemoryError("planted"), _on_the_host()]
