"""Successive deltas as one sync, with or without an anchor below."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import Live
from deltasync.delta.changes import Changes
from deltasync.delta.gap import table_of
from deltasync.delta.host import Bits, Table, padded_numel
from deltasync.delta.kernels.host import unsigned
from deltasync.delta.shard import whole
from deltasync.delta.snapshot import Bucket, Plan, distributed, whole_sizes
from deltasync.delta.tiles import Ints, Space
from deltasync.dtypes import Dtype
from deltasync.errors import LayoutMismatch
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.one_way import OneWayReader
from deltasync.files.patch_file import flats_of
from deltasync.transports.base import Frame
from deltasync.wire.changes import ALIGNMENT, TILE, Sizes
from deltasync.wire.messages import ParameterSpec

_BUCKET_BYTES = 16 << 20


class Merged:
    """What deltas, one after another, change of weights that are only read.

    Memory: positions and bits of what changes.

    Args:
        flats: The weights by parameter, which decode the first delta. They must not change
            meanwhile. What deltas say of others is left out.
        specs: The layout.

    Attributes:
        space: Of the layout.
        flats: The weights as they are after all deltas; only read.
        layers: What changes, by item size.
    """

    def __init__(self, flats: Mapping[int, Live], specs: Sequence[ParameterSpec]) -> None:
        self.space = space = Space(whole(tuple(specs)))
        self.layers = {s.item_size: Layer(space, s.item_size) for s in space.sections}
        self.flats = dict(flats)
        self._is_held = np.zeros(len(specs), np.bool_)
        self._is_held[list(flats)] = True
        for share, (number, first) in enumerate(zip(space.parameter, space.first, strict=False)):
            if (flat := flats.get(int(number))) is not None and space.share_numel[share]:
                layer = self.layers[int(space.item_size[share])]
                self.flats[int(number)] = cast("Live", Overlay(flat, layer, int(first) * TILE))

    def add(self, frames: Iterable[Frame]) -> None:
        """Put the next delta over them.

        Raises:
            WireError, SyncError: It is damaged: nothing has changed.
        """
        came = dict[int, list[tuple[Table, Changes]]]()
        for received in OneWayReader(flats_of=lambda _: self.flats).read(frames):
            size = received.changes.sizes.item_size
            came.setdefault(size, []).append((received.table, received.changes))
        for size, parts in came.items():
            self.layers[size].add(parts, self._is_held)


class Layer:
    """Other bits of some elements of one item size.

    Attributes:
        codes: int[n], increasing: TILE * tile + place of elements outside whole tiles.
        bits: unsigned[n]: of these.
        tiles: int64[m], increasing: tiles of TILE elements that are here whole.
        whole: unsigned[m, TILE]: of these.
    """

    def __init__(self, space: Space, item_size: int) -> None:
        self._space, kind = space, np.dtype(f"u{item_size}")
        is_small = len(space) * TILE <= 1 << 32
        self.codes: NDArray[Any] = np.zeros(0, np.uint32 if is_small else np.int64)
        self.bits: Bits = np.zeros(0, kind)
        self.tiles: Ints = np.zeros(0, np.int64)
        self.whole: Bits = np.zeros((0, TILE), kind)

    def add(self, parts: Sequence[tuple[Table, Changes]], is_held: NDArray[np.bool_]) -> None:
        """Put a delta over this.

        Args:
            parts: Its payloads, in order.
            is_held: bool[parameters]: of which it is wanted.
        """
        codes, bits, tiles, rows = (
            np.concatenate(c) for c in zip(*map(self._columns, parts), strict=True)
        )
        kept, kept_tiles = self._of(codes // TILE, is_held), self._of(tiles, is_held)
        if not (kept.all() and kept_tiles.all()):
            codes, bits, tiles, rows = codes[kept], bits[kept], tiles[kept_tiles], rows[kept_tiles]
        at, inside = _found(self.tiles, codes // TILE)
        self.whole[at[inside], codes[inside] % TILE] = bits[inside]
        replaced = _found(tiles, self.codes // TILE)[1]
        if replaced.any():
            self.codes, self.bits = self.codes[~replaced], self.bits[~replaced]
        codes, bits = codes[~inside].astype(self.codes.dtype), bits[~inside]
        self.codes, self.bits = _laid(self.codes, self.bits, codes, bits)
        self.tiles, self.whole = _laid(self.tiles, self.whole, tiles, rows)

    def at(self, codes: Ints, bits: Bits) -> None:
        """Write its bits over unsigned[n] bits of elements with int64[n] codes."""
        for keys, rows in ((self.codes, self.bits), (self.tiles, self.whole)):
            wanted = codes if rows.ndim == 1 else codes // TILE
            at, inside = _found(keys, wanted.astype(keys.dtype))
            at = at[inside]
            bits[inside] = rows[at] if rows.ndim == 1 else rows[at, codes[inside] % TILE]

    def between(self, begin: int, bits: Bits) -> None:
        """Write its bits over unsigned[n] bits of elements that lie side by side from a code on."""
        end = begin + len(bits)
        low, high = self.codes.searchsorted(np.array([begin, end - 1], self.codes.dtype))
        high += int(high < len(self.codes) and self.codes[high] == end - 1)
        bits[self.codes[low:high].astype(np.int64) - begin] = self.bits[low:high]
        low, high = self.tiles.searchsorted([begin // TILE, (end - 1) // TILE + 1])
        for tile, row in zip(self.tiles[low:high].tolist(), self.whole[low:high], strict=True):
            first, last = max(begin, tile * TILE), min(end, (tile + 1) * TILE)
            bits[first - begin : last - begin] = row[first - tile * TILE : last - tile * TILE]

    def buckets(self) -> Iterator[Bucket]:
        """All of it in payloads."""
        tiles, counts = table_of(self.codes, self.tiles)
        size, is_whole = self.bits.itemsize, counts == 0
        sums = np.stack([np.ones_like(counts), counts, TILE * is_whole, is_whole], 1).cumsum(0)
        sums = np.concatenate((np.zeros((1, 4), np.int64), sums))
        for low, high in distributed(sums[:, :3], size, _BUCKET_BYTES):
            sizes = Sizes(size, *(sums[high] - sums[low])[:3].tolist())
            lanes, rows = (slice(*sums[[low, high], column].tolist()) for column in (1, 3))
            pack = partial(self._pack, tiles[low:high], counts[low:high], lanes, rows)
            yield Bucket(sizes, torch.device("cpu"), partial(_pack, sizes, pack))

    def _pack(self, tiles: Ints, counts: Ints, lanes: slice, rows: slice, into: Changes) -> None:
        unsigned(into.tiles)[:] = tiles
        unsigned(into.counts)[:] = counts
        unsigned(into.places)[:] = self.codes[lanes] % TILE
        unsigned(into.values)[:] = self.bits[lanes]
        unsigned(into.whole)[:] = self.whole[rows].ravel()

    def _columns(self, part: tuple[Table, Changes]) -> tuple[Ints, Bits, Ints, Bits]:
        """The codes and bits of a payload, with those of short whole tiles, and its long ones."""
        table, changes = part
        codes, bits = np.repeat(table.tiles * TILE, table.counts), unsigned(changes.values)
        codes += table.places
        tiles, column = table.tiles[table.counts == 0], unsigned(changes.whole)
        numel = self._space.numel[tiles]
        short = numel < TILE
        if not short.any():
            return codes, bits, tiles, column.reshape(-1, TILE)
        padded = padded_numel(numel, column.itemsize)
        counts = numel[short].astype(np.int64)
        element = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        there = np.repeat((padded.cumsum() - padded)[short], counts) + element
        element += np.repeat(tiles[short] * TILE, counts)
        at, rows = codes.searchsorted(element), column[np.repeat(~short, padded)]
        codes, bits = np.insert(codes, at, element), np.insert(bits, at, column[there])
        return codes, bits, tiles[~short], rows.reshape(-1, TILE)

    def _of(self, tiles: Ints, is_held: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool[n]: which of int64[n] tiles are of parameters that are held."""
        found: NDArray[np.bool_] = is_held[self._space.parameter[self._space.share[tiles]]]
        return found


