"""Kernels in plain torch operations, for any device. Right by being obvious."""

from __future__ import annotations

import torch
from torch import Tensor

from deltasync.wire.digest import GOLDEN_RATIO, MASK, MULTIPLIERS

_BLOCK = 1 << 20  # elements mixed at once


def digest_run(bits: Tensor, key: int, start: int) -> int:
    """The digest of int[n] consecutive elements, the first at flat position `start`."""
    total = 0
    for begin in range(0, len(bits), _BLOCK):
        block = bits[begin : begin + _BLOCK]
        first = start + begin
        positions = torch.arange(first, first + len(block), device=bits.device)
        total += int(_mix(positions, block, key).sum())
    return total & MASK


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
