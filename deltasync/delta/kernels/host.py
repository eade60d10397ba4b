"""Kernels for host memory: numpy over integer views, in blocks that stay in the cache."""

from __future__ import annotations

from threading import local
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.wire import digest

_Bits: TypeAlias = NDArray[Any]

_BLOCK = 1 << 16  # indices compared at once
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
    steps = range(0, len(array) - 1, _BLOCK)
    return all(_increases(array[begin : begin + _BLOCK + 1]) for begin in steps)


def digest_run(bits: Tensor, key: int, start: int) -> int:
    """The digest of int[n] consecutive elements, the first at flat position `start`."""
    return digest.digest_run(bits.numpy(), key=key, start=start)


def digest_chunks(
    positions: Tensor, bits: Tensor, key: int, chunk_numel: int
) -> tuple[int, NDArray[np.uint64]]:
    """The digests of int[n] elements at increasing int64[n] flat positions, by chunk."""
    where = positions.numpy()
    first, last = int(where[0]) // chunk_numel, int(where[-1]) // chunk_numel
    if first == last:  # as in most of many small parameters
        return first, np.array([digest.digest_at(where, bits.numpy(), key=key)], np.uint64)
    cuts = np.searchsorted(where, np.arange(first, last + 2) * chunk_numel)
    sums, filled = np.zeros(last + 1 - first, np.uint64), np.flatnonzero(np.diff(cuts))
    keys = np.full(len(filled), key, np.uint64)
    cuts = np.append(cuts[filled], len(where))
    sums[filled] = digest.digest_pieces(where, bits.numpy(), keys, cuts)
    return first, sums


def _increases(array: NDArray[np.int32]) -> bool:
    return bool((array[1:] > array[:-1]).all())


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
    mask = getattr(_scratch, "mask", None)
    if mask is None or len(mask) < len(new):
        mask = _scratch.mask = np.empty(len(new), np.bool_)
    out: NDArray[np.bool_] = mask[: len(new)]
    np.not_equal(new, old, out=out)
    return out


def unsigned(bits: Tensor) -> NDArray[np.unsignedinteger]:
    """int[n] in host memory as numpy sees it without signs."""
    array = bits.numpy()
    return array.view(f"u{array.itemsize}")
