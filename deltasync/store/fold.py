"""Several changes of one parameter, one after another, as a single change: later values win."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.bits import Run
from deltasync.wire.table import MAX_SPARSE_SPAN


def fold_runs(deltas: Sequence[Sequence[Run]], numel: int) -> list[Run]:
    """The runs that write what all of `deltas`, one after another, write. Later bits win.

    Args:
        deltas: Each ordered, disjoint, checked, with all of its bits; all on one device.
        numel: Elements of the parameter.
    """
    deltas = [[run for run in runs if run.count] for runs in deltas]
    deltas = [runs for runs in deltas if runs]
    if not deltas:
        return []
    if len(deltas) == 1:
        return list(deltas[0])
    dense = _Dense.of(deltas)
    folded = _merged([dense.take(runs, numel) for runs in deltas])
    return _in_order(folded, dense.runs(), numel)


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

    def runs(self) -> list[Run]:
        """The intervals."""
        return [
            Run(start, stop - start, None, self.bits[begin:end])
            for (start, stop), (begin, end) in zip(self.bounds, pairwise(self.begins), strict=True)
        ]

    def _place(self, start: int) -> int:
        number = bisect_right(self.bounds, (start, 1 << 63)) - 1
        return self.begins[number] + start - self.bounds[number][0]


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
