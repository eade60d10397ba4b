"""How kernels of codecs are launched over rows: see `kernels.triton_codecs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.batched.weights import upload
from deltasync.delta.codecs.device_base import Ints
from deltasync.delta.kernels import triton_codecs as kernels
from deltasync.delta.kernels.triton_base import TYPES

_WIDEST = 8  # bytes of an element that is copied at once


@dataclass(frozen=True, slots=True)
class Tiles:
    """Which part of which row each program works on.

    Attributes:
        number: Of programs.
        first: int64[rows], the first one of each row.
        row: int64[tiles].
        size: What one program works on.
    """

    number: int
    first: Ints
    row: Ints
    size: int

    @classmethod
    def of(cls, counts: Ints, size: int) -> Tiles:
        """Tiles of at most `size`, of rows of int64[rows] `counts`."""
        each = -(-counts // size)
        row = np.repeat(np.arange(len(counts)), each)
        return cls(len(row), begins_of(each), row, size)

    def placed(self, columns: Sequence[Ints], device: torch.device) -> tuple[Tensor, Tensor]:
        """(int64[1 + columns, rows], int64[tiles]) on the device: `rows` and `tile_row`."""
        table, row = upload([np.stack([self.first, *columns]), self.row], device)
        return table, row

    def launch(
        self, kernel: Any, table: Tensor, row: Tensor, *arguments: Any, **constants: Any
    ) -> None:
        """A program for each tile."""
        if self.number:
            rows = table.shape[1]
            kernel[(self.number,)](table, row, *arguments, rows, **constants, TILE=self.size)

    def ends(self, width: int, device: torch.device) -> Tensor:
        """int64[1 + tiles, width], zeros: for numbers that are added up over tiles."""
        return torch.zeros((self.number + 1, width), dtype=torch.int64, device=device)

    def totals(self, ends: Ints, width: int) -> Ints:
        """int64[rows, width]: numbers of each row, from int64[(1 + tiles) width] that are added
        up.
        """
        ends = ends.reshape(-1, width)
        found: Ints = ends[np.append(self.first[1:], self.number)] - ends[self.first]
        return found


def add_up(rows: Tensor) -> None:
    """Make int64[rows, n] what is summed up to each element of a row, in its memory.

    A row at a time: of several at once, torch has each added up by a single block of threads.
    """
    for row in rows:
        row.cumsum_(0)


def begins_of(counts: Ints) -> Ints:
    """int64[rows]: where each row begins, if rows of so many lie one after another."""
    return np.cumsum(counts) - counts


class Copies:
    """Runs of bytes that are copied on a device in one launch, whatever their addresses."""

    def __init__(self) -> None:
        self._pieces: list[Ints] = []

    def add(self, sources: Ints, targets: Ints, lengths: Ints) -> None:
        """Have int64[n] `lengths` bytes copied from addresses to addresses."""
        self._pieces.append(np.stack((sources, targets, lengths)))

    def launch(self, device: torch.device) -> None:
        """Copy what was added; in no order."""
        columns = np.concatenate([np.empty((3, 0), np.int64), *self._pieces], axis=1)
        columns = columns[:, columns[2] > 0]
        joined = int(np.bitwise_or.reduce(columns, axis=None)) | _WIDEST
        unit = joined & -joined  # divides every address and length
        columns[2] //= unit
        tiles = Tiles.of(columns[2], kernels.COPIED)
        table, row = tiles.placed(list(columns), device)
        tiles.launch(kernels.copy_pieces, table, row, TYPE=TYPES[unit])
