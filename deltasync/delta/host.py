"""What a sync does on a host, over numpy: find changes, emit and write them, digest tiles.

`delta.device` has the same for GPUs. The lanes of changes are their elements outside whole tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import INTEGERS
from deltasync.delta.changes import Changes
from deltasync.delta.kernels import KERNELS
from deltasync.delta.kernels import host as kernels
from deltasync.delta.readers import Reader
from deltasync.delta.spans import Span, spans_of
from deltasync.delta.tiles import CHUNK, Ints, Section, Space
from deltasync.errors import InvalidIndices
from deltasync.wire.changes import ALIGNMENT, Sizes
from deltasync.wire.digest import MASK

Bits: TypeAlias = NDArray[Any]

_NULL = 16  # the first address that a view of memory has: numpy takes none at 0


@cache
def memory(item_size: int) -> Bits:
    """All memory of this process as one array: element n begins at address 16 + n * item_size.

    Fancy indexing alone may touch it: other functions copy what they get.
    """
    interface = {
        "data": (_NULL, False),
        "shape": ((1 << 47) // item_size,),
        "typestr": f"<u{item_size}",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def addresses(lines: Sequence[Tensor]) -> Ints:
    """int64[n]: where tensors begin."""
    return np.array([line.data_ptr() for line in lines], np.int64)


class Table:
    """The tiles of some changes on a host, and where their lanes and whole tiles are.

    Attributes:
        tiles, counts: int64[T].
        places: uint16[N].
        ends: int64[T]: where the lanes of each tile end.
        share, start, numel: int64[T]: as of a `Space`.

    Raises:
        InvalidIndices: A tile is not there.
    """

    def __init__(self, space: Space, changes: Changes) -> None:
        self.space, self.sizes = space, changes.sizes
        self.tiles, self.counts = changes.table()
        self.places = changes.places.cpu().numpy().view(np.uint16)
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

    def at(self, begins: Ints) -> Ints:
        """int64[N]: indices of `memory` of lanes, if shares begin at int64[shares] addresses."""
        first = (begins[self.share] - _NULL) // self.sizes.item_size + self.start
        found: Ints = np.repeat(first, self.counts)
        found += self.places
        return found

    def positions(self) -> Ints:
        """int64[N]: where lanes are in their shares."""
        found: Ints = np.repeat(self.start, self.counts)
        found += self.places
        return found

    def pieces(self, begins: Ints) -> Pieces:
        """The lanes cut where tiles and chunks end.

        Args:
            begins: int64[shares]: which element of all chunks the first one of each share is.
        """
        sparse = self.counts > 0
        share, start, numel, ends = (
            column[sparse] for column in (self.share, self.start, self.numel, self.ends)
        )
        low = begins[share] + start
        chunk = low // CHUNK
        border = (chunk + 1) * CHUNK - low
        cuts = np.concatenate(([0], ends))
        key = self.space.keys_of(share, start)
        if not (border < numel).any():
            return Pieces(self, share, cuts, key, chunk)
        made = list[tuple[int, int, int]]()
        for n in np.flatnonzero(border < numel).tolist():
            lanes = self.places[cuts[n] : cuts[n + 1]]
            made.append((n, int(cuts[n]) + int(lanes.searchsorted(border[n])), int(chunk[n]) + 1))
        where, extra, later = (np.array(column) for column in zip(*made, strict=True))
        cuts = np.insert(cuts, where + 1, extra)
        share = np.insert(share, where + 1, share[where])
        key = np.insert(key, where + 1, key[where])
        chunk = np.insert(chunk, where + 1, later)
        filled = np.flatnonzero(np.diff(cuts))
        cuts = np.append(cuts[filled], cuts[-1])
        return Pieces(self, share[filled], cuts, key[filled], chunk[filled])

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


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Lanes cut where tiles and chunks end.

    Attributes:
        table: Whose lanes they are.
        share: int64[n]: of each piece.
        cuts: int64[n + 1]: where each begins, and N. None is empty.
        key: uint64[n]: digest seeds of their tiles.
        chunk: int64[n].
    """

    table: Table
    share: Ints
    cuts: Ints
    key: NDArray[np.uint64]
    chunk: Ints

    def digests(self, bits: Bits) -> NDArray[np.uint64]:
        """uint64[n]: digests of [N] bits at the lanes, by piece."""
        table, space = self.table, self.table.space
        if not space.gaps:
            return kernels.digest_pieces(table.places, bits, self.key, self.cuts)
        positions, share = table.positions(), self.share
        for number, region in space.gaps.items():
            for n in np.flatnonzero(share == number).tolist():
                lanes = slice(self.cuts[n], self.cuts[n + 1])
                positions[lanes] = region.places(torch.from_numpy(positions[lanes])).numpy()
        return kernels.digest_pieces(positions, bits, space.seeds[share], self.cuts)


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
        return KERNELS[bits.device.type].digest_run(bits, key, start)
    positions = region.places(torch.arange(start, start + len(bits), device="cpu"))
    keys, cuts = np.array([key], np.uint64), np.array([0, len(bits)])
    return (
        int(kernels.digest_pieces(positions.numpy(), bits.cpu().numpy(), keys, cuts).sum()) & MASK
    )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Changes of a group of tiles: their table, places and values. Whole tiles stay in the source.

    Attributes:
        changed: int64[T]: elements of each tile that differ.
    """

    tiles: Ints
    counts: Ints
    places: NDArray[np.uint16]
    values: Bits
    changed: Ints


class HostFound:
    """Where some tiles of a source differ from a snapshot.

    Attributes:
        section: Of the tiles.
        counts: int64[shares]: elements that differ.
    """

    def __init__(self, detector: HostDetector, section: Section) -> None:
        self._detector, self.section = detector, section
        self.counts = np.zeros(len(detector.space.shares), np.int64)
        self._groups: list[tuple[int, int]] = []
        self._parts: list[Part | None] = []
        self._rows = [(0, 0, 0)]

    @cached_property
    def ends(self) -> Ints:
        """int64[groups + 1, 3]: tiles, places and whole elements of all groups before. Asked for
        when all groups are there.
        """
        return np.cumsum(np.array(self._rows, np.int64), axis=0)

    def add(self, low: int, high: int, room: int) -> int:
        """Compare the tiles [low, high), which follow those before, as one more group.

        Returns the bytes that their changes take of payloads. They are kept if that is no more than
        `room`, or found once more when they are emitted.
        """
        part, space = self._detector.part(low, high), self._detector.space
        np.add.at(self.counts, space.share[part.tiles], part.changed)
        sizes = self._sizes(part)
        self._rows.append((sizes.tiles, sizes.places, sizes.whole))
        self._groups.append((low, high))
        is_kept = sizes.num_bytes <= room or not sizes.tiles
        self._parts.append(part if is_kept else None)
        return sizes.num_bytes

    def emit(self, low: int, high: int, payload: Tensor, sums: Tensor) -> Changes:
        """Write the changes of groups [low, high) to a payload of their sizes.

        What they change of digests is added to int64[chunks]. Raises SourceMoved if they are others
        than were found.
        """
        parts = [self._part(n) for n in range(low, high)]
        sizes = Sizes(self.section.item_size, *(int(n) for n in self.ends[high] - self.ends[low]))
        changes = Changes.of(payload, sizes)
        changes.clear_padding()
        for name in ("tiles", "counts", "places", "values"):
            column = getattr(changes, name)
            into = column.numpy().view(f"u{column.element_size()}")
            np.concatenate([getattr(part, name) for part in parts], out=into, casting="unsafe")
        changed = sums.numpy().view(np.uint64)
        self._detector.add_lanes(changes, changed)
        self._detector.copy_whole(changes, changed)
        return changes

    def _sizes(self, part: Part) -> Sizes:
        size = self.section.item_size
        whole = padded_numel(self._detector.space.numel[part.tiles[part.counts == 0]], size)
        return Sizes(size, len(part.tiles), len(part.places), int(whole.sum()))

    def _part(self, nth: int) -> Part:
        """Of a group; found once more if it was not kept."""
        part, self._parts[nth] = self._parts[nth], None
        if part is None:
            part = self._detector.part(*self._groups[nth])
            sizes = self._sizes(part)
            if (sizes.tiles, sizes.places, sizes.whole) != self._rows[nth + 1]:
                raise SourceMoved
        return part


class SourceMoved(Exception):
    """A source is not what it was when it was compared."""


class HostDetector:
    """A copy of a source in host memory, and how the source differs from it.

    Args:
        space: What is sent.
        lines: int[numel] of each share: where the copy is, if it is there already. Not owned.

    Attributes:
        space: The same.
        ahead: bool[tiles]: which have other bits here than the version that is held.
        num_bytes: Of the copy.
    """

    device: torch.device | None = None

    def __init__(self, space: Space, lines: Sequence[Tensor] | None = None) -> None:
        self.space = space
        self.lines = arena(space, torch.device("cpu")) if lines is None else list(lines)
        self.num_bytes = int((space.share_numel * space.item_size).sum())
        self._begins = addresses(self.lines)
        self._is_aligned = not (self._begins % space.item_size).any()
        self._elements = space.first_chunk[:-1] * CHUNK
        self.ahead = np.zeros(len(space), np.bool_)
        self._readers: Mapping[int, Reader] = {}
        self._taken: Sequence[Reader] = ()
        self._spans: dict[tuple[int, int], list[Span]] = {}

    def take(self, readers: Sequence[Reader]) -> None:
        """Read from these from now on: one for each share, as these were given."""
        if readers is not self._taken:
            self._taken, order = readers, self.space.order.tolist()
            self._readers = {n: readers[given] for n, given in enumerate(order)}
            self._spans.clear()

    def take_one(self, share: int, reader: Reader) -> None:
        """The same of one share: the others are not there."""
        self._readers, self._taken = {share: reader}, ()
        self._spans.clear()

    def capture(self) -> None:
        """Copy the source."""
        for share, line in enumerate(self.lines):
            reader = self._readers[share]
            for start in range(0, len(line), CHUNK):
                stop = min(start + CHUNK, len(line))
                line[start:stop].copy_(reader.read(start, stop))
        self.ahead[:] = False

    def find(
        self, groups: Sequence[int], room: int, meanwhile: Callable[[], None]
    ) -> list[HostFound]:
        """Compare all tiles.

        Args:
            groups: How many tiles of each section are one group.
            room: Bytes of payloads up to which changes are kept.
            meanwhile: Called before.
        """
        meanwhile()
        made = list[HostFound]()
        for section, group in zip(self.space.sections, groups, strict=True):
            made.append(HostFound(self, section))
            for low in range(section.first, section.stop, group):
                room -= made[-1].add(low, min(low + group, section.stop), room)
        return made

    def part(self, low: int, high: int) -> Part:
        """How the tiles [low, high) differ."""
        space, found = self.space, list[tuple[int, tuple[Bits, ...]]]()
        if (spans := self._spans.get((low, high))) is None:
            spans = [*spans_of(space, low, high, self.lines, self._readers)]
            self._spans[low, high] = spans
        for span in spans:
            ahead = self.ahead[span.first : span.first + len(span.begins)]
            if columns := kernels.differing(span.new(), span.old(), span.begins, ahead):
                found.append((span.first, columns))
        if not found:
            none = np.zeros(0, np.int64)
            bits = np.zeros(0, f"u{space.item_size[space.share[low]]}")
            return Part(none, none, none.astype(np.uint16), bits, none)
        numbers = [first + columns[0] for first, columns in found]
        rest = zip(*(columns[1:] for _, columns in found), strict=True)
        return Part(*map(np.concatenate, (numbers, *rest)))

    def add_lanes(self, changes: Changes, sums: NDArray[np.uint64]) -> None:
        """Add by how much the lanes change digests."""
        pieces = Table(self.space, changes).pieces(self._elements)
        np.add.at(sums, pieces.chunk, pieces.digests(changes.values.numpy()))
        np.subtract.at(sums, pieces.chunk, pieces.digests(self.old_lanes(pieces.table)))

    def copy_whole(self, changes: Changes, sums: NDArray[np.uint64]) -> None:
        """Fill the column of whole tiles from the source; add by how much they change digests."""
        changes.whole.zero_()
        for run in Table(self.space, changes).runs():
            for chunk, low, high in chunks_of(self._elements[run.share], run.start, run.stop):
                new = changes.whole[run.at + low - run.start : run.at + high - run.start]
                new.copy_(self._readers[run.share].read(low, high))
                old = self.lines[run.share][low:high]
                gained, lost = (digest_run(self.space, run.share, low, b) for b in (new, old))
                sums[chunk : chunk + 1] += np.uint64((gained - lost) & MASK)

    def old_lanes(self, table: Table) -> Bits:
        """unsigned[N]: the bits of the copy at lanes."""
        size = table.sizes.item_size
        if self._is_aligned:
            found: Bits = memory(size)[table.at(self._begins)]
            return found
        found, positions = np.empty(table.sizes.places, f"u{size}"), table.positions()
        for share, lanes in table.by_share():
            found[lanes] = kernels.unsigned(self.lines[share])[positions[lanes]]
        return found

    @property
    def before(self) -> HostDetector:
        """What codecs ask for the bits before."""
        return self

    def read(self, share: int, start: int, stop: int) -> Tensor:
        """int[stop - start]: the bits of the copy of a run of a share; read only."""
        return self.lines[share][start:stop]

    def old(self, changes: Changes) -> tuple[Bits, Bits]:
        """(unsigned[N], unsigned[W]): the bits of the copy at lanes and whole tiles of changes."""
        table = Table(self.space, changes)
        whole = np.zeros(len(changes.whole), f"u{changes.whole.element_size()}")
        for run in table.runs():
            whole[run.there] = kernels.unsigned(self.lines[run.share][run.start : run.stop])
        return self.old_lanes(table), whole

    def advance(self, changes: Changes, *, ahead: bool = False) -> None:
        """Write changes to the copy; with `ahead`, before they are decided."""
        if ahead:
            self.ahead[changes.table()[0]] = True
        self.advance_whole(changes)
        self.advance_lanes(changes)

    def advance_whole(self, changes: Changes) -> None:
        """Write their whole tiles."""
        for run in Table(self.space, changes).runs():
            self.lines[run.share][run.start : run.stop] = changes.whole[run.there]

    def advance_lanes(self, changes: Changes) -> None:
        """Write the rest; the copy was not given, but made here."""
        table, values = Table(self.space, changes), changes.values.numpy()
        memory(values.itemsize)[table.at(self._begins)] = values.view(f"u{values.itemsize}")

    def whole_of(self, tiles: Ints) -> Changes:
        """All of int64[T] tiles, of one section."""
        payload = torch.empty(
            whole_sizes(self.space, tiles).num_bytes, dtype=torch.uint8, device="cpu"
        )
        self.full(tiles, payload)
        return Changes.of(payload, whole_sizes(self.space, tiles))

    def full(self, tiles: Ints, payload: Tensor) -> None:
        """Write all of int64[T] tiles, of one section, to a payload of their sizes."""
        changes = Changes.of(payload, whole_sizes(self.space, tiles))
        changes.clear_padding()
        changes.tiles.copy_(torch.from_numpy(tiles))
        changes.counts.zero_()
        changes.whole.zero_()
        for run in Table(self.space, changes).runs():
            changes.whole[run.there] = self.lines[run.share][run.start : run.stop]

    def measure(self, chunks: Ints) -> NDArray[np.uint64]:
        """uint64[n]: the digests of int64[n] chunks of a ledger, read from the copy."""
        space, found = self.space, np.zeros(len(chunks), np.uint64)
        shares = space.first_chunk.searchsorted(chunks, "right") - 1
        starts = (chunks - space.first_chunk[shares]) * CHUNK
        for n, (share, start) in enumerate(zip(shares.tolist(), starts.tolist(), strict=True)):
            bits = self.lines[share][start : start + CHUNK]
            found[n] = digest_run(space, share, start, bits)
        return found


def arena(space: Space, device: torch.device, *, pinned: bool = False) -> list[Tensor]:
    """int[numel] for each share, side by side."""
    sizes = space.share_numel * space.item_size
    spaces = -(-sizes // ALIGNMENT) * ALIGNMENT
    begins = np.cumsum(spaces) - spaces
    num_bytes = int(spaces.sum())
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    columns = begins.tolist(), sizes.tolist(), space.item_size.tolist()
    return [
        memory[begin : begin + length].view(INTEGERS[size])
        for begin, length, size in zip(*columns, strict=True)
    ]


def whole_sizes(space: Space, tiles: Ints) -> Sizes:
    """Of a payload with all of int64[T] tiles, of one section."""
    size = int(space.item_size[space.share[tiles[0]]])
    return Sizes(size, len(tiles), 0, int(padded_numel(space.numel[tiles], size).sum()))
