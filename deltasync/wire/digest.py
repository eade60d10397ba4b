"""Host reference of the state digest: what two ends compare to know that weights agree.

docs/wire-format.md, section 5. The digest of a set of elements is the sum over its
elements of a 64-bit mix of (parameter, position, bits), so that it can be kept up to date from a
patch, added up over disjoint pieces, and still sees order. It detects faults, not forgers.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

GOLDEN_RATIO = 0x9E3779B97F4A7C15  # 2^64 / phi: keys of neighbouring positions lie far apart
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = (1 << 64) - 1

BLOCK = 1 << 14  # elements mixed at once: two uint64 temporaries stay in the L2 cache
_STEP = np.uint64(GOLDEN_RATIO)
_M1, _M2 = (np.uint64(m) for m in MULTIPLIERS)
_S30, _S27, _S31 = (np.uint64(s) for s in (30, 27, 31))


@lru_cache(maxsize=1 << 18)
def seed(name: str) -> int:
    """The seed of the parameter with this canonical name, 0 to 2^64 - 1."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def mix64(x: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    """SplitMix64's finaliser on `x` in place; `scratch` has the same length."""
    np.right_shift(x, _S30, out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    np.multiply(x, _M1, out=x)
    np.right_shift(x, _S27, out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    np.multiply(x, _M2, out=x)
    np.right_shift(x, _S31, out=scratch)
    np.bitwise_xor(x, scratch, out=x)


def digest_run(bits: NDArray[np.integer], *, key: int, start: int) -> int:
    """Sum of mixes over consecutive elements.

    Args:
        bits: int[n], the elements' bits.
        key: The parameter's seed.
        start: Flat checkpoint position of the first element.
    """
    total = 0
    bits, buffers = _unsigned(bits), _buffers(len(bits))
    for begin in range(0, len(bits), BLOCK):
        block = bits[begin : begin + BLOCK]
        x, scratch = buffers[:, : len(block)]
        first = np.uint64((key + (start + begin) * GOLDEN_RATIO) & MASK)
        np.add(_ramp()[: len(block)], first, out=x)
        np.add(x, block, out=x)
        mix64(x, scratch)
        total += int(x.sum())
    return total & MASK


def digest_at(positions: NDArray[np.integer], bits: NDArray[np.integer], *, key: int) -> int:
    """Sum of mixes over scattered elements.

    Args:
        positions: int[n], flat checkpoint positions.
        bits: int[n], the bits of the element at each of them.
        key: The parameter's seed.
    """
    (total,) = digest_pieces(positions, bits, np.array([key], np.uint64), np.array([0, len(bits)]))
    return int(total)


def digest_pieces(
    positions: NDArray[np.integer],
    bits: NDArray[np.integer],
    keys: NDArray[np.uint64],
    cuts: NDArray[np.int64],
) -> NDArray[np.uint64]:
    """uint64[pieces]: the sums of mixes over pieces of scattered elements that lie side by side.

    Args:
        positions: int[n], flat positions. A piece may count its own from another place than 0 if
            its key is the seed plus that place times the golden ratio.
        bits: int[n], the bits of the element at each of them.
        keys: uint64[pieces].
        cuts: int64[pieces + 1], where each piece begins, and n. None is empty, unless n is 0.
    """
    sums = np.zeros(len(keys), np.uint64)
    positions, bits, buffers = _unsigned(positions), _unsigned(bits), _buffers(len(bits))
    for begin in range(0, len(bits), BLOCK):
        end = min(begin + BLOCK, len(bits))
        low, high = int(cuts.searchsorted(begin, "right")) - 1, int(cuts.searchsorted(end))
        inner = cuts[low : high + 1] - begin
        inner[0], inner[-1] = 0, end - begin
        x, scratch = buffers[:, : end - begin]
        np.multiply(positions[begin:end], _STEP, out=x)
        x += keys[low] if high == low + 1 else np.repeat(keys[low:high], inner[1:] - inner[:-1])
        x += bits[begin:end]
        mix64(x, scratch)
        sums[low:high] += np.add.reduceat(x, inner[:-1])
    return sums


def _unsigned(numbers: NDArray[np.integer]) -> NDArray[np.unsignedinteger]:
    """The same bits: numpy would compute with int64 and uint64 as float64."""
    return numbers.view(f"u{numbers.itemsize}")


def _buffers(n: int) -> NDArray[np.uint64]:
    return np.empty((2, min(BLOCK, n)), np.uint64)


@lru_cache(maxsize=1)
def _ramp() -> NDArray[np.uint64]:
    """Multiples 0, 1, 2 ... of the golden ratio, one block of them."""
    ramp = np.arange(BLOCK, dtype=np.uint64) * _STEP
    ramp.flags.writeable = False
    return ramp
