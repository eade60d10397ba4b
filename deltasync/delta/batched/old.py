"""The bits that many rows of a payload change, read where the weights are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.batched.weights import BatchedWeights, Upload, segments_in
from deltasync.delta.digests import Ints
from deltasync.delta.kernels import triton_live as kernels
from deltasync.delta.kernels.triton_base import SEGMENT, TYPES


@dataclass(frozen=True, slots=True, eq=False)
class SparseRows:
    """Rows of a payload, whose indices lie on the device: int64[rows] columns.

    Attributes:
        number: Which of the weights' parameters each is of.
        start: Where its indices count from, in what is held of that.
        span: As in the patch table.
        count: Changes of those that are looked at; 0 of others.
        indices_at: Addresses of int32[count] indices.
        old_at: Addresses of room for the old bits, at a multiple of the item size. What is not held
            is left as it is there.
        is_read: bool[rows]: whether old bits are wanted; if not, indices alone are checked.
    """

    number: Ints
    start: Ints
    span: Ints
    count: Ints
    indices_at: Ints
    old_at: Ints
    is_read: NDArray[np.bool_]


def read_old(weights: BatchedWeights, rows: SparseRows) -> Tensor:
    """int64[2, rows] on the device: digests of the old bits (rule W31); not 0 for bad indices.

    One launch for each item size, and one for indices alone.

    Args:
        weights: Whose bits they are.
        rows: What is wanted.
    """
    found = torch.zeros((2, len(rows.number)), dtype=torch.int64, device=weights.device)
    ways = np.where(rows.is_read, weights.ways[2 * rows.number], 0)
    for way in np.unique(ways[rows.count > 0]).tolist():
        which = np.flatnonzero((ways == way) & (rows.count > 0))
        box = None
        if way & 2:  # a row for each box, which takes from it what is its own
            nth, box = weights.boxes.of(rows.number[which])
            which = which[nth]
        _launch(weights, rows, which, box, found, way)
    return found


def _launch(
    weights: BatchedWeights,
    rows: SparseRows,
    which: Ints,
    box: Ints | None,
    found: Tensor,
    way: int,
) -> None:
    """Rows that kernels find in the same way: see `BatchedWeights.ways`; 0 to check indices."""
    first, number = segments_in(rows.count[which])
    sent = Upload([(12, len(which)), (int(number.sum()),)], weights.device)
    columns, segment_row = sent.arrays
    segment_row[:] = np.arange(len(which)).repeat(number)
    numbers, ledger = rows.number[which], weights.ledger
    columns[0], columns[1], columns[2] = (
        rows.indices_at[which],
        rows.old_at[which],
        rows.count[which],
    )
    columns[3], columns[4] = rows.span[which], rows.start[which]
    columns[5:7] = weights.facts[:2, numbers]
    columns[7], columns[9], columns[10] = which, first, 0
    columns[8], columns[11] = ledger.cols[numbers], ledger.gaps[numbers]
    if box is not None:
        columns[5], columns[10] = weights.boxes.address[box], box
    if not way:
        columns[5] = 0
    item_size = way // 8 or 1
    there, segments = sent.send()
    kernels.read_old[(len(segment_row),)](
        there,
        segments,
        *weights.boxes.table,
        found,
        len(which),
        found.shape[1],
        TYPE=TYPES[item_size],
        DIMS=0 if box is None else weights.boxes.dims,
        CODES=2 * item_size if way & 4 else 0,
        GAPS=weights.has_gaps,
        SEGMENT=SEGMENT,
        num_warps=4,
    )
