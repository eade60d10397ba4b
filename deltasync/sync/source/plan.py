"""What one sync sends: a delta against the snapshot, or the snapshot itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from deltasync.delta.bits import WireReader
from deltasync.delta.bucket import Bucket, Read, buckets, bytes_of
from deltasync.delta.diff import ModelDelta, diff_model, iter_runs
from deltasync.delta.patch import Run
from deltasync.delta.policy import Policy
from deltasync.delta.snapshot import Snapshot
from deltasync.sync.protocol.agreement import Digests

Packed = Callable[[int, Run, Tensor], None]
"""(parameter, run, int[count] bits): told of each run that is in a payload, before that is sent."""


class Payload(Protocol):
    """One bucket that can be packed.

    Attributes:
        num_bytes: Its length.
        num_rows: Rows of its table.
    """

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    def write(self, payload: Tensor) -> None:
        """Write it into uint8[num_bytes]."""
        ...


class Plan(Protocol):
    """What a round needs to know of what it sends.

    Attributes:
        base_version: The version that it fits on, or None when it fits on any.
        sparse_bytes, dense_bytes: Bytes of all indices and values.
    """

    base_version: int | None
    sparse_bytes: int
    dense_bytes: int

    @property
    def ledger(self) -> Digests:
        """The digests that receivers arrive at. Asked for when everything is packed."""
        ...

    def buckets(self) -> Iterator[Payload]:
        """The payloads, in order; each is written before the next is asked for."""
        ...

    def decided(self) -> None:
        """The version is final: advance the snapshot."""
        ...


class Delta(Plan, Protocol):
    """A plan made by comparing.

    Attributes:
        held_bytes: Memory for what is kept until the decision.
    """

    @property
    def held_bytes(self) -> int: ...

    @property
    def nnz(self) -> int:
        """Elements that differ."""
        ...

    @property
    def changed(self) -> Collection[int]:
        """Numbers of the parameters that differ."""
        ...


def plan_delta(
    snapshot: Snapshot,
    readers: Sequence[WireReader],
    *,
    policy: Policy,
    bucket_bytes: int,
    max_held_bytes: int,
    base_version: int,
) -> Delta:
    """Compare the source with the snapshot."""
    if snapshot.differ is not None:
        return snapshot.differ.compare(
            readers,
            snapshot.ledger,
            policy=policy,
            bucket_bytes=bucket_bytes,
            max_held_bytes=max_held_bytes,
            base_version=base_version,
            keep=snapshot.keep,
        )
    delta = diff_model(readers, snapshot, policy=policy, max_held_bytes=max_held_bytes)
    return DeltaPlan(
        delta,
        readers,
        snapshot,
        policy=policy,
        bucket_bytes=bucket_bytes,
        base_version=base_version,
    )


def plan_full(snapshot: Snapshot, *, bucket_bytes: int) -> Plan:
    """Send the snapshot."""
    if snapshot.differ is not None:
        return snapshot.differ.full(snapshot.ledger, bucket_bytes=bucket_bytes)
    return FullPlan(snapshot, bucket_bytes=bucket_bytes)


@dataclass(frozen=True, slots=True)
class _Payload:
    """A bucket of runs, and where the bits of its dense runs are."""

    bucket: Bucket
    read: Read
    packed: Packed | None = None

    @property
    def num_bytes(self) -> int:
        return self.bucket.num_bytes

    @property
    def num_rows(self) -> int:
        return len(self.bucket.rows)

    def write(self, payload: Tensor) -> None:
        for parameter, run, bits in self.bucket.write(payload, self.read):
            if self.packed is not None:
                self.packed(parameter, run, bits)


class DeltaPlan:
    """The changes since the snapshot. Packing overwrites the snapshot where it bounds memory."""

    def __init__(
        self,
        delta: ModelDelta,
        readers: Sequence[WireReader],
        snapshot: Snapshot,
        *,
        policy: Policy,
        bucket_bytes: int,
        base_version: int,
    ) -> None:
        self._delta, self._readers, self._snapshot, self._policy = delta, readers, snapshot, policy
        self._bucket_bytes = bucket_bytes
        self.ledger = delta.ledger
        self.base_version: int | None = base_version
        self.sparse_bytes, self.dense_bytes = delta.sparse_bytes, delta.dense_bytes
        self.nnz, self.held_bytes = delta.nnz, delta.held_bytes
        self.changed = {change.parameter for change in delta.changes}
        self._not_held = {c.parameter for c in delta.changes if c.runs is None}

    def buckets(self) -> Iterator[Payload]:
        shares = self._snapshot.shares
        for bucket in buckets(self.runs(), shares, bucket_bytes=self._bucket_bytes):
            yield _Payload(bucket, self.read, self.packed)

    def decided(self) -> None:
        """Advance the snapshot by what was held."""
        for change in self._delta.changes:
            for run in change.runs or ():
                if run.bits is not None:
                    self._snapshot.write(change.parameter, run, run.bits)
        self._snapshot.keep(self.ledger)

    def runs(self) -> Iterator[tuple[int, Run]]:
        """The changes; those that were not held in memory are found again, chunk by chunk."""
        for change in self._delta.changes:
            parameter = change.parameter
            if change.runs is not None:
                yield from ((parameter, run) for run in change.runs)
            else:
                old = self._snapshot.flats[parameter]
                for run, _ in iter_runs(self._readers[parameter], old, self._policy):
                    yield parameter, run

    def read(self, parameter: int, start: int, stop: int) -> Tensor:
        """From the live source."""
        return self._readers[parameter].read(start, stop)

    def packed(self, parameter: int, run: Run, bits: Tensor) -> None:
        """Nothing keeps the run until the decision: the snapshot takes it now."""
        if run.bits is None or parameter in self._not_held:
            self._snapshot.write_ahead(parameter, run, bits)


class FullPlan:
    """The whole snapshot: for receivers whose weights are not known."""

    base_version: int | None = None

    def __init__(self, snapshot: Snapshot, *, bucket_bytes: int) -> None:
        self._snapshot, self._bucket_bytes = snapshot, bucket_bytes
        self.ledger = snapshot.ledger
        sizes = [bytes_of(snapshot.shares[number], run) for number, run in self._runs()]
        self.sparse_bytes = sum(sparse for sparse, _ in sizes)
        self.dense_bytes = sum(dense for _, dense in sizes)

    def buckets(self) -> Iterator[Payload]:
        """Every parameter, dense."""
        shares = self._snapshot.shares
        for bucket in buckets(self._runs(), shares, bucket_bytes=self._bucket_bytes):
            yield _Payload(bucket, self.read)

    def _runs(self) -> Iterator[tuple[int, Run]]:
        shares = self._snapshot.shares
        return ((number, Run(0, one.numel)) for number, one in enumerate(shares) if one.numel)

    def decided(self) -> None:
        """The snapshot is what was sent."""

    def read(self, parameter: int, start: int, stop: int) -> Tensor:
        """From the snapshot: the live source may already be ahead."""
        return self._snapshot.flats[parameter].read(start, stop)
