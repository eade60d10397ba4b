"""The live weights of a receiver, as they were bound to the layout that its sender sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.apply import Applier, Staging, staged_bytes_of
from deltasync.delta.batched import device_for_batches
from deltasync.delta.batched.streams import OwnStream
from deltasync.delta.bits import Live
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host_rows import Lines
from deltasync.delta.patch import chunk_numel_on
from deltasync.delta.routes.loading import Loader, Loading
from deltasync.errors import LimitExceeded
from deltasync.sync.options import ReceiverOptions
from deltasync.wire.codecs import INDEX_ITEM_BYTES
from deltasync.wire.messages import Begin, Held, ParameterSpec, digest_text

if TYPE_CHECKING:  # imports Triton, which need not be there
    from deltasync.delta.batched.weights import BatchedWeights

_MIN_STAGED_BYTES = 64 << 20


class BoundWeights:
    """Where the parameters of a layout are, and their digests.

    Attributes:
        ledger: The digests of what is held. Replaced by a sync's own when that is written.
        parts: Elements held, of each parameter that is held in part, by number.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        flats: Mapping[int, Live],
        options: ReceiverOptions,
        stream: OwnStream,
    ) -> None:
        """Measure them.

        Args:
            specs: The layout.
            flats: The storage of each parameter that is held, by number.
            options: Memory, kernels.
            stream: On GPUs, what stages; moved to where the weights are.
        """
        devices = {flat.line.device.type for flat in flats.values()}
        chunk_numel = options.chunk_numel or chunk_numel_on(*devices)
        self.ledger = DigestLedger(specs, chunk_numel=chunk_numel, held=flats.keys())
        self._options, self._lines = options, Lines(flats, len(specs))
        self._batched = self._for_batches(stream)
        self.ledger.sums[:] = self.measure(np.arange(len(self.ledger.sums)))
        self.parts = {n: f.numel for n, f in flats.items() if f.held(0, 0) is not None}
        sizes = [flats[number].dtype.item_size for number in self.parts]
        self._part_item_size = min(sizes, default=None)
        self._held_bytes = sum(f.numel * f.dtype.item_size for f in flats.values())
        # Every element once, with an index of its own.
        self._max_sync_bytes = sum(
            spec.numel * (INDEX_ITEM_BYTES + spec.dtype.item_size) for spec in specs
        )

    @property
    def flats(self) -> Mapping[int, Live]:
        """The live parameters that are held, by number in the layout."""
        return self._lines.flats

    def measure(self, chunks: NDArray[np.int64]) -> NDArray[np.uint64]:
        """uint64[n]: digests of int64[n] chunks of the live weights."""
        if self._batched is not None:
            return self._batched.digests(chunks)
        return self.ledger.measured(chunks, self._lines.flats)

    def held(self, *, half_written: bool) -> Held:
        """What the sender hears of these weights."""
        return Held(
            digest=digest_text(self.ledger.total),
            parts=tuple(self.parts.items()),
            half_written=half_written,
        )

    def are_as_measured(self) -> bool:
        """Whether the live weights have the digests of the ledger, all of them."""
        now = self.measure(np.arange(len(self.ledger.sums)))
        return bool(np.array_equal(now, self.ledger.sums))

    def applier(
        self, begin: Begin, loader: Loader | None, *, writing: Callable[[], None]
    ) -> Applier:
        """What brings a sync into the weights. Raises LimitExceeded for one that cannot be.

        Args:
            begin: What the sync declares.
            loader: What has to write it; None if that can go to `flats`.
            writing: Called before something is written in place.
        """
        declared = begin.sparse_bytes + begin.dense_bytes
        if declared > self._max_sync_bytes:
            raise LimitExceeded(f"no sync of this layout takes over {self._max_sync_bytes} bytes")
        if loader is not None:
            return Loading(loader, self.flats, self.ledger, self.measure, writing=writing)
        limit = self._max_staged_bytes()
        if self._batched is not None:
            from deltasync.delta.batched.staging import BatchedStaging

            return BatchedStaging(
                self._batched,
                self.ledger,
                in_place=declared > limit,
                writing=writing,
            )
        needed = staged_bytes_of(
            sparse_bytes=begin.sparse_bytes,
            dense_bytes=begin.dense_bytes,
            part_item_size=self._part_item_size,
        )
        return Staging(
            self._lines,
            self.ledger,
            max_bytes=needed,
            in_place=needed > limit,
            writing=writing,
        )

    def synchronize(self) -> None:
        """Return when no kernel reads or writes the weights any more."""
        if self._batched is not None:
            self._batched.synchronize()

    def _for_batches(self, stream: OwnStream) -> BatchedWeights | None:
        device = device_for_batches(self.flats.values(), self._options.kernels)
        if device is None:
            return None
        from deltasync.delta.batched.warm_up import warm_up
        from deltasync.delta.batched.weights import BatchedWeights

        formats = frozenset((flat.dtype, flat.dtype) for flat in self.flats.values())
        weights = BatchedWeights(self.flats, self.ledger, device)
        warm_up(formats, self.ledger.chunk_numel, device, box_dims=weights.boxes.dims)
        stream.move_to(device)
        return weights

    def _max_staged_bytes(self) -> int:
        if self._options.max_staged_bytes is not None:
            return self._options.max_staged_bytes
        return max(_MIN_STAGED_BYTES, self._held_bytes // 4)
