"""Patches packed into contiguous buffers of bounded size, and unpacked as views."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import integer_dtype
from deltasync.delta.patch import Run
from deltasync.delta.shard import Share, share_of
from deltasync.errors import ConfigError, LimitExceeded
from deltasync.wire.codecs import INDEX_ITEM_BYTES, IndexCodec, ValueCodec
from deltasync.wire.messages import ParameterSpec
from deltasync.wire.table import (
    ALIGNMENT,
    ROW,
    RowKind,
    Rows,
    aligned,
    block_offsets,
    read_table,
)

Where: TypeAlias = slice | NDArray[np.bool_]

MIN_BUCKET_BYTES = 256
"""A row, an index and a value with their padding, and some."""

_BLOCK = 1 << 17  # indices widened at once

Read = Callable[[int, int, int], Tensor]
"""(parameter, start, stop) -> int[stop - start], bits of a dense run that are in the source."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows that fit into one payload, before they are written there.

    Attributes:
        runs: (parameter, run) for each row, in layout order.
        shares: What each of the runs is a part of.
        rows: The patch table.
        num_bytes: Length of the payload.
    """

    runs: list[tuple[int, Run]]
    shares: list[Share]
    rows: Rows
    num_bytes: int

    def write(self, payload: Tensor, read: Read) -> Iterator[tuple[int, Run, Tensor]]:
        """Write the payload into uint8[num_bytes], row by row.

        Yields (parameter, run, int[count] bits) when that row stands in the payload. The bits
        are a view of it.
        """
        table = torch.from_numpy(self.rows.view(np.uint8))
        payload[: len(table)].copy_(table)
        index_at, value_at, _ = block_offsets(self.rows)
        end = len(table)
        for (parameter, run), share, index, value in zip(
            self.runs, self.shares, index_at.tolist(), value_at.tolist(), strict=True
        ):
            if index_bytes := index_bytes_of(share, run):
                end = _pad(payload, end, index)
                _write_indices(share, run, payload[index : index + index_bytes].view(torch.int32))
                end = index + index_bytes
            bits = read(parameter, run.start, run.stop) if run.bits is None else run.bits
            block = _block(payload, value, bits)
            _pad(payload, end, value)
            block.copy_(bits)
            end = value + bits.numel() * bits.element_size()
            yield parameter, run, block


def buckets(
    runs: Iterable[tuple[int, Run]], specs: Sequence[ParameterSpec], *, bucket_bytes: int
) -> Iterator[Bucket]:
    """Distribute runs over buckets of at most `bucket_bytes`, slicing what does not fit.

    Args:
        runs: (parameter, run), in layout order.
        specs: The layout, or shares of its parameters.
        bucket_bytes: At least MIN_BUCKET_BYTES.
    """
    if bucket_bytes < MIN_BUCKET_BYTES:
        raise ConfigError(f"bucket_bytes is {bucket_bytes}, at least {MIN_BUCKET_BYTES} are needed")
    chosen: list[tuple[int, Run]] = []
    shares: list[Share] = []
    used = 0
    for parameter, run in runs:
        share = share_of(specs, parameter)
        rest: Run | None = run
        while rest is not None:
            head, rest = _split(rest, bucket_bytes - used - ROW.itemsize, share)
            if head is not None:
                chosen.append((parameter, head))
                shares.append(share)
                used += ROW.itemsize + _data_bytes(head, share)
            elif rest is not None:
                yield _bucket(chosen, shares)
                chosen, shares, used = [], [], 0
    if chosen:
        yield _bucket(chosen, shares)


def index_bytes_of(share: Share, run: Run) -> int:
    """What travels beside the values. A dense run that is no run in its parameter is sent sparse,
    with all of its indices.
    """
    if run.indices is None and not share.band.is_scattered(run.start, run.stop):
        return 0
    return INDEX_ITEM_BYTES * run.count


def bytes_of(share: Share, run: Run) -> tuple[int, int]:
    """(sparse, dense): bytes of the indices and values that a run is sent with."""
    values = share.dtype.item_size * run.count
    indices = index_bytes_of(share, run)
    return (indices + values, 0) if indices else (0, values)


@dataclass(frozen=True, slots=True)
class ReadBucket:
    """One payload whose table was checked. Its indices were not looked at.

    Attributes:
        rows: The patch table.
        index_at, value_at: int64[rows], where indices and values begin, in bytes.
        payload: uint8[n]; not owned.
    """

    specs: tuple[ParameterSpec, ...]
    rows: Rows
    index_at: NDArray[np.int64]
    value_at: NDArray[np.int64]
    payload: Tensor

    def runs(self, where: Where = slice(None)) -> Iterator[tuple[int, Run]]:
        """(parameter, run) of each row, or of those that `where` selects: views of the payload."""
        columns = self.rows[where], self.index_at[where], self.value_at[where]
        for row, index, value in zip(*(column.tolist() for column in columns), strict=True):
            parameter, kind, _, _, _, start, span, _, index_bytes, value_bytes = row
            dtype = integer_dtype(self.specs[parameter].dtype)
            bits = self.payload[value : value + value_bytes].view(dtype)
            indices = None
            if kind == RowKind.SPARSE:
                indices = self.payload[index : index + index_bytes].view(torch.int32)
            yield parameter, Run(start, span, indices, bits)


class Budget:
    """What is left of the indices and values that a sync declares, on all of its connections.

    Args:
        num_bytes: What it declares. A row takes some of it, so that buckets are bounded too.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def take(self, rows: Rows) -> None:
        """Raises LimitExceeded for rows that bring more."""
        self._left -= int(rows["index_bytes"].sum() + rows["value_bytes"].sum())
        if self._left < 0:
            raise LimitExceeded(
                f"the sync is {-self._left} bytes larger than its begin declared: begin must count "
                "the indices and values of all buckets"
            )


