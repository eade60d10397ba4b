"""The elements of a row by lane, class and position, the order in which `class` says what changed.

Each class has a bit for every element of a lane. Bits that are counted tell the position of an
element from its place in the order, and its place from its position. Nothing is sorted but what
changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from deltasync.dtypes import Dtype
from deltasync.files.classes import keys as class_keys
from deltasync.files.classes.bitstream import Bits, Indices, Ints, Words

_GROUP = 1 << 20  # elements whose bits are held at once, unless a lane has more
_WORD_BITS = 6  # 2^6 of them in a word

_Small = NDArray[np.uint8]


def orders(old: Bits, dtype: Dtype, lane: int, firsts: list[int]) -> Iterator[tuple[int, Order]]:
    """(where it begins, the order of its elements) of each group of lanes of a row.

    Args:
        old: unsigned[n], all bits of the row before.
        dtype: Of its elements.
        lane: Elements of a lane; a power of two, and of whole words.
        firsts: The first keys of the classes.
    """
    group = max(lane, _GROUP)
    for begin in range(0, len(old), group):
        yield begin, Order(old[begin : begin + group], dtype, lane, firsts)


class Order:
    """Of the elements of some lanes; arguments as of `orders`.

    Attributes:
        sizes: int64[lanes, classes], elements of each.
    """

    def __init__(self, old: Bits, dtype: Dtype, lane: int, firsts: list[int]) -> None:
        self._keys, self._lane = class_keys.keys(old, dtype), lane
        self._firsts, self._dtype = firsts, dtype
        self._width = -(-min(lane, len(old)) >> _WORD_BITS)  # words of a lane
        words = _marked(self._keys, firsts, (-(-len(old) // lane), len(firsts), self._width))
        self._words, self._counts = words.ravel(), np.bitwise_count(words).ravel()
        self._ends = np.cumsum(self._counts, dtype=np.int64)  # places up to the end of each word
        ends = self._ends[self._width - 1 :: self._width]
        sizes = ends.copy()
        sizes[1:] -= ends[:-1]
        self.sizes: Ints = sizes.reshape(words.shape[:2])

    def places(self, positions: Indices) -> tuple[Ints, Ints]:
        """int64[n]: the places of int32[n] positions, increasing; and int64[lanes, classes]: how
        many there are of each.
        """
        at = positions.astype(np.int64)
        segments = at // self._lane * self.sizes.shape[1]
        segments += class_keys.table(self._firsts, self._dtype).take(self._keys.take(at))
        order = segments.astype(np.uint16).argsort(kind="stable")  # 2^16 at most; a radix sort
        at, segments = at.take(order), segments.take(order)
        at &= self._lane - 1
        words = segments * self._width + (at >> _WORD_BITS)
        bits = (at & (1 << _WORD_BITS) - 1).astype(np.uint64)
        below = self._words.take(words) & (np.uint64(1) << bits) - np.uint64(1)
        found = self._before(words) + np.bitwise_count(below)
        counts = np.bincount(segments, minlength=self.sizes.size)
        return found, counts.reshape(self.sizes.shape)

    def positions(self, places: Ints) -> Ints:
        """int64[n]: the positions at int64[n] increasing places, increasing too."""
        words = self._ends.searchsorted(places, side="right")
        ranks = (places - self._before(words)).astype(np.uint8)
        segments = words // self._width
        found = words - segments * self._width << _WORD_BITS
        found += segments // self.sizes.shape[1] * self._lane
        found += _selected(self._words.take(words), ranks)
        are_found = np.zeros(len(self._keys), np.bool_)
        are_found[found] = True
        return np.flatnonzero(are_found)

    def _before(self, words: Ints) -> Ints:
        """int64[n]: places before those of each word."""
        return self._ends.take(words) - self._counts.take(words)


def _marked(keys: class_keys.Keys, firsts: list[int], shape: tuple[int, int, int]) -> Words:
    """uint64[lanes, classes, words]: a bit for each element of a lane that is of the class."""
    lanes, _, width = shape
    words, line = np.empty(shape, np.uint64), np.zeros(lanes * width, np.uint64)
    octets, are_above = line.view(np.uint8)[: -(-len(keys) // 8)], np.empty(len(keys), np.bool_)
    for number, first in enumerate(firsts):
        np.greater_equal(keys, first, out=are_above)
        octets[:] = np.packbits(are_above, bitorder="little")
        words[:, number] = line.reshape(lanes, width)
    words[:, :-1] ^= words[:, 1:]
    return words


def _selected(words: Words, ranks: _Small) -> _Small:
    """uint8[n]: where bit number `rank` of those set in each word lies. Both are overwritten."""
    found = np.zeros(len(words), np.uint8)
    for half in (32, 16, 8):
        below = np.bitwise_count(words & np.uint64((1 << half) - 1))
        shift = (ranks >= below).view(np.uint8)
        ranks -= below * shift
        shift *= np.uint8(half)
        found += shift
        words >>= shift.astype(np.uint64)
    octets = (words & np.uint64(0xFF)).astype(np.intp)
    return found + _SELECTED.take(octets << 3 | ranks)


def _table() -> _Small:
    """uint8[256 * 8]: where bit number r of those set in an octet lies, at 8 * octet + r."""
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    return np.argsort(1 - bits, axis=1, kind="stable").astype(np.uint8).ravel()


_SELECTED = _table()
