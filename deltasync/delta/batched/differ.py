"""The sender's side: what differs between source and snapshot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.delta.batched.masks import Masks
from deltasync.delta.batched.packing import UNCHANGED, most_sparse
from deltasync.delta.batched.plans import BatchedDelta, BatchedFull
from deltasync.delta.batched.source import BatchedSource, LiveSource
from deltasync.delta.batched.weights import BatchedWeights, device_of
from deltasync.delta.bits import WireReader
from deltasync.delta.columns import Ints
from deltasync.delta.digests import DigestLedger
from deltasync.delta.policy import Policy
from deltasync.wire.codecs import INDEX_ITEM_BYTES
from deltasync.wire.table import RowKind

_LEAST_ROOM_BYTES = 16 << 20
_BLOCK_BYTES = 24  # of what says where the changes of a block are, beside its mask


class BatchedDiffer:
    """Finds what differs between a source and the snapshot on one GPU.

    Memory beside the snapshot: an eighth of a byte an element for masks, and `max_held_bytes` for
    indices, values and where those of each block are.

    Attributes:
        ahead: bool[chunks], whose bits in the snapshot are not those of its version, because a
            sync that was not decided wrote them: they are sent dense.
    """

    def __init__(self, snapshot: BatchedWeights) -> None:
        self.ahead = np.zeros(len(snapshot.addresses), np.bool_)
        self._snapshot = snapshot
        self._live = LiveSource(snapshot)
        self._masks: Masks | None = None

    @property
    def device(self) -> torch.device:
        """Where kernels run."""
        return self._snapshot.device

    def compare(
        self,
        readers: Sequence[WireReader],
        ledger: DigestLedger,
        *,
        policy: Policy,
        bucket_bytes: int,
        max_held_bytes: int,
        base_version: int,
        keep: Callable[[DigestLedger], None],
    ) -> BatchedDelta:
        """Compare every parameter once. Waits for the counts of changes, for nothing else.

        Args:
            readers: The source, in layout order. It must not change until its elements are packed.
            ledger: The digests of the snapshot. Not changed.
            policy: When to go dense.
            bucket_bytes: Largest payload.
            max_held_bytes: Memory for sparse changes kept until the decision; those of a larger
                delta are written to the snapshot while they are packed.
            base_version: The snapshot's version.
            keep: Called at the decision with the snapshot's new digests.
        """
        with device_of(self._snapshot.device):
            source = self._live.look_up(readers)
            # Sparse changes of one bucket at least have to find room.
            rest = max_held_bytes - source.num_blocks * _BLOCK_BYTES
            room = max(rest, min(bucket_bytes, _LEAST_ROOM_BYTES))
            masks = self._masks_for(source, room)
            masks.compare(source, self._snapshot)
            most = self._most_sparse(policy, min(bucket_bytes, room))  # meanwhile
            return BatchedDelta(
                self._snapshot,
                source,
                masks,
                ledger,
                ahead=self.ahead,
                kinds=self._kinds(masks.counts, most),
                bucket_bytes=bucket_bytes,
                sparse_bucket_bytes=min(bucket_bytes, room),
                max_held_bytes=max_held_bytes,
                base_version=base_version,
                keep=keep,
            )

    def digests(self) -> NDArray[np.uint64]:
        """uint64[chunks]: the digests of the snapshot, read from memory."""
        return self._snapshot.digests()

    def full(self, ledger: DigestLedger, *, bucket_bytes: int) -> BatchedFull:
        """The whole snapshot, whose digests are `ledger`."""
        return BatchedFull(self._snapshot, ledger, bucket_bytes)

    def _masks_for(self, source: BatchedSource, room: int) -> Masks:
        """The masks of last time if they fit, with `room` bytes for indices and values."""
        sizes = self._snapshot.item_sizes
        least = INDEX_ITEM_BYTES + int(sizes.min())
        numel = int(self._snapshot.table.numel.sum())
        capacity = min(numel, room // least)
        masks = self._masks
        if masks is None or (masks.num_blocks, masks.capacity) != (source.num_blocks, capacity):
            masks = self._masks = None  # its memory first
            masks = self._masks = Masks(
                source.num_blocks, len(sizes), capacity, int(sizes.max()), self._snapshot.device
            )
        return masks

    def _most_sparse(self, policy: Policy, bucket_bytes: int) -> NDArray[np.float64]:
        """float64[chunks]: the most changes that a chunk is sent sparse with."""
        snapshot = self._snapshot
        limit = policy.crossover(snapshot.device.type) * snapshot.table.numel
        most: NDArray[np.float64] = np.minimum(
            limit, most_sparse(bucket_bytes, snapshot.item_sizes)
        )
        return most

    def _kinds(self, counts: Ints, most: NDArray[np.float64]) -> Ints:
        kinds = np.where(counts <= most, int(RowKind.SPARSE), int(RowKind.DENSE))
        kinds[counts == 0] = UNCHANGED
        kinds[self.ahead] = RowKind.DENSE
        return kinds
