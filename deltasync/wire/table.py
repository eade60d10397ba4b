"""The patch table of one bucket: a columnar array of which every bound is checked at once.

docs/wire-format.md, section 3. Offsets are not on the wire: they follow from the lengths.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import InvalidTable, TruncatedFrame, UnknownCodec
from deltasync.wire.codecs import INDEX_ITEM_BYTES, IndexCodec, ValueCodec

ALIGNMENT = 8
MAX_SPARSE_SPAN = (1 << 31) - 1

ROW = np.dtype(
    [
        ("parameter", "<u4"),
        ("kind", "u1"),
        ("index_codec", "u1"),
        ("value_codec", "u1"),
        ("reserved", "u1"),
        ("start", "<u8"),
        ("span", "<u8"),
        ("count", "<u8"),
        ("index_bytes", "<u8"),
        ("value_bytes", "<u8"),
    ]
)
Rows: TypeAlias = NDArray[np.void]
Ints: TypeAlias = NDArray[np.int64]


class RowKind(IntEnum):
    """What a row says of its span: some elements, or all."""

    SPARSE = 1
    DENSE = 2


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def block_offsets(rows: Rows) -> tuple[Ints, Ints, int]:
    """Where each row's indices and values begin, and where the payload ends, in bytes."""
    lengths = np.empty((len(rows), 2), np.int64)
    lengths[:, 0], lengths[:, 1] = rows["index_bytes"], rows["value_bytes"]
    spaces = (lengths + (ALIGNMENT - 1)) & -ALIGNMENT
    begins = np.cumsum(spaces).reshape(spaces.shape) - spaces + len(rows) * ROW.itemsize
    used = np.flatnonzero(lengths)
    end = int((begins + lengths).flat[used[-1]]) if len(used) else len(rows) * ROW.itemsize
    return begins[:, 0], begins[:, 1], end


def read_table(
    table: NDArray[np.uint8],
    *,
    payload_bytes: int,
    numels: NDArray[np.uint64],
    item_sizes: NDArray[np.uint64],
    after: tuple[int, int] = (0, 0),
) -> tuple[Rows, Ints, Ints]:
    """(rows, where indices begin, where values begin) of one bucket: see `block_offsets`.

    Each rule from W10 to W13 and W17 is checked.

    Args:
        table: The first bytes of the payload, as many as the declared rows take; fewer if
            the payload ends before.
        payload_bytes: Length of the whole payload, inflated.
        numels: uint64[parameters], elements of each parameter of the layout.
        item_sizes: uint64[parameters], bytes of one element of each.
        after: (parameter, end): where the last row of the bucket before ended.

    Raises:
        TruncatedFrame, InvalidTable, UnknownCodec: The first rule that is broken.
    """
    if not len(table) or len(table) % ROW.itemsize:
        raise TruncatedFrame(f"payload of {payload_bytes} bytes cannot hold its patch table")
    rows: Rows = np.frombuffer(table.tobytes(), ROW)
    _check_codes(rows, len(numels))
    _check_bounds(rows, numels[rows["parameter"]])
    index_at, value_at = _offsets(rows, item_sizes[rows["parameter"]], payload_bytes)
    _check_order(rows, after)
    return rows, index_at, value_at


def _require(good: NDArray[np.bool_], rule: str) -> None:
    if not good.all():
        row = int(np.argmin(good))
        raise InvalidTable(f"row {row}: {rule}", row=row)


def _check_codes(rows: Rows, num_parameters: int) -> None:
    _require(rows["parameter"] < num_parameters, "names a parameter that the layout has not")
    sparse, dense = rows["kind"] == RowKind.SPARSE, rows["kind"] == RowKind.DENSE
    _require(sparse | dense, "unknown kind")
    _require(rows["reserved"] == 0, "reserved byte is not 0")
    index_codec = np.where(sparse, IndexCodec.RAW, IndexCodec.NONE)
    if not ((rows["index_codec"] == index_codec) & (rows["value_codec"] == ValueCodec.RAW)).all():
        raise UnknownCodec("a row has an index or value codec that this build does not read")


def _check_bounds(rows: Rows, numel: NDArray[np.uint64]) -> None:
    start, span, count = rows["start"], rows["span"], rows["count"]
    # In this order, so that no sum of two unsigned numbers can wrap around.
    _require((span >= 1) & (span <= numel), "span beyond the parameter")
    _require(start <= numel - span, "start + span beyond the parameter")
    sparse = rows["kind"] == RowKind.SPARSE
    _require(~sparse | (span <= MAX_SPARSE_SPAN), "span of a sparse row of 2^31 or more")
    _require((count >= 1) & (count <= span), "count beyond the span")
    _require(sparse | (count == span), "count of a dense row is not its span")


def _offsets(rows: Rows, item_size: NDArray[np.uint64], payload_bytes: int) -> tuple[Ints, Ints]:
    sparse = rows["kind"] == RowKind.SPARSE
    # count <= 2^62 and item size <= 8 could wrap; a length within the payload cannot.
    _require(rows["count"] <= payload_bytes, "more elements than the payload has bytes")
    index_bytes = np.where(sparse, rows["count"] * np.uint64(INDEX_ITEM_BYTES), 0)
    _require(rows["index_bytes"] == index_bytes, "index bytes do not fit the count")
    _require(rows["value_bytes"] == rows["count"] * item_size, "value bytes do not fit the count")
    if float(rows["index_bytes"].sum(dtype=float) + rows["value_bytes"].sum(dtype=float)) > 2**53:
        raise TruncatedFrame("the blocks are longer than any payload")
    index_at, value_at, end = block_offsets(rows)
    if end != payload_bytes:
        raise TruncatedFrame(f"payload of {payload_bytes} bytes, its blocks end at {end}")
    return index_at, value_at


def _check_order(rows: Rows, after: tuple[int, int]) -> None:
    parameter = np.concatenate(([np.uint64(after[0])], rows["parameter"].astype(np.uint64)))
    end = np.concatenate(([np.uint64(after[1])], rows["start"] + rows["span"]))
    later = parameter[1:] > parameter[:-1]
    follows = (parameter[1:] == parameter[:-1]) & (rows["start"] >= end[:-1])
    _require(later | follows, "rows overlap or are out of order")
