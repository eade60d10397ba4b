"""What a sync sends, planned on the host and packed by kernels: a delta or the whole snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.batched.encoding import Packed, encode
from deltasync.delta.batched.masks import Masks
from deltasync.delta.batched.packing import UNCHANGED, PlannedBucket, plan_buckets
from deltasync.delta.batched.source import BatchedSource, Launch
from deltasync.delta.batched.weights import (
    ALIGNMENT,
    BatchedWeights,
    Numbers,
    blocks_in,
    device_of,
    segment_rows,
    segments_in,
    upload,
)
from deltasync.delta.bits import Live
from deltasync.delta.codecs.coding import Encode
from deltasync.delta.codecs.old import SnapshotOld
from deltasync.delta.digests import DigestLedger, Ints
from deltasync.delta.kernels import triton as kernels
from deltasync.delta.kernels.reads import AS_IS
from deltasync.delta.kernels.triton_base import SEGMENT, SPAN, TYPES
from deltasync.wire.codecs import INDEX_ITEM_BYTES, IndexCodec
from deltasync.wire.table import ALIGNMENT as PAYLOAD_ALIGNMENT
from deltasync.wire.table import RowKind, Rows


class Snapshot(Protocol):
    """What a delta was made against, and keeps up to date."""

    weights: BatchedWeights
    flats: Mapping[int, Live]
    ledger: DigestLedger
    ahead: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Sparse rows of one item size: columns as `kernels.pack` takes them."""

    item_size: int
    columns: Ints


