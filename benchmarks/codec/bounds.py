"""How few bytes changes could have: entropies of positions and of steps.

For N elements of which n change, H(n, N) = n log2(N / n) + (N - n) log2(N / (N - n)) bits say which
ones. A step is the distance of the new value from the old one, in ULPs and with its sign; n steps
of which n_s are alike take sum(n_s log2(n / n_s)) bits.

- Weights unknown: H of each tensor, and the steps of all tensors of one dtype together.
- Old exponent known: H of the elements of each tensor that have one exponent, and the steps of all
  elements of one dtype with one exponent. Dtypes without exponents are as unknown.

Tables of frequencies are free in both, so that no real coder comes down to them. A coder that knows
more than these two could go lower: the rows of an embedding that no token touched, for one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.codec.change import Change, Changed
from deltasync.delta.codecs.base import Bits
from deltasync.delta.codecs.steps import zigzag
from deltasync.dtypes import Dtype

_MANTISSAS = {  # bits below the exponent, and bits of the exponent
    "bfloat16": (7, 8),
    "float16": (10, 5),
    "float32": (23, 8),
    "float8_e4m3fn": (3, 4),
    "float8_e5m2": (2, 5),
}
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes of all changes of a pair: positions and steps, with the weights unknown, and known.

    Attributes:
        position, step: The receiver's weights are not used.
        position_known, step_known: The exponents of the old values are.
    """

    position: float
    step: float
    position_known: float
    step_known: float

    @property
    def unknown(self) -> float:
        return self.position + self.step

    @property
    def known(self) -> float:
        return self.position_known + self.step_known


def bounds_of(change: Change) -> Bounds:
    """The bounds of one pair, in bytes."""
    position = position_known = 0.0
    steps = defaultdict[str, list[tuple[Bits, Bits]]](list)
    for tensor in change.tensors:
        exponents = exponents_of(tensor.old, tensor.dtype)
        counts = np.bincount(exponents)
        changed = np.bincount(exponents[tensor.indices], minlength=len(counts))
        position += float(_choices(np.array([len(tensor.indices)]), np.array([len(tensor.old)])))
        position_known += float(_choices(changed, counts))
        steps[tensor.dtype.name].append((_steps(tensor), exponents[tensor.indices]))
    step = step_known = 0.0
    for found in steps.values():
        distances, exponents = (np.concatenate(parts) for parts in zip(*found, strict=True))
        step += _entropy(distances)
        step_known += sum(_entropy(distances[exponents == e]) for e in np.unique(exponents))
    return Bounds(*(bits / 8 for bits in (position, step, position_known, step_known)))


def exponents_of(bits: Bits, dtype: Dtype) -> Bits:
    """uint8[n]: the biased exponents of unsigned[n] bits; 0 for dtypes without."""
    if dtype.name not in _MANTISSAS:
        return np.zeros(len(bits), np.uint8)
    mantissa, exponent = _MANTISSAS[dtype.name]
    found: Bits = (bits >> mantissa & ((1 << exponent) - 1)).astype(np.uint8)
    return found


def _steps(tensor: Changed) -> Bits:
    return zigzag(tensor.new, tensor.old[tensor.indices], tensor.dtype)


def _choices(chosen: NDArray[np.intp], of: NDArray[np.intp]) -> float:
    """Bits that say which `chosen` of `of` elements, added up."""
    n, total = chosen.astype(np.float64), of.astype(np.float64)
    return float((_bits(n, total) + _bits(total - n, total)).sum())


def _entropy(numbers: Bits) -> float:
    """Bits of all of them together."""
    counts = np.unique(numbers, return_counts=True)[1].astype(np.float64)
    return float(_bits(counts, counts.sum()).sum())


def _bits(n: Floats, total: Floats | float) -> Floats:
    """n log2(total / n), 0 for 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = np.where(n > 0, n * np.log2(total / n), 0.0)
    return found
