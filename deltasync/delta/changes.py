"""Changes: which elements of some tiles get which bits. It is the payload of a bucket itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import INTEGERS
from deltasync.wire.changes import Sizes


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """The columns of a payload, see `wire.changes`: tensors over its memory, on any device.

    Signed types carry unsigned numbers: torch has little for others.

    Attributes:
        sizes: T, N and W.
        tiles: int32[T].
        counts: int16[T].
        places: int16[N].
        values: int[N].
        whole: int[W].
        memory: uint8[num_bytes], the payload.
    """

    sizes: Sizes
    tiles: Tensor
    counts: Tensor
    places: Tensor
    values: Tensor
    whole: Tensor
    memory: Tensor

    @classmethod
    def of(cls, payload: Tensor, sizes: Sizes) -> Changes:
        """Of uint8[sizes.num_bytes], which is not copied."""
        bits = INTEGERS[sizes.item_size]
        types = (torch.int32, torch.int16, torch.int16, bits, bits)
        tiles, counts, places, values, whole = (
            payload[begin : begin + length].view(dtype)
            for dtype, (begin, length) in zip(types, sizes.columns, strict=True)
        )
        return cls(sizes, tiles, counts, places, values, whole, payload)

    def clear_padding(self) -> None:
        """Write zeros between the columns."""
        columns = self.sizes.columns
        ends = [*(begin for begin, _ in columns[1:]), len(self.memory)]
        for (begin, length), end in zip(columns, ends, strict=True):
            self.memory[begin + length : end] = 0

    def join(self, parts: Sequence[Changes]) -> None:
        """Write those of parts here, one after another."""
        self.clear_padding()
        for name in ("tiles", "counts", "places", "values", "whole"):
            torch.cat([getattr(part, name) for part in parts], out=getattr(self, name))

    def table(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """int64[T] each: tiles and counts on the host."""
        tiles, counts = self.tiles.cpu().numpy(), self.counts.cpu().numpy()
        return tiles.view(np.uint32).astype(np.int64), counts.view(np.uint16).astype(np.int64)
