"""All of a model's weights on one GPU, which Triton kernels work on together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.delta.batched.decoding import DeviceDecoder
from deltasync.delta.batched.masks import Masks
from deltasync.delta.batched.packing import most_sparse
from deltasync.delta.batched.plans import BatchedDelta, BatchedFull
from deltasync.delta.batched.source import BatchedSource, LiveSource
from deltasync.delta.batched.staging import BatchedStaging
from deltasync.delta.batched.weights import BatchedWeights, device_of
from deltasync.delta.bits import Live
from deltasync.delta.digests import DigestLedger, Ints
from deltasync.delta.policy import Policy
from deltasync.delta.readers import Reader, copy_read
from deltasync.wire.codecs import INDEX_ITEM_BYTES

_LEAST_ROOM_BYTES = 16 << 20
_BLOCK_BYTES = 24  # of what says where the changes of a block are, beside its mask


class BatchedBackend:
    """The back end of weights on one GPU. See `delta.backend.Backend`.

    To compare, it needs memory beside the weights: an eighth of a byte an element for masks, and
    `max_held_bytes` for indices, values and where those of each block are.

    Attributes:
        flats: The weights by parameter. Not owned.
        ledger: The digests of the version that they hold.
        ahead: bool[chunks], whose bits are not those of that version, because a sync that was not
            decided wrote them: they are sent dense.
        weights: Where they lie, for kernels.
        device: Where kernels run.
        num_bytes: Bytes of the weights.
    """

    def __init__(
        self, flats: Mapping[int, Live], ledger: DigestLedger, device: torch.device
    ) -> None:
        self.flats, self.ledger, self.device = flats, ledger, device
        self.bucket_bytes = (256 if device.type == "cuda" else 64) << 20
        self.num_bytes = sum(flat.numel * flat.dtype.item_size for flat in flats.values())
        self.weights = BatchedWeights(flats, ledger, device)
        self.ahead = np.zeros(len(ledger.sums), np.bool_)
        self._live = LiveSource(self.weights)
        self._masks: Masks | None = None
        sizes = self.weights.item_sizes
        self._numel = int(self.weights.table.numel.sum())
        self._item_sizes = int(sizes.min()), int(sizes.max())
        self._most: tuple[tuple[float, int], NDArray[np.float64]] | None = None

    @cached_property
    def decoder(self) -> DeviceDecoder:
        """What decodes payloads by the weights where they are."""
        return DeviceDecoder(self.weights, self.flats)

    def capture(self, readers: Sequence[Reader]) -> None:
        """Take the source's bits as they are now, all of them."""
        for parameter, reader in enumerate(readers):
            copy_read(reader, self.flats[parameter], step=self.ledger.chunk_numel)
        self.ahead[:] = False
        self.ledger.sums[:] = self.weights.digests()

    def measure(self, chunks: Ints) -> NDArray[np.uint64]:
        """uint64[n]: digests of int64[n] chunks, read from memory. Waits for them."""
        return self.weights.digests(chunks)

    def compare(
        self,
        readers: Sequence[Reader],
        *,
        policy: Policy,
        bucket_bytes: int,
        max_held_bytes: int,
        base_version: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> BatchedDelta:
        """Compare every parameter once. Waits for the counts of changes, for nothing else."""
        with device_of(self.device):
            source = self._live.look_up(readers)
            # Sparse changes of one bucket at least have to find room.
            rest = max_held_bytes - source.num_blocks * _BLOCK_BYTES
            room = max(rest, min(bucket_bytes, _LEAST_ROOM_BYTES))
            masks = self._masks_for(source, room)
            masks.compare(source, self.weights)
            if meanwhile is not None:
                meanwhile()
            return BatchedDelta(
                self,
                source,
                masks,
                most=self._most_sparse(policy, min(bucket_bytes, room)),
                bucket_bytes=bucket_bytes,
                sparse_bucket_bytes=min(bucket_bytes, room),
                max_held_bytes=max_held_bytes,
                base_version=base_version,
            )

    def full(self, *, bucket_bytes: int) -> BatchedFull:
        """All of the weights."""
        return BatchedFull(self.weights, self.ledger, bucket_bytes)

    def stage(
        self, *, sparse_bytes: int, dense_bytes: int, max_bytes: int, writing: Callable[[], None]
    ) -> BatchedStaging:
        """Begin a sync that brings so many bytes; in place if staging takes over `max_bytes`."""
        in_place = sparse_bytes + dense_bytes > max_bytes
        return BatchedStaging(self.weights, self.ledger, in_place=in_place, writing=writing)

    def synchronize(self) -> None:
        """Return when no kernel of this reads or writes the weights any more."""
        self.weights.synchronize()

    def _masks_for(self, source: BatchedSource, room: int) -> Masks:
        """The masks of last time if they fit, with `room` bytes for indices and values."""
        smallest, largest = self._item_sizes
        capacity = min(self._numel, room // (INDEX_ITEM_BYTES + smallest))
        masks = self._masks
        if masks is None or (masks.num_blocks, masks.capacity) != (source.num_blocks, capacity):
            masks = self._masks = None  # its memory first
            masks = self._masks = Masks(
                source.num_blocks, len(self.weights.table), capacity, largest, self.weights.device
            )
        return masks

    def _most_sparse(self, policy: Policy, bucket_bytes: int) -> NDArray[np.float64]:
        """float64[chunks]: the most changes that a chunk is sent sparse with."""
        weights = self.weights
        key = policy.crossover(weights.device.type), bucket_bytes
        if self._most is None or self._most[0] != key:
            fits = most_sparse(bucket_bytes, weights.item_sizes)
            self._most = key, np.minimum(key[0] * weights.table.numel, fits)
        return self._most[1]
