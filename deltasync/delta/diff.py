"""What changed: bit-for-bit comparison of parameters with the snapshot, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, WireReader, dtype_of
from deltasync.delta.bucket import bytes_of
from deltasync.delta.digests import DigestLedger
from deltasync.delta.kernels import kernels_for
from deltasync.delta.patch import Patch, Run, patch_from_runs
from deltasync.delta.policy import Policy
from deltasync.delta.shard import Share
from deltasync.delta.snapshot import Snapshot
from deltasync.errors import LayoutMismatch
from deltasync.wire.table import MAX_SPARSE_SPAN

_SMALL = 1 << 12  # elements up to which one call for all costs less than a chunk's bookkeeping
_BLOCK = 1 << 17  # indices widened at once


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
    nnz: int
    runs: list[Run] | None
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


@dataclass(slots=True)
class ModelDelta:
    """How the source differs from the snapshot.

    Attributes:
        changes: One for each parameter that differs, in layout order.
        ledger: The digests of the source.
        held_bytes: Bytes of the indices and values that `changes` keep in memory.
    """

    ledger: DigestLedger
    changes: list[Change] = field(default_factory=list)
    held_bytes: int = 0

    @property
    def nnz(self) -> int:
        """Elements that differ."""
        return sum(change.nnz for change in self.changes)

    @property
    def sparse_bytes(self) -> int:
        return sum(change.sparse_bytes for change in self.changes)

    @property
    def dense_bytes(self) -> int:
        return sum(change.dense_bytes for change in self.changes)


def diff(
    new: Tensor, base: Tensor, *, name: str = "", policy: Policy | None = None
) -> Patch | None:
    """The patch that makes `base` bit-identical to `new`, or None if it is already.

    Args:
        new: The parameter; of `base`'s dtype or of another floating dtype, which is then
            rounded to `base`'s. Any strides.
        base: What the receiver holds. Same shape and device.
        name: Checkpoint name to put into the patch.
        policy: When to go dense.

    Raises:
        LayoutMismatch: The shapes differ.
        ConfigError: The dtypes cannot be compared, or a tensor has no plain storage.
    """
    if new.shape != base.shape:
        raise LayoutMismatch(f"{name}: shape {tuple(new.shape)} against {tuple(base.shape)}")
    reader = WireReader.of(new, dtype_of(base), name=name)
    runs, _ = find_runs(reader, Flat.of(base, name=name), policy or Policy())
    if not runs:
        return None
    filled = [_filled(run, reader) for run in runs]
    return patch_from_runs(name, tuple(base.shape), filled, base.dtype)


def diff_model(
    readers: Sequence[WireReader], snapshot: Snapshot, *, policy: Policy, max_held_bytes: int
) -> ModelDelta:
    """Compare every parameter with the snapshot, once.

    Args:
        readers: The source's parameters, in layout order.
        snapshot: What receivers hold; only read.
        policy: When to go dense.
        max_held_bytes: Indices and values kept in memory; what goes beyond is found again
            while packing.
    """
    delta = ModelDelta(snapshot.ledger.copy())
    for parameter, reader in enumerate(readers):
        room = max_held_bytes - delta.held_bytes
        change = compare(parameter, reader, snapshot, policy, ledger=delta.ledger, room=room)
        if change is None:
            continue
        if change.runs is not None:
            delta.held_bytes += change.held_bytes
        delta.changes.append(change)
    return delta


def compare(
    parameter: int,
    reader: WireReader,
    snapshot: Snapshot,
    policy: Policy,
    *,
    ledger: DigestLedger,
    room: int,
) -> Change | None:
    """One parameter's change, accounted for in `ledger`; None without one.

    Its runs are let go as soon as they outgrow `room` bytes, so that a large parameter takes no
    more memory than a small one.
    """
    change = Change(parameter, nnz=0, runs=None)
    share = snapshot.shares[parameter]
    runs: list[Run] = []
    for run, count in runs_to_send(parameter, reader, snapshot, policy):
        change.count(run, count, share)
        runs.append(run)
        if change.held_bytes > room:
            _keep_digests(ledger, parameter, runs, reader, snapshot)
            runs.clear()
    if not change.nnz:
        return None
    if not share.band.gap:  # what lies within one row is sent without indices
        runs = _merged(runs, reader.flat.numel)
    _keep_digests(ledger, parameter, runs, reader, snapshot)
    if change.held_bytes <= room:
        change.runs = runs
    return change


def runs_to_send(
    parameter: int, reader: WireReader, snapshot: Snapshot, policy: Policy
) -> Iterator[tuple[Run, int]]:
    """(run, changed elements): what to send of one parameter, chunk by chunk."""
    if parameter in snapshot.ahead:  # its old bits are gone: an aborted sync overwrote them
        yield Run(0, reader.flat.numel), reader.flat.numel
    else:
        yield from iter_runs(reader, snapshot.flats[parameter], policy)


def find_runs(reader: WireReader, old: Flat, policy: Policy) -> tuple[list[Run], int]:
    """The runs in which `reader` differs from `old`, and the number of differing elements."""
    found = list(iter_runs(reader, old, policy))
    runs = _merged([run for run, _ in found], old.numel)
    return runs, sum(count for _, count in found)


def iter_runs(reader: WireReader, old: Flat, policy: Policy) -> Iterator[tuple[Run, int]]:
    """(run, differing elements) of each chunk that differs, in order."""
    if _is_small_and_same(reader, old):
        return
    changed = kernels_for(old.line.device).changed
    numel, step = old.numel, policy.chunk_numel_on(old.line.device.type)
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        new_bits = reader.read(start, stop).to(old.line.device)
        limit = policy.max_sparse(stop - start, old.line.device.type)
        count, found = changed(new_bits, old.read(start, stop), limit)
        if found is None:
            yield Run(start, stop - start), count
        elif count:
            yield Run(start, stop - start, found[0], found[1]), count


def _is_small_and_same(reader: WireReader, old: Flat) -> bool:
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


def _merged(runs: list[Run], numel: int) -> list[Run]:
    """One run for the whole parameter, where all its chunks are sparse or all are dense."""
    sparse = [run for run in runs if run.indices is not None]
    if not sparse and sum(run.span for run in runs) == numel > 0:
        return [Run(0, numel)]
    # An int32 index relative to the parameter's beginning must not wrap around.
    if not sparse or len(sparse) < len(runs) or numel > MAX_SPARSE_SPAN:
        return runs
    indices = torch.cat([run.indices + run.start for run in sparse if run.indices is not None])
    return [Run(0, numel, indices, torch.cat([run.bits for run in sparse if run.bits is not None]))]


def _filled(run: Run, reader: WireReader) -> Run:
    if run.indices is not None:
        return run
    return Run(run.start, run.span, None, reader.read(run.start, run.stop).clone())


def _keep_digests(
    ledger: DigestLedger, parameter: int, runs: list[Run], reader: WireReader, snapshot: Snapshot
) -> None:
    old = snapshot.flats[parameter]
    for run in runs:
        if run.indices is None or run.bits is None:
            ledger.measure(parameter, reader.read, start=run.start, stop=run.stop)
        else:
            for begin in range(0, run.count, _BLOCK):
                positions = run.indices[begin : begin + _BLOCK].long() + run.start
                bits = run.bits[begin : begin + _BLOCK]
                ledger.replace_sparse(parameter, positions, old.gather(positions), bits)
