"""Lines of elements on a device, whose classes have been counted: ranks, and places of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.batched.weights import upload
from deltasync.delta.codecs import class_keys
from deltasync.delta.codecs.device_base import Ints
from deltasync.delta.codecs.device_class_tiles import RowTiles, numbered, run_flat
from deltasync.delta.codecs.device_tiles import begins_of
from deltasync.delta.kernels import triton_classes as kernels
from deltasync.delta.kernels.triton_base import TYPES
from deltasync.dtypes import Dtype

ONE_LANE = 40
"""The power of two of elements in the lane of a line that has but one."""

_WARPS = 8
"""Of programs that compare changes with blocks: with fewer, a thread has too many elements."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where lines lie, and how they are cut.

    Attributes:
        addresses: int64[rows], of the first element of each.
        lengths: int64[rows], elements.
        lane_bits: int64[rows], elements of a lane as a power of two.
        num_classes: int64[rows].
        counts: int64[rows], changes.
    """

    addresses: Ints
    lengths: Ints
    lane_bits: Ints
    num_classes: Ints
    counts: Ints

    @property
    def lanes(self) -> Ints:
        """int64[rows], lanes of each."""
        return _cut(self.lengths, self.lane_bits)

    @property
    def stretches(self) -> Ints:
        """int64[rows], stretches of each."""
        return _cut(self.lengths, np.minimum(self.lane_bits, kernels.STRETCH_BITS))


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines whose elements have been counted by class.

    Attributes:
        table: int64[10, rows], see `triton_classes`.
        classes: uint8[rows, keys], the classes of keys.
        segment_row: int64[segments], the row of each.
        bounds: int64[rows + 1], the first segment of each row.
        before, totals: What lies before each block and each stretch.
        sizes: int64[segments], elements of each.
        counts: int64[rows], changes.
        tiles: Of changes, each of which is compared with a block.
    """

    table: Tensor
    classes: Tensor
    lane_row: Tensor
    segment_row: Tensor
    bounds: Tensor
    before: Tensor
    totals: Tensor
    sizes: Tensor
    counts: Ints
    tiles: RowTiles
    block: int
    constants: Mapping[str, Any]

    @classmethod
    def of(cls, layout: Layout, classes: Tensor, dtype: Dtype, block: int) -> Lines:
        """Count the elements of lines: one pass over them."""
        device, each = classes.device, layout.num_classes
        lanes, stretches = layout.lanes, layout.stretches
        segments, blocks = lanes * each, -(-layout.lengths // block) * each
        columns = [
            layout.addresses, layout.lengths, layout.lane_bits, each, begins_of(lanes),
            begins_of(segments), begins_of(stretches), begins_of(blocks), begins_of(layout.counts),
            layout.counts,
        ]  # fmt: skip
        bounds = np.concatenate([[0], np.cumsum(segments)])
        there = upload([np.stack(columns), bounds, lanes, segments, stretches], device)
        bins = 32 if each.max() <= 32 else class_keys.MAX_CLASSES
        lines = cls(
            there[0],
            classes,
            numbered(lanes, there[2]),
            numbered(segments, there[3]),
            there[1],
            torch.empty(int(blocks.sum()), dtype=torch.int16, device=device),
            torch.empty((int(stretches.sum()), bins), dtype=torch.int32, device=device),
            torch.empty(int(bounds[-1]), dtype=torch.int64, device=device),
            layout.counts,
            RowTiles.of(layout.counts, kernels.COMPARED // block, device),
            block,
            {"BINS": bins, **key_constants(dtype), "TYPE": TYPES[dtype.item_size]},
        )
        is_aligned = not (layout.addresses % 16).any()
        lines._count(numbered(stretches, there[4]), is_aligned=is_aligned)
        return lines

    def _count(self, stretch_row: Tensor, *, is_aligned: bool) -> None:
        rows = len(self.counts)
        kernels.count_classes[(len(stretch_row),)](
            self.table, stretch_row, self.classes, self.before, self.totals, rows,
            **self.constants, BLOCK=self.block, ALIGNED=is_aligned,
        )  # fmt: skip
        kernels.add_stretches[(len(self.lane_row),)](
            self.table, self.lane_row, self.totals, self.sizes, rows, BINS=self.constants["BINS"]
        )

    @property
    def num_segments(self) -> int:
        """Classes of all lanes of all lines."""
        return len(self.segment_row)

    def ordered(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(int32[n] ranks of the changes, by lane and class; int64[segments] how many each has).

        Args:
            positions: int32[n], of the changes, increasing in each line.
        """
        ranks, device = torch.empty_like(positions), positions.device
        kinds = torch.empty(len(positions), dtype=torch.uint8, device=device)
        self._rank(positions, self.sizes, ranks, kinds, takes_all=False)
        chosen, ordered = torch.empty_like(self.sizes), torch.empty_like(ranks)
        kernels.order_changes[(len(self.lane_row),)](
            self.table, self.lane_row, positions, kinds, ranks, chosen, ordered, len(self.counts),
            BINS=self.constants["BINS"], TILE=kernels.ORDERED,
        )  # fmt: skip
        return ordered, chosen

    def slots(self, ends: Tensor) -> Tensor:
        """int32[n]: places of all elements, which are the changes, by row, class and position.

        Args:
            ends: int64[segments + 1], where segments begin in that order.
        """
        number, device = int(self.counts.sum()), self.table.device
        slots = torch.empty(number, dtype=torch.int32, device=device)
        self._rank(slots, ends, slots, slots, takes_all=True)
        return slots

    def _rank(
        self, positions: Tensor, ends: Tensor, ranks: Tensor, kinds: Tensor, *, takes_all: bool
    ) -> None:
        self.tiles.run(
            kernels.rank_elements, self.table, self.classes, self.before, self.totals, positions,
            ends, ranks, kinds, **self.constants, BLOCK=self.block, ALL=takes_all, num_warps=_WARPS,
        )  # fmt: skip

    def positions(self, ends: Tensor, ranks: Tensor) -> Tensor:
        """int32[n]: where the chosen ones are, in order over each line.

        Args:
            ends: int64[3, segments + 1], see `triton_class_streams`.
            ranks: int32, the written ones.
        """
        number, device, rows = int(self.counts.sum()), ranks.device, len(self.counts)
        blocks = torch.zeros((2, number), dtype=torch.int32, device=device)
        sizes = rows, self.num_segments, number
        run_flat(
            kernels.find_blocks, number, kernels.SEARCHED, self.table, self.segment_row,
            self.before, self.totals, self.sizes, ends, ranks, blocks[0], blocks[1], *sizes,
            BINS=self.constants["BINS"], BLOCK=self.block,
        )  # fmt: skip
        found = torch.empty(number, dtype=torch.int32, device=device)
        constants = {name: self.constants[name] for name in ("KEY_AT", "KEYS", "TYPE")}
        self.tiles.run(
            kernels.select_elements, self.table, self.classes, blocks[0], blocks[1], found,
            **constants, BLOCK=self.block, num_warps=_WARPS,
        )  # fmt: skip
        merged = torch.zeros_like(found)
        run_flat(
            kernels.merge_classes, number, kernels.SEARCHED, self.table, self.segment_row, ends,
            found, merged, *sizes,
        )  # fmt: skip
        return merged


def key_constants(dtype: Dtype) -> dict[str, int]:
    """How a kernel finds the key of an element."""
    low, high = class_keys.key_field(dtype)
    return {"KEY_AT": low, "KEYS": 1 << high}


def _cut(lengths: Ints, bits: Ints) -> Ints:
    """How many parts of 2^bits elements there are."""
    whole: Ints = (lengths + (1 << bits) - 1) >> bits
    return whole
