"""Steps as numbers from 1 on, the frequent ones first: what `class` writes of packed integers.

Where several small codes share an integer, a small step of one of them is a large step of the
integer. A row then lists the steps that are frequent in it; all others follow after these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltasync.dtypes import Dtype
from deltasync.errors import InvalidTable
from deltasync.files.classes.bitstream import Bits, Words, unsigned_dtype
from deltasync.files.classes.streams import ByteReader, varints

MOST = 64
"""Steps that a row lists."""

LEAST_OFTEN = 4
"""A step that occurs so often pays for its place in the list."""

_WIDEST = 4  # bytes: numbers of wider elements would not fit into 64 bits


def most_listed(dtype: Dtype) -> int:
    """How many steps a row of `dtype` may list."""
    return MOST if dtype.item_size <= _WIDEST else 0


def can_list(dtype: Dtype) -> bool:
    """Whether an encoder looks for frequent steps in rows of `dtype`."""
    return not dtype.is_floating and most_listed(dtype) > 0


@dataclass(frozen=True, slots=True)
class Frequent:
    """The steps that a row lists.

    Attributes:
        steps: unsigned[n], zigzag; n may be 0, as in all rows of floats.
    """

    steps: Bits

    @classmethod
    def of(cls, steps: Bits, dtype: Dtype) -> Frequent:
        """Those that occur often among zigzag steps, unsigned[n]."""
        if not can_list(dtype):
            return cls(steps[:0])
        found, counts = np.unique(steps, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:MOST]
        return cls(found[order[counts[order] >= LEAST_OFTEN]])

    @classmethod
    def read(cls, block: ByteReader, dtype: Dtype) -> Frequent:
        """Reads back what `to_bytes` made. Raises WireError."""
        if (count := block.varint()) > most_listed(dtype):
            raise InvalidTable(f"{count} frequent steps of {dtype.name}; {MOST} are the most")
        data = np.ascontiguousarray(block.take(count * dtype.item_size))
        return cls(data.view(unsigned_dtype(dtype)))

    def to_bytes(self) -> bytes:
        """How many, and each as it is."""
        listed: bytes = self.steps.tobytes()
        return varints(len(self.steps)) + listed

    def numbers(self, steps: Bits) -> Words:
        """uint64[n]: the number of each step: from 1 on, or without a list the step itself."""
        wide = steps.astype(np.uint64)
        if not len(self.steps):
            return wide
        order = np.argsort(self.steps)
        at = np.searchsorted(self.steps[order], steps).clip(max=len(order) - 1)
        is_listed = self.steps[order[at]] == steps
        places = order[at].astype(np.uint64) + np.uint64(1)
        return np.where(is_listed, places, wide + np.uint64(len(order) + 1))

    def back(self, numbers: Words) -> Bits:
        """unsigned[n]: the steps with these numbers."""
        count, kind = len(self.steps), self.steps.dtype
        if not count:
            return numbers.astype(kind)
        listed = self.steps[(numbers - np.uint64(1)).clip(max=count - 1).astype(np.int64)]
        others = (numbers - np.uint64(count + 1)).astype(kind)
        return np.where(numbers <= count, listed, others)
