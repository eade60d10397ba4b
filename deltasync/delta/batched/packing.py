"""Which chunk goes where: the rows and buckets of a sync, planned with numpy from counts alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.digests import ChunkTable, DigestLedger, Ints, cut
from deltasync.wire.codecs import INDEX_ITEM_BYTES, IndexCodec, ValueCodec
from deltasync.wire.table import ALIGNMENT, MAX_SPARSE_SPAN, ROW, RowKind, Rows, block_offsets

ROW_BYTES = ROW.itemsize + 2 * ALIGNMENT
"""The most that a row takes beside its indices and values."""

UNCHANGED = 0
"""Kind of a chunk that is not sent; the others are those of RowKind."""

LISTED = 3
"""Kind of a piece that is sent whole, with its indices: it is no run in its parameter."""


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """One payload, before it is written.

    Attributes:
        rows: The patch table; positions count from the beginning of a region.
        is_sparse: bool[rows], which of them have changes of sparse chunks; others have everything.
        first_chunk: int64[rows], the first chunk of each.
        last_chunk: The last one of the bucket.
        index_at, value_at: int64[rows], where indices and values begin, in bytes.
        num_bytes: Length of the payload.
        pads: int64[n]: 8-byte words of the payload with the ends of these others and padding.
        dense: int64[6, n], of the others: for each piece chunk, first element in it, elements,
            where its first value goes, in elements, and its first index, in int32 units, 0 for
            none; the position that its indices count from.
    """

    rows: Rows
    is_sparse: NDArray[np.bool_]
    first_chunk: Ints
    last_chunk: int
    index_at: Ints
    value_at: Ints
    num_bytes: int
    pads: Ints
    dense: Ints


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Chunks to send, or parts of those sent whole, in order: columns with an entry for each."""

    chunk: Ints
    begin: Ints  # within the chunk
    numel: Ints
    count: Ints
    kind: Ints
    parameter: Ints
    start: Ints  # within what is held of the parameter
    place: Ints  # the same, with what is left out
    span: Ints
    item_size: Ints
    is_head: NDArray[np.bool_]  # begins a row, wherever the bucket begins


def most_sparse(bucket_bytes: int, item_sizes: Ints) -> Ints:
    """int64[n]: the most changes of a chunk that fit into one bucket."""
    room = max(0, bucket_bytes - ROW_BYTES)
    fits: Ints = room // (INDEX_ITEM_BYTES + item_sizes)
    return fits


def plan_buckets(
    ledger: DigestLedger, origins: Ints, kinds: Ints, counts: Ints, *, bucket_bytes: int
) -> Iterator[PlannedBucket]:
    """Distribute chunks over buckets of at most `bucket_bytes`, slicing dense ones that do not fit.

    Args:
        ledger: Whose chunks are meant.
        origins: int64[chunks], see `origins_of`; rows do not span several.
        kinds: int64[chunks], UNCHANGED or a RowKind.
        counts: int64[chunks], changes of the sparse ones: at most `most_sparse`.
        bucket_bytes: Largest payload.
    """
    pieces = _pieces(ledger, origins, kinds, counts, bucket_bytes)
    data = pieces.count * pieces.item_size
    data += np.where(pieces.kind == RowKind.DENSE, 0, pieces.count * INDEX_ITEM_BYTES)
    used = np.cumsum(data + ROW_BYTES * pieces.is_head)
    begin = 0
    while begin < len(used):
        used_before = int(used[begin - 1]) if begin else 0
        room = bucket_bytes - (0 if pieces.is_head[begin] else ROW_BYTES)
        end = max(begin + 1, int(np.searchsorted(used, used_before + room, side="right")))
        yield _planned(pieces, begin, end)
        begin = end


def _pieces(
    ledger: DigestLedger, origins: Ints, kinds: Ints, counts: Ints, bucket_bytes: int
) -> _Pieces:
    table, chunk = ledger.table, np.flatnonzero(kinds)
    kind, numel, parameter = kinds[chunk], table.numel[chunk], table.parameter[chunk]
    item_size = ledger.item_sizes[parameter]
    is_dense = kind == RowKind.DENSE
    most = item_size + INDEX_ITEM_BYTES * (ledger.gaps[parameter] > 0)
    room = (bucket_bytes - ROW_BYTES) // most
    begin = np.zeros_like(chunk)
    if (is_dense & (numel > room)).any():
        which, begin = cut(numel, np.where(is_dense, room, numel))
        chunk, kind, item_size, is_dense = (a[which] for a in (chunk, kind, item_size, is_dense))
        numel = np.where(is_dense, np.minimum(room[which], numel[which] - begin), numel[which])
    parameter, start, origin = table.parameter[chunk], table.start[chunk] + begin, origins[chunk]
    place, span = _spread(ledger, parameter, start, numel)
    kind = np.where(is_dense & (span > numel), LISTED, kind)
    is_head = np.ones(len(chunk), np.bool_)
    follows = (parameter[1:] == parameter[:-1]) & (kind[1:] == kind[:-1])
    is_run = kind[1:] == RowKind.DENSE
    joins = np.where(is_run, place[1:] == (place + span)[:-1], origin[1:] == origin[:-1])
    is_head[1:] = ~(follows & joins)
    return _Pieces(
        chunk=chunk,
        begin=begin,
        numel=numel,
        count=np.where(is_dense, numel, counts[chunk]),
        kind=kind,
        parameter=parameter,
        start=start,
        place=place,
        span=span,
        item_size=item_size,
        is_head=is_head,
    )