class BucketReader:
    """Takes the buckets of a sync apart, in order, checking each bound of the wire format.

    Args:
        specs: The layout.

    Attributes:
        reached: (parameter, flat position) up to which buckets of this sync have come.
    """

    def __init__(self, specs: tuple[ParameterSpec, ...]) -> None:
        self._specs = specs
        self._numels = np.array([spec.numel for spec in specs], np.uint64)
        self._item_sizes = np.array([spec.dtype.item_size for spec in specs], np.uint64)
        self.begin()

    def begin(self, budget: Budget | None = None) -> None:
        """A new sync begins, which brings no more than `budget` if there is one."""
        self.reached, self._budget = (0, 0), budget

    def open(self, payload: Tensor, num_rows: int) -> ReadBucket:
        """Check the table of uint8[n] `payload`. Raises WireError."""
        if payload.data_ptr() % ALIGNMENT:
            payload = payload.clone()
        table = payload[: num_rows * ROW.itemsize].cpu().numpy()
        rows = read_table(
            table,
            payload_bytes=len(payload),
            numels=self._numels,
            item_sizes=self._item_sizes,
            after=self.reached,
        )
        if self._budget is not None:
            self._budget.take(rows)
        last = rows[-1]
        self.reached = int(last["parameter"]), int(last["start"] + last["span"])
        index_at, value_at, _ = block_offsets(rows)
        return ReadBucket(self._specs, rows, index_at, value_at, payload)

    def read(self, payload: Tensor, num_rows: int) -> list[tuple[int, Run]]:
        """(parameter, run) of each row. Raises WireError."""
        return list(self.open(payload, num_rows).runs())


def _data_bytes(run: Run, share: Share) -> int:
    return aligned(index_bytes_of(share, run)) + aligned(share.dtype.item_size * run.count)


def _split(run: Run, free: int, share: Share) -> tuple[Run | None, Run | None]:
    """The part of `run` that fits into one row of `free` bytes, and the rest."""
    item_size = share.dtype.item_size
    if _data_bytes(run, share) <= free:
        return run, None
    if not index_bytes_of(share, run):
        return _split_dense(run, max(0, (free - ALIGNMENT) // item_size))
    k = max(0, (free - 2 * ALIGNMENT) // (INDEX_ITEM_BYTES + item_size))
    return _split_dense(run, k) if run.indices is None else _split_sparse(run, run.indices, k)


def _split_dense(run: Run, k: int) -> tuple[Run | None, Run | None]:
    if k == 0:
        return None, run
    head_bits = None if run.bits is None else run.bits[:k]
    rest_bits = None if run.bits is None else run.bits[k:]
    return Run(run.start, k, None, head_bits), Run(run.start + k, run.span - k, None, rest_bits)


def _split_sparse(run: Run, indices: Tensor, k: int) -> tuple[Run | None, Run | None]:
    if k == 0 or run.bits is None:
        return None, run
    cut = int(indices[k])
    head = Run(run.start, cut, indices[:k], run.bits[:k])
    return head, Run(run.start + cut, run.span - cut, indices[k:] - cut, run.bits[k:])


def _bucket(runs: list[tuple[int, Run]], shares: list[Share]) -> Bucket:
    rows = [_row(share, run) for share, (_, run) in zip(shares, runs, strict=True)]
    table: Rows = np.array(rows, ROW)
    return Bucket(runs, shares, table, block_offsets(table)[2])


def _row(share: Share, run: Run) -> tuple[int, ...]:
    """The fields of `table.ROW`, in order."""
    index_bytes, value_bytes = index_bytes_of(share, run), share.dtype.item_size * run.count
    kind, codec = RowKind.DENSE, IndexCodec.NONE
    if index_bytes:
        kind, codec = RowKind.SPARSE, IndexCodec.RAW
    start = share.band.place(run.start)
    span = share.band.place(run.stop - 1) + 1 - start
    values = (ValueCodec.RAW, 0, start, span, run.count, index_bytes, value_bytes)
    return (share.number, kind, codec, *values)


def _write_indices(share: Share, run: Run, into: Tensor) -> None:
    """Write int32[count]: where the elements lie in the parameter, from the first place on."""
    band = share.band
    if run.indices is not None and not band.gap:
        into.copy_(run.indices)
        return
    for begin in range(0, run.count, _BLOCK):
        block = slice(begin, min(begin + _BLOCK, run.count))
        here = torch.arange(block.start, block.stop, device=into.device)
        if run.indices is not None:
            here = run.indices[block].to(into.device, torch.int64)
        into[block] = band.places(here + run.start) - band.place(run.start)


def _block(payload: Tensor, offset: int, like: Tensor) -> Tensor:
    return payload[offset : offset + like.numel() * like.element_size()].view(like.dtype)


def _pad(payload: Tensor, begin: int, end: int) -> int:
    if begin < end:
        payload[begin:end].zero_()
    return end
