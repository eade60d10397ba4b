"""How two versions of weights differ: how many elements, and by how much."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import Flat, dtype_of
from deltasync.delta.host import Bits
from deltasync.delta.kernels.host import changed, unsigned
from deltasync.delta.patch import CHUNK_NUMEL
from deltasync.delta.readers import WireReader
from deltasync.dtypes import Dtype
from deltasync.errors import LayoutMismatch
from deltasync.files.steps import ordered

Counts: TypeAlias = NDArray[np.signedinteger]

MAX_STEP = 128
"""Steps of so many ULPs and more are counted together."""

_STEP = 16 * CHUNK_NUMEL  # elements counted at once: the more, the less their number costs


@dataclass(frozen=True, slots=True, eq=False)
class Sparsity:
    """What changed between two versions of a tensor, or of many: `sum(found, Sparsity())`.

    Attributes:
        numel: Elements compared.
        changed: Elements whose bits differ.
        steps: int64[MAX_STEP + 1], changed elements by their distance in ULPs, the last for all
            that moved as far or further. -0.0 is one step below 0.0. Integers count as they are.
    """

    numel: int = 0
    changed: int = 0
    steps: Counts = field(default_factory=lambda: np.zeros(MAX_STEP + 1, np.int64))

    @property
    def density(self) -> float:
        """The share of elements that changed; 0 where there are none."""
        return self.changed / self.numel if self.numel else 0.0

    def __add__(self, other: Sparsity) -> Sparsity:
        return Sparsity(
            self.numel + other.numel,
            self.changed + other.changed,
            self.steps + other.steps,
        )


def sparsity(old: Tensor, new: Tensor) -> Sparsity:
    """Compare two versions of a tensor bit for bit, chunk by chunk, wherever they live.

    Args:
        old: The version that a receiver holds.
        new: The one to come; of `old`'s dtype or of another floating dtype, which is then rounded
            to `old`'s. Same shape and device.

    Raises:
        LayoutMismatch: The shapes differ.
        ConfigError: The dtypes cannot be compared, or a tensor has no plain storage.
    """
    if new.shape != old.shape:
        raise LayoutMismatch(f"shape {tuple(new.shape)} against {tuple(old.shape)}")
    reader, held = WireReader.of(new, dtype_of(old), name="new"), Flat.of(old, name="old")
    total = Sparsity()
    for start in range(0, held.numel, _STEP):
        stop = min(start + _STEP, held.numel)
        before, after = held.read(start, stop), reader.read(start, stop)
        positions = changed(after, before)
        new_bits, old_bits = (
            unsigned(one.index_select(0, positions).cpu()) for one in (after, before)
        )
        total += Sparsity(
            stop - start,
            len(positions),
            np.bincount(_steps(old_bits, new_bits, held.dtype), minlength=MAX_STEP + 1),
        )
    return total


def _steps(before: Bits, after: Bits, dtype: Dtype) -> Counts:
    """int64[k]: how far unsigned[k] bits are apart in ULPs, MAX_STEP at most."""
    old, new = (ordered(bits, dtype) for bits in (before, after))
    distances = np.maximum(old, new) - np.minimum(old, new)
    found: Counts = np.minimum(distances, MAX_STEP).astype(np.int64)
    return found
