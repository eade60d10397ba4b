"""Matrices that quantization may stumble over."""

from __future__ import annotations

import torch
from torch import Tensor

MATRICES = ("plain", "outliers", "tiny", "huge", "any", "halfway", "zero", "zero blocks", "signs")


def matrix(kind: str, rows: int, cols: int, *, seed: int) -> Tensor:
    """bf16 [rows, cols], finite: always the same bits.

    "tiny" has denormal numbers, "any" has any bits, "halfway" what lies between two codes often,
    and "signs" zeros of both signs among numbers of all sizes.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, cols, generator=generator)
    if kind == "plain":
        return (values * 0.02).bfloat16()
    if kind == "outliers":
        return (values * 0.02 * torch.where(values.abs() > 2, 50.0, 1.0)).bfloat16()
    if kind == "tiny":
        return (values * 1e-39).bfloat16()
    if kind == "huge":
        return (values.clamp(-3, 3) * 1e38).bfloat16()
    if kind == "halfway":
        steps = torch.randint(-28, 29, (rows, cols), generator=generator)
        return (steps * 0.25).bfloat16()
    if kind == "zero":
        return torch.zeros(rows, cols, dtype=torch.bfloat16)
    if kind == "zero blocks":
        return (values * (torch.arange(cols) // 16 % 3 != 0)).bfloat16()
    bits = torch.randint(-(2**15), 2**15, (rows, cols), generator=generator).to(torch.int16)
    anything = bits.view(torch.bfloat16).nan_to_num(0.0, 1.0, -1.0)
    if kind == "signs":
        return torch.where(
            values > 0.5, anything, torch.copysign(torch.zeros(1), values).bfloat16()
        )
    assert kind == "any"
    return anything
