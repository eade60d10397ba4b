"""Writing patches: into one tensor, or staged, committed and undone for a whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.bits import Flat, Live
from deltasync.delta.bucket import ReadBucket
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host_rows import HostRows, Lines
from deltasync.delta.kernels import kernels_for
from deltasync.delta.patch import ChunkedPatch, Patch, Run, positions_of, runs_of, write_run
from deltasync.errors import DigestMismatch, InvalidIndices, LayoutMismatch, LimitExceeded

_POSITION_BYTES = 8
_BLOCK = 1 << 14  # elements written before they are read back: their lines fit the L2 cache


def apply_patch(parameter: Tensor, patch: Patch) -> None:
    """Overwrite what the patch says of `parameter`, in place. Applying twice equals once.

    Args:
        parameter: The tensor to write, of any strides, on the patch's device.
        patch: The new values; they are checked before the first write.

    Raises:
        LayoutMismatch: Shape or dtype differ from the patch's.
        InvalidIndices: Indices out of range, unsorted or repeated.
        ConfigError: The tensor has no plain storage of its own.
    """
    flat = Flat.of(parameter, name=patch.name)
    _check_fits(flat, patch)
    runs = runs_of(patch)
    _check_runs(runs, flat.numel, patch.name)
    for run in runs:
        if run.bits is not None:
            write_run(flat, run, run.bits)


def _check_fits(flat: Flat, patch: Patch) -> None:
    if tuple(flat.tensor.shape) != tuple(patch.shape):
        raise LayoutMismatch(
            f"{patch.name}: patch of shape {patch.shape}, parameter {tuple(flat.tensor.shape)}"
        )
    for values in (
        [c.values for c in patch.chunks] if isinstance(patch, ChunkedPatch) else [patch.values]
    ):
        if values.dtype != flat.tensor.dtype:
            raise LayoutMismatch(
                f"{patch.name}: {values.dtype} values, {flat.tensor.dtype} weights"
            )


def _check_runs(runs: list[Run], numel: int, name: str) -> None:
    end = 0
    for run in runs:
        if not end <= run.start <= run.stop <= numel:
            raise InvalidIndices(f"{name}: chunks overlap, are unsorted or out of range")
        if run.bits is None or run.bits.shape != (run.count,):
            raise InvalidIndices(f"{name}: not one value for each index")
        end = run.stop
        check_indices(run, name=name)


def check_indices(run: Run, *, name: str) -> None:
    """Raises InvalidIndices unless a sparse run's indices rise strictly within its span."""
    if run.indices is None:
        return
    if not kernels_for(run.indices.device).is_increasing(run.indices, run.span):
        raise InvalidIndices(f"{name}: indices out of range, unsorted or repeated")


class Applier(Protocol):
    """Brings one sync into the weights: staged, or in place."""

    @property
    def in_place(self) -> bool:
        """Whether `stage_bucket` writes."""
        ...

    @property
    def staged_bytes(self) -> int: ...

    @property
    def ledger(self) -> DigestLedger:
        """The digests after `commit`."""
        ...

    def stage_bucket(self, bucket: ReadBucket) -> None: ...

    def commit(self) -> int:
        """Write. Returns the digest of the weights as re-read."""
        ...

    def undo(self) -> None:
        """Put the old bits back, or raise DigestMismatch."""
        ...


@dataclass(slots=True)
class StagedRun:
    """Elements of one live tensor, checked and ready to be written.

    Attributes:
        name: For errors: what it belongs to.
        flat: The live tensor.
        start: Flat position of a dense run's first element.
        positions: int64[count] flat positions; None for a dense run.
        bits: int[count], the new bits.
        old: int[count], the undo log.
    """

    name: str
    flat: Live
    start: int
    positions: Tensor | None
    bits: Tensor
    old: Tensor

    def commit(self) -> None:
        """Write, and read back while it is still in the cache. Raises DigestMismatch."""
        step = _BLOCK if self.bits.is_cpu and self.positions is not None else len(self.bits)
        for begin in range(0, len(self.bits), step):
            block = slice(begin, begin + step)
            self._write(self.bits, block)
            if not torch.equal(self._read(block), self.bits[block]):
                raise DigestMismatch(
                    f"{self.name}: the weights read back are not those that were written"
                )

    def restore(self) -> None:
        """Write the old bits."""
        self._write(self.old, slice(0, len(self.old)))

    def is_restored(self) -> bool:
        """Whether they are there."""
        return torch.equal(self._read(slice(0, len(self.old))), self.old)

    def _write(self, bits: Tensor, block: slice) -> None:
        if self.positions is None:
            self.flat.write(self.start + block.start, bits[block])
        else:
            self.flat.scatter(self.positions[block], bits[block])

    def _read(self, block: slice) -> Tensor:
        if self.positions is None:
            return self.flat.read(self.start + block.start, self.start + block.stop)
        return self.flat.gather(self.positions[block])

    @property
    def num_bytes(self) -> int:
        positions = 0 if self.positions is None else self.positions.nbytes
        return positions + self.bits.nbytes + self.old.nbytes


