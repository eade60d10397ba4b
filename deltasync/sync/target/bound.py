"""The live weights of a receiver, as they were bound to the layout that its sender sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from deltasync.delta.backend import Applier, Backend, backend_for
from deltasync.delta.bits import Live
from deltasync.delta.digests import DigestLedger
from deltasync.delta.patch import chunk_numel_on
from deltasync.delta.routes.loading import Loader, Loading
from deltasync.errors import LimitExceeded
from deltasync.sync.options import ReceiverOptions
from deltasync.wire.codecs import INDEX_ITEM_BYTES
from deltasync.wire.messages import Begin, Held, ParameterSpec, digest_text

_MIN_STAGED_BYTES = 64 << 20


class BoundWeights:
    """Where the parameters of a layout are, and their digests.

    Attributes:
        backend: What works on them. Its ledger is replaced by a sync's own when that is written.
        parts: Elements held, of each parameter that is held in part, by number.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        flats: Mapping[int, Live],
        options: ReceiverOptions,
    ) -> None:
        """Measure them.

        Args:
            specs: The layout.
            flats: The storage of each parameter that is held, by number.
            options: Memory, kernels.
        """
        devices = {flat.line.device.type for flat in flats.values()}
        chunk_numel = options.chunk_numel or chunk_numel_on(*devices)
        ledger = DigestLedger(specs, chunk_numel=chunk_numel, held=flats.keys())
        self.backend = backend_for(flats, ledger, kernels=options.kernels)
        ledger.sums[:] = self.backend.measure(np.arange(len(ledger.sums)))
        self.parts = {n: f.numel for n, f in flats.items() if f.held(0, 0) is not None}
        limit = options.max_staged_bytes
        self._max_staged_bytes = (
            max(_MIN_STAGED_BYTES, self.backend.num_bytes // 4) if limit is None else limit
        )
        # Every element once, with an index of its own.
        self._max_sync_bytes = sum(
            spec.numel * (INDEX_ITEM_BYTES + spec.dtype.item_size) for spec in specs
        )

    def held(self, *, half_written: bool) -> Held:
        """What the sender hears of these weights."""
        return Held(
            digest=digest_text(self.backend.ledger.total),
            parts=tuple(self.parts.items()),
            half_written=half_written,
        )

    def are_as_measured(self) -> bool:
        """Whether the live weights have the digests of the ledger, all of them."""
        sums = self.backend.ledger.sums
        return bool(np.array_equal(self.backend.measure(np.arange(len(sums))), sums))

    def applier(
        self, begin: Begin, loader: Loader | None, *, writing: Callable[[], None]
    ) -> Applier:
        """What brings a sync into the weights. Raises LimitExceeded for one that cannot be.

        Args:
            begin: What the sync declares.
            loader: What has to write it; None if that can go to the live parameters.
            writing: Called before something is written in place.
        """
        if begin.sparse_bytes + begin.dense_bytes > self._max_sync_bytes:
            raise LimitExceeded(f"no sync of this layout takes over {self._max_sync_bytes} bytes")
        if loader is not None:
            backend = self.backend
            return Loading(loader, backend.flats, backend.ledger, backend.measure, writing=writing)
        return self.backend.stage(
            sparse_bytes=begin.sparse_bytes,
            dense_bytes=begin.dense_bytes,
            max_bytes=self._max_staged_bytes,
            writing=writing,
        )


class Scrub:
    """The rolling scrub: finds weights that changed although no sync touched them.

    Re-computes a share of the digests from the live weights at each call. After `every` calls all
    weights were looked at.

    Args:
        every: The share is 1/every; 0 for never.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._next = 0

    def check(self, backend: Backend) -> str | None:
        """The name of a parameter whose weights are not what the ledger says, or None."""
        ledger = backend.ledger
        total = len(ledger.sums)
        if not self._every or not total:
            return None
        chunks = (self._next + np.arange(-(-total // self._every))) % total
        self._next = int(chunks[-1]) + 1
        wrong = chunks[backend.measure(chunks) != ledger.sums[chunks]]
        return ledger.specs[int(ledger.table.parameter[wrong[0]])].name if len(wrong) else None