def _found(keys: NDArray[Any], wanted: NDArray[Any]) -> tuple[Ints, NDArray[np.bool_]]:
    """int64[n]: where each of [n] numbers lies among increasing ones; bool[n]: whether it does."""
    at = keys.searchsorted(wanted)
    if not len(keys):
        return at, np.zeros(len(at), np.bool_)
    return at, keys[np.minimum(at, len(keys) - 1)] == wanted


def _laid(keys: NDArray[Any], rows: Bits, over: NDArray[Any], new: Bits) -> tuple[Any, Bits]:
    """Increasing keys and a row of each, with others over them."""
    at, inside = _found(keys, over)
    rows[at[inside]] = new[inside]
    if inside.all():
        return keys, rows
    at = at[~inside]
    return np.insert(keys, at, over[~inside]), np.insert(rows, at, new[~inside], axis=0)


@dataclass(frozen=True, slots=True)
class Overlay:
    """A parameter with other bits at some positions: of a `Live`, what decoding asks for.

    Attributes:
        flat: The parameter itself.
        layer: The other bits.
        begin: The code of its first element.
    """

    flat: Live
    layer: Layer
    begin: int

    @property
    def line(self) -> Tensor:
        """That of the parameter itself: for its device and dtype only."""
        return self.flat.line

    @property
    def dtype(self) -> Dtype:
        return self.flat.dtype

    @property
    def numel(self) -> int:
        return self.flat.numel

    def held(self, start: int, stop: int) -> Tensor | None:
        return self.flat.held(start, stop)

    def keeps(self, positions: Tensor) -> Tensor | None:
        return self.flat.keeps(positions)

    def read(self, start: int, stop: int) -> Tensor:
        if (held := self.held(start, stop)) is not None:
            return self.gather(held)
        found = self.flat.read(start, stop)
        bits = found.clone() if found.is_cpu else found.cpu()
        if stop > start:
            self.layer.between(self.begin + start, unsigned(bits))
        return bits.to(found.device)

    def gather(self, positions: Tensor) -> Tensor:
        found = self.flat.gather(positions)
        bits = found.clone() if found.is_cpu else found.cpu()
        self.layer.at(positions.cpu().numpy() + self.begin, unsigned(bits))
        return bits.to(found.device)


