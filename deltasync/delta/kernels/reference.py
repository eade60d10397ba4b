"""Kernels in plain torch operations, for any device. Right by being obvious."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.wire.digest import GOLDEN_RATIO, MASK, MULTIPLIERS

_BLOCK = 1 << 20  # elements mixed at once


def changed(
    new: Tensor, old: Tensor, limit: float
) -> tuple[int, tuple[Tensor, Tensor, Tensor] | None]:
    """How many of int[n] `new` and `old` differ, and which.

    Returns:
        The count, and (int32[count] increasing positions, int[count] new bits, int[count] old
        bits), or None where the count exceeds `limit`.
    """
    mask = new != old
    if (count := int(mask.sum())) > limit:
        return count, None
    found = mask.nonzero().squeeze(1)
    return count, (found.to(torch.int32), new[found], old[found])


def is_increasing(indices: Tensor, span: int) -> bool:
    """Whether int32[n] indices are strictly increasing within [0, span)."""
    if not len(indices):
        return True
    inside = (indices[0] >= 0) & (indices[-1].to(torch.int64) < span)
    return bool((indices[1:] > indices[:-1]).all() & inside)


def digest_run(bits: Tensor, key: int, start: int) -> int:
    """The digest of int[n] consecutive elements, the first at flat position `start`."""
    total = 0
    for begin in range(0, len(bits), _BLOCK):
        block = bits[begin : begin + _BLOCK]
        first = start + begin
        positions = torch.arange(first, first + len(block), device=bits.device)
        total += int(_mix(positions, block, key).sum())
    return total & MASK


def digest_chunks(
    positions: Tensor, bits: Tensor, key: int, chunk_numel: int
) -> tuple[int, NDArray[np.uint64]]:
    """The digests of int[n] elements at increasing int64[n] flat positions, by chunk."""
    chunks = positions.div(chunk_numel, rounding_mode="floor")
    first, last = int(chunks[0]), int(chunks[-1])
    sums = torch.zeros(last - first + 1, dtype=torch.int64, device=bits.device)
    sums.index_add_(0, chunks - first, _mix(positions, bits, key))
    return first, sums.cpu().numpy().view(np.uint64)


def _mix(positions: Tensor, bits: Tensor, key: int) -> Tensor:
    unsigned = bits.to(torch.int64)
    if bits.element_size() < 8:
        unsigned &= (1 << 8 * bits.element_size()) - 1
    x = positions * _signed(GOLDEN_RATIO) + _signed(key) + unsigned
    x = (x ^ _shift(x, 30)) * _signed(MULTIPLIERS[0])
    x = (x ^ _shift(x, 27)) * _signed(MULTIPLIERS[1])
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's own keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value
