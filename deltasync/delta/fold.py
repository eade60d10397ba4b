"""Several changes of one parameter, one after another, as a single change: later values win."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, Live, Run, are_equal
from deltasync.delta.patch import Patch, check_runs, patch_from_runs, runs_of, values_of
from deltasync.errors import LayoutMismatch
from deltasync.wire.table import MAX_SPARSE_SPAN


def fold(patches: Iterable[Patch | None], *, base: Tensor | None = None) -> Patch | None:
    """Merge successive patches of one parameter into one patch. Later values win.

    To apply the result has the same effect as to apply all patches in order. Work and memory grow
    with the patches, not with the parameter.

    Args:
        patches: In the order in which they would be applied, on one device. None is a step that
            changed nothing, as `diff` returns it.
        base: What the first patch applies to; of the patches' shape, dtype and device. Elements
            that end as they are in `base` are then left out, and the result changes what `diff` of
            the two ends changes. Elements that a dense part covers stay, unless it changes nothing
            at all. Without `base`, elements that end where they began stay in the result.

    Returns:
        The patch, or None if nothing is changed. It owns its memory, except that a single patch
        may be returned as views of itself.

    Raises:
        LayoutMismatch: Patches, or `base`, differ in name, shape, dtype or device.
        InvalidIndices: Indices of a patch are out of range, unsorted or repeated.
    """
    given = [patch for patch in patches if patch is not None]
    if not given:
        return None
    first = given[0]
    dtype, numel = _check_alike(given, base), math.prod(first.shape)
    deltas = [runs_of(patch) for patch in given]
    for runs in deltas:
        check_runs(runs, numel, name=first.name)
    old = None if base is None else Flat.of(base, name=first.name)
    runs = fold_runs(deltas, numel, old=old)
    return patch_from_runs(first.name, tuple(first.shape), runs, dtype) if runs else None


def fold_runs(deltas: Sequence[Sequence[Run]], numel: int, *, old: Live | None = None) -> list[Run]:
    """The runs that write what all of `deltas`, one after another, write. Later bits win.

    Args:
        deltas: Each ordered, disjoint, checked, with all of its bits; all on one device.
        numel: Elements of the parameter.
        old: What the first delta applies to, all of it held, on that device: what ends as it was is
            left out, except elements of a dense run that changes others. None to keep all.
    """
    deltas = [[run for run in runs if run.count] for runs in deltas]
    deltas = [runs for runs in deltas if runs]
    if not deltas:
        return []
    if len(deltas) == 1 and old is None:
        return list(deltas[0])
    dense = _Dense.of(deltas)
    folded = _merged_all([dense.take(runs, numel) for runs in deltas])
    if old is not None:
        folded = folded.differing(old)
    return _in_order(folded, dense.runs(old), numel)


@dataclass(frozen=True, slots=True)
class _Scattered:
    """Values at increasing positions: int[n] `positions`, int32 if all fit, and int[n] `bits`."""

    positions: Tensor
    bits: Tensor

    @classmethod
    def of(cls, runs: Iterable[Run], numel: int, bits: Tensor) -> _Scattered:
        """The elements of sparse runs; `bits` is any tensor of their dtype and device."""
        dtype = torch.int32 if numel <= MAX_SPARSE_SPAN else torch.int64
        positions = [
            run.indices.to(dtype) + run.start if run.start else run.indices.to(dtype)
            for run in runs
            if run.indices is not None
        ]
        values = [run.bits for run in runs if run.indices is not None and run.bits is not None]
        if len(positions) == 1:
            return cls(positions[0], values[0])
        if not positions:
            return cls(bits.new_empty(0, dtype=dtype), bits[:0])
        return cls(torch.cat(positions), torch.cat(values))

    def where(self, kept: Tensor) -> _Scattered:
        """Those that bool[n] `kept` selects."""
        return _Scattered(self.positions[kept], self.bits[kept])

    def below(self, newer: _Scattered) -> _Scattered:
        """These and newer ones, which win."""
        if not len(self.positions) or not len(newer.positions):
            return newer if len(newer.positions) else self
        at = torch.searchsorted(newer.positions, self.positions)
        met = newer.positions[at.clamp(max=len(newer.positions) - 1)] == self.positions
        kept = ~met
        mine, at = self.where(kept), at[kept]
        place = at + torch.arange(len(at), device=at.device)
        total = len(at) + len(newer.positions)
        is_newer = torch.ones(total, dtype=torch.bool, device=at.device)
        is_newer[place] = False
        positions, bits = newer.positions.new_empty(total), newer.bits.new_empty(total)
        for into, old, new in (
            (positions, mine.positions, newer.positions),
            (bits, mine.bits, newer.bits),
        ):
            into[place] = old
            into[is_newer] = new
        return _Scattered(positions, bits)

    def differing(self, old: Live) -> _Scattered:
        """Those whose bits are not those of `old`."""
        return self.where(old.gather(self.positions.long()) != self.bits)


@dataclass(frozen=True, slots=True)
class _Dense:
    """The elements that some dense run covers: all of them are written.

    Attributes:
        bounds: Where each of the intervals begins and ends, ascending and disjoint.
        begins: Where each of them lies in `bits`, and the end.
        bits: int[n], their bits so far.
    """

    bounds: list[tuple[int, int]]
    begins: list[int]
    bits: Tensor

    @classmethod
    def of(cls, deltas: Sequence[Sequence[Run]]) -> _Dense:
        """Room for the dense runs of all deltas."""
        bounds: list[tuple[int, int]] = []
        covered = ((r.start, r.stop) for runs in deltas for r in runs if r.indices is None)
        for start, stop in sorted(covered):
            if bounds and start <= bounds[-1][1]:
                bounds[-1] = bounds[-1][0], max(stop, bounds[-1][1])
            else:
                bounds.append((start, stop))
        begins = [0, *accumulate(stop - start for start, stop in bounds)]
        sample = deltas[0][0].bits
        assert sample is not None
        return cls(bounds, begins, sample.new_empty(begins[-1]))

    def take(self, runs: Sequence[Run], numel: int) -> _Scattered:
        """Write what is covered of a delta. Returns the rest."""
        for run in runs:
            if run.indices is None and run.bits is not None:
                begin = self._place(run.start)
                self.bits[begin : begin + run.span] = run.bits
        scattered = _Scattered.of(runs, numel, self.bits)
        if not self.bounds or not len(scattered.positions):
            return scattered
        edges = torch.tensor(self.bounds, device=self.bits.device).to(scattered.positions.dtype)
        code = torch.searchsorted(edges.view(-1), scattered.positions, right=True)
        inside = code % 2 == 1
        covered, interval = scattered.where(inside), code[inside] // 2
        shifts = [b - start for b, (start, _) in zip(self.begins, self.bounds, strict=False)]
        shift = torch.tensor(shifts, device=self.bits.device)
        self.bits[covered.positions.long() + shift[interval]] = covered.bits
        return scattered.where(~inside)

    def runs(self, old: Live | None) -> list[Run]:
        """The intervals; of those that change nothing of `old`, none."""
        found = [
            Run(start, stop - start, None, self.bits[begin:end])
            for (start, stop), (begin, end) in zip(self.bounds, pairwise(self.begins), strict=True)
        ]
        if old is None:
            return found
        return [r for r in found if not are_equal(old.read(r.start, r.stop), _bits(r))]

    def _place(self, start: int) -> int:
        number = bisect_right(self.bounds, (start, 1 << 63)) - 1
        return self.begins[number] + start - self.bounds[number][0]


def _bits(run: Run) -> Tensor:
    assert run.bits is not None
    return run.bits


def _merged_all(deltas: Sequence[_Scattered]) -> _Scattered:
    """Merge neighbours until one is left, so that each element is moved a few times only."""
    left = list(deltas)
    while len(left) > 1:
        left = [
            left[n].below(left[n + 1]) if n + 1 < len(left) else left[n]
            for n in range(0, len(left), 2)
        ]
    return left[0]


def _in_order(scattered: _Scattered, dense: list[Run], numel: int) -> list[Run]:
    """Dense runs, and sparse ones between them, none of a span that no index can count."""
    ends = [0, *(bound for run in dense for bound in (run.start, run.stop)), numel]
    found = list(dense)
    gaps = [
        (low, min(low + MAX_SPARSE_SPAN, stop))
        for start, stop in zip(ends[::2], ends[1::2], strict=True)
        for low in range(start, stop, MAX_SPARSE_SPAN)
    ]
    edges = torch.tensor(gaps, dtype=torch.int64).to(scattered.positions)
    cuts = torch.searchsorted(scattered.positions, edges.view(-1, 2)).tolist()
    for (start, stop), (low, high) in zip(gaps, cuts, strict=True):
        if low < high:
            indices = (scattered.positions[low:high] - start).to(torch.int32)
            found.append(Run(start, stop - start, indices, scattered.bits[low:high]))
    return sorted(found, key=lambda run: run.start)


def _check_alike(patches: Sequence[Patch], base: Tensor | None) -> torch.dtype:
    """The dtype of all values. Raises LayoutMismatch if something differs."""
    first = patches[0]
    kinds = {(v.dtype, v.device) for patch in patches for v in values_of(patch)}
    shapes = {(patch.name, tuple(patch.shape)) for patch in patches}
    if base is not None:
        kinds.add((base.dtype, base.device))
        shapes.add((first.name, tuple(base.shape)))
    for what in (shapes, kinds):
        if len(what) > 1:
            one, other = sorted(map(str, what))[:2]
            raise LayoutMismatch(f"{first.name}: {one} and {other} cannot be folded into one patch")
    if not kinds:
        raise LayoutMismatch(f"{first.name}: a patch without chunks has no dtype")
    return kinds.pop()[0]
