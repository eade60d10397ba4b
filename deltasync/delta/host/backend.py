"""Weights on which torch and numpy work, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import Live, Run, WireReader
from deltasync.delta.bucket import staged_bytes_of
from deltasync.delta.diff import changed_runs, merged
from deltasync.delta.digests import DigestLedger, Ints
from deltasync.delta.host.plans import Change, DeltaPlan, FullPlan
from deltasync.delta.host.staging import Lines, Staging
from deltasync.delta.policy import Policy

_BLOCK = 1 << 17  # positions digested at once
_SMALL = 1 << 12  # elements up to which one call for all costs less than a chunk's bookkeeping


class HostBackend:
    """The back end of weights on any devices. See `delta.backend.Backend`.

    A sender's copies advance in two phases: a sync reads them, the decision writes them. To bound
    memory, packing may overwrite a parameter early. That parameter is then *ahead*: if the sync is
    aborted, all of it is sent the next time.

    Attributes:
        flats: The weights by parameter. Not owned.
        ledger: The digests of the version that they hold.
        ahead: Parameters whose bits are already those of an undecided version.
        num_bytes: Bytes of the weights.
    """

    device = None
    bucket_bytes = 64 << 20

    def __init__(self, flats: Mapping[int, Live], ledger: DigestLedger) -> None:
        self.flats, self.ledger = flats, ledger
        self.ahead: set[int] = set()
        self.num_bytes = sum(flat.numel * flat.dtype.item_size for flat in flats.values())
        self._policy: Policy | None = None
        self._crossover: dict[str, float] = {}

    def capture(self, readers: Sequence[WireReader]) -> None:
        """Take the source's bits as they are now, all of them."""
        for parameter, reader in enumerate(readers):
            reader.copy_to(self.flats[parameter], step=self.ledger.chunk_numel)
        self.ahead.clear()
        self.ledger.sums[:] = self.measure(np.arange(len(self.ledger.sums)))

    def measure(self, chunks: Ints) -> NDArray[np.uint64]:
        """uint64[n]: digests of int64[n] chunks, read from memory."""
        table = self.ledger.table
        columns = table.parameter[chunks], table.start[chunks], table.numel[chunks]
        found = [
            self._digest(parameter, low, low + numel)
            for parameter, low, numel in zip(*(c.tolist() for c in columns), strict=True)
        ]
        return np.array(found, np.uint64)

    def compare(
        self,
        readers: Sequence[WireReader],
        *,
        policy: Policy,
        bucket_bytes: int,
        max_held_bytes: int,
        base_version: int,
    ) -> DeltaPlan:
        """Compare every parameter with the source, once. Indices and values beyond
        `max_held_bytes` are found a second time while packing.
        """
        ledger, changes, room = self.ledger.copy(), list[Change](), max_held_bytes
        for parameter, reader in enumerate(readers):
            change = self.change(parameter, reader, policy, ledger=ledger, room=room)
            if change is not None:
                changes.append(change)
                room -= change.held_bytes
        return DeltaPlan(
            self,
            changes,
            ledger,
            policy,
            readers,
            bucket_bytes=bucket_bytes,
            base_version=base_version,
        )

    def change(
        self,
        parameter: int,
        reader: WireReader,
        policy: Policy,
        *,
        ledger: DigestLedger,
        room: int,
    ) -> Change | None:
        """How the source of one parameter differs, accounted for in `ledger`; None if it does not.

        Its runs are let go as soon as they outgrow `room` bytes, so that a large parameter takes no
        more memory than a small one.
        """
        if parameter not in self.ahead and _is_small_and_same(reader, self.flats[parameter]):
            return None
        change, share = Change(parameter), ledger.shares[parameter]
        runs: list[Run] = []
        for run, nnz in self.find(parameter, reader, policy):
            change.count(run, nnz, share)
            runs.append(run)
            if change.held_bytes > room:
                self._account(ledger, parameter, runs, reader)
                runs.clear()
        if not change.nnz:
            return None
        if share.region.is_run:  # what lies within one row is sent without indices
            runs = merged(runs, reader.flat.numel)
        self._account(ledger, parameter, runs, reader)
        if change.held_bytes <= room:
            change.runs = runs
        else:
            change.held_bytes = 0
        return change

    def find(self, parameter: int, reader: WireReader, policy: Policy) -> Iterator[tuple[Run, int]]:
        """(run, differing elements) of each chunk in which the source of a parameter differs."""
        if parameter in self.ahead:  # its old bits are gone: an aborted sync overwrote them
            return iter([(Run(0, reader.flat.numel), reader.flat.numel)])
        old = self.flats[parameter]
        if policy is not self._policy:  # what follows from it is worked out once
            self._policy, self._crossover = policy, {}
        if (kind := old.line.device.type) not in self._crossover:
            self._crossover[kind] = policy.crossover(kind)
        return changed_runs(
            reader, old, step=self.ledger.chunk_numel, crossover=self._crossover[kind]
        )

    def full(self, *, bucket_bytes: int) -> FullPlan:
        """All of the weights."""
        return FullPlan(self.flats, self.ledger, bucket_bytes=bucket_bytes)

    def stage(
        self, *, sparse_bytes: int, dense_bytes: int, max_bytes: int, writing: Callable[[], None]
    ) -> Staging:
        """Begin a sync that brings so many bytes; in place if staging takes over `max_bytes`."""
        needed = staged_bytes_of(
            sparse_bytes=sparse_bytes,
            dense_bytes=dense_bytes,
            part_item_size=self._part_item_size,
        )
        return Staging(
            self._lines,
            self.ledger,
            max_bytes=needed,
            in_place=needed > max_bytes,
            writing=writing,
        )

    def synchronize(self) -> None:
        """Nothing is in flight."""

    def write_ahead(self, parameter: int, run: Run, bits: Tensor) -> None:
        """Overwrite a run with int[count] bits before its version is decided."""
        self.ahead.add(parameter)
        run.write(self.flats[parameter], bits)

    def advance(self, changes: Iterable[Change], ledger: DigestLedger) -> None:
        """A version is decided: what was held of it is written, and `ledger` has its digests."""
        for change in changes:
            for run in change.runs or ():
                if run.bits is not None:
                    run.write(self.flats[change.parameter], run.bits)
        self.ledger = ledger
        self.ahead.clear()

    def _account(
        self, ledger: DigestLedger, parameter: int, runs: Iterable[Run], reader: WireReader
    ) -> None:
        """Let `ledger` have the digests after these runs."""
        old = self.flats[parameter]
        for run in runs:
            if run.indices is None or run.bits is None:
                ledger.measure(parameter, reader.read, start=run.start, stop=run.stop)
                continue
            for begin in range(0, len(run.bits), _BLOCK):
                positions = run.indices[begin : begin + _BLOCK].long()
                if run.start:
                    positions += run.start
                bits = run.bits[begin : begin + _BLOCK]
                ledger.replace_sparse(parameter, positions, old.gather(positions), bits)

    def _digest(self, parameter: int, low: int, high: int) -> int:
        flat = self.flats[parameter]
        if flat.is_contiguous:
            return self.ledger.digest_run(parameter, flat.line[low:high], low)
        positions = flat.held(low, high)
        bits = flat.read(low, high) if positions is None else flat.gather(positions)
        return self.ledger.digest_held(parameter, positions, bits, low)

    @cached_property
    def _lines(self) -> Lines:
        return Lines(self.flats, len(self.ledger.specs))

    @cached_property
    def _part_item_size(self) -> int | None:
        """The smallest element of those that are held in part."""
        parts = [flat for flat in self.flats.values() if flat.held(0, 0) is not None]
        return min((flat.dtype.item_size for flat in parts), default=None)


def _is_small_and_same(reader: WireReader, old: Live) -> bool:
    """A quick look at small host parameters: models with thousands of them leave most unchanged."""
    new = reader.flat
    return (
        new.numel <= _SMALL
        and new.line.is_cpu
        and old.line.is_cpu
        and new.is_contiguous
        and old.is_contiguous
        and reader.dtype == new.dtype
        and torch.equal(new.line, old.line)
    )
