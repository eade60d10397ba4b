"""Columns of numbers, with which numpy plans what is done to many tensors at once."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


def cut(lengths: Ints, step: Ints | int) -> tuple[Ints, Ints]:
    """(which, begin): runs of these lengths cut into pieces of at most `step`."""
    pieces = -(-lengths // step)
    which = np.repeat(np.arange(len(lengths)), pieces)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return which, nth * (step if isinstance(step, int) else step[which])
