"""Which chunk goes where: the rows and buckets of a sync, planned with numpy from counts alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.columns import Ints, cut
from deltasync.delta.digests import ChunkTable
from deltasync.wire.codecs import INDEX_ITEM_BYTES, IndexCodec, ValueCodec
from deltasync.wire.table import (
    ALIGNMENT,
    MAX_SPARSE_SPAN,
    ROW,
    RowKind,
    Rows,
    block_offsets,
)

ROW_BYTES = ROW.itemsize + 2 * ALIGNMENT
"""The most that a row takes beside its indices and values."""

UNCHANGED = 0
"""Kind of a chunk that is not sent; the others are those of RowKind."""


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """One payload, before it is written.

    Attributes:
        rows: The patch table.
        first_chunk: int64[rows], the first chunk of each.
        last_chunk: The last one of the bucket.
        index_at, value_at: int64[rows], where indices and values begin, in bytes.
        num_bytes: Length of the payload.
        pads: int64[n]: 8-byte words of the payload with the ends of dense rows and padding.
        dense: int64[4, n], for each dense piece: chunk, first element in it, elements, where its
            first value goes, in elements.
    """

    rows: Rows
    first_chunk: Ints
    last_chunk: int
    index_at: Ints
    value_at: Ints
    num_bytes: int
    pads: Ints
    dense: Ints

    @property
    def is_sparse(self) -> NDArray[np.bool_]:
        """bool[rows]."""
        return np.asarray(self.rows["kind"] == RowKind.SPARSE)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Chunks to send, or parts of dense ones, in order. Each attribute has one entry a piece."""

    chunk: Ints
    begin: Ints  # within the chunk
    numel: Ints
    count: Ints
    kind: Ints
    parameter: Ints
    start: Ints  # within the parameter
    item_size: Ints
    is_head: NDArray[np.bool_]  # begins a row, wherever the bucket begins


def most_sparse(bucket_bytes: int, item_sizes: Ints) -> Ints:
    """int64[n]: the most changes of a chunk that fit into one bucket."""
    room = max(0, bucket_bytes - ROW_BYTES)
    fits: Ints = room // (INDEX_ITEM_BYTES + item_sizes)
    return fits


def plan_buckets(
    table: ChunkTable,
    item_sizes: Ints,
    origins: Ints,
    kinds: Ints,
    counts: Ints,
    *,
    bucket_bytes: int,
) -> Iterator[PlannedBucket]:
    """Distribute chunks over buckets of at most `bucket_bytes`, slicing dense ones that do not fit.

    Args:
        table: The chunks of the layout.
        item_sizes: int64[chunks], bytes of an element.
        origins: int64[chunks], see `origins_of`; rows do not span several.
        kinds: int64[chunks], UNCHANGED or a RowKind.
        counts: int64[chunks], changes of the sparse ones: at most `most_sparse`.
        bucket_bytes: Largest payload.
    """
    pieces = _pieces(table, item_sizes, origins, kinds, counts, bucket_bytes)
    data = pieces.count * pieces.item_size
    data += np.where(pieces.kind == RowKind.SPARSE, pieces.count * INDEX_ITEM_BYTES, 0)
    used = np.cumsum(data + ROW_BYTES * pieces.is_head)
    begin = 0
    while begin < len(used):
        used_before = int(used[begin - 1]) if begin else 0
        room = bucket_bytes - (0 if pieces.is_head[begin] else ROW_BYTES)
        end = max(begin + 1, int(np.searchsorted(used, used_before + room, side="right")))
        yield _planned(pieces, begin, end)
        begin = end


def _pieces(
    table: ChunkTable,
    item_sizes: Ints,
    origins: Ints,
    kinds: Ints,
    counts: Ints,
    bucket_bytes: int,
) -> _Pieces:
    chunk = np.flatnonzero(kinds)
    kind, numel, item_size = kinds[chunk], table.numel[chunk], item_sizes[chunk]
    is_dense = kind == RowKind.DENSE
    room = (bucket_bytes - ROW_BYTES) // item_size
    begin = np.zeros_like(chunk)
    if (is_dense & (numel > room)).any():
        which, begin = cut(numel, np.where(is_dense, room, numel))
        chunk, kind, item_size, is_dense = (a[which] for a in (chunk, kind, item_size, is_dense))
        numel = np.where(is_dense, np.minimum(room[which], numel[which] - begin), numel[which])
    parameter, start, origin = table.parameter[chunk], table.start[chunk] + begin, origins[chunk]
    stop = start + numel
    is_head = np.ones(len(chunk), np.bool_)
    follows = (parameter[1:] == parameter[:-1]) & (kind[1:] == kind[:-1])
    joins = np.where(is_dense[1:], start[1:] == stop[:-1], origin[1:] == origin[:-1])
    is_head[1:] = ~(follows & joins)
    count = np.where(is_dense, numel, counts[chunk])
    return _Pieces(chunk, begin, numel, count, kind, parameter, start, item_size, is_head)


def origins_of(table: ChunkTable) -> Ints:
    """int64[chunks]: the flat position that int32 indices of a chunk count from.

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
    return PlannedBucket(
        rows=rows,
        first_chunk=pieces.chunk[first],
        last_chunk=int(pieces.chunk[end - 1]),
        index_at=index_at,
        value_at=value_at,
        num_bytes=num_bytes,
        pads=_pads(rows, value_at, num_bytes),
        dense=_dense(
            pieces, begin + np.flatnonzero(pieces.kind[here] == RowKind.DENSE), first, value_at
        ),
    )


def _dense(pieces: _Pieces, which: Ints, first: Ints, value_at: Ints) -> Ints:
    row = np.searchsorted(first, which, side="right") - 1
    item_size = pieces.item_size[which]
    place = value_at[row] // item_size + pieces.start[which] - pieces.start[first][row]
    return np.stack((pieces.chunk[which], pieces.begin[which], pieces.numel[which], place))


def _rows(pieces: _Pieces, first: Ints, last: Ints) -> Rows:
    """The rows that pieces `first` to `last` make, without their counts and lengths."""
    rows: Rows = np.zeros(len(first), ROW)
    is_sparse = pieces.kind[first] == RowKind.SPARSE
    rows["parameter"] = pieces.parameter[first]
    rows["kind"] = pieces.kind[first]
    rows["index_codec"] = np.where(is_sparse, IndexCodec.RAW, IndexCodec.NONE)
    rows["value_codec"] = ValueCodec.RAW
    rows["start"] = pieces.start[first]
    rows["span"] = pieces.start[last] + pieces.numel[last] - pieces.start[first]
    return rows


def _pads(rows: Rows, value_at: Ints, num_bytes: int) -> Ints:
    dense = rows["kind"] == RowKind.DENSE
    ends = value_at[dense] + rows["value_bytes"][dense].astype(np.int64)
    padded: Ints = ends[(ends % ALIGNMENT != 0) & (ends < num_bytes)] // ALIGNMENT
    return padded
