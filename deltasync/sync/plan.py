"""What one sync sends: a delta against the snapshot, or the snapshot itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from deltasync.delta.bits import WireReader
from deltasync.delta.diff import ModelDelta, iter_runs
from deltasync.delta.digests import DigestLedger
from deltasync.delta.patch import Run
from deltasync.delta.policy import Policy
from deltasync.delta.snapshot import Snapshot


class Plan(Protocol):
    """What a round needs to know of what it sends.

    Attributes:
        ledger: The digests that receivers arrive at.
        base_version: The version that it fits on, or None when it fits on any.
        sparse_bytes, dense_bytes: Bytes of all indices and values.
    """

    ledger: DigestLedger
    base_version: int | None
    sparse_bytes: int
    dense_bytes: int

    def runs(self) -> Iterator[tuple[int, Run]]:
        """(parameter, run) in layout order."""
        ...

    def read(self, parameter: int, start: int, stop: int) -> Tensor:
        """int[stop - start]: bits of a dense run."""
        ...

    def packed(self, parameter: int, run: Run, bits: Tensor) -> None:
        """A run stands in a payload as int[count] bits; called before it is sent."""
        ...

    def decided(self) -> None:
        """The version is final."""
        ...


class DeltaPlan:
    """The changes since the snapshot. Packing overwrites the snapshot where it bounds memory."""

    def __init__(
        self,
        delta: ModelDelta,
        readers: Sequence[WireReader],
        snapshot: Snapshot,
        *,
        policy: Policy,
        base_version: int,
    ) -> None:
        self._delta, self._readers, self._snapshot, self._policy = delta, readers, snapshot, policy
        self.ledger = delta.ledger
        self.base_version: int | None = base_version
        self.sparse_bytes, self.dense_bytes = delta.sparse_bytes, delta.dense_bytes
        self._not_held = {c.parameter for c in delta.changes if c.runs is None}

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

    def decided(self) -> None:
        """Advance the snapshot by what was held."""
        for change in self._delta.changes:
            for run in change.runs or ():
                if run.bits is not None:
                    self._snapshot.write(change.parameter, run, run.bits)
        self._snapshot.ledger = self.ledger
        self._snapshot.ahead.clear()


class FullPlan:
    """The whole snapshot: for receivers whose weights are not known."""

    base_version: int | None = None
    sparse_bytes = 0

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.ledger = snapshot.ledger
        self.dense_bytes = snapshot.num_bytes

    def runs(self) -> Iterator[tuple[int, Run]]:
        """Every parameter, dense."""
        for parameter, spec in enumerate(self._snapshot.specs):
            if spec.numel:
                yield parameter, Run(0, spec.numel)

    def read(self, parameter: int, start: int, stop: int) -> Tensor:
        """From the snapshot: the live source may already be ahead."""
        return self._snapshot.flats[parameter].read(start, stop)

    def packed(self, parameter: int, run: Run, bits: Tensor) -> None:
        """Nothing to keep."""

    def decided(self) -> None:
        """The snapshot is what was sent."""
