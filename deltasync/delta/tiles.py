"""The flat space: all elements that one rank sends, as one row of tiles.

A tile is a run of at most `TILE` elements of one share, in the order of the share; only the last
tile of a share has fewer. Shares are ordered by the bytes of their elements, then by parameter. So
a tile has one number at both ends, and every question of a sync is about tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.region import Region
from deltasync.delta.shard import Share
from deltasync.errors import InvalidIndices, InvalidTable, LimitExceeded
from deltasync.wire.changes import ALIGNMENT, PLACE_BYTES, TILE, Sizes
from deltasync.wire.digest import GOLDEN_RATIO, MASK, seed
from deltasync.wire.messages import ParameterSpec
from deltasync.wire.shares import SHARE

Ints: TypeAlias = NDArray[np.int64]

MAX_TILES = 1 << 32
"""Payloads number tiles in 32 bits: 2^44 elements."""


CHUNK_TILES = 64
"""Tiles whose digests are one number in a ledger."""

CHUNK = CHUNK_TILES * TILE
"""Elements of these."""


@dataclass(frozen=True, slots=True)
class Section:
    """The tiles of one item size.

    Attributes:
        item_size: Bytes of an element.
        first, stop: Its tiles.
    """

    item_size: int
    first: int
    stop: int


class Space:
    """The tiles of some shares.

    Attributes:
        given: The shares, as they were given.
        order: int64[shares]: which of these each is, in the order of their tiles.
        shares: The shares in that order.
        first: int64[shares + 1]: the first tile of each.
        sections: By item size.

    Raises:
        LimitExceeded: There are more tiles than numbers.
    """

    def __init__(self, shares: Sequence[Share]) -> None:
        self.given = tuple(shares)
        sizes = np.array([share.spec.dtype.item_size for share in shares], np.int64)
        self.order: Ints = np.argsort(sizes, kind="stable")
        self.shares = tuple(self.given[number] for number in self.order)
        self.item_size: Ints = sizes[self.order]
        self.share_numel: Ints = np.array([share.numel for share in self.shares], np.int64)
        each = -(-self.share_numel // TILE)
        if each.sum(dtype=np.float64) > MAX_TILES:
            raise LimitExceeded(f"over {MAX_TILES} tiles: no format numbers so many")
        self.first: Ints = np.concatenate(([0], np.cumsum(each)))
        keys = [(seed(s.spec.name) + s.region.start * GOLDEN_RATIO) & MASK for s in self.shares]
        self.seeds: NDArray[np.uint64] = np.array(keys, np.uint64)
        chunks = -(-each // CHUNK_TILES)
        self.first_chunk: Ints = np.concatenate(([0], np.cumsum(chunks)))
        every, begins = np.unique(self.item_size, return_index=True)
        bounds = self.first[[*begins, len(shares)]].tolist()
        self.sections = tuple(map(Section, every.tolist(), bounds[:-1], bounds[1:]))

    def __len__(self) -> int:
        return int(self.first[-1])

    @cached_property
    def share(self) -> Ints:
        """int64[tiles]: which share each is a part of."""
        return np.repeat(np.arange(len(self.shares)), np.diff(self.first))

    @cached_property
    def start(self) -> Ints:
        """int64[tiles]: its first element, counted within the share."""
        found: Ints = (np.arange(len(self)) - self.first[self.share]) * TILE
        return found

    @cached_property
    def numel(self) -> NDArray[np.int32]:
        """int32[tiles]: its elements."""
        left = self.share_numel[self.share] - self.start
        found: NDArray[np.int32] = np.minimum(TILE, left).astype(np.int32)
        return found

    @cached_property
    def chunk(self) -> NDArray[np.int32]:
        """int32[tiles]: its place in the sums of a `Ledger` of these shares."""
        return (self.first_chunk[self.share] + self.start // CHUNK).astype(np.int32)

    def find(self, tiles: Ints) -> tuple[Ints, Ints, Ints]:
        """int64[T] each: share, start and numel of int64[T] tiles, without those of all.

        Raises InvalidIndices for a tile that is not there.
        """
        if len(tiles) and tiles.max() >= len(self):
            raise InvalidIndices("a payload has tiles beyond those of its lane")
        share: Ints = self.first.searchsorted(tiles, "right") - 1
        start: Ints = (tiles - self.first[share]) * TILE
        numel: Ints = np.minimum(TILE, self.share_numel[share] - start)
        return share, start, numel

    def keys_of(self, share: Ints, start: Ints) -> NDArray[np.uint64]:
        """uint64[T]: digest seeds of tiles that begin there."""
        found: NDArray[np.uint64] = self.seeds[share]
        found += start.view(np.uint64) * np.uint64(GOLDEN_RATIO)
        return found

    @property
    def num_chunks(self) -> int:
        """Numbers in a ledger."""
        return int(self.first_chunk[-1])

    def bounds(self, chunk: int) -> tuple[int, int, int]:
        """(share, start, stop): the elements of a chunk of a ledger."""
        share = int(self.first_chunk.searchsorted(chunk, "right")) - 1
        start = (chunk - int(self.first_chunk[share])) * CHUNK
        return share, start, min(start + CHUNK, int(self.share_numel[share]))

    @cached_property
    def most_bytes(self) -> int:
        """The most that a payload takes: all elements, each with a place of its own."""
        all_elements = int((self.share_numel * (PLACE_BYTES + self.item_size)).sum())
        return Sizes(1, len(self), 0, all_elements + ALIGNMENT * (1 + len(self))).num_bytes

    @cached_property
    def gaps(self) -> dict[int, Region]:
        """The shares that are no run in their parameter, and where their elements lie from the
        first one on.
        """
        return {n: Region(0, s.region.dims) for n, s in enumerate(self.shares) if s.gap}

    @cached_property
    def parameter(self) -> Ints:
        """int64[shares]: the number of the parameter in the layout."""
        return np.array([share.number for share in self.shares], np.int64)

    def section_of(self, item_size: int) -> Section | None:
        """The tiles of elements of so many bytes."""
        return next((one for one in self.sections if one.item_size == item_size), None)

    def parts(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """(share, start, stop): of each share that has some of the tiles [low, high)."""
        first, last = self.share[low], self.share[high - 1]
        for share in range(int(first), int(last) + 1):
            start = max(0, low - int(self.first[share])) * TILE
            stop = min(int(self.share_numel[share]), (high - int(self.first[share])) * TILE)
            if start < stop:
                yield share, start, stop


def table_of(space: Space) -> NDArray[np.uint8]:
    """uint8[n]: the payload of `Shares`, see `wire.shares`."""
    rows = np.zeros(len(space.given), SHARE)
    for row, share in zip(rows, space.given, strict=True):
        row["parameter"], row["start"] = share.number, share.region.start
        row["rows"], row["cols"] = share.numel // share.cols, share.cols
        row["stride"] = share.cols + share.gap
    return rows.view(np.uint8)


def space_of(table: NDArray[np.uint8], specs: Sequence[ParameterSpec]) -> Space:
    """What the payload of `Shares` says of a layout. Raises InvalidTable."""
    rows = np.frombuffer(table.tobytes(), SHARE)
    shares, before = list[Share](), (0, 0)
    for number, row in enumerate(rows.tolist()):
        parameter, reserved, start, count, cols, stride = row
        stop = start + (count - 1) * stride + cols
        good = not reserved and parameter < len(specs) and count and 0 < cols <= stride
        if not good or (parameter, start) < before or stop > specs[parameter].numel:
            raise InvalidTable(f"share {number}: out of its parameter, or out of order", row=number)
        before = parameter, stop
        region = Region(start, ((count, stride), (cols, 1)))
        shares.append(Share(parameter, specs[parameter], region))
    return Space(shares)
