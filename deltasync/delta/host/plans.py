"""What a sender's host sends: a delta or all of the weights, cut into payloads of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.bits import Live, Run, WireReader
from deltasync.delta.bucket import MIN_BUCKET_BYTES
from deltasync.delta.digests import DigestLedger
from deltasync.delta.policy import Policy
from deltasync.delta.shard import Share
from deltasync.errors import ConfigError
from deltasync.wire.codecs import INDEX_ITEM_BYTES, IndexCodec, ValueCodec
from deltasync.wire.table import ALIGNMENT, ROW, RowKind, Rows, block_offsets

if TYPE_CHECKING:
    from deltasync.delta.host.backend import HostBackend

_BLOCK = 1 << 17  # indices widened at once

Read = Callable[[int, int, int], Tensor]
"""(parameter, start, stop) -> int[stop - start], bits of a dense run that are in the source."""

Packed = Callable[[int, Run, Tensor], None]
"""(parameter, run, int[count] bits): told of each run that is in a payload, before that is sent."""


@dataclass(slots=True)
class Change:
    """How one parameter differs from the snapshot.

    Attributes:
        parameter: Its number in the layout.
        nnz: Elements that differ.
        runs: What to send, ordered and disjoint; None when the runs were let go to bound memory
            and have to be found again while packing.
        sparse_bytes, dense_bytes: Bytes of the indices and values of its runs.
        held_bytes: Of these, what runs of sparse changes take in memory.
    """

    parameter: int
    nnz: int = 0
    runs: list[Run] | None = None
    sparse_bytes: int = 0
    dense_bytes: int = 0
    held_bytes: int = 0

    def count(self, run: Run, nnz: int, share: Share) -> None:
        """Add a run of which `nnz` elements differ."""
        self.nnz += nnz
        sparse_bytes, dense_bytes = bytes_of(share, run)
        self.sparse_bytes += sparse_bytes
        self.dense_bytes += dense_bytes
        if run.indices is not None:
            self.held_bytes += sparse_bytes


class DeltaPlan:
    """The changes since the snapshot. Packing overwrites the snapshot where it bounds memory.

    Attributes:
        changes: One for each parameter that differs, in layout order.
        changed: Their numbers.
        nnz: Elements that differ.
        ledger: The digests of the source.
        sparse_bytes, dense_bytes: Bytes of all indices and values.
        held_bytes: Bytes of the indices and values that `changes` keep in memory.
        base_version: The version that it fits on.
    """

    def __init__(
        self,
        snapshot: HostBackend,
        changes: list[Change],
        ledger: DigestLedger,
        policy: Policy,
        readers: Sequence[WireReader],
        *,
        bucket_bytes: int,
        base_version: int,
    ) -> None:
        self.changes, self.ledger = changes, ledger
        self._snapshot, self._policy, self._readers = snapshot, policy, readers
        self._bucket_bytes = bucket_bytes
        self.base_version: int | None = base_version
        self.nnz = sum(change.nnz for change in changes)
        self.sparse_bytes = sum(change.sparse_bytes for change in changes)
        self.dense_bytes = sum(change.dense_bytes for change in changes)
        self.held_bytes = sum(change.held_bytes for change in changes)
        self.changed = {change.parameter for change in changes}
        self._not_held = {change.parameter for change in changes if change.runs is None}

    def buckets(self) -> Iterator[_Payload]:
        for bucket in buckets(self.runs(), self.ledger.shares, bucket_bytes=self._bucket_bytes):
            yield _Payload(bucket, self.read, self.packed)

    def decided(self) -> None:
        """Advance the snapshot by what was held."""
        self._snapshot.advance(self.changes, self.ledger)

    def runs(self) -> Iterator[tuple[int, Run]]:
        """The changes; those that were not held in memory are found again, chunk by chunk."""
        for change in self.changes:
            parameter = change.parameter
            if change.runs is not None:
                yield from ((parameter, run) for run in change.runs)
                continue
            for run, _ in self._snapshot.find(parameter, self._readers[parameter], self._policy):
                yield parameter, run

    def read(self, parameter: int, start: int, stop: int) -> Tensor:
        """From the live source."""
        return self._readers[parameter].read(start, stop)

    def packed(self, parameter: int, run: Run, bits: Tensor) -> None:
        """Nothing keeps the run until the decision: the snapshot takes it now."""
        if run.bits is None or parameter in self._not_held:
            self._snapshot.write_ahead(parameter, run, bits)


class FullPlan:
    """The whole snapshot: for receivers whose weights are not known.

    Attributes:
        ledger: Its digests.
        sparse_bytes, dense_bytes: Bytes of all indices and values.
    """

    base_version: int | None = None

    def __init__(
        self, flats: Mapping[int, Live], ledger: DigestLedger, *, bucket_bytes: int
    ) -> None:
        self._flats, self.ledger, self._bucket_bytes = flats, ledger, bucket_bytes
        self.sparse_bytes = self.dense_bytes = 0
        for number, run in self._runs():
            sparse_bytes, dense_bytes = bytes_of(ledger.shares[number], run)
            self.sparse_bytes += sparse_bytes
            self.dense_bytes += dense_bytes

    def buckets(self) -> Iterator[_Payload]:
        """Every parameter, dense."""
        for bucket in buckets(self._runs(), self.ledger.shares, bucket_bytes=self._bucket_bytes):
            yield _Payload(bucket, self.read)

    def decided(self) -> None:
        """The snapshot is what was sent."""

    def read(self, parameter: int, start: int, stop: int) -> Tensor:
        """From the snapshot: the live source may already be ahead."""
        return self._flats[parameter].read(start, stop)

    def _runs(self) -> Iterator[tuple[int, Run]]:
        for number, share in enumerate(self.ledger.shares):
            if numel := share.numel:
                yield number, Run(0, numel)


class _Payload:
    """A bucket of runs, and where the bits of its dense runs are.

    Attributes:
        num_bytes, num_rows: Its length, and rows of its table.
    """

    def __init__(self, bucket: Bucket, read: Read, packed: Packed | None = None) -> None:
        self.num_bytes, self.num_rows = bucket.num_bytes, len(bucket.rows)
        self._bucket, self._read, self._packed = bucket, read, packed

    def write(self, payload: Tensor) -> None:
        """Write it into uint8[num_bytes]."""
        for parameter, run, bits in self._bucket.write(payload, self._read):
            if self._packed is not None:
                self._packed(parameter, run, bits)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows that fit into one payload, before they are written there.

    Attributes:
        runs: (parameter, run) for each row, in layout order.
        shares: What each of the runs is a part of.
        rows: The patch table.
        index_at, value_at: Where the indices and values of each row begin, in bytes.
        num_bytes: Length of the payload.
    """

    runs: list[tuple[int, Run]]
    shares: list[Share]
    rows: Rows
    index_at: list[int]
    value_at: list[int]
    num_bytes: int

    def write(self, payload: Tensor, read: Read) -> Iterator[tuple[int, Run, Tensor]]:
        """Write the payload into uint8[num_bytes], row by row.

        Yields (parameter, run, int[count] bits) when that row stands in the payload. The bits
        are a view of it.
        """
        table = torch.from_numpy(self.rows.view(np.uint8))
        payload[: len(table)].copy_(table)
        end = len(table)
        columns = self.index_at, self.rows["index_bytes"].tolist(), self.value_at
        for (parameter, run), share, index, index_bytes, value in zip(
            self.runs, self.shares, *columns, strict=True
        ):
            if index_bytes:
                end = _pad(payload, end, index)
                _write_indices(share, run, payload[index : index + index_bytes].view(torch.int32))
                end = index + index_bytes
            bits = run.bits
            if bits is None:
                bits = read(parameter, run.start, run.start + run.span)
            block = payload[value : value + bits.nbytes].view(bits.dtype)
            _pad(payload, end, value)
            block.copy_(bits)
            end = value + bits.nbytes
            yield parameter, run, block


