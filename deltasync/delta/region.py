"""Regions: elements of a flat tensor at regular distances.

An engine fuses, stacks, transposes, shards and pads checkpoint tensors. A trainer's rank holds a
box of each. All of these are regions, of a checkpoint tensor or of a storage. A copy is two regions
that have their elements in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Self

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.kernels.host import array_at
from deltasync.errors import ConfigError

_MAX_WORK = 100_000  # of numpy's search, some milliseconds; beyond that elements are marked

Pairs = list[tuple[int, int, int]]
"""(size, stride in one region, stride in another) of each dimension that the two share."""


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of a flat tensor, in an order of their own.

    Element n is element `start + sum(c * stride)` of the flat tensor, where c are the coordinates
    of n in `dims`, row-major. Dimensions of size 1 are dropped, and dimensions that continue each
    other are merged. Therefore two regions are equal if, and only if, they have the same elements
    in the same order.

    Attributes:
        start: Where the first element lies; 0 without elements.
        dims: (size, stride) of each dimension, the outermost first. Strides are in elements.
    """

    start: int
    dims: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if len(self.dims) == 1 and self.dims[0][0] > 1:
            return
        done: list[tuple[int, int]] = []
        for size, stride in self.dims:
            if size == 0:
                object.__setattr__(self, "start", 0)
                done = [(0, 1)]
                break
            if size > 1:
                if done and done[-1][1] == size * stride:
                    size *= done.pop()[0]
                done.append((size, stride))
        object.__setattr__(self, "dims", tuple(done))

    @classmethod
    def run(cls, start: int, numel: int) -> Self:
        """So many elements, one after another."""
        return cls(start, ((numel, 1),))

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """The elements of a tensor in its storage."""
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        return cls(int(tensor.storage_offset()), tuple(dims))

    @classmethod
    def of_bytes(cls, tensor: Tensor) -> Self:
        """The bytes of a tensor in memory, by address."""
        size = tensor.element_size()
        dims = [(n, step * size) for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
        return cls(tensor.data_ptr(), (*dims, (size, 1)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for size, _ in self.dims)

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(stride for _, stride in self.dims)

    @property
    def numel(self) -> int:
        return prod(size for size, _ in self.dims)

    @property
    def stop(self) -> int:
        """One past the farthest element; `start` without elements."""
        return self.start + (1 + sum((n - 1) * s for n, s in self.dims) if self.numel else 0)

    @property
    def is_run(self) -> bool:
        """Whether the elements lie one after another."""
        return not self.dims or (len(self.dims) == 1 and self.dims[0][1] == 1)

    @property
    def is_rising(self) -> bool:
        """Whether each element lies after the one before it."""
        reach = 0
        for size, stride in reversed(self.dims):
            if stride <= reach:
                return False
            reach += (size - 1) * stride
        return True

    @property
    def rows(self) -> tuple[int, int] | None:
        """(cols, gap) of rows of one length: elements in a row, and between two rows.

        A run is one row, without a gap. None if they are no such rows.
        """
        match self.dims:
            case ():
                return 1, 0
            case ((cols, 1),):
                return max(1, cols), 0
            case ((_, width),):
                return 1, width - 1
            case ((_, width), (cols, 1)):
                return cols, width - cols
        return None

    def view(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor's storage: a view of that shape. Not owned."""
        return tensor.detach().as_strided(self.shape, self.strides, self.start)

    def places(self, numbers: Tensor) -> Tensor:
        """int64[n]: where int64[n] elements lie, in memory of their own."""
        stride = self.dims[-1][1] if self.dims else 1
        found = numbers + self.start if stride == 1 else (numbers * stride).add_(self.start)
        inside = 1  # a coordinate rises by one after so many elements, and those inside begin again
        for (_, stride), (size, inner) in reversed(list(pairwise(self.dims))):
            inside *= size
            found.add_(numbers.div(inside, rounding_mode="floor"), alpha=stride - size * inner)
        return found

    def meets(self, other: Region) -> bool:
        """Whether the two have an element in common."""
        begin = min(self.start, other.start)
        try:
            first, second = (_described(one, begin) for one in (self, other))
            return np.shares_memory(first, second, max_work=_MAX_WORK)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            marks = np.zeros(max(self.stop, other.stop) - begin, np.bool_)
            mine, others = (
                as_strided(marks[one.start - begin :], one.shape, one.strides)
                for one in (self, other)
            )
            mine[...] = True
            return bool(others.any())

    @property
    def repeats(self) -> bool:
        """Whether an element is there twice."""
        if self.is_rising:
            return False
        # The two differ in a first dimension: by some steps there, by any number in later ones.
        for place, (size, stride) in enumerate(self.dims):
            later = Region(self.start, self.dims[place + 1 :])
            others = Region(self.start + stride, ((size - 1, stride), *later.dims))
            if later.meets(others):
                return True
        return False


def _described(region: Region, begin: int) -> NDArray[np.void]:
    """An array at the places of a region, for numpy to compare. Its memory is never read."""
    # At 0 it would allocate memory.
    return array_at(region.start - begin + 1, region.shape, "|V1", region.strides)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape), int.__mul__, initial=1))[-2::-1]


def paired(one: Region, other: Region) -> Pairs:
    """The dimensions of two regions of one size, split until both have the same sizes.

    Raises ConfigError if that cannot be done, as for rows of 2 elements and rows of 3.
    """
    found: Pairs = []
    dims, others = list(one.dims), list(other.dims)
    while dims:
        (size, stride), (count, step) = dims.pop(), others.pop()
        both = min(size, count)
        if both and (size % both or count % both):
            raise ConfigError(f"{one} and {other} are no boxes of one shape")
        if size > both:
            dims.append((size // both, stride * both))
        elif count > both:
            others.append((count // both, step * both))
        found.append((both, stride, step))
    return found[::-1]