class Staging:
    """The patches of one sync at a receiver, from checked bytes to written weights.

    Staging checks, copies and predicts while the engine serves and writes nothing; `commit`
    writes and reads back; `undo` restores. Its memory is positions, new bits and undo log.

    With `in_place`, for receivers without that memory, what is staged is written at once and
    nothing of it is kept. A bucket is checked whole before its first element is written. The engine
    must be paused. There is no undo: broken off after a write, the model is dirty.

    Attributes:
        in_place: Whether it does so.
        ledger: The digests that the weights have after `commit`.
        staged_bytes: Memory held.
    """

    def __init__(
        self,
        lines: Lines,
        ledger: DigestLedger,
        *,
        max_bytes: int | None = None,
        in_place: bool = False,
        writing: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin a sync.

        Args:
            lines: The live weights that this receiver holds.
            ledger: Their digests now. Not changed.
            max_bytes: Raise LimitExceeded beyond; None when the sender's word is taken.
            in_place: Write what is staged, at once.
            writing: Called before `stage_bucket` writes in place.
        """
        self.in_place, self._writing = in_place, writing
        self._lines = lines
        self._runs: list[StagedRun] = []
        self._max_bytes = max_bytes
        self.ledger = ledger.copy()
        self.staged_bytes = 0

    def stage_bucket(self, bucket: ReadBucket) -> None:
        """Take over all its rows; their memory is copied. Raises InvalidIndices, LimitExceeded."""
        sparse = self._lines.sparse(bucket)
        item_size = self.ledger.item_sizes[bucket.rows["parameter"]] * sparse
        groups = [
            HostRows.of(bucket, np.flatnonzero(item_size == size), self._lines)
            for size in np.unique(item_size[sparse])
        ]
        alone = list(bucket.runs(~sparse))
        for rows in groups:
            rows.check(bucket.specs)
        for parameter, run in alone:
            check_indices(run, name=self.ledger.specs[parameter].name)
        while groups:
            self._stage_rows(groups.pop(0).held())
        for parameter, run in alone:
            self._stage_run(parameter, run)

    def _stage_rows(self, rows: HostRows) -> None:
        """Take over checked rows, all of them held in `lines`."""
        positions, old = rows.positions(), torch.empty_like(rows.bits)
        staged = []
        for line, part in rows.by_line():
            flat = self._lines.storages[line]
            torch.index_select(flat.line, 0, positions[part], out=old[part])
            name = self.ledger.specs[rows.parameter_at(part.start)].name
            staged.append(StagedRun(name, flat, 0, positions[part], rows.bits[part], old[part]))
        self.ledger.replace_rows(rows, old, rows.bits)
        self._take(staged)

    def _stage_run(self, parameter: int, run: Run) -> None:
        flat = self._lines.flats.get(parameter)
        name = self.ledger.specs[parameter].name
        if flat is None or run.bits is None:
            return
        bits = run.bits.to(flat.line.device, copy=not self.in_place)
        positions, new = _held_of(run, bits, flat)
        if not len(new):
            return
        if positions is None:
            # What is written in place is not put back, and nobody asks for its old bits.
            old = new if self.in_place else flat.read(run.start, run.stop).clone()
            self.ledger.replace_dense(parameter, run.start, new, flat.read)
        else:
            old = flat.gather(positions)
            self.ledger.replace_sparse(parameter, positions, old, new)
        self._take([StagedRun(name, flat, run.start, positions, new, old)])

    def _take(self, runs: list[StagedRun]) -> None:
        if self.in_place:
            if runs:
                self._writing()
            for run in runs:
                run.commit()
            return
        self.staged_bytes += sum(run.num_bytes for run in runs)
        if self._max_bytes is not None and self.staged_bytes > self._max_bytes:
            raise LimitExceeded(f"{runs[0].name}: the sync is larger than its begin declared")
        self._runs += runs

    def commit(self) -> int:
        """Write everything and read it back. Returns the digest of the weights.

        Raises DigestMismatch, by name, for what is not there, and whatever a write raises; the
        caller then calls `undo`.
        """
        for run in self._runs:
            run.commit()
        return self.ledger.total

    def undo(self) -> None:
        """Put the old bits back and check that they are there. Raises DigestMismatch."""
        if self.in_place:
            raise DigestMismatch("weights that were written in place cannot be put back")
        for run in self._runs:
            run.restore()
        for run in self._runs:
            if not run.is_restored():
                raise DigestMismatch(f"{run.name}: undo failed")


def _held_of(run: Run, bits: Tensor, flat: Live) -> tuple[Tensor | None, Tensor]:
    """(int64[k] positions, int[k] bits) of what is held of a run; without positions a dense run."""
    if run.indices is None:
        positions = flat.held(run.start, run.stop)
        return positions, bits if positions is None else bits[positions - run.start]
    positions = positions_of(run).to(bits.device)
    kept = flat.keeps(positions)
    return (positions, bits) if kept is None else (positions[kept], bits[kept])


def staged_bytes_of(
    *, sparse_bytes: int, dense_bytes: int, part_item_size: int | None = None
) -> int:
    """Memory that staging takes for what a begin declares.

    Positions are int64 where indices are int32, and new values are kept beside old ones: twice
    what travels. What is dense has no positions, unless only parts of it are held.

    Args:
        sparse_bytes, dense_bytes: Of indices and values.
        part_item_size: The smallest element of those held in part; None if all are held whole.
    """
    positions = 0 if part_item_size is None else _POSITION_BYTES // part_item_size
    return 2 * sparse_bytes + (2 + positions) * dense_bytes
