"""How the kernels of `class` are launched: over numbers, and over parts of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltasync.delta.batched.weights import upload
from deltasync.delta.codecs.device_base import Ints
from deltasync.delta.codecs.device_tiles import begins_of


def numbered(counts: Ints, each: Tensor) -> Tensor:
    """int64[sum]: of each of several things the row that it belongs to.

    Args:
        counts, each: int64[rows], how many there are of each row, on the host and on the device.
    """
    return torch.repeat_interleave(each, output_size=int(counts.sum()))


def run_flat(kernel: Any, number: int, tile: int, *arguments: Any, **constants: Any) -> None:
    """Launch a program for each `tile` of so many numbers."""
    if number:
        kernel[(-(-number // tile),)](*arguments, **constants, TILE=tile)


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Programs, each of which works on a part of one row. There may be as many as changes.

    Attributes:
        number: How many.
        row: int64[number], the row of each.
        first: int64[rows], the first one of each row.
        stop: int64[rows], the one after its last.
        size: How much one works on.
    """

    number: int
    row: Tensor
    first: Tensor
    stop: Tensor
    size: int

    @classmethod
    def of(cls, counts: Ints, size: int, device: torch.device) -> RowTiles:
        """Those of rows with so much work."""
        each = -(-counts // size)
        first = begins_of(each)
        there = upload([each, first, first + each], device)
        return cls(int(each.sum()), numbered(each, there[0]), there[1], there[2], size)

    def run(self, kernel: Any, table: Tensor, *arguments: Any, **constants: Any) -> None:
        """Launch a program for each."""
        if self.number:
            rows = len(self.first)
            kernel[(self.number,)](
                table, self.row, self.first, *arguments, rows, **constants, TILE=self.size
            )
