"""What blocks of `class` are read from and written to, beside fields: unary numbers and varints.

A number *q* in unary is *q* zeros and a one, the lowest bit first, so that the ones of a stream lie
where its numbers end.
"""

from __future__ import annotations

import numpy as np

from deltasync.errors import TruncatedFrame
from deltasync.files.classes.bitstream import Bytes, Ints

_SLICE = 1 << 17  # bytes of a unary stream that are taken apart at once
_MAX_VARINT = 5  # bytes


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
