"""What a relay sends: the version that it holds, and the deltas that have led to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.backend import Delta, Plan
from deltasync.delta.bits import Run
from deltasync.delta.digests import DigestLedger, Ints
from deltasync.delta.host.packing import Bucket, buckets, bytes_of
from deltasync.errors import ConfigError
from deltasync.sync.held import Proved
from deltasync.sync.options import SenderOptions
from deltasync.sync.relay.kept import KeptDeltas, runs_of
from deltasync.sync.source.layout import SentLayout, specs_of
from deltasync.sync.source.weights import LocalWeights
from deltasync.wire.messages import ParameterSpec


@dataclass(frozen=True, slots=True)
class _Sent:
    """What members hold."""

    stream_id: str
    layout_hash: str
    version: int
    digest: int


class RelayedWeights(LocalWeights):
    """The version that a receiver holds, for a `WeightSender` that gives it on.

    Nothing is compared: deltas are those that the receiver has kept. The version has the number
    that its trainer gave it.

    Args:
        options: Sizes, compression.
        kept: The deltas that the receiver has brought.
    """

    def __init__(self, options: SenderOptions, kept: KeptDeltas) -> None:
        super().__init__(options)
        self._kept = kept
        self._shown: Proved | None = None
        self._here: SentLayout | None = None  # of what is shown
        self._sent: _Sent | None = None

    @property
    def is_new(self) -> bool:
        """Whether what is held is not what members have."""
        return self._shown is not None and self._sent != self._sending

    def show(self, held: Proved) -> None:
        """Send this from now on. It must stay as it is while it is sent."""
        specs = held.backend.ledger.specs
        if self._here is None or self._here.specs != specs:
            self._here = SentLayout(specs)
        self._shown, self._snapshot, self.version = held, held.backend, held.version
        self._judge()

    def declared(self, *, timeout_s: float = 60.0) -> tuple[ParameterSpec, ...]:
        return self._held.ledger.specs

    def capture(self, held: Sequence[ParameterSpec]) -> None:
        """Start from what is shown. Raises ConfigError if a receiver asks for other dtypes."""
        assert self._here is not None
        if specs_of(self._here.specs, held, {}) != self._here.specs:
            raise ConfigError(
                "a relay gives on what it gets: load the model in the dtypes that the trainer "
                "sends, or give the trainer's sender `wire_dtypes`"
            )
        self.layout = self._here
        self._decided()

    def delta(self, base_version: int, *, max_staged_bytes: int = 0) -> Delta:
        held = self._held
        assert self.version is not None
        deltas = self._kept.between(base_version, self.version) or []
        runs = runs_of(deltas, held.ledger.specs)
        return RelayedPlan(
            self, runs, held.ledger, base_version, bucket_bytes=self._bucket_bytes(held)
        )

    def full(self) -> Plan:
        return self._held.full(bucket_bytes=self._bucket_bytes(self._held))

    @property
    def trained(self) -> NDArray[np.bool_]:
        return np.ones(len(self._held.ledger.specs), np.bool_)

    def _decided(self) -> None:
        """Members hold what is shown."""
        self._sent = self._sending
        self._kept.forget(self._sent.version)
        self._judge()

    @property
    def _sending(self) -> _Sent:
        shown, layout = self._shown, self._here
        assert shown is not None
        assert layout is not None
        digest = shown.backend.ledger.total
        return _Sent(shown.stream_id, layout.hash, shown.version, digest)

    def _judge(self) -> None:
        """Members are lost if no delta leads from what they hold to what is shown."""
        sent, now = self._sent, self._sending
        if sent is None:
            self.is_lost = False
            return
        is_same_run = (sent.stream_id, sent.layout_hash) == (now.stream_id, now.layout_hash)
        is_same = sent.digest == now.digest and sent.version <= now.version
        is_led = self._kept.between(sent.version, now.version) is not None
        self.is_lost = not (is_same_run and (is_same or (is_led and sent.version < now.version)))


class RelayedPlan:
    """Deltas on their way, as one. See `delta.backend.Delta`.

    Attributes:
        ledger: The digests of the version.
        nnz: Elements that are written.
        changed: int64[n], increasing: numbers of the parameters that are.
        sparse_bytes, dense_bytes: Bytes of all indices and values.
        held_bytes: The same, together: all is kept in memory.
        base_version: The version that it fits on.
    """

    waited_s = 0.0

    def __init__(
        self,
        weights: RelayedWeights,
        runs: list[tuple[int, Run]],
        ledger: DigestLedger,
        base_version: int,
        *,
        bucket_bytes: int,
    ) -> None:
        self._weights, self._runs, self._bucket_bytes = weights, runs, bucket_bytes
        self.ledger = ledger
        self.base_version: int | None = base_version
        sizes = [bytes_of(ledger.shares[parameter], run) for parameter, run in runs]
        self.sparse_bytes = sum(sparse for sparse, _ in sizes)
        self.dense_bytes = sum(dense for _, dense in sizes)
        self.held_bytes = self.sparse_bytes + self.dense_bytes
        self.nnz = sum(run.count for _, run in runs)
        numbers = np.array([(parameter, run.count) for parameter, run in runs], np.int64)
        self.changed, place = np.unique(numbers.reshape(-1, 2)[:, 0], return_inverse=True)
        self._counts = np.bincount(place, numbers.reshape(-1, 2)[:, 1]).astype(np.int64)

    def counts(self) -> Ints:
        """int64[n]: elements that are written, of each of `changed`."""
        return self._counts

    def buckets(self) -> Iterator[Bucket]:
        """All runs, as they have come or folded."""
        return buckets(self._runs, self.ledger.shares, bucket_bytes=self._bucket_bytes)

    def decided(self) -> None:
        """Members hold the version."""
        self._weights._decided()
