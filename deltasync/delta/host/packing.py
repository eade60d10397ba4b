"""Runs of changes or of whole parameters, packed into payloads of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import Run
from deltasync.delta.bucket import MIN_BUCKET_BYTES
from deltasync.delta.codecs.old import OldRows
from deltasync.delta.shard import Share
from deltasync.errors import ConfigError
from deltasync.wire.codecs import INDEX_ITEM_BYTES, IndexCodec, ValueCodec
from deltasync.wire.table import ALIGNMENT, ROW, RowKind, Rows, block_offsets

_BLOCK = 1 << 17  # indices widened at once

Read = Callable[[int, int, int], Tensor]
"""(parameter, start, stop) -> int[stop - start], the bits of a dense run that has none."""

Packed = Callable[[int, Run, Tensor], None]
"""(parameter, run, int[count] bits): called when a run stands in a payload, of which `bits` is a
view, before that is sent."""


OldOf = Callable[[NDArray[np.int64]], OldRows | None]
"""(int64[rows] numbers of what is sent) -> what the rows of a bucket change; None if unknown."""


def _no_old(numbers: NDArray[np.int64]) -> None:
    """Nothing is known."""


def _no_bits(parameter: int, start: int, stop: int) -> Tensor:
    raise ValueError("a run without its bits")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows that fit into one payload, before they are written there.

    Attributes:
        runs: (parameter, run) for each row, in layout order.
        shares: What each of the runs is a part of.
        rows: The patch table.
        index_at, value_at: Where the indices and values of each row begin, in bytes.
        num_bytes: Length of the payload.
        num_rows: Rows of the table.
        read: Returns the bits of runs that have none.
        packed: Called with each run that was written.
        old_of: Returns what the rows change, by the numbers of what they are runs of.
    """

    runs: list[tuple[int, Run]]
    shares: list[Share]
    rows: Rows
    index_at: list[int]
    value_at: list[int]
    num_bytes: int
    num_rows: int
    read: Read
    packed: Packed | None
    old_of: OldOf = _no_old
    device = torch.device("cpu")

    def encoder(self, codec: IndexCodec) -> None:
        """The host codes it."""

    @property
    def old(self) -> OldRows | None:
        """What the rows change; None if nothing of it is known."""
        return self.old_of(np.array([number for number, _ in self.runs]))

    def write(self, payload: Tensor, written: Callable[[], None] | None = None) -> None:
        """Write the payload into uint8[num_bytes], call `written`, then call `packed`."""
        table = torch.from_numpy(self.rows.view(np.uint8))
        payload[: len(table)].copy_(table)
        end, blocks = len(table), list[Tensor]()
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
                bits = self.read(parameter, run.start, run.start + run.span)
            block = payload[value : value + bits.nbytes].view(bits.dtype)
            _pad(payload, end, value)
            block.copy_(bits)
            end = value + bits.nbytes
            blocks.append(block)
        if written is not None:
            written()
        if self.packed is not None:
            for (parameter, run), block in zip(self.runs, blocks, strict=True):
                self.packed(parameter, run, block)


def buckets(
    runs: Iterable[tuple[int, Run]],
    shares: Sequence[Share],
    *,
    bucket_bytes: int,
    read: Read = _no_bits,
    packed: Packed | None = None,
    old_of: OldOf = _no_old,
) -> Iterator[Bucket]:
    """Distribute runs over buckets of at most `bucket_bytes`, slicing what does not fit.

    Args:
        runs: (parameter, run), in layout order.
        shares: What these are runs of, by number.
        bucket_bytes: At least MIN_BUCKET_BYTES.
        read, packed, old_of: As of `Bucket`.
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
                yield _bucket(chosen, parts, read, packed, old_of)
                chosen, parts, used = [], [], 0
    if chosen:
        yield _bucket(chosen, parts, read, packed, old_of)


def sizes_of(share: Share, run: Run) -> tuple[int, int]:
    """Bytes of the indices and of the values that a run is sent with.

    A dense run that is no run in its parameter is sent sparse, with all of its indices.
    """
    indices, item_size = run.indices, share.spec.dtype.item_size
    if indices is not None:
        return INDEX_ITEM_BYTES * len(indices), item_size * len(indices)
    is_listed = share.gap and share.region.is_scattered(run.start, run.stop)
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


def _bucket(
    runs: list[tuple[int, Run]],
    shares: list[Share],
    read: Read,
    packed: Packed | None,
    old_of: OldOf,
) -> Bucket:
    rows = _table(runs, shares)
    index_at, value_at, num_bytes = block_offsets(rows)
    places = index_at.tolist(), value_at.tolist()
    return Bucket(runs, shares, rows, *places, num_bytes, len(rows), read, packed, old_of)


def _table(runs: list[tuple[int, Run]], shares: list[Share]) -> Rows:
    """The patch table of these runs, in the coordinates of the layout."""
    numbers = [
        (share.number, run.start, run.span, *sizes_of(share, run))
        for share, (_, run) in zip(shares, runs, strict=True)
    ]
    regions = [(share.region.start, share.cols, share.gap) for share in shares]
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
    if run.indices is not None and not share.gap:
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