class BatchedDelta:
    """How the source differs from the snapshot: a plan of a round.

    The changes of a small delta are held by the masks until the decision. A larger one is collected
    bucket by bucket, and written to the snapshot while it is packed, as dense chunks always are:
    those chunks are *ahead*.

    Attributes:
        sparse_bytes, dense_bytes: Bytes of all indices and values, with indices and without.
        held_bytes: Memory kept until the decision, beside the masks.
        base_version: The snapshot's version.
    """

    def __init__(
        self,
        backend: Snapshot,
        source: BatchedSource,
        masks: Masks,
        *,
        most: NDArray[np.float64],
        bucket_bytes: int,
        sparse_bucket_bytes: int,
        max_held_bytes: int,
        base_version: int,
    ) -> None:
        """Plan. Waits for the counts of changes.

        Args:
            backend: The snapshot. Kept up to date: what is ahead, and at the decision the digests.
            source: What it was compared with.
            masks: What differs.
            most: float64[chunks], the most changes that each is sent sparse with.
            bucket_bytes: Largest payload.
            sparse_bucket_bytes: Largest one that the masks have room for.
            max_held_bytes: Memory for what is kept until the decision.
            base_version: The snapshot's version.
        """
        self.backend, self._source, self._masks = backend, source, masks
        self._snapshot = backend.weights
        self._before, self._ahead = backend.ledger, backend.ahead
        self.base_version: int | None = base_version
        self._held: list[tuple[int, Tensor, Tensor]] = []
        self._packed: Numbers | None = None
        counts, snapshot = masks.counts, self._snapshot
        self._kinds = _sparse_or_dense(counts, most, self._ahead)
        # Of chunks that are ahead the old bits are gone: all of their elements count as changed.
        self._written = np.where(self._ahead, snapshot.table.numel, counts)
        is_sparse, is_dense = (self._kinds == kind for kind in (RowKind.SPARSE, RowKind.DENSE))
        each = INDEX_ITEM_BYTES + snapshot.item_sizes[is_sparse]
        changes = int((counts[is_sparse] * each).sum())
        listed, self.dense_bytes = _bytes_of(snapshot, np.flatnonzero(is_dense))
        self.sparse_bytes = changes + listed
        masks.choose(source, snapshot, is_sparse, hold=changes <= max_held_bytes)
        self.held_bytes = changes if masks.is_held else 0
        is_collected = changes and not masks.is_held
        self._bucket_bytes = sparse_bucket_bytes if is_collected else bucket_bytes

    @property
    def is_held(self) -> bool:
        """Whether the changes of sparse chunks are kept, and not in the snapshot already."""
        return self._masks.is_held

    @property
    def nnz(self) -> int:
        """Elements that differ."""
        return int(self._written.sum())

    @property
    def changed(self) -> Ints:
        """int64[n], increasing: numbers of the parameters that differ."""
        parameters = self._snapshot.table.parameter[self._written > 0]
        return np.flatnonzero(np.bincount(parameters))

    def counts(self) -> Ints:
        """int64[n]: elements that differ, of each of `changed`."""
        found = np.bincount(self._snapshot.table.parameter, self._written)
        return found[found > 0].astype(np.int64)

    def buckets(self) -> Iterator[BatchedBucket]:
        """The payloads, in order; each has to be written before the next is asked for."""
        snapshot = self._snapshot
        planned = plan_buckets(
            snapshot.ledger,
            snapshot.origins,
            self._kinds,
            self._masks.counts,
            bucket_bytes=self._bucket_bytes,
        )
        for bucket in planned:
            self._ahead[bucket.dense[0]] = True
            yield BatchedBucket(bucket, snapshot, self._source, delta=self)
        with device_of(snapshot.device):
            self._packed = Numbers(self._masks.sums)

    @property
    def digests(self) -> Tensor:
        """int64[chunks] on the device: of dense chunks, complete when all are packed."""
        return self._masks.digests

    @cached_property
    def ledger(self) -> DigestLedger:
        """The digests of the source. Waits until all buckets are packed."""
        ledger = self._before.copy()
        if self._packed is not None:
            of_dense, of_sparse = self._packed.read().view(np.uint64)[:, : len(ledger.sums)]
            sparse = np.flatnonzero(self._kinds == RowKind.SPARSE)
            dense = np.flatnonzero(self._kinds == RowKind.DENSE)
            ledger.sums[dense] = of_dense[dense]
            ledger.sums[sparse] += of_sparse[sparse]
        return ledger

    def decided(self) -> None:
        """The version is final: advance the snapshot."""
        with device_of(self._snapshot.device):
            for item_size, rows, segment_row in self._held:
                kernels.advance[(len(segment_row),)](
                    rows,
                    segment_row,
                    self._masks.indices,
                    self._masks.values,
                    rows.shape[1],
                    TYPE=TYPES[item_size],
                    STRIDE=self._masks.value_bytes // item_size,
                    SEGMENT=SEGMENT,
                    num_warps=4,
                )
        self._ahead[:] = False
        self.backend.ledger = self.ledger

    def rows_of(self, bucket: PlannedBucket) -> list[_Rows]:
        """The sparse rows of a bucket by item size."""
        if not bucket.is_sparse.any():
            return []
        snapshot = self._snapshot
        if not self._masks.is_held:  # `find` writes to the snapshot
            chunks = slice(bucket.first_chunk[0], bucket.last_chunk + 1)
            self._ahead[chunks] |= self._kinds[chunks] == RowKind.SPARSE
        begins = self._masks.find(self._source, snapshot, bucket)
        parameters = bucket.rows["parameter"].astype(np.int64)
        item_sizes = np.where(bucket.is_sparse, self._before.item_sizes[parameters], 0)
        found = []
        for item_size in np.flatnonzero(np.bincount(item_sizes)[1:]) + 1:
            here = np.flatnonzero(item_sizes == item_size)
            count = bucket.rows["count"][here].astype(np.int64)
            rows = (
                begins[here],
                bucket.index_at[here] // INDEX_ITEM_BYTES,
                bucket.value_at[here] // item_size,
                count,
                bucket.rows["start"][here].astype(np.int64),
                snapshot.origins[bucket.first_chunk[here]],
                snapshot.pointers[parameters[here]],
                snapshot.ledger.cols[parameters[here]],
                snapshot.ledger.gaps[parameters[here]],
                *segments_in(count),
            )
            found.append(_Rows(int(item_size), np.array(rows)))
        return found

    def pack_sparse(self, parts: list[_Rows], there: list[Tensor], payload: Tensor) -> None:
        """Write indices and values of sparse rows, whose columns are `there` on the device."""
        masks = self._masks
        for part, rows in zip(parts, there, strict=True):
            segment_row = segment_rows(part.columns[10], rows[10])
            kernels.pack[(len(segment_row),)](
                rows,
                segment_row,
                masks.indices,
                masks.values,
                payload,
                len(payload),
                rows.shape[1],
                TYPE=TYPES[part.item_size],
                GAPS=self._snapshot.has_gaps,
                STRIDE=masks.value_bytes // part.item_size,
                SEGMENT=SEGMENT,
                num_warps=4,
            )
            if masks.is_held:
                self._held.append((part.item_size, rows, segment_row))


