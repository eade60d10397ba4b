"""Several changes of one parameter, one after another, as a single change: later values win."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
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
    check_runs(*deltas, numel=numel, name=first.name)
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
    folded = _merged([dense.take(runs, numel) for runs in deltas])
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


def _merged(deltas: Sequence[_Scattered]) -> _Scattered:
    """All of them in one order, with the last value of each position."""
    filled = [one for one in deltas if len(one.positions)] or list(deltas[:1])
    if len(filled) == 1:
        return filled[0]
    positions = torch.cat([one.positions for one in filled])
    bits = torch.cat([one.bits for one in filled])
    positions, order = _sorted(positions)
    is_last = torch.ones(len(positions), dtype=torch.bool, device=positions.device)
    torch.ne(positions[1:], positions[:-1], out=is_last[:-1])
    if positions.is_cpu:  # numpy selects several times as fast as torch
        chosen = torch.from_numpy(order.numpy()[is_last.numpy()])
        positions = torch.from_numpy(positions.numpy()[is_last.numpy()])
        return _Scattered(positions, bits.index_select(0, chosen))
    kept = is_last.nonzero().squeeze(1)  # which waits, unlike each choice by mask
    return _Scattered(positions[kept], bits[order[kept]])


def _sorted(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in order, and where each was; equal ones stay in the order in which they were."""
    if not positions.is_cpu or positions.dtype != torch.int32:
        return torch.sort(positions, stable=True)
    # numpy sorts words by vector instructions: a position, and below it the place.
    words = positions.numpy().astype(np.uint64) << np.uint64(32)
    words |= np.arange(len(words), dtype=np.uint64)
    words.sort()
    order = (words & np.uint64(0xFFFFFFFF)).astype(np.int64)
    words >>= np.uint64(32)
    return torch.from_numpy(words.astype(np.int32)), torch.from_numpy(order)


def _in_order(scattered: _Scattered, dense: list[Run], numel: int) -> list[Run]:
    """Dense runs, and sparse ones between them, none of a span that no index can count."""
    if not dense and numel <= MAX_SPARSE_SPAN:
        if not len(scattered.positions):
            return []
        return [Run(0, numel, scattered.positions, scattered.bits)]
    ends = [0, *(bound for run in dense for bound in (run.start, run.stop)), numel]
    found = list(dense)
    gaps = [
        (low, min(low + MAX_SPARSE_SPAN, stop))
        for start, stop in zip(ends[::2], ends[1::2], strict=True)
        for low in range(start, stop, MAX_SPARSE_SPAN)
    ]
    edges = torch.tensor(gaps, dtype=torch.int64, device="cpu").to(scattered.positions)
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