def buckets(
    runs: Iterable[tuple[int, Run]], shares: Sequence[Share], *, bucket_bytes: int
) -> Iterator[Bucket]:
    """Distribute runs over buckets of at most `bucket_bytes`, slicing what does not fit.

    Args:
        runs: (parameter, run), in layout order.
        shares: What these are runs of, by number.
        bucket_bytes: At least MIN_BUCKET_BYTES.
    """
    if bucket_bytes < MIN_BUCKET_BYTES:
        raise ConfigError(f"bucket_bytes is {bucket_bytes}, at least {MIN_BUCKET_BYTES} are needed")
    chosen: list[tuple[int, Run]] = []
    parts: list[Share] = []
    used = 0
    for parameter, run in runs:
        share = shares[parameter]
        rest: Run | None = run
        while rest is not None:
            head, rest, size = _split(rest, bucket_bytes - used - ROW.itemsize, share)
            if head is not None:
                chosen.append((parameter, head))
                parts.append(share)
                used += ROW.itemsize + size
            elif rest is not None:
                yield _bucket(chosen, parts)
                chosen, parts, used = [], [], 0
    if chosen:
        yield _bucket(chosen, parts)


def sizes_of(share: Share, run: Run) -> tuple[int, int]:
    """Bytes of the indices and of the values that a run is sent with.

    A dense run that is no run in its parameter is sent sparse, with all of its indices.
    """
    indices, item_size = run.indices, share.spec.dtype.item_size
    if indices is not None:
        return INDEX_ITEM_BYTES * len(indices), item_size * len(indices)
    is_listed = not share.region.is_run and share.region.is_scattered(run.start, run.stop)
    return INDEX_ITEM_BYTES * run.span if is_listed else 0, item_size * run.span