def _spread(ledger: DigestLedger, parameter: Ints, start: Ints, numel: Ints) -> tuple[Ints, Ints]:
    """(place, span): where pieces begin, and how long they are, with what lies between rows."""
    cols, gap, last = ledger.cols[parameter], ledger.gaps[parameter], start + numel - 1
    place = start + start // cols * gap
    return place, last + last // cols * gap + 1 - place


def scattered(ledger: DigestLedger) -> NDArray[np.bool_]:
    """bool[chunks]: which chunks are no run in their parameter."""
    table = ledger.table
    _, span = _spread(ledger, table.parameter, table.start, table.numel)
    return np.asarray(span > table.numel)


def origins_of(table: ChunkTable) -> Ints:
    """int64[chunks]: the position that int32 indices of a chunk count from in its region.

    That is the beginning of its parameter, or its own where the indices could wrap around.
    """
    numels = np.bincount(table.parameter, weights=table.numel)
    origins: Ints = np.where(numels[table.parameter] > MAX_SPARSE_SPAN, table.start, 0)
    return origins


def _planned(pieces: _Pieces, begin: int, end: int) -> PlannedBucket:
    here = slice(begin, end)
    is_head = pieces.is_head[here].copy()
    is_head[0] = True
    heads = np.flatnonzero(is_head)
    first, last = begin + heads, begin + np.append(heads[1:], end - begin) - 1
    rows = _rows(pieces, first, last)
    rows["count"] = total = np.add.reduceat(pieces.count[here], heads)
    rows["index_bytes"] = np.where(rows["kind"] == RowKind.SPARSE, total * INDEX_ITEM_BYTES, 0)
    rows["value_bytes"] = total * pieces.item_size[first]
    index_at, value_at, num_bytes = block_offsets(rows)
    whole = begin + np.flatnonzero(pieces.kind[here] != RowKind.SPARSE)
    is_sparse = pieces.kind[first] == RowKind.SPARSE
    return PlannedBucket(
        rows=rows,
        is_sparse=is_sparse,
        first_chunk=pieces.chunk[first],
        last_chunk=int(pieces.chunk[end - 1]),
        index_at=index_at,
        value_at=value_at,
        num_bytes=num_bytes,
        pads=_pads(rows[~is_sparse], index_at[~is_sparse], value_at[~is_sparse], num_bytes),
        dense=_dense(pieces, whole, first, index_at, value_at),
    )


def _dense(pieces: _Pieces, which: Ints, first: Ints, index_at: Ints, value_at: Ints) -> Ints:
    row = np.searchsorted(first, which, side="right") - 1
    ahead = np.cumsum(pieces.count) - pieces.count
    before = ahead[which] - ahead[first][row]
    index = np.where(pieces.kind[which] == LISTED, index_at[row] // INDEX_ITEM_BYTES + before, 0)
    return np.stack(
        (
            pieces.chunk[which],
            pieces.begin[which],
            pieces.numel[which],
            value_at[row] // pieces.item_size[which] + before,
            index,
            pieces.place[first][row],
        )
    )


def _rows(pieces: _Pieces, first: Ints, last: Ints) -> Rows:
    """The rows that pieces `first` to `last` make, without their counts and lengths."""
    rows: Rows = np.zeros(len(first), ROW)
    is_dense = pieces.kind[first] == RowKind.DENSE
    rows["parameter"] = pieces.parameter[first]
    rows["kind"] = np.where(is_dense, RowKind.DENSE, RowKind.SPARSE)
    rows["index_codec"] = np.where(is_dense, IndexCodec.NONE, IndexCodec.RAW)
    rows["value_codec"] = ValueCodec.RAW
    rows["start"] = pieces.place[first]
    rows["span"] = pieces.place[last] + pieces.span[last] - pieces.place[first]
    return rows


def _pads(rows: Rows, index_at: Ints, value_at: Ints, num_bytes: int) -> Ints:
    index_ends = index_at + rows["index_bytes"].astype(np.int64)
    ends = np.append(index_ends, value_at + rows["value_bytes"].astype(np.int64))
    padded: Ints = ends[(ends % ALIGNMENT != 0) & (ends < num_bytes)] // ALIGNMENT
    return padded
