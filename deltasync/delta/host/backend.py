"""Weights on which torch and numpy work, parameter by parameter, and what is sent of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import Live, Run
from deltasync.delta.bucket import staged_bytes_of
from deltasync.delta.codecs.old import SnapshotOld
from deltasync.delta.digests import DigestLedger, Ints
from deltasync.delta.host.packing import Bucket, buckets, bytes_of
from deltasync.delta.host.small import SMALL, SmallSource, SmallWeights
from deltasync.delta.host.staging import Lines, Staging
from deltasync.delta.kernels import KERNELS
from deltasync.delta.policy import Policy
from deltasync.delta.readers import Reader, copy_read
from deltasync.delta.shard import Share
from deltasync.wire.table import MAX_SPARSE_SPAN

_BLOCK = 1 << 17  # positions digested at once
_MANY = 8  # parameters from which on it pays to read small ones together


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
    decoder = None
    bucket_bytes = 64 << 20

    def __init__(self, flats: Mapping[int, Live], ledger: DigestLedger) -> None:
        self.flats, self.ledger = flats, ledger
        self.ahead: set[int] = set()
        self.num_bytes = sum(flat.numel * flat.dtype.item_size for flat in flats.values())
        self._policy: Policy | None = None
        self._crossover: dict[str, float] = {}
        self._readers: Sequence[Reader] | None = None  # of the last comparison
        self._small_source: SmallSource | None = None  # of these, if they have come twice

    def capture(self, readers: Sequence[Reader]) -> None:
        """Take the source's bits as they are now, all of them."""
        for parameter, reader in enumerate(readers):
            copy_read(reader, self.flats[parameter], step=self.ledger.chunk_numel)
        self.ahead.clear()
        self.ledger.sums[:] = self.measure(np.arange(len(self.ledger.sums)))

    def measure(self, chunks: Ints) -> NDArray[np.uint64]:
        """uint64[n]: digests of int64[n] chunks, read from memory."""
        table, found = self.ledger.table, np.zeros(len(chunks), np.uint64)
        parameter = table.parameter[chunks]
        is_small = self._small.has[parameter]
        if is_small.any():
            found[is_small] = self._small.digests(parameter[is_small])
        rest = np.flatnonzero(~is_small)
        columns = rest, parameter[rest], table.start[chunks[rest]], table.numel[chunks[rest]]
        for nth, number, low, numel in zip(*(c.tolist() for c in columns), strict=True):
            found[nth] = self._digest(number, low, low + numel)
        return found

    def compare(
        self,
        readers: Sequence[Reader],
        *,
        policy: Policy,
        bucket_bytes: int,
        max_held_bytes: int,
        base_version: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> DeltaPlan:
        """Compare every parameter with the source, once. Indices and values beyond
        `max_held_bytes` are found a second time while packing.
        """
        if meanwhile is not None:
            meanwhile()
        ledger, changes, room = self.ledger.copy(), list[Change](), max_held_bytes
        for parameter in self._looked_at(readers):
            change = self.change(parameter, readers[parameter], policy, ledger=ledger, room=room)
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

    def _looked_at(self, readers: Sequence[Reader]) -> Iterable[int]:
        """Numbers of the parameters to compare one by one: all, or of many all but small ones that
        are the same.

        It takes a while to find small ones, and for a source that moves that would be for nothing.
        """
        if len(readers) < _MANY:
            return range(len(readers))
        if readers is not self._readers:
            self._readers, self._small_source = readers, None
            return range(len(readers))
        if self._small_source is None:
            self._small_source = SmallSource(readers, self.flats)
        ahead = np.array(list(self.ahead), np.int64)
        found = self._small_source.others, self._small_source.differing(), ahead
        numbers: list[int] = np.unique(np.concatenate(found)).tolist()
        return numbers

    def change(
        self,
        parameter: int,
        reader: Reader,
        policy: Policy,
        *,
        ledger: DigestLedger,
        room: int,
    ) -> Change | None:
        """How the source of one parameter differs, accounted for in `ledger`; None if it does not.

        Dense chunks are digested while they are in the cache, sparse ones together. Runs are let go
        as soon as they outgrow `room` bytes, so that a large parameter takes no more memory than a
        small one.
        """
        if parameter not in self.ahead and _is_small_and_same(reader, self.flats[parameter]):
            return None
        change, share = Change(parameter), ledger.shares[parameter]
        runs: list[Run] = []
        for run, nnz in self.find(parameter, reader, policy):
            change.count(run, nnz, share)
            runs.append(run)
            if run.bits is None:
                ledger.measure(parameter, reader.read, start=run.start, stop=run.stop)
            if change.held_bytes > room:
                self._account(ledger, parameter, runs)
                runs.clear()
        if not change.nnz:
            return None
        if not share.gap:  # what lies within one row is sent without indices
            runs = merged(runs, reader.numel)
        self._account(ledger, parameter, runs)
        if change.held_bytes <= room:
            change.runs = runs
        else:
            change.held_bytes = 0
        return change

    def find(self, parameter: int, reader: Reader, policy: Policy) -> Iterator[tuple[Run, int]]:
        """(run, differing elements) of each chunk in which the source of a parameter differs."""
        if parameter in self.ahead:  # its old bits are gone: an aborted sync overwrote them
            return iter([(Run(0, reader.numel), reader.numel)])
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

    def _account(self, ledger: DigestLedger, parameter: int, runs: Iterable[Run]) -> None:
        """Let `ledger` have the digests after those of these runs that are sparse."""
        old = self.flats[parameter]
        for run in runs:
            if run.indices is None or run.bits is None:
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
    def _small(self) -> SmallWeights:
        return SmallWeights(self.flats if len(self.flats) >= _MANY else {}, self.ledger)

    @cached_property
    def _lines(self) -> Lines:
        return Lines(self.flats, len(self.ledger.specs))

    @cached_property
    def _part_item_size(self) -> int | None:
        """The smallest element of those that are held in part."""
        parts = [flat for flat in self.flats.values() if flat.held(0, 0) is not None]
        return min((flat.dtype.item_size for flat in parts), default=None)


@dataclass(slots=True)
class Change:
    """How one parameter differs from the snapshot.

    Attributes:
        parameter: Its number in the layout.
        nnz: Elements that differ.
        runs: What to send, ordered and disjoint; None when the runs were let go to bound memory
            and have to be found again while packing.
        sparse_bytes, dense_bytes: Bytes of the indices and values of its runs.
        held_bytes: Of these, what runs of sparse changes take in memory.
    """

    parameter: int
    nnz: int = 0
    runs: list[Run] | None = None
    sparse_bytes: int = 0
    dense_bytes: int = 0
    held_bytes: int = 0

    def count(self, run: Run, nnz: int, share: Share) -> None:
        """Add a run of which `nnz` elements differ."""
        self.nnz += nnz
        sparse_bytes, dense_bytes = bytes_of(share, run)
        self.sparse_bytes += sparse_bytes
        self.dense_bytes += dense_bytes
        if run.indices is not None:
            self.held_bytes += sparse_bytes


class DeltaPlan:
    """The changes since the snapshot. Packing overwrites the snapshot where it bounds memory.

    Attributes:
        changes: One for each parameter that differs, in layout order.
        changed: Their numbers.
        nnz: Elements that differ.
        ledger: The digests of the source.
        sparse_bytes, dense_bytes: Bytes of all indices and values.
        held_bytes: Bytes of the indices and values that `changes` keep in memory.
        base_version: The version that it fits on.
    """

    def __init__(
        self,
        snapshot: HostBackend,
        changes: list[Change],
        ledger: DigestLedger,
        policy: Policy,
        readers: Sequence[Reader],
        *,
        bucket_bytes: int,
        base_version: int,
    ) -> None:
        self.changes, self.ledger = changes, ledger
        self._snapshot, self._policy, self._readers = snapshot, policy, readers
        self._bucket_bytes = bucket_bytes
        self.base_version: int | None = base_version
        self.nnz = sum(change.nnz for change in changes)
        self.sparse_bytes = sum(change.sparse_bytes for change in changes)
        self.dense_bytes = sum(change.dense_bytes for change in changes)
        self.held_bytes = sum(change.held_bytes for change in changes)
        numbers = [(change.parameter, change.nnz) for change in changes]
        self.changed, self._counts = np.array(numbers, np.int64).reshape(-1, 2).T
        self._not_held = {change.parameter for change in changes if change.runs is None}

    def counts(self) -> Ints:
        """int64[n]: elements that differ, of each of `changed`."""
        return self._counts

    def moved(self) -> Ints:
        """int64[n]: parameters that were packed with other bits than were digested.

        The source was written meanwhile. Ask when everything is packed: what was read twice is in
        the snapshot then.
        """
        ledger, step = self.ledger, self.ledger.chunk_numel
        is_written = np.zeros(len(ledger.sums), np.bool_)
        for change in self.changes:
            first, numel = ledger.first[change.parameter], ledger.shares[change.parameter].numel
            for run in change.runs or [Run(0, numel)]:
                chunks = slice(first + run.start // step, first - (-run.stop // step))
                is_written[chunks] |= run.bits is None
        written = np.flatnonzero(is_written)
        differs = self._snapshot.measure(written) != ledger.sums[written]
        return np.unique(ledger.table.parameter[written[differs]])

    def buckets(self) -> Iterator[Bucket]:
        is_held = self.held_bytes == self.sparse_bytes + self.dense_bytes
        gone = np.array(sorted(self._snapshot.ahead), np.int64)  # what an aborted sync overwrote
        flats, shares = self._snapshot.flats, self.ledger.shares

        def old_of(numbers: Ints) -> SnapshotOld:
            return SnapshotOld(shares, flats, numbers, ~np.isin(numbers, gone))

        return buckets(
            self.runs(),
            self.ledger.shares,
            bucket_bytes=self._bucket_bytes,
            read=self.read,
            packed=None if is_held else self.packed,
            old_of=old_of,
        )

    def decided(self) -> None:
        """Advance the snapshot by what was held."""
        snapshot = self._snapshot
        for change in self.changes:
            for run in change.runs or ():
                if run.bits is not None:
                    run.write(snapshot.flats[change.parameter], run.bits)
        snapshot.ledger = self.ledger
        snapshot.ahead.clear()

    def runs(self) -> Iterator[tuple[int, Run]]:
        """The changes; those that were not held in memory are found again, chunk by chunk."""
        for change in self.changes:
            parameter = change.parameter
            if change.runs is not None:
                yield from ((parameter, run) for run in change.runs)
                continue
            for run, _ in self._snapshot.find(parameter, self._readers[parameter], self._policy):
                yield parameter, run

    def read(self, parameter: int, start: int, stop: int) -> Tensor:
        """From the live source."""
        return self._readers[parameter].read(start, stop)

    def packed(self, parameter: int, run: Run, bits: Tensor) -> None:
        """Nothing keeps the run until the decision: the snapshot takes it now."""
        if run.bits is None or parameter in self._not_held:
            self._snapshot.write_ahead(parameter, run, bits)


class FullPlan:
    """The whole snapshot: for receivers whose weights are not known.

    Attributes:
        ledger: Its digests.
        sparse_bytes, dense_bytes: Bytes of all indices and values.
    """

    base_version: int | None = None

    def __init__(
        self, flats: Mapping[int, Live], ledger: DigestLedger, *, bucket_bytes: int
    ) -> None:
        self._flats, self.ledger, self._bucket_bytes = flats, ledger, bucket_bytes
        self.sparse_bytes = self.dense_bytes = 0
        for number, run in self._runs():
            sparse_bytes, dense_bytes = bytes_of(ledger.shares[number], run)
            self.sparse_bytes += sparse_bytes
            self.dense_bytes += dense_bytes

    def buckets(self) -> Iterator[Bucket]:
        """Every parameter, dense."""
        size = self._bucket_bytes
        return buckets(self._runs(), self.ledger.shares, bucket_bytes=size, read=self.read)

    def decided(self) -> None:
        """The snapshot is what was sent."""

    def read(self, parameter: int, start: int, stop: int) -> Tensor:
        """From the snapshot: the live source may already be ahead."""
        return self._flats[parameter].read(start, stop)

    def _runs(self) -> Iterator[tuple[int, Run]]:
        for number, share in enumerate(self.ledger.shares):
            if numel := share.numel:
                yield number, Run(0, numel)


def changed_runs(
    reader: Reader, old: Live, *, step: int, crossover: float
) -> Iterator[tuple[Run, int]]:
    """(run, differing elements) of each chunk that differs, in order.

    This decides whether a chunk is sent sparse or dense; on GPUs `batched.plans` does.

    Args:
        reader: The new bits.
        old: The old bits; on the device that compares.
        step: Elements of a chunk.
        crossover: The density above which a chunk is dense.
    """
    numel, device = old.numel, old.line.device
    changed = KERNELS[device.type].changed
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        new_bits = reader.read(start, stop).to(device)
        count, found = changed(new_bits, old.read(start, stop), crossover * (stop - start))
        if found is None:
            yield Run(start, stop - start), count
        elif count:
            yield Run(start, stop - start, found[0], found[1]), count


def merged(runs: list[Run], numel: int) -> list[Run]:
    """One run for the whole parameter, where all its chunks are sparse or all are dense."""
    sparse = [run for run in runs if run.indices is not None]
    if not sparse and sum(run.span for run in runs) == numel > 0:
        return [Run(0, numel)]
    # An int32 index relative to the parameter's beginning must not wrap around.
    if not sparse or len(sparse) < len(runs) or numel > MAX_SPARSE_SPAN:
        return runs
    if len(sparse) == 1 and sparse[0].span == numel:
        return sparse
    indices = torch.cat([run.indices + run.start for run in sparse if run.indices is not None])
    return [Run(0, numel, indices, torch.cat([run.bits for run in sparse if run.bits is not None]))]


def _is_small_and_same(reader: Reader, old: Live) -> bool:
    """A quick look at small host parameters: models with thousands of them leave most unchanged."""
    new = reader.flat
    return (
        new is not None
        and new.numel <= SMALL
        and new.line.is_cpu
        and old.line.is_cpu
        and new.is_contiguous
        and old.is_contiguous
        and reader.dtype == new.dtype
        and torch.equal(new.line, old.line)
    )
