"""The codec `class`: positions and steps by the exponents of the old values.

An element is the likelier to change, and changes by the more steps, the smaller it is: each
exponent has a density and a distribution of its own. The old values are at both ends, so that the
exponents cost nothing. Both ends must go over all old values from the first tile of a share that
changes to the last one. Shares in which little changes, and whole tiles, are coded by `gap`.
docs/wire-format.md, section 4.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.delta import gap
from deltasync.delta.changes import Changes
from deltasync.delta.coding import CODECS
from deltasync.delta.detector import HostSnapshot
from deltasync.delta.host import Table
from deltasync.delta.kernels.host import unsigned
from deltasync.delta.staging import Lane
from deltasync.delta.tiles import Ints, Space
from deltasync.errors import InvalidIndices, InvalidTable, TruncatedFrame, WireError, WrongBase
from deltasync.files import steps
from deltasync.files.classes import positions, values
from deltasync.files.classes.bitstream import Bits, Bytes
from deltasync.wire.changes import TILE, Sizes
from deltasync.wire.streams import packed, unpacked

LEAST = 64
"""Changes of a share in a payload, from which on a row pays."""

_MOST_TILES = 1 << 14  # of a row: all of its old bits are read at once
_REST = struct.Struct("<Q")  # tiles that no row has
_ROW = np.dtype(
    [
        ("first", "<u4"),  # tile
        ("last", "<u4"),
        ("count", "<u8"),  # of changes
        ("index_bytes", "<u8"),
        ("value_bytes", "<u8"),
    ]
)


class ClassCodec:
    """Codes each share by the classes of its old values; see `delta.coding.Codec`."""

    def encode(self, changes: Changes, old: HostSnapshot) -> bytes | None:
        table, new = Table(old.space, changes), unsigned(changes.values)
        (before, before_whole), where = old.old(changes), table.positions()
        is_left = np.ones(len(table.tiles), np.bool_)
        rows, index, value = list[tuple[int, ...]](), list[bytes](), list[bytes]()
        for piece in _pieces(table):
            lanes = piece.lanes
            count = lanes.stop - lanes.start
            if count < LEAST:
                continue
            share, start, stop = _run(old.space, piece.first, piece.last)
            dtype = old.space.shares[share].spec.dtype
            there = (where[lanes] - start).astype(np.int32)
            zigzag = steps.zigzag(new[lanes], before[lanes], dtype)
            one = positions.encode(there, unsigned(old.lines[share][start:stop]), dtype)
            other = values.encode(zigzag, before[lanes], dtype)
            if _ROW.itemsize + len(one) + len(other) <= count * (2 + dtype.item_size):
                is_left[piece.tiles] &= table.counts[piece.tiles] == 0
                rows.append((piece.first, piece.last, count, len(one), len(other)))
                index.append(one)
                value.append(other)
        rest: bytes | None = b""
        if is_left.any():
            lanes_left = np.repeat(is_left, table.counts)
            left = _changes(
                table.tiles[is_left],
                table.counts[is_left],
                table.places[lanes_left],
                new[lanes_left],
                unsigned(changes.whole),
            )
            rest = gap.encode(left, before[lanes_left], before_whole)
        if rest is None:
            return None
        head = _REST.pack(int(is_left.sum())) + np.array(rows, _ROW).tobytes()
        return packed([head, b"".join(index), b"".join(value), rest])

    def decode(self, data: memoryview, sizes: Sizes, lane: Lane) -> Changes:
        head, index, value, rest = unpacked(data, sizes.num_bytes)
        if len(head) < _REST.size or (len(head) - _REST.size) % _ROW.itemsize:
            raise TruncatedFrame(f"a table of {len(head)} bytes")
        rows = head[_REST.size :].view(_ROW)
        (num_left,) = _REST.unpack(head[: _REST.size].tobytes())
        _check(rows, len(index), len(value), sizes, lane.space)
        if num_left > sizes.tiles:
            raise InvalidTable("more tiles in no row than there are")
        places = sizes.places - int(rows["count"].sum())
        others = _rest(rest, Sizes(sizes.item_size, num_left, places, sizes.whole), lane)
        found, is_held, index_at, value_at = list[tuple[Ints, Bits]](), True, 0, 0
        for row in rows.tolist():
            first, last, count, index_bytes, value_bytes = row
            blocks = (
                index[index_at : (index_at := index_at + index_bytes)],
                value[value_at : (value_at := value_at + value_bytes)],
            )
            share, start, stop = _run(lane.space, first, last)
            old = lane.span(share, start, stop)
            if old is None:
                is_held, bits = False, np.zeros(count, f"u{sizes.item_size}")
                found.append((_anywhere(first, last, count, others), bits))
                continue
            where, new = _decoded(lane.space, share, blocks, count, old)
            found.append((first * TILE + where.astype(np.int64), new))
        made = _joined(found, others)
        if is_held and made.sizes.tiles != sizes.tiles:
            raise InvalidIndices("a coded payload has not as many tiles as its bucket says")
        return made


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tiles of a share with all their lanes.

    Attributes:
        first, last: Tiles that have some.
        tiles, lanes: Where they are among those of a payload.
    """

    first: int
    last: int
    tiles: slice
    lanes: slice


