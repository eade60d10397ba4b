"""Kernels for host memory: numpy over integer views, in blocks that stay in the cache."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.wire.changes import PLACE_BYTES
from deltasync.wire.digest import GOLDEN_RATIO, MASK, MULTIPLIERS

_Bits: TypeAlias = NDArray[Any]

BLOCK = 1 << 14  # elements mixed at once: two uint64 temporaries stay in the L2 cache
_STEP = np.uint64(GOLDEN_RATIO)
_M1, _M2 = (np.uint64(m) for m in MULTIPLIERS)
_S30, _S27, _S31 = (np.uint64(s) for s in (30, 27, 31))
_WORD = np.dtype(np.int64)


def changed(new: Tensor, old: Tensor) -> Tensor:
    """int32[k] increasing positions where int[n] differ, on any device. n is less than 2^31."""
    if not new.is_cpu:
        return (new != old).nonzero().squeeze(1).to(torch.int32)
    news, olds = unsigned(new), unsigned(old)
    if (positions := _positions(news, olds)) is None:
        positions = np.flatnonzero(news != olds)
    return torch.from_numpy(positions.astype(np.int32))


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


def digest_pieces(
    positions: NDArray[np.integer],
    bits: NDArray[np.integer],
    keys: NDArray[np.uint64],
    cuts: NDArray[np.int64],
    old: NDArray[np.integer] | None = None,
) -> NDArray[np.uint64]:
    """uint64[pieces]: the sums of mixes over pieces of scattered elements that lie side by side.

    Args:
        positions: int[n], flat positions. A piece may count its own from another place than 0 if
            its key is the seed plus that place times the golden ratio.
        bits: int[n], the bits of the element at each of them.
        keys: uint64[pieces].
        cuts: int64[pieces + 1], where each piece begins, and n. None is empty, unless n is 0.
        old: int[n], other bits at the same positions, whose mixes are subtracted.
    """
    sums = np.zeros(len(keys), np.uint64)
    positions, bits, buffers = _unsigned(positions), _unsigned(bits), _buffers(len(bits))
    subtracted = None if old is None else (_unsigned(old), np.empty_like(buffers[0]))
    for begin in range(0, len(bits), BLOCK):
        end = min(begin + BLOCK, len(bits))
        low, high = int(cuts.searchsorted(begin, "right")) - 1, int(cuts.searchsorted(end))
        inner = cuts[low : high + 1] - begin
        inner[0], inner[-1] = 0, end - begin
        x, scratch = buffers[:, : end - begin]
        np.multiply(positions[begin:end], _STEP, out=x)
        own = keys[low:high]
        x += own[0] if (own == own[0]).all() else np.repeat(own, inner[1:] - inner[:-1])
        if subtracted is not None:
            before, other = subtracted[0][begin:end], subtracted[1][: end - begin]
            np.add(x, before, out=other)
            _mix(other, scratch)
        x += bits[begin:end]
        _mix(x, scratch)
        if subtracted is not None:
            x -= other
        sums[low:high] += np.add.reduceat(x, inner[:-1])
    return sums


def differing(
    new: _Bits,
    old: _Bits,
    begins: NDArray[np.int64],
    ahead: NDArray[np.bool_],
    *,
    only_counts: bool = False,
) -> tuple[_Bits, ...] | None:
    """How tiles differ that lie one after another.

    A tile goes whole where places and values would take more bytes than all its elements.

    Args:
        new, old: unsigned[n] bits.
        begins: int64[tiles]: where each begins.
        ahead: bool[tiles]: which go whole, whatever their bits are: see `Snapshot`.
        only_counts: Whether to return no places and bits.

    Returns:
        None if none does. Otherwise int64[T] tiles, counts of their changes (0 for one that goes
        whole), uint16[N] places and unsigned[N] new bits of those that do not, and int64[T]
        elements of each tile that differ; all, if it goes whole whatever they are.
    """
    positions = _positions(new, old)
    if positions is not None and not len(positions) and not ahead.any():
        return None
    if positions is None:  # most words differ: count before finding
        mask = new != old
        ends = pairwise([*begins.tolist(), len(mask)])
        changed = np.array([np.count_nonzero(mask[low:high]) for low, high in ends])
    else:
        changed = np.diff(positions.searchsorted(begins), append=len(positions))
    goes = (changed > 0) | ahead
    if not goes.any():
        return None
    numel, size, found = np.diff(begins, append=len(new)), new.itemsize, changed
    changed = np.where(ahead, numel, found)
    is_whole = changed * (PLACE_BYTES + size) > numel * size
    counts, tiles = np.where(is_whole, 0, changed), np.flatnonzero(goes)
    if only_counts:
        return tiles, counts[goes], np.zeros(0, np.uint16), new[:0], changed[goes]
    if positions is None:
        for tile in np.flatnonzero(is_whole).tolist():
            mask[begins[tile] : begins[tile] + numel[tile]] = False
        positions = np.flatnonzero(mask)
    elif is_whole.any():
        positions = positions[np.repeat(~is_whole, found)]
    places = (positions - np.repeat(begins, counts)).astype(np.uint16)
    return tiles, counts[goes], places, new.take(positions), changed[goes]


def _positions(new: _Bits, old: _Bits) -> NDArray[np.intp] | None:
    """Where they differ; None where most words do.

    numpy takes longer to find positions in a mask than to make it. So words of several elements are
    compared first, where most of these are alike.
    """
    end = len(new) - len(new) % (_WORD.itemsize // new.itemsize)  # of whole words
    words = _words_that_differ(new[:end], old[:end])
    if words is None:
        return None
    news, olds = (bits[:end].view(_WORD).take(words).view(bits.dtype) for bits in (new, old))
    found = np.flatnonzero(news != olds)
    shift = (_WORD.itemsize // new.itemsize).bit_length() - 1
    positions = (words.take(found >> shift) << shift) + (found & (1 << shift) - 1)
    if end == len(new):
        return positions
    return np.concatenate((positions, end + np.flatnonzero(new[end:] != old[end:])))


def _words_that_differ(new: _Bits, old: _Bits) -> NDArray[np.intp] | None:
    """Positions of words; None where most differ, or the arrays do not consist of words."""
    if new.itemsize == _WORD.itemsize or new.nbytes % _WORD.itemsize:
        return None
    new, old = new.view(_WORD), old.view(_WORD)
    if not (new.flags.aligned and old.flags.aligned):
        return None
    mask = new != old
    return None if 2 * np.count_nonzero(mask) > len(mask) else np.flatnonzero(mask)


def unsigned(bits: Tensor) -> NDArray[np.unsignedinteger]:
    """int[n] in host memory as numpy sees it without signs: the same memory."""
    if not len(bits):  # which has no address; numpy before 2.4 takes none
        return np.zeros(0, f"u{bits.itemsize}")
    assert bits.is_cpu  # `Tensor.numpy` would do, but keeps a storage from being resized for good:
    size = bits.itemsize  # FSDP1 and engines that sleep resize storages
    return array_at(bits.data_ptr(), (len(bits),), f"<u{size}", (bits.stride(0) * size,), bits)


def array_at(
    address: int,
    shape: tuple[int, ...],
    kind: str,
    strides: tuple[int, ...] | None = None,
    owner: object = None,
) -> _Bits:
    """An array over memory from an address on, which an owner keeps. None of it is read."""
    interface = {
        "data": (address, False),
        "shape": shape,
        "typestr": kind,
        "strides": strides,
        "version": 3,
    }
    return np.asarray(SimpleNamespace(owner=owner, __array_interface__=interface))


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