class BatchedFull:
    """The whole snapshot, for receivers whose weights are not known: a plan of a round.

    Attributes:
        ledger: Its digests.
        sparse_bytes, dense_bytes: Bytes of all indices and values, with indices and without.
    """

    base_version: int | None = None

    def __init__(self, snapshot: BatchedWeights, ledger: DigestLedger, bucket_bytes: int) -> None:
        self._snapshot, self._bucket_bytes = snapshot, bucket_bytes
        self.ledger = ledger
        self.sparse_bytes, self.dense_bytes = _bytes_of(snapshot, np.arange(len(snapshot.table)))

    def buckets(self) -> Iterator[BatchedBucket]:
        """The payloads, in order."""
        snapshot = self._snapshot
        as_is = np.full_like(snapshot.pointers, AS_IS)
        source = BatchedSource(snapshot, snapshot.pointers, as_is, snapshot.ledger.item_sizes)
        kinds = np.full(len(snapshot.table), int(RowKind.DENSE))
        planned = plan_buckets(
            snapshot.ledger, snapshot.origins, kinds, kinds, bucket_bytes=self._bucket_bytes
        )
        return (BatchedBucket(bucket, snapshot, source) for bucket in planned)

    def decided(self) -> None:
        """The snapshot is what was sent."""


class BatchedBucket:
    """One payload.

    Attributes:
        num_bytes: Its length.
        num_rows: Rows of its table.
    """

    def __init__(
        self,
        planned: PlannedBucket,
        snapshot: BatchedWeights,
        source: BatchedSource,
        *,
        delta: BatchedDelta | None = None,
    ) -> None:
        """Of a delta, or else dense pieces of `source`."""
        self.num_bytes, self.num_rows = planned.num_bytes, len(planned.rows)
        self._planned, self._snapshot, self._source = planned, snapshot, source
        self._delta = delta

    @property
    def device(self) -> torch.device:
        """The snapshot's."""
        return self._snapshot.device

    @property
    def old(self) -> SnapshotOld | None:
        """What its rows change, as far as kernels have not overwritten it."""
        if self._delta is None:
            return None
        backend = self._delta.backend
        return SnapshotOld(backend.ledger.shares, backend.flats, self._numbers, self._is_known)

    def encoder(self, codec: IndexCodec) -> Encode | None:
        """What codes it on the snapshot's device; None if the codec cannot code it there."""
        if codec is not IndexCodec.BLOCK:
            return None
        return lambda payload: encode(
            Packed(
                payload,
                self._placed(self._planned.rows),
                self._snapshot,
                self._numbers,
                self._planned.rows["start"].astype(np.int64),
                self._is_known,
            )
        )

    @property
    def _numbers(self) -> Ints:
        """int64[rows]: of which of the snapshot's parameters each row is."""
        return self._planned.rows["parameter"].astype(np.int64)

    @property
    def _is_known(self) -> NDArray[np.bool_]:
        """bool[rows]: whose old bits the snapshot has: not of those that are sent whole."""
        is_held = self._delta is not None and self._delta.is_held
        return self._planned.is_sparse & is_held

    def write(self, payload: Tensor, written: Callable[[], None] | None = None) -> None:
        """Write uint8[num_bytes], then call `written`. The host does not wait for the GPU."""
        device = self._snapshot.device
        with device_of(device):
            if payload.device == device:
                self._write(payload)
            else:
                there = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
                self._write(there)
                payload.copy_(there)
            if written is not None:
                written()

    def _write(self, payload: Tensor) -> None:
        planned, launches = self._planned, self._source.launches
        sparse = [] if self._delta is None else self._delta.rows_of(planned)
        launch_of = self._source.launch_of[planned.dense[0]]
        dense = [planned.dense[:, launch_of == number] for number in range(len(launches))]
        columns = [rows.columns for rows in sparse]
        table, pads, *there = upload(
            [self._placed(planned.rows).view(np.int64), planned.pads, *columns, *dense],
            payload.device,
        )
        if self._delta is not None:
            self._delta.pack_sparse(sparse, there[: len(columns)], payload)
        payload[: table.nbytes].view(torch.int64).copy_(table)
        if len(planned.pads):
            whole = len(payload) // PAYLOAD_ALIGNMENT * PAYLOAD_ALIGNMENT
            payload[:whole].view(torch.int64).index_fill_(0, pads, 0)
        for launch, pieces, column in zip(launches, dense, there[len(columns) :], strict=True):
            if pieces.size:
                self._pack_dense(launch, pieces, column, payload)

    def _placed(self, rows: Rows) -> Rows:
        """The rows in the coordinates of the layout, of which the snapshot may hold shares."""
        ledger, there = self._snapshot.ledger, rows.copy()
        there["parameter"] = ledger.numbers[rows["parameter"]]
        there["start"] += ledger.starts[rows["parameter"]].astype(np.uint64)
        return there

    def _pack_dense(self, launch: Launch, planned: Ints, pieces: Tensor, payload: Tensor) -> None:
        source, snapshot = self._source, self._snapshot
        digests = None if self._delta is None else self._delta.digests
        num_pieces = pieces.shape[1]
        places = (planned[1] | planned[3]) * launch.item_size | planned[2]
        places |= planned[4] * INDEX_ITEM_BYTES | payload.data_ptr()
        is_aligned = launch.is_aligned and not (places % ALIGNMENT).any()
        blocks_each = blocks_in(planned[2])
        kernels.pack_dense[(num_pieces * blocks_each,)](
            source.addresses,
            snapshot.addresses_there,
            snapshot.starts,
            snapshot.keys,
            snapshot.cols,
            snapshot.gaps,
            source.quantized,
            pieces,
            payload,
            payload if digests is None else digests,
            num_pieces,
            blocks_each,
            TYPE=TYPES[launch.item_size],
            READ=launch.read,
            CODES_AT=launch.codes_at,
            AHEAD=digests is not None,
            GAPS=snapshot.has_gaps,
            ALIGNED=is_aligned,
            BLOCK=SPAN,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _sparse_or_dense(counts: Ints, most: NDArray[np.float64], ahead: NDArray[np.bool_]) -> Ints:
    """int64[chunks], UNCHANGED or a RowKind: how chunks are sent that have so many changes each."""
    kinds, differ = np.full(len(counts), UNCHANGED), np.flatnonzero(counts)
    is_sparse = counts[differ] <= most[differ]
    kinds[differ] = np.where(is_sparse, int(RowKind.SPARSE), int(RowKind.DENSE))
    kinds[ahead] = RowKind.DENSE
    return kinds


def _bytes_of(snapshot: BatchedWeights, sent: Ints) -> tuple[int, int]:
    """(sparse, dense): bytes of int64[n] chunks sent whole, with indices and without."""
    is_scattered, numels = snapshot.is_scattered[sent], snapshot.table.numel[sent]
    sizes = numels * (snapshot.item_sizes[sent] + INDEX_ITEM_BYTES * is_scattered)
    sparse = int(sizes[is_scattered].sum())
    return sparse, int(sizes.sum()) - sparse