def _pieces(table: Table) -> Iterator[_Piece]:
    """All lanes, by share."""
    cuts = np.concatenate(([0], table.ends))
    for _, lanes in table.by_share():
        low = int(table.ends.searchsorted(lanes.start, "right"))
        stop = int(table.ends.searchsorted(lanes.stop)) + 1
        while low < stop:
            beyond = table.tiles[low] + _MOST_TILES
            high = min(stop, int(table.tiles.searchsorted(beyond)))
            sparse = low + np.flatnonzero(table.counts[low:high])
            if len(sparse):
                first, last = int(table.tiles[sparse[0]]), int(table.tiles[sparse[-1]])
                yield _Piece(first, last, slice(low, high), slice(int(cuts[low]), int(cuts[high])))
            low = high


def _run(space: Space, first: int, last: int) -> tuple[int, int, int]:
    """(share, start, stop): the elements of tiles [first, last] of one share."""
    share, start, numel = space.find(np.array([first, last]))
    return int(share[0]), int(start[0]), int(start[1] + numel[1])


def _check(
    rows: NDArray[np.void], index_bytes: int, value_bytes: int, sizes: Sizes, space: Space
) -> None:
    """Raises WireError unless rows are of this space, in order, and have what is there."""
    section = space.section_of(sizes.item_size)
    if not len(rows):
        return
    first, last = (rows[name].astype(np.int64) for name in ("first", "last"))
    if section is None or not section.first <= first.min() <= last.max() < section.stop:
        raise InvalidTable("a row is of tiles that are not there")
    if not (first <= last).all() or not (first[1:] > last[:-1]).all():
        raise InvalidTable("rows overlap, or are unsorted")
    (share, start, _), (same, end, numel) = space.find(first), space.find(last)
    if (last - first >= _MOST_TILES).any() or (share != same).any():
        raise InvalidTable("a row is of several shares, or of too many tiles")
    spans = end + numel - start
    if not ((rows["count"] > 0) & (rows["count"] <= spans.astype(np.uint64))).all():
        raise InvalidTable("a row has more changes than elements, or none")
    if int(rows["count"].sum()) > sizes.places:
        raise InvalidTable("rows have more changes than their bucket says")
    for name, size in (("index_bytes", index_bytes), ("value_bytes", value_bytes)):
        if rows[name].max() > size or int(rows[name].sum()) != size:
            raise InvalidTable(f"{name} of the rows are not those of the blocks")


def _decoded(
    space: Space, share: int, blocks: tuple[Bytes, Bytes], count: int, old: Bits
) -> tuple[NDArray[np.int32], Bits]:
    """(int32[count] places in what a row covers, unsigned[count] new bits)."""
    spec = space.shares[share].spec
    try:
        where = positions.decode(blocks[0], count, old, spec.dtype)
        before = old[where]
        return where, steps.stepped(
            values.decode(blocks[1], before, spec.dtype), before, spec.dtype
        )
    except WireError as error:
        raise WrongBase(
            f"{spec.name}: the delta was made from other values than those held here, or is "
            "damaged; rejoin for a full sync"
        ) from error


def _anywhere(first: int, last: int, count: int, others: Changes) -> Ints:
    """int64[count]: codes of a row that nobody can decode, in its tiles that do not go whole."""
    tiles = np.setdiff1d(np.arange(first, last + 1), others.table()[0], assume_unique=True)
    codes: Ints = (tiles[: -(-count // TILE), None] * TILE + np.arange(TILE)).ravel()[:count]
    if len(codes) < count:
        raise InvalidTable("a row has more changes than elements")
    return codes


def _rest(data: Bytes, sizes: Sizes, lane: Lane) -> Changes:
    """What no row has, checked. Raises WireError."""
    if sizes.tiles:
        return gap.decode(data.data, sizes, lane.old)
    if len(data) or sizes.places or sizes.whole:
        raise TruncatedFrame("tiles that no row has are missing, or are none")
    return Changes.of(torch.zeros(sizes.num_bytes, dtype=torch.uint8, device="cpu"), sizes)


def _joined(found: list[tuple[Ints, Bits]], rest: Changes) -> Changes:
    """Elements of rows, as (TILE * tile + place, bits), and the rest, in order."""
    tiles, counts = rest.table()
    codes = np.repeat(tiles * TILE, counts) + rest.places.numpy().view(np.uint16)
    codes = np.concatenate([codes, *(one for one, _ in found)])
    bits = np.concatenate([unsigned(rest.values), *(one for _, one in found)])
    order = np.argsort(codes, kind="stable")
    codes, bits = codes[order], bits[order]
    tiles, counts = gap.table_of(codes, tiles[counts == 0])
    return _changes(tiles, counts, codes % TILE, bits, unsigned(rest.whole))


def _changes(
    tiles: Ints, counts: Ints, places: NDArray[np.integer], values: Bits, whole: Bits
) -> Changes:
    sizes = Sizes(values.itemsize, len(tiles), len(places), len(whole))
    changes = Changes.of(torch.zeros(sizes.num_bytes, dtype=torch.uint8, device="cpu"), sizes)
    columns = changes.tiles, changes.counts, changes.places, changes.values, changes.whole
    for column, numbers in zip(columns, (tiles, counts, places, values, whole), strict=True):
        unsigned(column)[:] = numbers
    return changes


CODECS["class"] = ClassCodec()
