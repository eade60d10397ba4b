"""Payloads coded in the memory of the device where they were packed.

docs/wire-format.md, section 4. A row is coded in blocks, or raw; no section is compressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.batched.old import SparseRows, read_old
from deltasync.delta.batched.weights import BatchedWeights, upload
from deltasync.delta.bits import integer_dtype
from deltasync.delta.codecs.coding import LONGEST, Coded
from deltasync.delta.codecs.device_base import DeviceBlocks, DeviceRows
from deltasync.delta.codecs.device_blocks import encode_rows
from deltasync.delta.codecs.device_tiles import Copies, begins_of
from deltasync.delta.digests import Ints
from deltasync.wire.codecs import INDEX_ITEM_BYTES, IndexCodec, ValueCodec
from deltasync.wire.coded import HEADER_BYTES, ROW_BYTES, CodedTable, Lengths
from deltasync.wire.table import Rows, block_offsets


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A payload on the device, and the weights that it changes as they were before.

    Attributes:
        payload: uint8[n], as section 3 has it; only read.
        rows: Its patch table.
        weights: The sender's snapshot.
        number: int64[rows], which of its parameters each row is of.
        start: int64[rows], where the row begins in what is held of that.
        is_known: bool[rows], which rows are sparse and find their old bits there.
    """

    payload: Tensor
    rows: Rows
    weights: BatchedWeights
    number: Ints
    start: Ints
    is_known: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Rows of one dtype, and where their changes are brought together.

    Attributes:
        which: int64[k], the rows.
        rows: What is known of them.
        indices, new, old: int32[n] and int[n] of the dtype's size, on the device.
    """

    which: Ints
    rows: DeviceRows
    indices: Tensor
    new: Tensor
    old: Tensor


def encode(packed: Packed) -> Coded | None:
    """The form of a payload that is coded in blocks; None if that gets no shorter.

    Rows for which blocks do not pay stay raw. Waits for the device once for each dtype.
    """
    return _Encoding(packed).coded() if packed.is_known.any() else None


class _Encoding:
    """One payload on its way out.

    Its arrays say of each row how long its blocks are, and where on the device they lie.
    """

    def __init__(self, packed: Packed) -> None:
        self._packed, self._device = packed, packed.weights.device
        rows = packed.rows
        self._coded_rows = rows.copy()
        self._span, self._count, self._index_bytes, self._value_bytes = (
            rows[name].astype(np.int64) for name in ("span", "count", "index_bytes", "value_bytes")
        )
        index_at, value_at, _ = block_offsets(rows)
        self._index_from = packed.payload.data_ptr() + index_at
        self._value_from = packed.payload.data_ptr() + value_at
        self._is_coded = np.zeros(len(rows), np.bool_)

    def coded(self) -> Coded | None:
        """See `encode`."""
        groups = [self._group(which) for which in self._dtypes()]
        digests = self._read(groups)
        # What these hold is read by the last launch.
        made = [encode_rows(one.rows, one.indices, one.new, one.old) for one in groups]
        for group, blocks in zip(groups, made, strict=True):
            self._choose(group.which, blocks)
        return self._assembled(digests)

    def _dtypes(self) -> Iterator[Ints]:
        """int64[k]: the rows to code, of one dtype after another."""
        which = np.flatnonzero(self._packed.is_known)
        kinds = self._packed.weights.dtype_codes[self._packed.number[which]]
        for kind in np.unique(kinds):
            yield which[kinds == kind]

    def _group(self, which: Ints) -> _Group:
        packed, counts = self._packed, self._count[which]
        dtype = packed.weights.ledger.specs[packed.number[which[0]]].dtype
        total, bits = int(counts.sum()), integer_dtype(dtype)
        new, old = (torch.empty(total, dtype=bits, device=self._device) for _ in range(2))
        indices = torch.empty(total, dtype=torch.int32, device=self._device)
        rows = DeviceRows(counts, self._span[which], dtype)
        return _Group(which, rows, indices, new, old)

    def _read(self, groups: Sequence[_Group]) -> Tensor:
        """Bring indices, new and old bits together. int64[rows]: the digests of the old ones."""
        copies, packed = Copies(), self._packed
        old_at = np.zeros(len(packed.rows), np.int64)
        for group in groups:
            which, begins = group.which, begins_of(group.rows.counts)
            size = group.rows.dtype.item_size
            indices_at = group.indices.data_ptr() + INDEX_ITEM_BYTES * begins
            copies.add(self._index_from[which], indices_at, self._index_bytes[which])
            new_at = group.new.data_ptr() + size * begins
            copies.add(self._value_from[which], new_at, self._value_bytes[which])
            old_at[which] = group.old.data_ptr() + size * begins
        copies.launch(self._device)
        rows = SparseRows(
            number=packed.number,
            start=packed.start,
            span=self._span,
            count=np.where(packed.is_known, self._count, 0),
            indices_at=self._index_from,
            old_at=old_at,
            is_read=packed.is_known,
        )
        return read_old(packed.weights, rows)[0]

    def _choose(self, which: Ints, blocks: DeviceBlocks) -> None:
        """Take the blocks of rows that get no longer by them."""
        raw_bytes = self._index_bytes[which] + self._value_bytes[which]
        pays = blocks.index_bytes + blocks.value_bytes <= raw_bytes
        taken = which[pays]
        self._is_coded[taken] = True
        for lengths, sources, block, block_bytes in (
            (self._index_bytes, self._index_from, blocks.index, blocks.index_bytes),
            (self._value_bytes, self._value_from, blocks.value, blocks.value_bytes),
        ):
            sources[taken] = (block.data_ptr() + begins_of(block_bytes))[pays]
            lengths[taken] = block_bytes[pays]

    def _assembled(self, digests: Tensor) -> Coded | None:
        """Header, table and blocks in one piece."""
        rows, index_bytes, value_bytes = self._coded_rows, self._index_bytes, self._value_bytes
        full = len(rows) * ROW_BYTES, int(index_bytes.sum()), int(value_bytes.sum())
        lengths = Lengths(full, full)
        if HEADER_BYTES + sum(full) >= LONGEST * len(self._packed.payload):
            return None
        rows["index_codec"][self._is_coded] = IndexCodec.BLOCK
        rows["value_codec"][self._is_coded] = ValueCodec.BLOCK
        rows["index_bytes"], rows["value_bytes"] = index_bytes, value_bytes
        table = CodedTable(rows, np.zeros(len(rows), np.uint64))
        data = torch.empty(HEADER_BYTES + sum(full), dtype=torch.uint8, device=self._device)
        head = np.frombuffer(lengths.to_bytes() + table.columns().tobytes(), np.int64)
        words, is_coded = upload([head, self._is_coded.astype(np.int64)], self._device)
        there = data[: head.nbytes].view(torch.int64)
        there.copy_(words)
        torch.mul(digests, is_coded, out=there[-len(rows) :])
        copies, at = Copies(), data.data_ptr() + head.nbytes
        copies.add(self._index_from, at + begins_of(index_bytes), index_bytes)
        copies.add(self._value_from, at + full[1] + begins_of(value_bytes), value_bytes)
        copies.launch(self._device)
        return Coded(data, table.bytes_by_codec(lengths))