def bytes_of(share: Share, run: Run) -> tuple[int, int]:
    """(sparse, dense): bytes that a run adds to what a begin declares, one of them 0."""
    index_bytes, value_bytes = sizes_of(share, run)
    return (index_bytes + value_bytes, 0) if index_bytes else (0, value_bytes)


def _split(run: Run, free: int, share: Share) -> tuple[Run | None, Run | None, int]:
    """The part of `run` that fits into one row of `free` bytes, the rest, and the part's bytes."""
    item_size = share.spec.dtype.item_size
    index_bytes, value_bytes = sizes_of(share, run)
    size = _aligned(index_bytes) + _aligned(value_bytes)
    if size <= free:
        return run, None, size
    if not index_bytes:
        head, rest = _split_dense(run, max(0, (free - ALIGNMENT) // item_size))
    else:
        k = max(0, (free - 2 * ALIGNMENT) // (INDEX_ITEM_BYTES + item_size))
        indices = run.indices
        head, rest = _split_dense(run, k) if indices is None else _split_sparse(run, indices, k)
    return head, rest, 0 if head is None else sum(map(_aligned, sizes_of(share, head)))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


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
    rows = _table(runs, shares)
    index_at, value_at, num_bytes = block_offsets(rows)
    return Bucket(runs, shares, rows, index_at.tolist(), value_at.tolist(), num_bytes)


def _table(runs: list[tuple[int, Run]], shares: list[Share]) -> Rows:
    """The patch table of these runs, in the coordinates of the layout."""
    numbers = [
        (share.number, run.start, run.span, *sizes_of(share, run))
        for share, (_, run) in zip(shares, runs, strict=True)
    ]
    regions = [(share.region.start, *share.region.rows) for share in shares]
    number, start, span, index_bytes, value_bytes = np.array(numbers, np.int64).T
    first, cols, gap = np.array(regions, np.int64).T
    item_sizes = np.array([share.spec.dtype.item_size for share in shares])
    last, is_sparse = start + span - 1, index_bytes > 0
    begin, end = (first + at + at // cols * gap for at in (start, last))  # as `Region.place` does
    rows: Rows = np.zeros(len(runs), ROW)
    rows["parameter"], rows["start"], rows["span"] = number, begin, end + 1 - begin
    rows["kind"] = np.where(is_sparse, RowKind.SPARSE, RowKind.DENSE)
    rows["index_codec"] = np.where(is_sparse, IndexCodec.RAW, IndexCodec.NONE)
    rows["value_codec"] = ValueCodec.RAW
    rows["count"] = value_bytes // item_sizes
    rows["index_bytes"], rows["value_bytes"] = index_bytes, value_bytes
    return rows


def _write_indices(share: Share, run: Run, into: Tensor) -> None:
    """Write int32[count]: where the elements lie in the parameter, from the first place on."""
    region = share.region
    if run.indices is not None and region.is_run:
        into.copy_(run.indices)
        return
    for begin in range(0, len(into), _BLOCK):
        block = slice(begin, min(begin + _BLOCK, len(into)))
        here = torch.arange(block.start, block.stop, device=into.device)
        if run.indices is not None:
            here = run.indices[block].to(into.device, torch.int64)
        into[block] = region.places(here + run.start) - region.place(run.start)


def _pad(payload: Tensor, begin: int, end: int) -> int:
    if begin < end:
        payload[begin:end].zero_()
    return end
