"""Writing a full sync through an engine's own loader, which proves the routes around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.bits import Flat, Live, Run, integer_dtype, torch_dtype
from deltasync.delta.bucket import ReadBucket
from deltasync.delta.digests import DigestLedger, Measure
from deltasync.delta.patch import check_indices
from deltasync.errors import DigestMismatch, InvalidTable

RELOAD = "for vLLM, EngineSync(without_routes='reload') finds out whether reloading will do"
"""What may help where no route leads."""


class Loader(Protocol):
    """How an engine takes a checkpoint."""

    def load(self, weights: Iterable[tuple[str, Tensor]], /) -> object:
        """Take a few checkpoint tensors, under the layout's names. Each comes once, whole."""
        ...

    def together(self) -> Sequence[Sequence[str]]:
        """Groups of tensors that `load` needs in one call, in this order, by the layout's names."""
        ...

    def finish(self) -> None:
        """All have been loaded."""
        ...


class Loading:
    """Gives a full sync to a loader, then looks whether all of it is where the routes say.

    The engine must be paused. There is no undo: broken off, the model is dirty. Of tensors that
    several buckets bring, those are held that are not complete: one, or with several ranks that
    send, those of which some have come further than others; see `is_crowded`. Tensors that the
    loader needs in one call are held until all of their group have come: at most the groups of
    which the first has come and the last has not, in the order in which tensors are sent.

    Attributes:
        staged_bytes: The most memory that all these took.
    """

    in_place = True

    def __init__(
        self,
        loader: Loader,
        flats: Mapping[int, Live],
        ledger: DigestLedger,
        measure: Measure,
        *,
        writing: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin a sync.

        Args:
            loader: The engine's.
            flats: Where routes say that its parameters are.
            ledger: Their digests now. Not changed.
            measure: Reads digests from `flats`.
            writing: Called before something is loaded.
        """
        self.staged_bytes = 0
        self._writing = writing
        self._loader, self._flats, self._measure = loader, flats, measure
        self._expected = ledger.copy()
        self._parts: dict[int, _Part] = {}
        self._complete: set[int] = set()  # all of them has come
        numbers = {spec.name: number for number, spec in enumerate(ledger.specs)}
        groups = [tuple(map(numbers.__getitem__, names)) for names in loader.together()]
        self._groups = {number: group for group in groups for number in group}
        self._waiting: dict[int, Tensor] = {}  # whole, for others of their group
        self._payload_bytes = 0

    def stage_bucket(self, bucket: ReadBucket) -> None:
        """Load the tensors that it completes, or nothing of a bucket that is bad.

        Raises InvalidIndices, and InvalidTable for more than all of a tensor.
        """
        self._payload_bytes = max(self._payload_bytes, len(bucket.payload))
        whole: dict[int, Tensor] = {}
        runs = list(bucket.runs())
        for number, run in runs:
            check_indices(run, name=self._expected.specs[number].name)
        for number, run in runs:
            if number in self._flats and (bits := self._completed(number, run)) is not None:
                self._expect(number, bits)
                whole[number] = bits
        if ready := [self._named(number, bits) for number, bits in self._due(whole)]:
            self._writing()
            with torch.no_grad():
                self._loader.load(ready)

    def _due(self, whole: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Of int[numel] bits that have come those that can be loaded; others are kept."""
        for number, bits in whole.items():
            group = self._groups.get(number, (number,))
            if any(n not in whole and n not in self._waiting for n in group):
                self._waiting[number] = bits.clone()  # they may lie in the payload
            elif number == next(n for n in reversed(group) if n in whole):
                for n in group:
                    yield n, whole[n] if n in whole else self._waiting.pop(n)
        self.staged_bytes = max(self.staged_bytes, self._held_bytes)

    def _named(self, number: int, bits: Tensor) -> tuple[str, Tensor]:
        spec = self._expected.specs[number]
        return spec.name, bits.view(torch_dtype(spec.dtype)).view(spec.shape)

    def is_crowded(self, senders: int) -> bool:
        """Whether more waits to be completed than two payloads of each of so many ranks bring."""
        return self._part_bytes > 2 * senders * self._payload_bytes and len(self._parts) > 1

    @property
    def _part_bytes(self) -> int:
        return sum(part.bits.nbytes for part in self._parts.values())

    @property
    def _held_bytes(self) -> int:
        return self._part_bytes + sum(bits.nbytes for bits in self._waiting.values())

    def _expect(self, number: int, bits: Tensor) -> None:
        """What is held of int[numel] bits is to be found where it is held."""
        held = self._flats[number].held
        bits = bits.to(self._flats[number].line.device)
        self._expected.measure(number, lambda low, high: bits[low:high], held=held)

    @cached_property
    def ledger(self) -> DigestLedger:
        """The digests of the weights as they were re-read. Raises DigestMismatch, InvalidTable."""
        if left := self._parts.keys() | self._waiting.keys():
            name = self._expected.specs[min(left)].name
            raise InvalidTable(f"{name}: a full sync leaves out some of it")
        self._loader.finish()
        found = self._expected.copy()
        found.sums[:] = self._measure(np.arange(len(found.sums)))
        wrong = np.flatnonzero(found.sums != self._expected.sums)
        if len(wrong):
            names = {found.specs[int(found.table.parameter[chunk])].name for chunk in wrong}
            raise DigestMismatch(
                f"{len(names)} parameters, {min(names)!r} among them, were loaded and are not "
                "where routes lead: the engine changes its layout after loading, or its loader "
                f"leaves out what comes in several calls; {RELOAD}"
            )
        return found

    def commit(self) -> int:
        """The digest of the weights as they were re-read."""
        return self.ledger.total

    def undo(self) -> None:
        """Nothing was kept. Raises DigestMismatch."""
        raise DigestMismatch("weights that were loaded in place cannot be put back")

    def _completed(self, number: int, run: Run) -> Tensor | None:
        """int[numel] if the run completes its parameter. Raises InvalidTable."""
        spec = self._expected.specs[number]
        assert run.bits is not None
        part = self._parts.get(number)
        is_whole = run.count == spec.numel and run.indices is None
        if number in self._complete or (is_whole and part is not None):
            raise InvalidTable(f"{spec.name}: a full sync brings some of it twice")
        if is_whole:
            self._complete.add(number)
            return run.bits
        if part is None:
            device, dtype = run.bits.device, integer_dtype(spec.dtype)
            part = _Part(torch.empty(spec.numel, dtype=dtype, device=device), spec.numel)
            self._parts[number] = part
            self.staged_bytes = max(self.staged_bytes, self._held_bytes)
        part.fill(run, spec.name)
        if part.missing:
            return None
        self._complete.add(number)
        return self._parts.pop(number).bits


@dataclass(slots=True)
class _Part:
    """A parameter of which some has come, and how many elements have not."""

    bits: Tensor
    missing: int

    def fill(self, run: Run, name: str) -> None:
        """Take a run whose indices were checked. Raises InvalidTable."""
        self.missing -= run.count
        if self.missing < 0:
            raise InvalidTable(f"{name}: a full sync brings some of it twice")
        assert run.bits is not None
        run.write(Flat.of(self.bits), run.bits)
