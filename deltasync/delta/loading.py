"""Writing a full sync through an engine's own loader, which proves the routes around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.bits import Live, integer_dtype, torch_dtype
from deltasync.delta.bucket import ReadBucket
from deltasync.delta.digests import DigestLedger, Measure
from deltasync.delta.patch import Run
from deltasync.errors import DigestMismatch, InvalidTable


class Loader(Protocol):
    """How an engine takes a checkpoint."""

    def load(self, weights: Iterable[tuple[str, Tensor]], /) -> object:
        """Take a few checkpoint tensors, under the layout's names. Each comes once, whole."""
        ...

    def finish(self) -> None:
        """All have been loaded."""
        ...


class Loading:
    """Gives a full sync to a loader, then looks whether all of it is where the routes say.

    The engine must be paused. There is no undo: broken off, the model is dirty. One tensor at most
    is held: of those that several buckets bring, the one that is not complete.

    Attributes:
        staged_bytes: Memory of the largest of these.
    """

    in_place = True

    def __init__(
        self, loader: Loader, flats: Mapping[int, Live], ledger: DigestLedger, measure: Measure
    ) -> None:
        """Begin a sync.

        Args:
            loader: The engine's.
            flats: Where routes say that its parameters are.
            ledger: Their digests now. Not changed.
            measure: Reads digests from `flats`.
        """
        self.staged_bytes = 0
        self._loader, self._flats, self._measure = loader, flats, measure
        self._expected = ledger.copy()
        self._part = torch.empty(0)  # of one parameter
        self._filled = 0

    def stage_bucket(self, bucket: ReadBucket) -> None:
        """Load the tensors that it completes. Raises InvalidTable for rows that are not dense."""
        ready: list[tuple[str, Tensor]] = []
        for number, run in bucket.runs():
            if number in self._flats and (bits := self._completed(number, run)) is not None:
                spec = self._expected.specs[number]
                self._expect(number, bits)
                ready.append((spec.name, bits.view(torch_dtype(spec.dtype)).view(spec.shape)))
        if ready:
            with torch.no_grad():
                self._loader.load(ready)

    def _expect(self, number: int, bits: Tensor) -> None:
        """What is held of int[numel] bits is to be found where it is held."""
        held = self._flats[number].held
        bits = bits.to(self._flats[number].line.device)
        self._expected.measure(number, lambda low, high: bits[low:high], held=held)

    @cached_property
    def ledger(self) -> DigestLedger:
        """The digests of the weights as they were re-read. Raises DigestMismatch."""
        self._loader.finish()
        found = self._expected.copy()
        found.sums[:] = self._measure(np.arange(len(found.sums)))
        wrong = np.flatnonzero(found.sums != self._expected.sums)
        if len(wrong):
            names = {found.specs[int(found.table.parameter[chunk])].name for chunk in wrong}
            raise DigestMismatch(
                f"{len(names)} parameters, {min(names)!r} among them, are not where the loader "
                "puts them: the engine changes its layout after loading; no route leads there"
            )
        return found

    def commit(self) -> int:
        """The digest of the weights as they were re-read."""
        return self.ledger.total

    def undo(self) -> None:
        """Nothing was kept. Raises DigestMismatch."""
        raise DigestMismatch("weights that were loaded in place cannot be put back")

    def _completed(self, number: int, run: Run) -> Tensor | None:
        """int[numel] if the run completes its parameter. Runs come in order."""
        spec = self._expected.specs[number]
        if run.indices is not None or run.bits is None:
            raise InvalidTable(f"{spec.name}: a sparse row in a full sync")
        if run.count == spec.numel:
            return run.bits
        if run.start == 0:
            device, dtype = run.bits.device, integer_dtype(spec.dtype)
            self._part = torch.empty(spec.numel, dtype=dtype, device=device)
            self._filled = 0
            self.staged_bytes = max(self.staged_bytes, self._part.nbytes)
        if run.start != self._filled or run.stop > len(self._part):
            raise InvalidTable(f"{spec.name}: a full sync leaves out some of it")
        self._part[run.start : run.stop].copy_(run.bits)
        self._filled = run.stop
        return self._part if run.stop == spec.numel else None
