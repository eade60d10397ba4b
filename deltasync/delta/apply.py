"""Writing patches: into one tensor, or staged, committed and undone for a whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, Live
from deltasync.delta.bucket import ReadBucket
from deltasync.delta.digests import DigestLedger
from deltasync.delta.kernels import kernels_for
from deltasync.delta.patch import ChunkedPatch, Patch, Run, positions_of, runs_of, write_run
from deltasync.errors import DigestMismatch, InvalidIndices, LayoutMismatch, LimitExceeded
from deltasync.wire.digest import MASK

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
    """One run, checked and ready to be written.

    Attributes:
        parameter: Its parameter's number in the layout.
        flat: The live parameter.
        start: Flat position of a dense run's first element.
        positions: int64[count] flat positions; None for a dense run.
        bits: int[count], the new bits.
        old: int[count], the undo log.
        digest: The digest of the new bits at their places.
    """

    parameter: int
    flat: Live
    start: int
    positions: Tensor | None
    bits: Tensor
    old: Tensor
    digest: int

    def write(self, bits: Tensor) -> None:
        if self.positions is None:
            self.flat.write(self.start, bits)
        else:
            self.flat.scatter(self.positions, bits)

    def read(self) -> Tensor:
        """int[count]: the live bits."""
        if self.positions is None:
            return self.flat.read(self.start, self.start + len(self.bits))
        return self.flat.gather(self.positions)

    @property
    def num_bytes(self) -> int:
        positions = 0 if self.positions is None else self.positions.nbytes
        return positions + self.bits.nbytes + self.old.nbytes


class Staging:
    """The patches of one sync at a receiver, from checked bytes to written weights.

    `stage` checks, copies and predicts while the engine serves and writes nothing; `commit`
    writes and reads back; `undo` restores. Its memory is positions, new bits and undo log.

    Attributes:
        ledger: The digests that the weights have after `commit`.
        staged_bytes: Memory held.
    """

    in_place = False

    def __init__(
        self, flats: Mapping[int, Live], ledger: DigestLedger, *, max_bytes: int | None
    ) -> None:
        """Begin a sync.

        Args:
            flats: The live parameters that this receiver holds, by number in the layout.
            ledger: Their digests now. Not changed.
            max_bytes: Raise LimitExceeded beyond; None when the sender's word is taken.
        """
        self._flats = flats
        self._runs: list[StagedRun] = []
        self._max_bytes = max_bytes
        self.ledger = ledger.copy()
        self.staged_bytes = 0

    def stage_bucket(self, bucket: ReadBucket) -> None:
        """Take over all its runs."""
        for parameter, run in bucket.runs():
            self.stage(parameter, run)

    def stage(self, parameter: int, run: Run) -> None:
        """Take over one run; its memory is copied. Raises InvalidIndices, LimitExceeded."""
        flat = self._flats.get(parameter)
        name = self.ledger.specs[parameter].name
        check_indices(run, name=name)
        if flat is None or run.bits is None:
            return
        positions, new = _held_of(run, run.bits.to(flat.line.device, copy=True), flat)
        if not len(new):
            return
        staged = self._staged(parameter, flat, run.start, positions, new)
        self.staged_bytes += staged.num_bytes
        if self._max_bytes is not None and self.staged_bytes > self._max_bytes:
            raise LimitExceeded(f"{name}: the sync is larger than its begin declared")
        self._runs.append(staged)

    def _staged(
        self, parameter: int, flat: Live, start: int, positions: Tensor | None, new: Tensor
    ) -> StagedRun:
        if positions is None:
            old = flat.read(start, start + len(new)).clone()
            gained = self.ledger.replace_dense(parameter, start, new, flat.read)
            return StagedRun(parameter, flat, start, None, new, old, gained)
        old = flat.gather(positions)
        gained = self.ledger.replace_sparse(parameter, positions, old, new)
        return StagedRun(parameter, flat, start, positions, new, old, gained)

    def commit(self) -> int:
        """Write everything and read it back. Returns the digest of the weights as re-read.

        Raises whatever a write raises; the caller then calls `undo`.
        """
        digest = self.ledger.total
        for run in self._runs:
            digest += self._write(run) - run.digest
        return digest & MASK

    def undo(self) -> None:
        """Put the old bits back and check that they are there. Raises DigestMismatch."""
        for run in self._runs:
            run.write(run.old)
        for run in self._runs:
            if not torch.equal(run.read(), run.old):
                raise DigestMismatch(f"{self.ledger.specs[run.parameter].name}: undo failed")

    def _write(self, run: StagedRun) -> int:
        """Write a run. Returns the digest of what is read back, while it is still in the cache."""
        if run.positions is None:
            run.write(run.bits)
            return self.ledger.digest_run(run.parameter, run.read(), run.start)
        digest = 0
        step = _BLOCK if run.positions.is_cpu else len(run.positions)
        for begin in range(0, len(run.positions), step):
            positions = run.positions[begin : begin + step]
            run.flat.scatter(positions, run.bits[begin : begin + step])
            live = run.flat.gather(positions)
            digest += self.ledger.digest_at(run.parameter, positions, live)
        return digest


class InPlace:
    """Writes a sync as it arrives, for receivers without the memory to stage it.

    The engine must be paused. There is no undo: broken off, the model is dirty.

    Attributes:
        ledger: The digests of the weights as re-read after each write.
        staged_bytes: Memory held: none.
    """

    in_place = True
    staged_bytes = 0

    def __init__(self, flats: Mapping[int, Live], ledger: DigestLedger) -> None:
        self._flats = flats
        self.ledger = ledger.copy()

    def stage_bucket(self, bucket: ReadBucket) -> None:
        """Write all its runs."""
        for parameter, run in bucket.runs():
            self.stage(parameter, run)

    def stage(self, parameter: int, run: Run) -> None:
        """Write one run. Raises InvalidIndices before anything of it is written."""
        flat = self._flats.get(parameter)
        check_indices(run, name=self.ledger.specs[parameter].name)
        if flat is None or run.bits is None:
            return
        positions, bits = _held_of(run, run.bits.to(flat.line.device), flat)
        if positions is None:
            self._write_dense(parameter, flat, run, bits)
        elif len(positions):
            old = flat.gather(positions)
            flat.scatter(positions, bits)
            self.ledger.replace_sparse(parameter, positions, old, flat.gather(positions))

    def _write_dense(self, parameter: int, flat: Live, run: Run, bits: Tensor) -> None:
        for _, low, high in self.ledger.chunks(run.start, run.stop):
            self._write_piece(parameter, flat, low, bits[low - run.start : high - run.start])

    def _write_piece(self, parameter: int, flat: Live, start: int, bits: Tensor) -> None:
        """A piece lies in one chunk, so that its old bits are asked for whole or not at all."""
        old = flat.read(start, start + len(bits)).clone()
        flat.write(start, bits)
        live = flat.read(start, start + len(bits))
        self.ledger.replace_dense(parameter, start, live, lambda *_: old)

    def commit(self) -> int:
        """The digest of the weights as they were re-read."""
        return self.ledger.total

    def undo(self) -> None:
        """Nothing was kept. Raises DigestMismatch."""
        raise DigestMismatch("weights that were written in place cannot be put back")


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
