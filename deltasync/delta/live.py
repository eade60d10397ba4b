"""Live weights on a GPU, and what a receiver does with them over Triton's kernels.

`delta.staging` has the same for hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import Live, Spread
from deltasync.delta.changes import Changes
from deltasync.delta.kernels import tiles as kernels
from deltasync.delta.kernels import tiles_live
from deltasync.delta.launches import (
    IN_RUNS,
    Opened,
    Rows,
    Tiles,
    aligned_by_size,
    arriving,
    on,
    there,
)
from deltasync.delta.ledger import Ledger
from deltasync.delta.region import paired
from deltasync.delta.staging import Lane, LiveWeights, Received
from deltasync.delta.tiles import CHUNK, Ints, Space
from deltasync.errors import DigestMismatch, InvalidIndices
from deltasync.wire.changes import Sizes

_NO_STRIDE = 1 << 62  # of dimensions that a box has not: no position lies so far
_MOST_NUMEL = (1 << 31) - 1  # of parameters in which kernels count in 32 bits
_FLAG_AT = 4 * tiles_live.ACCUMULATORS  # among the numbers of a tally
_SUMS_AT = _FLAG_AT + 2


def tiles_of(live: LiveWeights, space: Space, device: torch.device) -> Tiles:
    """Where the tiles of a space, whose shares are parts of parameters, are in live weights."""
    share, rows = space.share, Rows.of(space)
    flats = [live.flats.get(one.number) for one in space.shares]
    whole = live.share_of[space.parameter]
    start = np.array([one.region.start for one in space.shares], np.int64)
    way = np.array([_way_to(flat) for flat in flats], np.int64)[share]
    runs = [0 if f is None or not f.is_contiguous else f.line.data_ptr() for f in flats]
    begin = start[share] + rows.begin
    address = np.array(runs, np.int64)[share] + begin * space.item_size[share]
    address[way != IN_RUNS] = 0
    chunk, before = live.space.first_chunk[whole[share]] + begin // CHUNK, begin % CHUNK
    is_odd = bool(space.gaps) or bool((before + space.numel > CHUNK).any())
    dims, boxes, entries, met = _boxes_of(space, flats, begin, rows)
    columns = [address, space.keys_of(share, rows.begin).view(np.int64), space.numel, chunk]
    if is_odd or dims:
        columns += [rows.before, rows.cols, rows.gap, before]
    if dims:
        columns += [begin, way, *met]
    here = way >= IN_RUNS
    ways = {
        one.item_size: np.unique(way[one.first : one.stop][here[one.first : one.stop]]).tolist()
        for one in space.sections
    }
    tiles = Tiles(
        space,
        there(np.stack(columns, axis=1).astype(np.int64), device),
        kernels.PARAMETERS if is_odd else 0,
        aligned_by_size(space, address),
        dims,
        there(boxes, device),
        there(entries, device),
        is_small=max((one.spec.numel for one in space.shares), default=0) < _MOST_NUMEL,
        ways=ways,
    )
    if device.type == "cuda":
        with on(device):
            tiles.warm_up(is_live=True)
    return tiles


def _way_to(flat: Live | None) -> int:
    """Where kernels have to look for a parameter, as in `Tiles.ways`; less if they do not."""
    if flat is None:
        return IN_RUNS - 1
    if flat.in_codes:
        return 2 * flat.dtype.item_size
    return IN_RUNS if flat.is_contiguous else 0


def _boxes_of(
    space: Space, flats: Sequence[Live | None], begin: Ints, rows: Rows
) -> tuple[int, Ints, NDArray[np.int32], tuple[Ints, Ints]]:
    """The boxes of what lies in no run, as in `Tiles`, and which of their entries each tile meets.

    Args:
        space: The tiles.
        flats: What its shares are parts of.
        begin: int64[tiles]: flat positions of their first elements.
        rows: How they lie.

    Returns:
        dims, boxes and entries; and int64[tiles] each: the first entry, and how many.
    """
    boxes, tiles, entries = list[Spread](), [np.zeros(0, np.int64)], list[int]()
    last = space.numel - 1
    end = begin + last + (rows.before + last) // rows.cols * rows.gap
    for share, flat in enumerate(flats):
        first, stop = space.first[share : share + 2].tolist()
        spread = [] if flat is None or flat.is_contiguous else flat.spread()
        assert spread is not None, "the host works on such weights"
        for box in spread:
            low = first + int(end[first:stop].searchsorted(box.source.start))
            high = first + int(begin[first:stop].searchsorted(box.source.stop))
            if low < high:
                tiles.append(np.arange(low, high))
                entries += [len(boxes)] * (high - low)
                boxes.append(box)
    every = np.concatenate(tiles)
    count = np.bincount(every, minlength=len(space))
    dims = [paired(box.source, box.target) for box in boxes]
    most = max((max(1, len(one)) for one in dims), default=0)
    table = np.zeros((2 + 3 * most + tiles_live.MOST_CODES, max(1, len(boxes))), np.int64)
    for nth, (box, own) in enumerate(zip(boxes, dims, strict=True)):
        padded = chain.from_iterable([(1, _NO_STRIDE, 0)] * (most - len(own)) + own)
        numbers = [box.address, box.source.start, *padded, *box.apart]
        table[: len(numbers), nth] = numbers
    ordered = np.array([*entries, 0], np.int32)[np.append(np.argsort(every, kind="stable"), -1)]
    return most, table, ordered, (np.cumsum(count) - count, count)


class DeviceLane(Lane):
    """Where what a rank of a trainer sends is in live weights on a device.

    Args:
        live: The weights.
        tiles: What the rank sends.
    """

    def __init__(self, live: LiveWeights, tiles: Tiles) -> None:
        super().__init__(live, tiles.space)
        self.tiles = tiles
        self._last = torch.full((1,), -1, dtype=torch.int32, device=tiles.device)

    def begin(self) -> None:
        self._last.fill_(-1)

    def check(self, received: Received) -> None:
        """Raises InvalidIndices for what shows in sizes; kernels check the rest."""
        changes = received.changes
        if self.space.section_of(changes.sizes.item_size) is None or not len(changes.tiles):
            raise InvalidIndices("tiles of a payload are out of range, unsorted or repeated")

    def changes(self, received: Received, tally: Any, *, in_place: bool) -> Iterator[DeviceChanges]:
        """Check changes; unless they are written in place, tell what that does. Nothing waits.

        All looks at a copy of them: a sender that has given this receiver up may write there. Only
        what is private, and not kept, is not copied. The tally raises InvalidIndices if they are
        bad; then nothing of the sync is written.
        """
        assert isinstance(tally, DeviceTally)
        tiles, sizes, memory = self.tiles, received.changes.sizes, received.changes.memory
        section = self.space.section_of(sizes.item_size)
        assert section is not None
        tally.add()
        with on(tiles.device):
            if in_place and received.is_private and memory.device == tiles.device:
                here, kept_bytes = received.changes, 0
            else:
                here, kept_bytes = _copied(received.changes, tiles.device)
            opened = tiles.open(here, section, tally.flag, self._last)
            new, old = (here.values, here.whole), None
            if not in_place:
                old = torch.empty_like(new[0]), torch.empty_like(new[1])
                sums, gains = tally.sums, tally.predicted
                tiles.change(tiles_live.PREDICT, opened, new, tally.flag, old, sums, gains)
        yield DeviceChanges(tiles, tally, opened, kept_bytes, new, old)


def _copied(changes: Changes, device: torch.device) -> tuple[Changes, int]:
    """The same on a device, and bytes of all but the table, which lies apart and is not kept."""
    sizes, memory = changes.sizes, changes.memory
    alone = Sizes(sizes.item_size, sizes.tiles, 0, 0)
    table, kept = (
        Changes.of(part.to(device, copy=True), some)
        for part, some in (
            (memory[: alone.num_bytes], alone),
            (memory[alone.num_bytes :], replace(sizes, tiles=0)),
        )
    )
    return replace(kept, sizes=sizes, tiles=table.tiles, counts=table.counts), kept.sizes.num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class DeviceChanges:
    """One payload at a receiver: see `delta.staging.Elements`.

    Attributes:
        tiles: Where it belongs.
        tally: What is added up.
        opened: What it changes.
        kept_bytes: Memory of places and new bits.
        new: int[N] and int[W]: bits.
        old: Of the same sizes: the bits before; None if they are written in place.
    """

    tiles: Tiles
    tally: DeviceTally
    opened: Opened
    kept_bytes: int
    new: tuple[Tensor, Tensor]
    old: tuple[Tensor, Tensor] | None

    @property
    def num_bytes(self) -> int:
        others: list[Tensor] = [self.opened.tile_of, self.opened.whole, *(self.old or ())]
        return self.kept_bytes + sum(one.nbytes for one in others)

    def commit(self) -> None:
        """Write, and add up what is read back: the tally finds what is not there."""
        does = tiles_live.REPLACE if self.old is None else tiles_live.WRITE
        self._write(does, self.new, self.tally.written)

    def restore(self) -> bool:
        """The same of the old bits."""
        assert self.old is not None  # what is written in place is not put back
        self._write(tiles_live.WRITE, self.old, self.tally.restored)
        return True

    def _write(self, does: int, bits: tuple[Tensor, Tensor], gains: Tensor) -> None:
        tiles, opened, tally = self.tiles, self.opened, self.tally
        with on(tiles.device):
            tiles.change(does, opened, bits, tally.flag, None, tally.sums, tally.predicted)
            tiles.change(tiles_live.READ_BACK, opened, bits, tally.flag, gains=gains)


class DeviceTally:
    """What a sync adds up on a device, and the host reads when all was launched.

    Args:
        before: Digests before. Not changed.
        device: Where it is added up.

    Attributes:
        sums: int64[chunks]: by how much digests change.
        predicted: int64[2, n]: digests of all bits that are staged, and of those that they replace.
        written, restored: int64[n]: digests of what was read back.
        flag: int32[n]: the first two say what is bad, see `kernels.tiles`.
    """

    def __init__(self, before: Ledger, device: torch.device) -> None:
        self._before = before
        self._ledger: Ledger | None = None
        with on(device):
            # Each begins at a multiple of 16 bytes, which kernels are compiled for.
            count = _SUMS_AT + len(before.sums)
            self._numbers = torch.zeros(count, dtype=torch.int64, device=device)
            totals = self._numbers[:_FLAG_AT].view(4, -1)
            self.predicted, self.written, self.restored = totals[:2], totals[2], totals[3]
            self.flag = self._numbers[_FLAG_AT:_SUMS_AT].view(torch.int32)
            self.flag[:] = kernels.CLEAR
            self.sums = self._numbers[_SUMS_AT:]

    @property
    def ledger(self) -> Ledger:
        """The digests that everything that was staged leads to. Waits. Raises InvalidIndices."""
        if self._ledger is None:
            (fault, chunk, *_), _, sums = self._read()
            if fault == kernels.MISPLACED:
                space = self._before.space
                name = space.shares[space.bounds(chunk)[0]].spec.name
                raise InvalidIndices(f"{name}: places out of range, unsorted or repeated")
            if fault != kernels.CLEAR:
                raise InvalidIndices(_FAULTS[fault])
            self._ledger = Ledger(self._before.space, self._before.sums + sums)
        return self._ledger

    def add(self) -> None:
        """More is staged."""
        self._ledger = None

    def check_written(self) -> None:
        """Raises DigestMismatch unless what was read back is what was staged."""
        _, (new, _, written, _), _ = self._read(_SUMS_AT)
        self.written.zero_()
        if written != new:
            raise DigestMismatch("the weights read back are not those that were written")

    @property
    def is_restored(self) -> bool:
        """Whether the old bits were read back, if anything was written."""
        (fault, *_), (_, old, _, restored), _ = self._read(_SUMS_AT)
        self.restored.zero_()
        return fault != kernels.CLEAR or restored == old

    def _read(self, stop: int | None = None) -> tuple[list[int], list[int], NDArray[np.uint64]]:
        """The flag; digests of bits that are staged, replaced, written, restored; and, unless the
        numbers stop before, by how much chunks change. Waits.
        """
        numbers = arriving(self._numbers[:stop])()
        digests = numbers[:_FLAG_AT].view(np.uint64).reshape(4, -1).sum(axis=1)
        flag = numbers[_FLAG_AT:_SUMS_AT].view(np.int32)
        return flag.tolist(), digests.tolist(), numbers[_SUMS_AT:].view(np.uint64)


_FAULTS = {
    kernels.UNSORTED: "tiles of a payload are out of range, unsorted or repeated",
    kernels.MISCOUNTED: "the counts of a payload do not add up to what it has",
}
