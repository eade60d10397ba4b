"""Bit patterns in which mistakes show, for tensors of every dtype that can be sent."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import as_bits, dtype_of
from deltasync.dtypes import Dtype
from deltasync.wire.messages import ParameterSpec

# Infinities, quiet and signalling NaNs with payloads, the largest denormal, 1.0.
_SPECIALS = {
    "bfloat16": (0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFAB, 0x007F, 0x3F80),
    "float16": (0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7C01, 0xFDAB, 0x03FF, 0x3C00),
    "float32": (
        *(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000),
        *(0x7F800001, 0xFFABCDEF, 0x007FFFFF, 0x3F800000),
    ),
    "float64": (
        *(0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0xFFF8000000000000),
        *(0x7FF0000000000001, 0xFFFABCDEF0123456, 0x000FFFFFFFFFFFFF, 0x3FF0000000000000),
    ),
}


def random_bits(dtype: Dtype, numel: int, rng: np.random.Generator) -> Tensor:
    """int[numel]: a mix of special values of `dtype`, edge patterns and random bits."""
    size = dtype.item_size
    if dtype.name == "bool":  # other bytes than 0 and 1 are no valid bool
        return torch.from_numpy(rng.integers(0, 2, numel, np.uint8))
    noise = rng.integers(0, 256, numel * size, np.uint8).view(f"<u{size}")
    chosen = rng.choice(_edges(dtype), numel).astype(noise.dtype)
    mixed = np.where(rng.random(numel) < rng.choice([0.0, 0.5, 1.0]), noise, chosen)
    return torch.from_numpy(mixed.view(f"<i{size}" if size > 1 else "u1"))


def flipped(tensor: Tensor, mask: NDArray[np.bool_], rng: np.random.Generator) -> Tensor:
    """int[shape]: the bits of `tensor`, with other bits where the flat `mask` says so."""
    bits = as_bits(tensor).contiguous()
    width = f"u{tensor.element_size()}"
    high = 1 if tensor.dtype == torch.bool else 8 * tensor.element_size()
    flips = np.left_shift(np.uint64(1), rng.integers(0, high, bits.numel(), np.uint64))
    flips = np.where(mask, flips, 0).astype(width)
    changed = bits.view(-1).numpy().view(width) ^ flips
    return torch.from_numpy(changed).view(bits.dtype).view(tensor.shape)


def specs_of(model: Mapping[str, Tensor]) -> tuple[ParameterSpec, ...]:
    """The layout of `model`."""
    return tuple(
        ParameterSpec((name,), tuple(tensor.shape), dtype_of(tensor))
        for name, tensor in model.items()
    )


def _edges(dtype: Dtype) -> NDArray[np.uint64]:
    """Patterns where mistakes show: all zeros and ones, the sign alone (-0.0), one denormal."""
    width = 8 * dtype.item_size
    sign = 1 << (width - 1)
    common = (0, 1, sign, sign | 1, sign - 1, (1 << width) - 1)
    if dtype.name == "complex64":
        halves = (0, 1 << 31, *_SPECIALS["float32"])
        return np.array([high << 32 | low for high in halves for low in halves], np.uint64)
    return np.array(common + _SPECIALS.get(dtype.name, ()), np.uint64)
