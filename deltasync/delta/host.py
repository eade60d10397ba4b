"""What both ends of a sync do on a host, over numpy: look at changes, and digest tiles.

The lanes of changes are their elements outside whole tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.changes import Changes
from deltasync.delta.kernels import host as kernels
from deltasync.delta.kernels import reference
from deltasync.delta.tiles import CHUNK, Ints, Space
from deltasync.errors import InvalidIndices
from deltasync.wire.changes import ALIGNMENT
from deltasync.wire.digest import MASK

Bits: TypeAlias = NDArray[Any]

_BLOCK = 1 << 15  # lanes worked on at once: their addresses stay in the L2 cache
_NULL = 16  # the first address that a view of memory has: numpy takes none at 0


@cache
def memory(item_size: int) -> Bits:
    """All memory of this process as one array: element n begins at address 16 + n * item_size.

    Fancy indexing alone may touch it: other functions copy what they get.
    """
    return kernels.array_at(_NULL, ((1 << 47) // item_size,), f"<u{item_size}")


def addresses(lines: Sequence[Tensor]) -> Ints:
    """int64[n]: where tensors begin."""
    return np.array([line.data_ptr() for line in lines], np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """Where scattered elements are in the memory of this process.

    Attributes:
        item_size: Bytes of an element.
        first: int64[T]: where each of some tiles begins, as `memory` counts.
        counts: int64[T]: how many elements are in each.
        places: uint16[N]: where they are in it.
    """

    item_size: int
    first: Ints
    counts: Ints
    places: NDArray[np.uint16]

    @property
    def num_bytes(self) -> int:
        return self.first.nbytes + self.counts.nbytes + self.places.nbytes

    def read(self) -> Bits:
        """unsigned[N]: their bits."""
        bits: Bits = np.empty(len(self.places), f"u{self.item_size}")
        for lanes, at in self._blocks():
            bits[lanes] = memory(self.item_size)[at]
        return bits

    def write(self, bits: Bits) -> None:
        """Overwrite them with unsigned[N]."""
        for lanes, at in self._blocks():
            memory(self.item_size)[at] = bits[lanes]

    def write_checked(self, bits: Bits) -> bool:
        """The same. Returns whether these bits were read back."""
        is_there = True
        for lanes, at in self._blocks():
            memory(self.item_size)[at] = bits[lanes]
            is_there &= np.array_equal(memory(self.item_size)[at], bits[lanes])
        return is_there

    def _blocks(self) -> Iterator[tuple[slice, Ints]]:
        """(lanes, int64[n] indices of `memory`): as many tiles at once as fit the cache."""
        ends = np.cumsum(self.counts)
        cuts = np.flatnonzero(np.diff((ends - self.counts) // _BLOCK, prepend=-1)).tolist()
        for low, high in pairwise([*cuts, len(ends)]):
            lanes = slice(int(ends[low] - self.counts[low]), int(ends[high - 1]))
            at: Ints = np.repeat(self.first[low:high], self.counts[low:high])
            at += self.places[lanes]
            yield lanes, at


class Table:
    """The tiles of some changes on a host, and where their lanes and whole tiles are.

    It is a copy of their first three columns: what it checks is what is written, although a sender
    that has given a receiver up may pack the next payload into the memory of this one.

    Attributes:
        changes: The same.
        sizes: Of these.
        tiles, counts: int64[T].
        places: uint16[N].
        ends: int64[T]: where the lanes of each tile end.
        share, start, numel: int64[T]: as of a `Space`.

    Raises:
        InvalidIndices: A tile is not there.
    """

    def __init__(self, space: Space, changes: Changes) -> None:
        self.space, self.changes, self.sizes = space, changes, changes.sizes
        self.tiles, self.counts = changes.table()
        self.places = changes.places.cpu().numpy().astype(np.uint16)
        self.ends: Ints = np.cumsum(self.counts)
        self.share, self.start, self.numel = space.find(self.tiles)

    def check(self, after: int = -1) -> None:
        """Raises InvalidIndices unless they are changes of this space, in order, past a tile."""
        tiles, sizes, section = self.tiles, self.sizes, self.space.section_of(self.sizes.item_size)
        first, stop = (0, 0) if section is None else (section.first, section.stop)
        inside = len(tiles) > 0 and max(first, after + 1) <= tiles[0] <= tiles[-1] < stop
        if not inside or not (tiles[1:] > tiles[:-1]).all():
            raise InvalidIndices("tiles of a payload are out of range, unsorted or repeated")
        whole = padded_numel(self.numel[self.counts == 0], sizes.item_size)
        if int(self.ends[-1]) != sizes.places or int(whole.sum()) != sizes.whole:
            raise InvalidIndices("the counts of a payload do not add up to what it has")
        places, sparse = self.places, self.counts > 0
        if not len(places):
            return
        ends, rises = self.ends[sparse], np.empty(len(places), np.bool_)
        rises[0] = True
        np.greater(places[1:], places[:-1], out=rises[1:])
        rises[ends[:-1]] = True
        good = places[ends - 1] < self.numel[sparse]
        if rises.all() and good.all():
            return
        lane = int(ends[np.argmin(good)]) - 1 if rises.all() else int(np.argmin(rises))
        share = self.share[self.ends.searchsorted(lane, "right")]
        name = self.space.shares[share].spec.name
        raise InvalidIndices(f"{name}: places out of range, unsorted or repeated")

    def lanes(self, begins: Ints) -> Lanes:
        """Where all lanes are, if shares begin at int64[shares] addresses."""
        sparse, size = self.counts > 0, self.sizes.item_size
        first = (begins[self.share[sparse]] - _NULL) // size + self.start[sparse]
        return Lanes(size, first, self.counts[sparse], self.places)

    def positions(self) -> Ints:
        """int64[N]: where lanes are in their shares."""
        found: Ints = np.repeat(self.start, self.counts)
        found += self.places
        return found

    def account(self, begins: Ints, sums: NDArray[np.uint64], new: Bits, old: Bits) -> None:
        """Add to uint64[chunks] by how much [N] bits instead of old ones change digests.

        Args:
            begins: int64[shares]: which element of all chunks the first one of each share is.
            sums, new, old: Of all chunks, and of the lanes.
        """
        space, sparse = self.space, self.counts > 0
        share, start, numel, ends = (
            column[sparse] for column in (self.share, self.start, self.numel, self.ends)
        )
        left, cuts = CHUNK - (begins[share] + start) % CHUNK, np.append(0, ends)
        inner = [  # tiles are cut where chunks end
            cuts[n] + self.places[cuts[n] : cuts[n + 1]].searchsorted(left[n])
            for n in np.flatnonzero(left < numel).tolist()
        ]
        if inner:
            cuts = np.union1d(cuts, inner)
            tile = ends.searchsorted(cuts[:-1], "right")
            share, start = share[tile], start[tile]
        chunk = (begins[share] + start + self.places[cuts[:-1]]) // CHUNK
        where: NDArray[np.integer] = self.places
        keys = space.keys_of(share, start)
        if space.gaps:
            where, keys = self.positions(), space.seeds[share]
            for number, lanes in self.by_share():
                if (region := space.gaps.get(number)) is not None:
                    where[lanes] = region.places(torch.from_numpy(where[lanes])).numpy()
        np.add.at(sums, chunk, kernels.digest_pieces(where, new, keys, cuts, old))

    def by_share(self) -> Iterator[tuple[int, slice]]:
        """(share, lanes): of each share that has some."""
        bounds = np.flatnonzero(np.diff(self.share, prepend=-1, append=-1))
        ends = np.concatenate(([0], self.ends))
        for low, high in pairwise(bounds.tolist()):
            if ends[low] < ends[high]:
                yield int(self.share[low]), slice(int(ends[low]), int(ends[high]))

    def runs(self) -> Iterator[WholeRun]:
        """All whole tiles, in order: those together that follow each other."""
        goes = self.counts == 0
        tiles, share, start, numel = (
            column[goes] for column in (self.tiles, self.share, self.start, self.numel)
        )
        if not len(tiles):
            return
        lengths = padded_numel(numel, self.sizes.item_size)
        at = np.cumsum(lengths) - lengths
        breaks = np.flatnonzero((np.diff(tiles) > 1) | (np.diff(share) > 0)) + 1
        for low, high in pairwise([0, *breaks.tolist(), len(tiles)]):
            stop = int(start[high - 1] + numel[high - 1])
            yield WholeRun(int(share[low]), int(start[low]), stop, int(at[low]))


@dataclass(frozen=True, slots=True)
class WholeRun:
    """Whole tiles of a share that follow each other.

    Attributes:
        share, start, stop: Which elements they are.
        at: Where their bits begin in the column of whole tiles.
    """

    share: int
    start: int
    stop: int
    at: int

    @property
    def there(self) -> slice:
        """Where they are in the column."""
        return slice(self.at, self.at + self.stop - self.start)


def chunks_of(begin: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(chunk, low, high): elements [start, stop) of a share, which begins at an element of all
    chunks, cut where chunks end.
    """
    while start < stop:
        chunk = (begin + start) // CHUNK
        high = min(stop, (chunk + 1) * CHUNK - begin)
        yield int(chunk), start, int(high)
        start = int(high)


