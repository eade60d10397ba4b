"""Bit patterns as numbers in the order of their values, and the distance of two as a small number.

All arithmetic is modulo 2^bits of the element. So each pair of bit patterns has exactly one
distance, and an old pattern and a distance give exactly one new pattern: -0.0 and 0.0 are two
patterns, one step apart, and each NaN is a pattern of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.delta import gap
from deltasync.delta.host import Bits
from deltasync.dtypes import Dtype

_SIGNED = ("int8", "int16", "int32", "int64")
_UNSIGNED_FLOAT = "float8_e8m0fnu"  # an exponent, without a sign


def ordered(bits: Bits, dtype: Dtype) -> Bits:
    """unsigned[n]: numbers in the order of the values, neighbours one apart; memory of its own.

    docs/wire-format.md, section 4. Args: unsigned[n] `bits` of `dtype`.
    """
    return _flipped(bits, dtype, _spread_sign(bits))


def unordered(numbers: Bits, dtype: Dtype) -> Bits:
    """unsigned[n]: the bits with these `ordered` numbers; memory of its own."""
    return _flipped(numbers, dtype, ~_spread_sign(numbers))


def _flipped(bits: Bits, dtype: Dtype, flips: Bits) -> Bits:
    """unsigned[n]: negative values of floats count down, by the `flips` of their bits."""
    sign = _sign_of(bits)
    if dtype.is_floating and dtype.name != _UNSIGNED_FLOAT:
        flips |= sign
        flips ^= bits
        return flips
    return bits ^ sign if dtype.name in _SIGNED else bits.copy()


def zigzag(new: Bits, old: Bits, dtype: Dtype) -> Bits:
    """unsigned[n]: how far each of `new` is from `old`: 0, -1, 1, -2 ... become 0, 1, 2, 3 ...

    Args: unsigned[n] bits of `dtype`. Memory of its own.
    """
    return gap.zigzag(ordered(new, dtype), ordered(old, dtype))


def stepped(zigzagged: Bits, old: Bits, dtype: Dtype) -> Bits:
    """unsigned[n]: the bits that are so far from `old`: the inverse of `zigzag`."""
    return unordered(gap.stepped(zigzagged, ordered(old, dtype)), dtype)


def in_order(bits: Bits, dtype: Dtype) -> NDArray[np.signedinteger[Any]]:
    """int32[n], or int64[n] of wide dtypes: `ordered` numbers whose differences are distances."""
    numbers = ordered(bits, dtype)
    if numbers.itemsize == 8:
        wide: NDArray[np.int64] = (numbers ^ _sign_of(numbers)).view(np.int64)
        return wide
    return numbers.astype(np.int32 if numbers.itemsize <= 2 else np.int64)


def _sign_of(bits: Bits) -> Any:
    return bits.dtype.type(1 << 8 * bits.itemsize - 1)


def _spread_sign(bits: Bits) -> Bits:
    """unsigned[n]: all bits as the first one."""
    signed = bits.view(f"<i{bits.itemsize}")
    return (signed >> (8 * bits.itemsize - 1)).view(bits.dtype)
