"""Weights that differ from an engine's own, to find what is derived from them."""

from __future__ import annotations

import zlib
from functools import cache

import torch
from torch import Tensor

from deltasync.delta.bits import as_bits


def other_bits(tensor: Tensor, name: str) -> Tensor:
    """Return weights that no rounding makes equal to these: each float is 10 to 50 % smaller.

    If the floats have both signs, half of them change their sign. Zeros, and the smallest floats,
    change by one bit; what is not finite changes too. Floats of a dtype without a fraction become
    50 or 75 % smaller. Integers are reordered. The result depends only on `tensor` and `name`.
    """
    if not tensor.is_floating_point():
        return tensor.flatten().flip(0).view(tensor.shape)
    made = tensor.detach().clone(memory_format=torch.contiguous_format)
    every, drawn, seed = as_bits(made).view(-1), _drawn(tensor.device), zlib.crc32(name.encode())
    signs = _has_both_signs(every, tensor.dtype)
    for start in range(0, len(every), _BLOCK):
        bits = every[start : start + _BLOCK]
        first = (seed + start * _SPREAD) % (_DRAWN - _BLOCK)
        here = drawn[first : first + len(bits)]
        less = _scaled(here, tensor.dtype, bits.dtype)
        # The smallest floats are closer to zero than that: they are halved at most.
        half = (bits & (1 << 8 * bits.element_size() - 1) - 1) >> 1
        less = torch.minimum(half, less, out=half)
        bits.sub_(less).bitwise_xor_(less.eq(0).to(bits.dtype))
        if signs:
            turned = (here & 2).ne_(0).to(bits.dtype)
            bits.bitwise_xor_(turned.mul_(torch.iinfo(bits.dtype).min or 1 << 7))
    return made


def _has_both_signs(bits: Tensor, dtype: torch.dtype) -> bool:
    """Whether floats, given by their bits, are on both sides of zero."""
    if not len(bits) or dtype == torch.float8_e8m0fnu:  # that has no signs
        return False
    least, most = (bits.view(torch.int8) if bits.dtype == torch.uint8 else bits).aminmax()
    return bool(least < 0 < most)


def _scaled(drawn: Tensor, dtype: torch.dtype, integer: torch.dtype) -> Tensor:
    """What to subtract from the bits of floats: a quarter to all of the bits of one octave.

    A float becomes 12.5 to 50 % smaller, even if it falls below a power of two. Dtypes that hold
    only powers of two are halved once or twice.
    """
    one, two = as_bits(torch.tensor([1.0, 2.0], device="cpu").to(dtype)).tolist()
    digits = (two - one).bit_length() - 1  # of the fraction
    if not digits:
        return (drawn & 1).add_(1).to(integer)
    if digits > _DRAWN_DIGITS:
        return drawn.to(integer).mul_(1 << digits - _DRAWN_DIGITS)
    return torch.bitwise_right_shift(drawn, _DRAWN_DIGITS - digits).to(integer)


@cache
def _drawn(device: torch.device) -> Tensor:
    """int16[_DRAWN]: random, a quarter to all of 1 << _DRAWN_DIGITS. Keeps 2 MiB."""
    most, some = 1 << _DRAWN_DIGITS, torch.empty(_DRAWN, dtype=torch.int16, device="cpu")
    generator = torch.Generator("cpu").manual_seed(0)
    some.random_(most // 4, most, generator=generator)
    return some.to(device)


_BLOCK = 1 << 18  # elements changed at once, so that they stay in a cache
_DRAWN, _DRAWN_DIGITS, _SPREAD = 1 << 20, 15, 7919
