"""Kernels for host memory: numpy over integer views, in blocks that stay in the cache."""

from __future__ import annotations

from functools import lru_cache
from threading import local
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.wire.digest import GOLDEN_RATIO, MASK, MULTIPLIERS

_Bits: TypeAlias = NDArray[Any]

BLOCK = 1 << 14  # elements mixed at once: two uint64 temporaries stay in the L2 cache
_COMPARED = 1 << 16  # indices compared at once
_STEP = np.uint64(GOLDEN_RATIO)
_M1, _M2 = (np.uint64(m) for m in MULTIPLIERS)
_S30, _S27, _S31 = (np.uint64(s) for s in (30, 27, 31))
_WORD = np.dtype(np.int64)
_scratch = local()


def changed(
    new: Tensor, old: Tensor, limit: float
) -> tuple[int, tuple[Tensor, Tensor, Tensor] | None]:
    """How many of int[n] `new` and `old` differ, and which.

    Returns:
        The count, and (int32[count] increasing positions, int[count] new bits, int[count] old
        bits), or None where the count exceeds `limit`.
    """
    news, olds = new.numpy(), old.numpy()
    end = len(news) - len(news) % (_WORD.itemsize // news.itemsize)  # of whole words
    count, found = _differing(news[:end], olds[:end], limit)
    if end < len(news):
        more, rest = _differing(news[end:], olds[end:], limit)
        count += more
        if found is not None and rest is not None:
            rest[0] += end
            found = [np.concatenate(pair) for pair in zip(found, rest, strict=True)]
    if count > limit or found is None:
        return count, None
    positions, news, olds = found
    positions = positions.astype(np.int32)
    return count, (torch.from_numpy(positions), torch.from_numpy(news), torch.from_numpy(olds))


def is_increasing(indices: Tensor, span: int) -> bool:
    """Whether int32[n] indices are strictly increasing within [0, span)."""
    array = indices.numpy()
    if not len(array):
        return True
    if array[0] < 0 or array[-1] >= span:
        return False
    for begin in range(0, len(array) - 1, _COMPARED):
        block = array[begin : begin + _COMPARED + 1]
        rises = _mask(len(block) - 1)
        np.greater(block[1:], block[:-1], out=rises)
        if not rises.all():
            return False
    return True


def digest_run(bits: Tensor, key: int, start: int) -> int:
    """The digest of int[n] consecutive elements, the first at flat position `start`."""
    total, numbers = 0, unsigned(bits)
    buffers = _buffers(len(numbers))
    for begin in range(0, len(numbers), BLOCK):
        block = numbers[begin : begin + BLOCK]
        x, scratch = buffers[:, : len(block)]
        first = np.uint64((key + (start + begin) * GOLDEN_RATIO) & MASK)
        np.add(_ramp()[: len(block)], first, out=x)
        np.add(x, block, out=x)
        _mix(x, scratch)
        total += int(x.sum())
    return total & MASK


def digest_chunks(
    positions: Tensor, bits: Tensor, key: int, chunk_numel: int
) -> tuple[int, NDArray[np.uint64]]:
    """The digests of int[n] elements at increasing int64[n] flat positions, by chunk."""
    where = positions.numpy()
    first, last = int(where[0]) // chunk_numel, int(where[-1]) // chunk_numel
    if first == last:  # as in most of many small parameters
        ends = np.array([0, len(where)])
        return first, digest_pieces(where, bits.numpy(), np.array([key], np.uint64), ends)
    cuts = np.searchsorted(where, np.arange(first, last + 2) * chunk_numel)
    sums, filled = np.zeros(last + 1 - first, np.uint64), np.flatnonzero(np.diff(cuts))
    keys = np.full(len(filled), key, np.uint64)
    cuts = np.append(cuts[filled], len(where))
    sums[filled] = digest_pieces(where, bits.numpy(), keys, cuts)
    return first, sums


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
        own = keys[low:high]
        x += own[0] if (own == own[0]).all() else np.repeat(own, inner[1:] - inner[:-1])
        x += bits[begin:end]
        _mix(x, scratch)
        sums[low:high] += np.add.reduceat(x, inner[:-1])
    return sums


def _differing(new: _Bits, old: _Bits, limit: float) -> tuple[int, list[_Bits] | None]:
    """How many differ, and [positions, new, old] of them unless they are more than `limit`.

    numpy takes longer to find positions in a mask than to make it. So words of several elements are
    compared first, where most of these are alike.
    """
    words = _words_that_differ(new, old)
    if words is None:
        mask = _differ(new, old)
        if (count := int(np.count_nonzero(mask))) > limit:
            return count, None
        found = np.flatnonzero(mask)
        return count, [found, new.take(found), old.take(found)]
    new, old = (bits.view(_WORD).take(words).view(bits.dtype) for bits in (new, old))
    found = np.flatnonzero(new != old)
    if len(found) > limit:
        return len(found), None
    shift = (_WORD.itemsize // new.itemsize).bit_length() - 1
    positions = (words.take(found >> shift) << shift) + (found & (1 << shift) - 1)
    return len(found), [positions, new.take(found), old.take(found)]


def _words_that_differ(new: _Bits, old: _Bits) -> NDArray[np.intp] | None:
    """Positions of words; None where most differ, or the arrays do not consist of words."""
    if new.itemsize == _WORD.itemsize or new.nbytes % _WORD.itemsize:
        return None
    new, old = new.view(_WORD), old.view(_WORD)
    if not (new.flags.aligned and old.flags.aligned):
        return None
    mask = _differ(new, old)
    return None if 2 * np.count_nonzero(mask) > len(mask) else np.flatnonzero(mask)


def _differ(new: _Bits, old: _Bits) -> NDArray[np.bool_]:
    out = _mask(len(new))
    np.not_equal(new, old, out=out)
    return out


def _mask(n: int) -> NDArray[np.bool_]:
    """bool[n]: memory of this thread, until the next call."""
    mask: NDArray[np.bool_] | None = getattr(_scratch, "mask", None)
    if mask is None or len(mask) < n:
        mask = _scratch.mask = np.empty(n, np.bool_)
    return mask[:n]


def unsigned(bits: Tensor) -> NDArray[np.unsignedinteger]:
    """int[n] in host memory as numpy sees it without signs."""
    return _unsigned(bits.numpy())


def _mix(x: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    """SplitMix64's finaliser on `x` in place; `scratch` has the same length."""
    np.right_shift(x, _S30, out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    np.multiply(x, _M1, out=x)
    np.right_shift(x, _S27, out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    np.multiply(x, _M2, out=x)
    np.right_shift(x, _S31, out=scratch)
    np.bitwise_xor(x, scratch, out=x)


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
