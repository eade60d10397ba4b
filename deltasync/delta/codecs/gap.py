"""Codec `gap` + `ulp`: gaps between changed elements, and distances from the old values, in bytes.

docs/wire-format.md, rules W27 and W28. Both are made for an entropy coder to follow: most of their
bytes are small numbers of one distribution.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.codecs.base import (
    Bits,
    Block,
    CodedRow,
    Indices,
    SparseRow,
    unsigned_dtype,
)
from deltasync.delta.codecs.steps import stepped, zigzag
from deltasync.errors import InvalidIndices, TruncatedFrame, WireError

_BLOCK = 1 << 15  # elements worked on at once: temporaries stay in the L2 cache
_ESCAPE = 255  # of steps: the new bits follow
_WIDE = 2  # bytes of a gap
_ESCAPES = {1: 0xFF, _WIDE: 0xFFFF}  # of gaps, by their width: so many more follow
_NARROW_UP_TO = 368  # mean gap from which two bytes are shorter than one and its escapes


def encode_gaps(indices: Indices) -> bytes:
    """The index block of int32[n] strictly increasing indices, n at least 1."""
    is_narrow = int(indices[-1]) < _NARROW_UP_TO * len(indices)
    kind = np.dtype(np.uint8 if is_narrow else "<u2")
    codes = b"".join(
        _gap_codes(indices[begin : begin + _BLOCK], int(indices[begin - 1]) if begin else -1, kind)
        for begin in range(0, len(indices), _BLOCK)
    )
    if not is_narrow:  # all low bytes, then all high ones: they look different
        codes = np.frombuffer(codes, np.uint8).reshape(-1, _WIDE).T.tobytes()
    return bytes([kind.itemsize]) + codes


def _gap_codes(indices: Indices, before: int, kind: np.dtype[Any]) -> bytes:
    """How many are unchanged before each that is not; the largest code says: so many more."""
    gaps = np.empty_like(indices)
    np.subtract(indices[1:], indices[:-1], out=gaps[1:])
    gaps[0] = indices[0] - before
    gaps -= 1
    most = _ESCAPES[kind.itemsize]
    if gaps.max() < most:
        return gaps.astype(kind).tobytes()
    skipped = gaps // most
    gaps -= skipped * most
    skipped += 1
    skipped[0] -= 1
    ends = skipped.cumsum(dtype=np.int32).astype(np.intp)  # in another dtype it takes far longer
    codes = np.full(int(ends[-1]) + 1, most, kind)
    codes[ends] = gaps.astype(kind)
    return codes.tobytes()


def decode_gaps(block: Block, count: int, span: int) -> Indices:
    """int32[count]: the indices of an index block. Raises WireError."""
    if not len(block) or block[0] not in (1, _WIDE):
        raise WireError("an index block that does not begin with the width of its gaps")
    codes = block[1:]
    if block[0] == _WIDE:
        if len(codes) % _WIDE:
            raise TruncatedFrame("gaps of 2 bytes in an odd number of bytes")
        codes = codes.reshape(_WIDE, -1).T.copy().view("<u2")[:, 0]
    if len(codes) < count:
        raise TruncatedFrame(f"{len(codes)} gaps for {count} indices")
    if int(codes.sum(dtype=np.int64)) + count > span:
        raise InvalidIndices("gaps lead beyond the span")
    ends = _ends(codes, count)
    indices, before = np.empty(count, np.int32), -1
    for begin in range(0, count, _BLOCK):
        sums = indices[begin : begin + _BLOCK]
        if ends is None:
            np.cumsum(codes[begin : begin + _BLOCK], dtype=np.int32, out=sums)
        else:
            last = ends[begin : begin + _BLOCK]
            first = int(ends[begin - 1]) + 1 if begin else 0
            summed = np.cumsum(codes[first : int(last[-1]) + 1], dtype=np.int32)
            np.take(summed, last - first, out=sums)
        sums += _ramp()[: len(sums)]
        sums += before
        before = int(sums[-1])
    return indices


def _ends(codes: NDArray[Any], count: int) -> NDArray[np.intp] | None:
    """int64[count]: where the code of each index ends; None if each has one code."""
    escape = _ESCAPES[codes.itemsize]
    if len(codes) == count and codes.max() < escape:
        return None
    ends = np.flatnonzero(codes != escape)
    if len(ends) != count or ends[-1] != len(codes) - 1:
        raise InvalidIndices(f"gaps that do not lead to {count} indices")
    return ends


@lru_cache(maxsize=1)
def _ramp() -> Indices:
    """1, 2, 3 ..., for one block."""
    return np.arange(1, _BLOCK + 1, dtype=np.int32)


def encode_steps(row: SparseRow) -> bytes:
    """The value block of a row, whose `old` bits are those of its elements."""
    if row.dtype.item_size == 1:
        return zigzag(row.new, row.old, row.dtype).tobytes()
    codes, far = np.empty(len(row.new), np.uint8), list[bytes]()
    for begin in range(0, len(row.new), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        steps = zigzag(row.new[block], row.old[block], row.dtype)
        if steps.max() >= _ESCAPE:
            far.append(row.new[block][steps >= _ESCAPE].tobytes())
            np.minimum(steps, _ESCAPE, out=steps)
        codes[block] = steps
    return codes.tobytes() + b"".join(far)


def decode_steps(row: CodedRow, old: Bits) -> Bits:
    """unsigned[count]: the new bits of a value block. Raises WireError."""
    kind = unsigned_dtype(row.dtype)
    codes, rest = row.value[: row.count], row.value[row.count :]
    far = np.flatnonzero(codes == _ESCAPE) if kind.itemsize > 1 else np.empty(0, np.intp)
    needed = row.count + len(far) * kind.itemsize
    if len(row.value) != needed:
        raise TruncatedFrame(f"value block of {len(row.value)} bytes, its steps need {needed}")
    new = np.empty(row.count, kind)
    for begin in range(0, row.count, _BLOCK):
        block = slice(begin, begin + _BLOCK)
        new[block] = stepped(codes[block].astype(kind), old[block], row.dtype)
    new[far] = np.frombuffer(rest.tobytes(), kind)
    return new
