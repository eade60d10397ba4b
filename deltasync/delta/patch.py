"""One parameter's change, as users see it: sparse, chunked or dense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from deltasync.delta.bits import Run, as_bits
from deltasync.delta.kernels import KERNELS
from deltasync.errors import InvalidIndices

CHUNK_NUMEL = 1 << 18
"""Elements that are compared at once, and in a chunk of a patch."""

INDEX_BYTES = 4
MAX_SPARSE_SPAN = (1 << 31) - 1
"""Elements that int32 indices can count: a longer parameter has a list for each chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePatch:
    """New values for scattered elements of one parameter.

    Attributes:
        name: Checkpoint name of the parameter.
        shape: Its full checkpoint shape.
        indices: int32[nnz], strictly increasing flat row-major positions.
        values: dtype[nnz], the new values themselves, bit for bit. A new value may be 0.
    """

    name: str
    shape: tuple[int, ...]
    indices: Tensor
    values: Tensor

    @property
    def nnz(self) -> int:
        """Changed elements."""
        return len(self.indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class DensePatch:
    """New values for all elements of one parameter.

    Attributes:
        name: Checkpoint name of the parameter.
        shape: Its full checkpoint shape.
        values: dtype[numel], flat and row-major.
    """

    name: str
    shape: tuple[int, ...]
    values: Tensor

    @property
    def nnz(self) -> int:
        """Written elements: all."""
        return len(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New values within one chunk.

    Attributes:
        start: Flat position of the chunk's first element.
        numel: Elements in the chunk.
        indices: int32[nnz], strictly increasing, relative to `start`; None when all are written.
        values: dtype[nnz] or dtype[numel].
    """

    start: int
    numel: int
    indices: Tensor | None
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedPatch:
    """New values of a parameter that is too large, or too unevenly changed, for one index list.

    Attributes:
        name: Checkpoint name of the parameter.
        shape: Its full checkpoint shape.
        chunks: In order of `start`, disjoint. A chunk that is absent is unchanged.
    """

    name: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nnz(self) -> int:
        """Written elements."""
        return sum(len(chunk.values) for chunk in self.chunks)


Patch: TypeAlias = SparsePatch | ChunkedPatch | DensePatch


def patch_from_runs(
    name: str, shape: tuple[int, ...], runs: list[Run], dtype: torch.dtype
) -> Patch:
    """The patch that `runs`, ordered and disjoint, make of one parameter."""
    whole = len(runs) == 1 and runs[0].span == math.prod(shape)
    values = [_values(run, dtype) for run in runs]
    if not whole:
        chunks = tuple(
            Chunk(start=run.start, numel=run.span, indices=run.indices, values=value)
            for run, value in zip(runs, values, strict=True)
        )
        return ChunkedPatch(name=name, shape=shape, chunks=chunks)
    if runs[0].indices is None:
        return DensePatch(name=name, shape=shape, values=values[0])
    return SparsePatch(name=name, shape=shape, indices=runs[0].indices, values=values[0])


def runs_of(patch: Patch) -> list[Run]:
    """The runs of a patch, over the same memory."""
    match patch:
        case SparsePatch(shape=shape, indices=indices, values=values):
            return [Run(0, math.prod(shape), indices, as_bits(values))]
        case DensePatch(shape=shape, values=values):
            return [Run(0, math.prod(shape), None, as_bits(values))]
        case ChunkedPatch(chunks=chunks):
            return [Run(c.start, c.numel, c.indices, as_bits(c.values)) for c in chunks]


def values_of(patch: Patch) -> list[Tensor]:
    """The values of each part of a patch. Not copied."""
    return [c.values for c in patch.chunks] if isinstance(patch, ChunkedPatch) else [patch.values]


def _values(run: Run, dtype: torch.dtype) -> Tensor:
    if run.bits is None:
        raise ValueError("the run's values are still in the source")
    return run.bits.view(dtype)


def check_indices(run: Run, *, name: str) -> None:
    """Raises InvalidIndices unless a sparse run's indices rise strictly within its span."""
    indices = run.indices
    if indices is None or KERNELS[indices.device.type].is_increasing(indices, run.span):
        return
    raise InvalidIndices(f"{name}: indices out of range, unsorted or repeated")


def check_runs(runs: Sequence[Run], *, numel: int, name: str) -> None:
    """Raises InvalidIndices unless runs are disjoint and ordered, with a value for each index."""
    end = 0
    for run in runs:
        if not end <= run.start <= run.stop <= numel:
            raise InvalidIndices(f"{name}: chunks overlap, are unsorted or out of range")
        given = run.indices
        if given is not None and (given.dtype, given.dim()) != (torch.int32, 1):
            raise InvalidIndices(f"{name}: indices are {given.dtype}{[*given.shape]}, not int32[n]")
        if run.bits is None or run.bits.shape != (run.count,):
            raise InvalidIndices(f"{name}: not one value for each index")
        check_indices(run, name=name)
        end = run.stop
