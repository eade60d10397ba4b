"""One parameter's change, as users see it: sparse, chunked or dense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from deltasync.delta.bits import Live, as_bits
from deltasync.delta.kernels import KERNELS
from deltasync.errors import InvalidIndices, LayoutMismatch

CHUNK_NUMEL = 1 << 18
"""Elements that are compared at once, and in a chunk of a patch."""

INDEX_BYTES = 4
_BLOCK = 1 << 17  # indices widened at once: still in the cache when used, and few calls
MAX_SPARSE_SPAN = (1 << 31) - 1
"""Of `diff`: elements that int32 indices can count; a longer parameter has a list by chunk."""


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

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """One, of all elements."""
        numel = math.prod(self.shape)
        return (Chunk(start=0, numel=numel, indices=self.indices, values=self.values),)


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

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """One, of all elements."""
        return (Chunk(start=0, numel=math.prod(self.shape), indices=None, values=self.values),)


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


def patch_of(name: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> Patch:
    """The patch of one parameter that has these chunks, ordered and disjoint."""
    first = chunks[0]
    if len(chunks) > 1 or first.numel != math.prod(shape):
        return ChunkedPatch(name=name, shape=shape, chunks=tuple(chunks))
    if first.indices is None:
        return DensePatch(name=name, shape=shape, values=first.values)
    return SparsePatch(name=name, shape=shape, indices=first.indices, values=first.values)


def check_patch(patch: Patch, parameter: Tensor) -> None:
    """Raises LayoutMismatch unless a patch is of such a parameter.

    Raises InvalidIndices unless its chunks are disjoint and ordered, with a value for each index.
    """
    name, end = patch.name, 0
    if tuple(parameter.shape) != tuple(patch.shape):
        raise LayoutMismatch(
            f"{name}: patch of shape {patch.shape}, parameter {tuple(parameter.shape)}"
        )
    for chunk in patch.chunks:
        if chunk.values.dtype != parameter.dtype:
            raise LayoutMismatch(f"{name}: {chunk.values.dtype} values, {parameter.dtype} weights")
        if not end <= chunk.start <= chunk.start + chunk.numel <= parameter.numel():
            raise InvalidIndices(f"{name}: chunks overlap, are unsorted or out of range")
        given, count, end = chunk.indices, chunk.numel, chunk.start + chunk.numel
        if given is not None and (given.dtype, given.dim()) != (torch.int32, 1):
            raise InvalidIndices(f"{name}: indices are {given.dtype}{[*given.shape]}, not int32[n]")
        if chunk.values.shape != (count if given is None else len(given),):
            raise InvalidIndices(f"{name}: not one value for each index")
        if given is not None and not KERNELS[given.device.type].is_increasing(given, count):
            raise InvalidIndices(f"{name}: indices out of range, unsorted or repeated")


def write_chunk(chunk: Chunk, live: Live) -> None:
    """Overwrite what a chunk that was checked speaks of, wherever the two live."""
    bits, device = as_bits(chunk.values), live.line.device
    if chunk.indices is None:
        live.write(chunk.start, bits)
        return
    for begin in range(0, len(bits), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        positions = chunk.indices[block].to(torch.int64) + chunk.start
        live.scatter(positions.to(device), bits[block].to(device))