def padded_numel(numel: NDArray[np.integer], item_size: int) -> Ints:
    """int64[n]: elements that whole tiles take of a payload."""
    each = ALIGNMENT // item_size
    found: Ints = -(-numel.astype(np.int64) // each) * each
    return found


def digest_run(space: Space, share: int, start: int, bits: Tensor) -> int:
    """The digest of int[n] elements of a share from `start` on."""
    key = int(space.seeds[share])
    if (region := space.gaps.get(share)) is None:
        run = kernels.digest_run if bits.is_cpu else reference.digest_run
        return run(bits, key, start)
    positions = region.places(torch.arange(start, start + len(bits), device="cpu"))
    keys, cuts = np.array([key], np.uint64), np.array([0, len(bits)])
    return (
        int(kernels.digest_pieces(positions.numpy(), bits.cpu().numpy(), keys, cuts).sum()) & MASK
    )


def account_run(
    sums: NDArray[np.uint64], space: Space, share: int, start: int, new: Tensor, old: Tensor
) -> None:
    """Account in uint64[chunks] for int[n] bits of a chunk of a share instead of old ones.

    If they are all of the chunk, its digest is theirs, whatever it was.
    """
    chunk = int(space.first_chunk[share]) + start // CHUNK
    gained = digest_run(space, share, start, new)
    if len(new) == min(CHUNK, int(space.share_numel[share]) - start // CHUNK * CHUNK):
        sums[chunk] = gained
    else:
        lost = digest_run(space, share, start, old)
        sums[chunk : chunk + 1] += np.uint64((gained - lost) & MASK)