def of_anchor(
    anchor: Checkpoint, specs: Sequence[ParameterSpec], held: Collection[int]
) -> dict[int, Live]:
    """What an anchor has of the parameters that are wanted.

    Raises LayoutMismatch if it lacks one, or has it in another shape or dtype.
    """
    flats = flats_of(anchor, specs)
    if lacking := [specs[number].name for number in sorted(held) if number not in flats]:
        raise LayoutMismatch(f"the anchor lacks {lacking[0]!r}, which its layout has")
    return {number: flats[number] for number in held}


@dataclass(frozen=True, slots=True)
class Stated:
    """The digest of a model that was not measured here."""

    total: int

    def digest_of(self, copies: object) -> int:
        """That of one copy."""
        return self.total


def plan_of_deltas(merged: Merged, *, base_version: int, digest: int) -> Plan:
    """What deltas change together, as one.

    Args:
        merged: The deltas.
        base_version: What the first one applies to.
        digest: State digest of the weights after the last one.
    """
    buckets = (bucket for layer in merged.layers.values() for bucket in layer.buckets())
    return Plan(merged.space, buckets, Stated(digest), base_version=base_version)


def plan_of_anchor(merged: Merged, anchor: Checkpoint, *, digest: int) -> Plan:
    """All of an anchor's weights that are wanted, with the deltas after it. Memory: one payload.

    Args:
        merged: The deltas, over the anchor.
        anchor: The anchor.
        digest: State digest of the version.
    """
    space = merged.space
    is_held = np.isin(space.parameter, list(merged.flats))
    buckets = list[Bucket]()
    for section in space.sections:
        tiles = np.arange(section.first, section.stop)
        tiles = tiles[is_held[space.share[tiles]]]
        step = max(1, _BUCKET_BYTES // (TILE * section.item_size + 4 * ALIGNMENT))
        for low in range(0, len(tiles), step):
            some = tiles[low : low + step]
            sizes, pack = whole_sizes(space, some), partial(_pack_anchor, merged, anchor, some)
            buckets.append(Bucket(sizes, torch.device("cpu"), partial(_pack, sizes, pack)))
    return Plan(space, buckets, Stated(digest))


def _pack_anchor(merged: Merged, anchor: Checkpoint, tiles: Ints, into: Changes) -> None:
    unsigned(into.tiles)[:] = tiles
    for run in Table(merged.space, into).runs():
        flat = merged.flats[int(merged.space.parameter[run.share])]
        into.whole[run.there] = flat.read(run.start, run.stop)
    anchor.release()


def _pack(
    sizes: Sizes, fill: Callable[[Changes], None], payload: Tensor, packed: Callable[[], None]
) -> None:
    """Write a payload, see `Bucket`."""
    fill(Changes.of(payload.zero_(), sizes))
    packed()
