"""Which elements differ: a bit for each, and the indices of those that do."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.batched.packing import PlannedBucket
from deltasync.delta.batched.source import BatchedSource, Launch
from deltasync.delta.batched.weights import BatchedWeights, Numbers, upload
from deltasync.delta.digests import Ints
from deltasync.delta.kernels import triton as kernels
from deltasync.delta.kernels.reads import AS_IS, ROUNDED
from deltasync.delta.kernels.triton_base import SEGMENT, TYPES

_WORDS = kernels.BLOCK // 32


class Masks:
    """What the last comparison of a source with the snapshot found.

    Attributes:
        num_blocks: Blocks of the source.
        capacity: Elements that `indices` and `values` have room for.
        is_held: Whether all changes of sparse chunks are in `indices` and `values`. Otherwise
            `find` collects those of a bucket there, and writes them to the snapshot.
        indices: int32[capacity] on the device, in the order of the source's blocks.
        values: uint8[capacity value_bytes] on the device, a value every `value_bytes`.
        digests: int64[chunks] on the device, of what was packed dense.
        changes: int64[chunks] on the device: by how much what was collected changes the digests.
        sums: int64[2, n] on the device: both, and what keeps them aligned.
    """

    def __init__(
        self,
        num_blocks: int,
        num_chunks: int,
        capacity: int,
        value_bytes: int,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.capacity, self.value_bytes = num_blocks, capacity, value_bytes
        self._counts = self._before = self._collected = np.zeros(0, np.int64)
        self._arriving: Numbers | None = None  # the counts
        self.is_held = False
        self.indices = torch.empty(capacity, dtype=torch.int32, device=device)
        self.values = torch.empty(capacity * value_bytes, dtype=torch.uint8, device=device)
        padded = num_chunks + num_chunks % 2  # kernels are compiled for aligned addresses
        self.sums = torch.empty((2, padded), dtype=torch.int64, device=device)
        self.digests, self.changes = self.sums[0, :num_chunks], self.sums[1, :num_chunks]
        self._words = torch.empty(num_blocks * _WORDS, dtype=torch.int32, device=device)
        self._block_counts = torch.empty(num_blocks, dtype=torch.int32, device=device)
        self._ends = torch.zeros(num_blocks + 1, dtype=torch.int64, device=device)

    @property
    def counts(self) -> Ints:
        """int64[chunks], elements that differ. Waits for them."""
        if self._arriving is not None:
            self._counts, self._arriving = self._arriving.read().astype(np.int64), None
        return self._counts

    def compare(self, source: BatchedSource, snapshot: BatchedWeights) -> None:
        """Begin to find what differs. Waits for nothing.

        Changes are collected even before it is known whether they fit: most of the time they do.
        """
        num_chunks = len(snapshot.addresses)
        counts = torch.zeros(num_chunks, dtype=torch.int32, device=snapshot.device)
        self.sums.zero_()
        if source.computed is not None:  # first: scales are compared like other parameters
            source.computed.compare(self._words)
        for launch in source.launches:
            self._compare(launch, source, snapshot, counts)
        self._arriving = Numbers(counts)
        self._collect_all(source, snapshot)

    def _compare(
        self, launch: Launch, source: BatchedSource, snapshot: BatchedWeights, counts: Tensor
    ) -> None:
        """Write masks, and count what they mark."""
        if launch.is_computed:
            self._count(launch, source, snapshot, counts)
            return
        kernels.compare[(launch.num_blocks,)](
            source.addresses,
            snapshot.addresses_there,
            snapshot.numels,
            source.first_block,
            source.chunk_of,
            self._words,
            self._block_counts,
            counts,
            launch.first_block,
            TYPE=TYPES[launch.item_size],
            NARROW=launch.read == ROUNDED,
            PAIRS=launch.is_aligned and launch.item_size == 2 and launch.read == AS_IS,
            BLOCK=kernels.BLOCK,
            num_warps=4,
        )

    def _count(
        self, launch: Launch, source: BatchedSource, snapshot: BatchedWeights, counts: Tensor
    ) -> None:
        """Count what was found of a launch that was compared by kernels of a form."""
        kernels.count_masks[(-(-launch.num_blocks // kernels.COUNTED),)](
            snapshot.numels,
            source.first_block,
            source.chunk_of,
            self._words,
            self._block_counts,
            counts,
            launch.first_block,
            launch.first_block + launch.num_blocks,
            BLOCK=kernels.BLOCK,
            GROUP=kernels.COUNTED,
            num_warps=4,
        )

    def choose(
        self,
        source: BatchedSource,
        snapshot: BatchedWeights,
        is_sparse: NDArray[np.bool_],
        *,
        hold: bool,
    ) -> None:
        """Say which chunks are sparse, and whether their changes are to be held together."""
        counts = self.counts
        self.is_held = hold and int(counts.sum()) <= self.capacity
        if not self.is_held:  # with what goes dense left out they may fit
            counts = np.where(is_sparse, counts, 0)
            (there,) = upload([is_sparse.astype(np.int64)], self.indices.device)
            self._block_counts.mul_(there[source.chunk_of])
            self.sums.zero_()
            self.is_held = hold and int(counts.sum()) <= self.capacity
            self._collect_all(source, snapshot, places=self.is_held)
        self._collected, self._before = counts, source.before(counts)

    def find(self, source: BatchedSource, snapshot: BatchedWeights, bucket: PlannedBucket) -> Ints:
        """int64[rows]: where the changes of each row begin; meaningless for dense rows."""
        if self.is_held:
            return self._before[bucket.first_chunk]
        out = 0
        begins = np.zeros(len(bucket.rows), np.int64)
        for number, launch in enumerate(source.launches):
            part = launch.between(int(bucket.first_chunk[0]), bucket.last_chunk + 1)
            if not len(part.chunks):
                continue
            begin, end = part.first_block, part.first_block + part.num_blocks
            self._locate(source, begin, end, out=out)
            self._collect(source, snapshot, part, begin, end, out=out, ahead=True)
            here = source.launch_of[bucket.first_chunk] == number
            before = self._before[bucket.first_chunk[here]] - self._before[part.chunks[0]]
            begins[here] = out + before
            out += int(self._collected[part.chunks].sum())
        return begins

    def _collect_all(
        self, source: BatchedSource, snapshot: BatchedWeights, *, places: bool = True
    ) -> None:
        """Say where the changes of all blocks are; with `places` collect them there."""
        torch.cumsum(self._block_counts, 0, out=self._ends[1:])
        if places:
            self._locate(source, 0, source.num_blocks, out=0)
            for launch in source.launches:
                self._collect(source, snapshot, launch, 0, source.num_blocks, out=0, ahead=False)

    def _locate(self, source: BatchedSource, begin: int, end: int, *, out: int) -> None:
        kernels.locate[(-(-(end - begin) // kernels.GROUP),)](
            source.first_block,
            source.chunk_of,
            source.shifts,
            self._words,
            self._ends,
            self.indices,
            self.capacity,
            begin,
            end,
            out,
            BLOCK=kernels.BLOCK,
            GROUP=kernels.GROUP,
            num_warps=4,
        )

    def _collect(
        self,
        source: BatchedSource,
        snapshot: BatchedWeights,
        launch: Launch,
        begin: int,
        end: int,
        *,
        out: int,
        ahead: bool,
    ) -> None:
        """Collect the changes of a launch, which are among those located in blocks [begin, end).

        With `ahead` they are written to the snapshot.
        """
        kernels.collect[(int(launch.tiles[-1] - launch.tiles[0]),)](
            source.addresses,
            snapshot.addresses_there,
            snapshot.starts,
            snapshot.keys,
            snapshot.cols,
            snapshot.gaps,
            source.shifts,
            source.quantized,
            source.tile_chunk,
            source.tile_block,
            self._ends,
            self.indices,
            self.values,
            self.changes,
            self.capacity,
            int(launch.tiles[0]),
            begin,
            end,
            out,
            TYPE=TYPES[launch.item_size],
            READ=launch.read,
            CODES_AT=launch.codes_at,
            AHEAD=ahead,
            GAPS=snapshot.has_gaps,
            STRIDE=self.value_bytes // launch.item_size,
            SEGMENT=SEGMENT // 2,
            num_warps=4,
            enable_fp_fusion=False,
        )
