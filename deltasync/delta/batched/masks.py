"""Which elements differ: a bit for each, and the indices of those that do."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.delta.batched.packing import Ints, PlannedBucket
from deltasync.delta.batched.source import BatchedSource
from deltasync.delta.batched.weights import BatchedWeights, Numbers, upload
from deltasync.delta.kernels import triton as kernels

_WORDS = kernels.BLOCK // 32


class Masks:
    """What the last comparison of a source with the snapshot found.

    Attributes:
        num_blocks: Blocks of the source.
        capacity: Elements that `indices` has room for.
        counts: int64[chunks], elements that differ.
        is_located: Whether `indices` has those of all sparse chunks; otherwise `find` locates
            those of a bucket.
        indices: int32[capacity] on the device, in the order of the source's blocks.
    """

    def __init__(self, num_blocks: int, capacity: int, device: torch.device) -> None:
        self.num_blocks, self.capacity = num_blocks, capacity
        self.counts = np.zeros(0, np.int64)
        self.is_located = False
        self.indices = torch.empty(capacity, dtype=torch.int32, device=device)
        self._words = torch.empty(num_blocks * _WORDS, dtype=torch.int32, device=device)
        self._block_counts = torch.empty(num_blocks, dtype=torch.int32, device=device)
        self._ends = torch.zeros(num_blocks + 1, dtype=torch.int64, device=device)
        self._located = self._before = np.zeros(0, np.int64)

    def compare(self, source: BatchedSource, snapshot: BatchedWeights) -> None:
        """Find what differs. Waits for the counts.

        What differs is located even before they are known: most of the time there is room for it.
        """
        counts = torch.zeros(len(snapshot.addresses), dtype=torch.int32, device=snapshot.device)
        for lane in source.lanes:
            kernels.compare[(lane.num_blocks,)](
                source.addresses,
                snapshot.addresses_there,
                snapshot.numels,
                source.first_block,
                source.chunk_of,
                self._words,
                self._block_counts,
                counts,
                lane.first_block,
                TYPE=kernels.TYPES[lane.item_size],
                NARROW=lane.narrow,
                PAIRS=lane.is_aligned and lane.item_size == 2 and not lane.narrow,
                BLOCK=kernels.BLOCK,
                num_warps=4,
            )
        arriving = Numbers(counts)
        self._locate_all(source)
        self.counts = arriving.read().astype(np.int64)

    def choose(self, source: BatchedSource, is_sparse: NDArray[np.bool_], *, hold: bool) -> None:
        """Say which chunks are sparse, and whether their indices are to be held together."""
        counts = self.counts
        if not hold or counts.sum() > self.capacity:
            counts = np.where(is_sparse, counts, 0)
            (there,) = upload([is_sparse.view(np.uint8)], self.indices.device)
            self._block_counts.mul_(there[source.chunk_of])
            self._locate_all(source)
        self.is_located = hold and int(counts.sum()) <= self.capacity
        self._located, self._before = counts, source.before(counts)

    def find(self, source: BatchedSource, bucket: PlannedBucket) -> Ints:
        """int64[rows]: where the indices of each row begin; meaningless for dense rows."""
        if self.is_located:
            return self._before[bucket.first_chunk]
        out = 0
        begins = np.zeros(len(bucket.rows), np.int64)
        for number, lane in enumerate(source.lanes):
            chunks = lane.chunks_between(int(bucket.first_chunk[0]), bucket.last_chunk + 1)
            if not len(chunks):
                continue
            self._locate(source, *lane.blocks_between(chunks[0], chunks[-1] + 1), out=out)
            here = source.lane_of[bucket.first_chunk] == number
            begins[here] = out + self._before[bucket.first_chunk[here]] - self._before[chunks[0]]
            out += int(self._located[chunks].sum())
        return begins

    def _locate_all(self, source: BatchedSource) -> None:
        torch.cumsum(self._block_counts, 0, out=self._ends[1:])
        self._locate(source, 0, self.num_blocks, out=0)

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
