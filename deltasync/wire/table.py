"""The patch table of one bucket: a columnar array of which every bound is checked at once.

docs/wire-format.md, section 3. Offsets are not on the wire: they follow from the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import InvalidTable, TruncatedFrame, UnknownCodec
from deltasync.wire.codecs import INDEX_ITEM_BYTES, IndexCodec, ValueCodec

ALIGNMENT = 8
MAX_SPARSE_SPAN = (1 << 31) - 1
"""Elements that a sparse row may cover: its int32 indices count from the row's `start`, a uint64.

`changed` of `delta.kernels` finds them, or `locate` of its triton.py. A longer parameter has a row
for each chunk: see `merged` in `delta.host.backend`, and `origins_of` in `delta.batched.packing`.
"""

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


@dataclass(slots=True)
class Entry:
    """A row of a table as numbers: many times faster to read one by one than the array's."""

    parameter: int
    kind: int
    index_codec: int
    value_codec: int
    reserved: int
    start: int
    span: int
    count: int
    index_bytes: int
    value_bytes: int


class RowKind(IntEnum):
    """What a row says of its span: some elements, or all."""

    SPARSE = 1
    DENSE = 2


# The upper half of a row's first eight bytes: kind and codecs. There are no others yet.
_SPARSE = RowKind.SPARSE | IndexCodec.RAW << 8 | ValueCodec.RAW << 16
_DENSE = RowKind.DENSE | IndexCodec.NONE << 8 | ValueCodec.RAW << 16
_PARAMETER = (1 << 32) - 1


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def columns_of(rows: Rows) -> Ints:
    """int64[6, rows]: a table by column, for whoever computes with most of them.

    The first column has the number of the parameter in its lower 32 bits, and above them kind,
    codecs and the reserved byte. The others are those from `start` on.
    """
    words: Ints = rows.view("<i8").reshape(len(rows), -1)
    return words.T.copy()


def block_offsets(rows: Rows) -> tuple[Ints, Ints, int]:
    """Where each row's indices and values begin, and where the payload ends, in bytes.

    There is a row, and the last one has values.
    """
    lengths: Ints = rows.view("<i8").reshape(len(rows), -1)[:, -2:]
    spaces = (lengths + (ALIGNMENT - 1)) & -ALIGNMENT
    begins = np.cumsum(spaces).reshape(spaces.shape) - spaces + len(rows) * ROW.itemsize
    return begins[:, 0], begins[:, 1], int(begins[-1, 1] + lengths[-1, 1])


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
    columns = columns_of(rows)
    parameter = columns[0] & _PARAMETER
    _require(parameter < len(numels), "names a parameter that the layout has not")
    codes, unsigned = columns[0] >> 32, columns.view(np.uint64)
    is_sparse = codes == _SPARSE
    if not (is_sparse | (codes == _DENSE)).all():
        _refuse_codes(rows)
    _check_bounds(unsigned, is_sparse, numels[parameter])
    _check_lengths(unsigned, is_sparse, item_sizes[parameter], payload_bytes)
    index_at, value_at, end = block_offsets(rows)
    if end != payload_bytes:
        raise TruncatedFrame(f"payload of {payload_bytes} bytes, its blocks end at {end}")
    _check_order(parameter, columns[1], columns[2], after)
    return rows, index_at, value_at


def _require(good: NDArray[np.bool_], rule: str) -> None:
    if not good.all():
        row = int(np.argmin(good))
        raise InvalidTable(f"row {row}: {rule}", row=row)


def _refuse_codes(rows: Rows) -> None:
    """Raise what is wrong with rows that are not all `_SPARSE` or `_DENSE`."""
    kinds = rows["kind"]
    _require((kinds == RowKind.SPARSE) | (kinds == RowKind.DENSE), "unknown kind")
    _require(rows["reserved"] == 0, "reserved byte is not 0")
    raise UnknownCodec("a row has an index or value codec that this build does not read")


def _check_bounds(
    columns: NDArray[np.uint64], is_sparse: NDArray[np.bool_], numel: NDArray[np.uint64]
) -> None:
    start, span, count = columns[1:4]
    # In this order, so that no sum of two unsigned numbers can wrap around.
    _require((span >= 1) & (span <= numel), "span beyond the parameter")
    _require(start <= numel - span, "start + span beyond the parameter")
    _require(~is_sparse | (span <= MAX_SPARSE_SPAN), "span of a sparse row of 2^31 or more")
    _require((count >= 1) & (count <= span), "count beyond the span")
    _require(is_sparse | (count == span), "count of a dense row is not its span")


def _check_lengths(
    columns: NDArray[np.uint64],
    is_sparse: NDArray[np.bool_],
    item_size: NDArray[np.uint64],
    payload_bytes: int,
) -> None:
    count, index_bytes, value_bytes = columns[3:]
    # count <= 2^62 and item size <= 8 could wrap; a length within the payload cannot.
    _require(count <= payload_bytes, "more elements than the payload has bytes")
    indices = count * (is_sparse * np.uint64(INDEX_ITEM_BYTES))
    _require(index_bytes == indices, "index bytes do not fit the count")
    _require(value_bytes == count * item_size, "value bytes do not fit the count")
    if float(columns[4:].sum(dtype=float)) > 2**53:
        raise TruncatedFrame("the blocks are longer than any payload")


def _check_order(parameter: Ints, start: Ints, span: Ints, after: tuple[int, int]) -> None:
    before = np.concatenate(([after[0]], parameter[:-1]))
    end = np.concatenate(([after[1]], (start + span)[:-1]))
    good = (parameter > before) | ((parameter == before) & (start >= end))
    _require(good, "rows overlap or are out of order")
