"""Bit streams, least significant bit first: fields of given widths, and unary numbers.

Everything goes over whole arrays. A number *q* in unary is *q* zeros and a one, so that the ones of
a stream lie where its numbers end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import TruncatedFrame

MAX_WIDTH = 56
"""Bits of a field: one that begins at any bit of a byte fits into 8 bytes."""

_SLICE = 1 << 17  # bytes of a unary stream that are taken apart at once
_MAX_VARINT = 5  # bytes

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]


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


def pack_unary(numbers: Ints) -> bytes:
    """int64[n] numbers from 0 on in unary, padded to a byte with zeros."""
    if not len(numbers):
        return b""
    ends = np.cumsum(numbers + 1)
    bits = np.zeros(int(ends[-1]), np.bool_)
    bits[ends - 1] = True
    return np.packbits(bits, bitorder="little").tobytes()


class UnaryReader:
    """Reads back what `pack_unary` wrote, in pieces.

    Args:
        data: uint8[bytes]. Not copied.
    """

    def __init__(self, data: Bytes) -> None:
        self._data, self._read = data, 0
        self._ends = np.zeros(0, np.int64)  # where numbers end that were found and not taken
        self._last = -1

    def take(self, count: int) -> Ints:
        """int64[count]: the next numbers. Raises TruncatedFrame where the stream has fewer."""
        pieces, found = [self._ends], len(self._ends)
        while found < count and self._read < len(self._data):
            piece = self._data[self._read : self._read + _SLICE]
            ends = np.flatnonzero(np.unpackbits(piece, bitorder="little"))
            pieces.append(ends + 8 * self._read)
            self._read, found = self._read + len(piece), found + len(ends)
        if found < count:
            raise TruncatedFrame(f"a unary stream has {found} more numbers where {count} belong")
        ends = np.concatenate(pieces)
        taken, self._ends = ends[:count], ends[count:]
        numbers = np.diff(taken, prepend=self._last) - 1
        if count:
            self._last = int(taken[-1])
        return numbers

    def finish(self) -> None:
        """Raises TruncatedFrame if more than the padding of the last byte is left."""
        if len(self._ends) or 8 * len(self._data) - self._last > 8:
            raise TruncatedFrame(f"a unary stream of {len(self._data)} bytes has too many")


def varints(*numbers: int) -> bytes:
    """Numbers from 0 on, 7 bits a byte, the lowest first; every byte but the last is over 127."""
    coded = bytearray()
    for number in numbers:
        while number > 0x7F:
            coded.append(number & 0x7F | 0x80)
            number >>= 7
        coded.append(number)
    return bytes(coded)


class ByteReader:
    """Reads a block from its beginning on.

    Args:
        data: uint8[bytes]. Not copied.
    """

    def __init__(self, data: Bytes) -> None:
        self._data, self._at = data, 0

    def varint(self) -> int:
        """The next number, less than 2^35. Raises TruncatedFrame."""
        number, places = 0, range(self._at, min(self._at + _MAX_VARINT, len(self._data)))
        for place, at in enumerate(places):
            byte = int(self._data[at])
            number |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                self._at += place + 1
                return number
        raise TruncatedFrame(f"no number ends within {_MAX_VARINT} bytes from {self._at} on")

    def take(self, size: int) -> Bytes:
        """uint8[size]: the next bytes. Raises TruncatedFrame if there are fewer."""
        if size > len(self._data) - self._at:
            raise TruncatedFrame(f"{size} bytes belong at {self._at} of {len(self._data)}")
        self._at += size
        return self._data[self._at - size : self._at]

    def rest(self) -> Bytes:
        """uint8[n]: what is left."""
        return self.take(len(self._data) - self._at)
