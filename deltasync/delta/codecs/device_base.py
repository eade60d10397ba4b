"""What rows and blocks are on a device: the counterpart of `base`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.batched.weights import Numbers
from deltasync.dtypes import Dtype

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """Sparse rows of one dtype, whose changes lie one after another on a device.

    Attributes:
        counts: int64[rows], changes of each row, 1 or more.
        spans: int64[rows], elements that each covers, 1 to 2^31 - 1.
        dtype: Of all rows.
    """

    counts: Ints
    spans: Ints
    dtype: Dtype


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBlocks:
    """Coded rows.

    Attributes:
        index, value: uint8[n] on the device, the rows' blocks side by side.
        index_bytes, value_bytes: int64[rows], how long each block is.
    """

    index: Tensor
    value: Tensor
    index_bytes: Ints
    value_bytes: Ints


class Checks:
    """What is to be looked at once a device has computed it: all of it in one wait.

    What is launched after a check that was put off must be sound whatever that check will find: it
    reads and writes nothing out of bounds.
    """

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._looks: list[Callable[[Ints], None]] = []

    def add(self, found: Tensor, look: Callable[[Ints], None]) -> None:
        """Have `look` see int64[n] `found` when `finish` is called. It raises what is wrong."""
        self._found.append(found.reshape(-1))
        self._looks.append(look)

    def finish(self) -> None:
        """Wait for the device once, and look, in the order in which checks were added."""
        if not self._found:
            return
        ends = np.cumsum([len(found) for found in self._found])
        numbers = Numbers(torch.cat(self._found)).read()
        for found, look in zip(np.split(numbers, ends[:-1]), self._looks, strict=True):
            look(found)
