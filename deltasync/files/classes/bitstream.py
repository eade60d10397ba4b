"""Bit streams, least significant bit first: fields of given widths, over whole arrays."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltasync.dtypes import Dtype
from deltasync.errors import TruncatedFrame

MAX_WIDTH = 56
"""Bits of a field: one that begins at any bit of a byte fits into 8 bytes."""

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int32]
Bits: TypeAlias = NDArray[Any]
"""unsigned[n] (uint8, uint16, uint32 or uint64, by the item size): the bits of n elements."""


@cache
def unsigned_dtype(dtype: Dtype) -> np.dtype[Any]:
    """The numpy type that carries the bits of `dtype`."""
    return np.dtype(f"<u{dtype.item_size}")


def pack_fields(values: Words, widths: Ints) -> bytes:
    """The low `widths` bits of uint64[n] values, one after another, padded to a byte with zeros.

    Args:
        values: uint64[n], each below 2^width.
        widths: int64[n], 0 to MAX_WIDTH.
    """
    stops = np.cumsum(widths)
    if not len(values) or not stops[-1]:
        return b""
    begins = stops - widths
    words = np.zeros(int(stops[-1] + 63) // 64 + 1, np.uint64)
    at, shift = begins >> 6, (begins & 63).astype(np.uint64)
    firsts = np.flatnonzero(np.diff(at, prepend=-1))
    words[at[firsts]] = np.bitwise_or.reduceat(values << shift, firsts)
    over = np.flatnonzero((begins & 63) + widths > 64)  # at most one field for each word
    words[at[over] + 1] |= values[over] >> (np.uint64(64) - shift[over])
    return words.astype("<u8").tobytes()[: int(stops[-1] + 7) // 8]


class FieldReader:
    """Reads back what `pack_fields` wrote, in pieces.

    Args:
        data: uint8[bytes]. Not copied but for its last 8 bytes.
    """

    def __init__(self, data: Bytes) -> None:
        self._data = np.concatenate([data, np.zeros(8, np.uint8)])
        self._bits, self._at = 8 * len(data), 0
        strided = np.lib.stride_tricks.as_strided
        self._words = strided(self._data[:8].view("<u8"), (len(data) + 1,), (1,))

    def take(self, widths: Ints) -> Words:
        """uint64[n]: the next fields. Raises TruncatedFrame where the stream ends before them."""
        stops = np.cumsum(widths) + self._at
        stop = int(stops[-1]) if len(stops) else self._at
        if stop > self._bits:
            raise TruncatedFrame(f"fields need {stop} bits, and {self._bits} came")
        self._at = stop
        begins = stops - widths
        words: Words = self._words[begins >> 3] >> (begins & 7).astype(np.uint64)
        return words & ((np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1))

    def finish(self) -> None:
        """Raises TruncatedFrame if more than the padding of the last byte is left."""
        if self._bits - self._at >= 8:
            raise TruncatedFrame(f"fields end at bit {self._at} of {self._bits}")
