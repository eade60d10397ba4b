"""Roundings that give the same bits on every device, and for every slice of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_FP8 = 448.0
"""The largest float8_e4m3fn."""


def largest(values: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """The largest magnitude along `dims`, which stay as 1, or NaN; in the dtype of `values`."""
    return with_one_nan(values.abs().amax(dim=dims, keepdim=True))


def with_one_nan(values: Tensor) -> Tensor:
    """`values`, and the same NaN for all of theirs.

    Which NaN an operation makes depends on the device, and on how the vector loop falls over the
    tensor.
    """
    return torch.where(values.isnan(), torch.nan, values)


def divided(values: Tensor, divisor: float) -> Tensor:
    """`values` / `divisor`, rounded once.

    On GPUs, torch multiplies by the reciprocal of a divisor that is a number (div_true_kernel_cuda
    in BinaryDivTrueKernel.cu), which rounds twice. It divides by one that is a tensor.
    """
    return values / torch.full((1,), divisor, dtype=values.dtype, device=values.device)


def scale_of_compressed_tensors(amax: Tensor, steps: float = LARGEST_FP8) -> Tensor:
    """bfloat16: amax / steps, or 2^-7 if that is 0. Source: see `Fp8`."""
    scale = divided(amax, steps)
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def as_fp8(values: Tensor) -> Tensor:
    """The nearest float8_e4m3fn, ties to even: the largest for what is beyond, one NaN for NaN.

    Before version 2.13 torch itself makes NaN of what is beyond.
    """
    codes = values.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(codes & 0x7F == 0x7F, 0x7F).view(torch.float8_e4m3fn)


def power_of_two_above(values: Tensor) -> Tensor:
    """int32: the biased exponents of the least powers of two that are not below `values`.

    Args:
        values: float32, not negative. Zero and what is at most 2^-127 gives 0, infinity 255.
    """
    bits = values.view(torch.int32)
    return torch.where(bits <= 0x400000, 0, (bits + 0x7FFFFF) >> 23)


def power_of_two(exponent: Tensor) -> Tensor:
    """float32: 2^(exponent - 127) of int32, as e8m0 has it: that of 0 is 2^-127."""
    return torch.where(exponent == 0, 0x400000, exponent << 23).view(torch.float32)
