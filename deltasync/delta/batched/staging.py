"""The receiver's side: check, write and undo buckets, all rows of one in each launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.batched.weights import (
    ALIGNMENT,
    CHANGES_AT,
    FLAG_AT,
    BatchedWeights,
    Numbers,
    Upload,
    blocks_in,
    device_of,
    segments_in,
    upload,
)
from deltasync.delta.bucket import ReadBucket
from deltasync.delta.digests import DigestLedger, Ints, cut
from deltasync.delta.kernels import triton_live as kernels
from deltasync.delta.kernels.triton_base import SEGMENT, SPAN, TYPES
from deltasync.errors import DigestMismatch, InvalidIndices, LimitExceeded
from deltasync.wire.codecs import INDEX_ITEM_BYTES
from deltasync.wire.digest import MASK
from deltasync.wire.table import RowKind, columns_of


@dataclass(frozen=True, slots=True)
class _Rows:
    """Columns of rows of one kind, int64[rows] each; positions in the payload are in elements."""

    parameter: Ints
    start: Ints
    span: Ints
    count: Ints
    index_at: Ints
    value_at: Ints


@dataclass(frozen=True, slots=True)
class _Sparse:
    """The sparse rows of one item size in segments: columns as `kernels.check` takes them."""

    item_size: int
    dims: int
    codes: int
    rows: Tensor
    segment_row: Tensor

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + self.segment_row.nbytes


@dataclass(frozen=True, slots=True)
class _Dense:
    """The dense rows of one item size, cut at chunk ends: columns as `kernels.check_dense` does."""

    item_size: int
    dims: int
    codes: int
    pieces: Tensor
    blocks_each: int
    is_aligned: bool

    @property
    def num_bytes(self) -> int:
        return self.pieces.nbytes


_LOST = "the weights read back are not those that were written"
_MAX_PROGRAMS = (1 << 31) - 1  # of one launch


class BatchedStaging:
    """The buckets of one sync at a receiver, from arrival to written weights.

    `stage_bucket` checks indices on the device and predicts the digests from the live bits, on a
    stream of its own, so that the table of the next bucket can be read meanwhile; nothing waits for
    that before `ledger` is asked for. `commit` exchanges new bits with live ones in one
    launch a bucket and item size, so that the staged payload becomes the undo log.

    With `in_place` a bucket is written as soon as all of it is checked, and nothing of it is kept.
    The device checks, and nothing waits for it: of a bad bucket, and of those that follow, nothing
    is written, and `ledger` raises.

    Attributes:
        in_place: Whether it does so.
        staged_bytes: Memory held: payloads, and some 100 bytes for each of their rows.
    """

    def __init__(
        self,
        weights: BatchedWeights,
        ledger: DigestLedger,
        *,
        in_place: bool = False,
        writing: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin a sync.

        Args:
            weights: The live weights that this receiver holds.
            ledger: Their digests now. Not changed.
            in_place: Write what is staged, at once.
            writing: Called before `stage_bucket` writes in place.
        """
        self.staged_bytes = 0
        self._writing = writing
        self._weights, self._before = weights, ledger
        self.in_place = in_place
        self._staged: list[tuple[_Sparse | _Dense, Tensor]] = []  # with its payload
        self._num_written = 0  # parts
        self._is_whole = np.zeros(len(ledger.sums), np.bool_)
        self._numbers = weights.blank.clone()
        # Digests over all elements: of staged bits; of re-read bits, and of those they replaced in
        # dense rows that make up whole chunks. What others replaced follows from the changes.
        self._sums = self._numbers[:FLAG_AT].view(2, 2, kernels.ACCUMULATORS)
        self._staged_sums, self._written_sums = self._sums
        # The flag, of which kernels look at the low half, and changes of the digests.
        self._found, self._change = self._numbers[FLAG_AT:], self._numbers[CHANGES_AT:]
        self._flag = self._found.view(torch.int32)
        self._record(self._numbers)

    def stage_bucket(self, bucket: ReadBucket) -> None:
        """Take over one bucket; its payload is copied. Raises LimitExceeded."""
        with device_of(self._weights.device):
            payload = bucket.payload.to(self._weights.device, copy=not self.in_place)
            if self.in_place:
                self._write_at_once(bucket, payload)
                return
            self._record(payload)
            with self._aside():
                parts = self._parts(bucket, payload.data_ptr())
                for part in parts:
                    self._check(part, payload)
            self.staged_bytes += payload.nbytes + sum(part.num_bytes for part in parts)
            self._staged += ((part, payload) for part in parts)

    @cached_property
    def ledger(self) -> DigestLedger:
        """The digests that the weights have after `commit`; written in place, as they were re-read.

        Waits for the device, if anything was staged. Raises InvalidIndices, DigestMismatch.
        """
        if not (self._staged or self.in_place):
            return self._before.copy()
        with device_of(self._weights.device):
            self._weights.join_side()
            numbers = Numbers(self._found).read()
        bad, change = int(numbers[0]), numbers[CHANGES_AT - FLAG_AT :]
        if bad != kernels.CLEAR:
            name = self._weights.ledger.specs[bad].name
            raise InvalidIndices(f"{name}: indices out of range, unsorted or repeated")
        ledger, found = self._before.copy(), change.view(np.uint64)
        ledger.sums[self._is_whole] = 0
        ledger.sums += found
        if self.in_place and self._surplus():
            raise DigestMismatch(_LOST)
        return ledger

    def commit(self) -> int:
        """Write everything and read it back. Returns the digest. Raises DigestMismatch."""
        expected = self.ledger.total
        if self.in_place or not self._staged:
            return expected
        with device_of(self._weights.device):
            self._write_rest()
            if self._surplus():
                raise DigestMismatch(_LOST)
        return expected

    def undo(self) -> None:
        """Put the old bits back and check that they are there. Raises DigestMismatch."""
        if self.in_place:
            raise DigestMismatch("weights that were written in place cannot be put back")
        with device_of(self._weights.device):
            numbers = Numbers(self._found).read()
            if int(numbers[0]) != kernels.CLEAR:  # nothing was written
                return
            self._write_rest()  # so that the sums are of everything
            sums = torch.zeros_like(self._written_sums)
            for part, payload in self._staged:
                self._write(part, payload, sums)
            staged, written = Numbers(self._sums).read()
            restored = Numbers(sums).read()
        replaced = _total(staged[0]) - _total(numbers[CHANGES_AT - FLAG_AT :]) + _total(written[1])
        if (_total(restored[0]) - replaced) & MASK:
            raise DigestMismatch("undo failed: the weights are not what they were")

    def _write_at_once(self, bucket: ReadBucket, payload: Tensor) -> None:
        parts = self._parts(bucket, payload.data_ptr())
        for part in parts:
            if isinstance(part, _Sparse):
                self._check(part, payload)
        if parts:
            self._writing()
        for part in parts:
            self._write(part, payload, self._written_sums)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Launch on the side stream, after what the current one holds now."""
        side = self._weights.side
        if side is None:
            yield
            return
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield

    def _record(self, *tensors: Tensor) -> None:
        """The side stream may still use them when they are let go of."""
        for tensor in tensors:
            if self._weights.side is not None:
                tensor.record_stream(self._weights.side)

    def _write_rest(self) -> None:
        """Write the parts that are not written yet."""
        for part, payload in self._staged[self._num_written :]:
            self._write(part, payload, self._written_sums)
            self._num_written += 1

    def _surplus(self) -> int:
        """How the digest of what was re-read differs from that of what was staged."""
        staged, written = Numbers(self._sums).read()
        return _total(written[0]) - _total(staged[0])

    def _parts(self, bucket: ReadBucket, address: int) -> list[_Sparse | _Dense]:
        """How to read a bucket whose payload lies at `address` on the device."""
        columns, boxes = columns_of(bucket.rows), self._weights.boxes
        is_dense = bucket.rows["kind"] == RowKind.DENSE
        columns[0], columns[4], columns[5] = (
            bucket.rows["parameter"],
            bucket.index_at // INDEX_ITEM_BYTES,
            bucket.value_at,
        )
        ways = self._weights.ways[2 * columns[0] + is_dense]
        parts: list[_Sparse | _Dense] = []
        for way in np.flatnonzero(np.bincount(ways)).tolist():
            is_these, box = ways == way, None
            these = columns if is_these.all() else columns[:, is_these]
            if way & 2:  # a row for each box, which takes from it what is its own
                which, box = boxes.of(these[0])
                these = these[:, which]
            item_size = way // 8
            parameter, start, span, count, index_at, value_at = these
            rows = _Rows(parameter, start, span, count, index_at, value_at // item_size)
            codes = 2 * item_size if way & 4 else 0
            if way & 1:
                parts += self._dense(rows, item_size, box, address, codes)
            else:
                parts.append(self._sparse(rows, item_size, box, codes))
        return parts

    def _sparse(self, rows: _Rows, item_size: int, box: Ints | None, codes: int) -> _Sparse:
        first, number = segments_in(rows.count)
        row = np.arange(len(number))
        sent = Upload([(11, len(row)), (int(number.sum()),)], self._weights.device)
        columns, segment_row = sent.arrays
        segment_row[:] = row.repeat(number)
        columns[0], columns[1], columns[2] = rows.index_at, rows.value_at, rows.count
        columns[3], columns[4], columns[8] = rows.span, rows.start, rows.parameter
        columns[5:8] = self._weights.facts[:, rows.parameter]
        columns[9], columns[10], dims = first, 0, 0
        if box is not None:
            columns[5], columns[10] = self._weights.boxes.address[box], box
            dims = self._weights.boxes.dims
        return _Sparse(item_size, dims, codes, *sent.send())

    def _dense(
        self, rows: _Rows, item_size: int, box: Ints | None, address: int, codes: int
    ) -> list[_Dense]:
        """Pieces of the rows that are held here, none of which reaches into another chunk."""
        if box is None:
            places = self._weights.pointers[rows.parameter]  # 0 if they are not held
        else:
            places = self._weights.boxes.address[box]
        held = np.flatnonzero(places)
        if not len(held):
            return []
        start, value_at, places = rows.start[held], rows.value_at[held], places[held]
        stop = start + rows.span[held]
        step = self._before.chunk_numel
        first, last = start // step, -(-stop // step)
        row, nth = cut(last - first, 1)
        chunk = first[row] + nth
        low, high = np.maximum(chunk * step, start[row]), np.minimum((chunk + 1) * step, stop[row])
        parameter = rows.parameter[held][row]
        place = self._before.first[parameter] + chunk
        is_whole = high - low == self._before.table.numel[place]
        self._is_whole[place[is_whole]] = True
        columns = (
            value_at[row] + low - start[row],
            high - low,
            low,
            places[row],
            self._before.keys[parameter].view(np.int64),
            place,
            is_whole.astype(np.int64),
            row if box is None else box[row],
        )
        blocks_each = blocks_in(high - low)
        if len(low) * blocks_each > _MAX_PROGRAMS:
            raise LimitExceeded("more dense rows of different lengths than one launch can take")
        (pieces,) = upload([np.array(columns)], self._weights.device)
        begins = (columns[0] | columns[2]) * item_size | columns[3] | columns[1] | address
        is_aligned = box is None and not (begins % ALIGNMENT).any()
        dims = 0 if box is None else self._weights.boxes.dims
        return [_Dense(item_size, dims, codes, pieces, blocks_each, is_aligned)]

    def _check(self, part: _Sparse | _Dense, payload: Tensor) -> None:
        if isinstance(part, _Sparse):
            kernels.check[(len(part.segment_row),)](
                part.rows,
                part.segment_row,
                *self._weights.boxes.table,
                payload,
                self._flag,
                self._change,
                self._staged_sums,
                part.rows.shape[1],
                TYPE=TYPES[part.item_size],
                DIMS=part.dims,
                CODES=part.codes,
                CHUNK=self._before.chunk_numel,
                SEGMENT=SEGMENT,
                num_warps=4,
            )
        else:
            kernels.check_dense[(part.pieces.shape[1] * part.blocks_each,)](
                part.pieces,
                *self._weights.boxes.table,
                payload,
                self._change,
                self._staged_sums,
                part.pieces.shape[1],
                part.blocks_each,
                TYPE=TYPES[part.item_size],
                DIMS=part.dims,
                CODES=part.codes,
                ALIGNED=part.is_aligned,
                BLOCK=SPAN,
                num_warps=4,
            )

    def _write(self, part: _Sparse | _Dense, payload: Tensor, sums: Tensor) -> None:
        """Write a part; unless in place, the old bits take the place of the new ones in it."""
        if isinstance(part, _Sparse):
            kernels.write[(len(part.segment_row) * (SEGMENT // kernels.PART),)](
                part.rows,
                part.segment_row,
                *self._weights.boxes.table,
                payload,
                self._flag,
                sums,
                part.rows.shape[1],
                TYPE=TYPES[part.item_size],
                DIMS=part.dims,
                CODES=part.codes,
                KEEP=not self.in_place,
                SEGMENT=SEGMENT,
                PART=kernels.PART,
                num_warps=kernels.PART // 32,
            )
        else:
            kernels.write_dense[(part.pieces.shape[1] * part.blocks_each,)](
                part.pieces,
                *self._weights.boxes.table,
                payload,
                self._flag,
                self._change,
                sums,
                part.pieces.shape[1],
                part.blocks_each,
                TYPE=TYPES[part.item_size],
                DIMS=part.dims,
                CODES=part.codes,
                IN_PLACE=self.in_place,
                ALIGNED=part.is_aligned,
                BLOCK=SPAN,
                num_warps=4,
            )


def _total(sums: NDArray[np.int64]) -> int:
    return int(sums.view(np.uint64).sum()) & MASK
