"""What a bucket carries: the changed elements of some tiles of one item size.

docs/wire-format.md, section 3. The columns of a payload, each of which begins at a multiple of
`ALIGNMENT`, with zeros between them:

| column | content |
|---|---|
| tiles | uint32[T]: numbers of tiles, increasing |
| counts | uint16[T]: changed elements of each; 0 for a tile that comes whole |
| places | uint16[N]: where they are in their tiles, increasing within each |
| values | [N]: their new bits |
| whole | [W]: all bits of each whole tile, padded to a multiple of `ALIGNMENT` bytes |
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 16
"""Bytes."""

PLACE_BYTES = 2
"""Of a place."""

TILE = 4096
"""Elements of a tile."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a payload has.

    Attributes:
        item_size: Bytes of an element.
        tiles, places, whole: T, N and W.
    """

    item_size: int
    tiles: int
    places: int
    whole: int

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """(begin, length) in bytes of each column."""
        lengths = (
            4 * self.tiles,
            2 * self.tiles,
            2 * self.places,
            self.item_size * self.places,
            self.item_size * self.whole,
        )
        begins = accumulate(map(padded, lengths), initial=0)
        return tuple(zip(begins, lengths, strict=False))

    @property
    def num_bytes(self) -> int:
        """Of the payload."""
        begin, length = self.columns[-1]
        return begin + padded(length)


def padded(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
