"""Kernels for host memory: numpy over integer views, in blocks that stay in the cache."""

from __future__ import annotations

from threading import local

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.wire import digest

_BLOCK = 1 << 16  # indices compared at once
_scratch = local()


def changed(new: Tensor, old: Tensor, limit: float) -> tuple[int, Tensor | None]:
    """How many of int[n] `new` and `old` differ, and where: int32[count] increasing positions.

    The positions are left out (None) when there are more than `limit`.
    """
    mask = _differ(new, old)
    count = int(np.count_nonzero(mask))
    if count > limit:
        return count, None
    if not count:
        return 0, torch.empty(0, dtype=torch.int32)
    return count, torch.from_numpy(np.flatnonzero(mask).astype(np.int32))


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
    return digest.digest_run(unsigned(bits), key=key, start=start)


def digest_chunks(
    positions: Tensor, bits: Tensor, key: int, chunk_numel: int
) -> tuple[int, NDArray[np.uint64]]:
    """The digests of int[n] elements at increasing int64[n] flat positions, by chunk."""
    where = positions.numpy()
    first, last = int(where[0]) // chunk_numel, int(where[-1]) // chunk_numel
    if first == last:  # as in most of many small parameters
        return first, np.array([digest.digest_at(where, unsigned(bits), key=key)], np.uint64)
    cuts = np.searchsorted(where, np.arange(first, last + 2) * chunk_numel)
    sums, filled = np.zeros(last + 1 - first, np.uint64), np.flatnonzero(np.diff(cuts))
    keys = np.full(len(filled), key, np.uint64)
    cuts = np.append(cuts[filled], len(where))
    sums[filled] = digest.digest_pieces(where, unsigned(bits), keys, cuts)
    return first, sums


def _increases(array: NDArray[np.int32]) -> bool:
    return bool((array[1:] > array[:-1]).all())


def _differ(new: Tensor, old: Tensor) -> NDArray[np.bool_]:
    mask = getattr(_scratch, "mask", None)
    if mask is None or len(mask) < len(new):
        mask = _scratch.mask = np.empty(len(new), np.bool_)
    out: NDArray[np.bool_] = mask[: len(new)]
    np.not_equal(new.numpy(), old.numpy(), out=out)
    return out


def unsigned(bits: Tensor) -> NDArray[np.unsignedinteger]:
    """int[n] in host memory as numpy sees it without signs."""
    array = bits.numpy()
    return array.view(f"u{array.itemsize}")
