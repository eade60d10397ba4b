"""What changed between the two versions of a pair, in the forms that coders take it in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.codec.pairs import Pair
from deltasync.delta.bits import Flat, Run, as_bits
from deltasync.delta.codecs.base import Bits, Indices, unsigned_dtype
from deltasync.delta.diff import diff
from deltasync.delta.patch import runs_of
from deltasync.delta.policy import Policy
from deltasync.dtypes import Dtype
from deltasync.wire.messages import ParameterSpec

_SPARSE = Policy(dense_above=1)


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """One tensor that changed.

    Attributes:
        number: Its place in the layout.
        dtype: Of its elements. `cols`: elements in a row of it.
        indices: int32[count], flat positions, increasing.
        new: unsigned[count], the new bits at these.
        old, whole: unsigned[numel], all old and all new bits.
    """

    number: int
    dtype: Dtype
    cols: int
    indices: Indices
    new: Bits
    old: Bits
    whole: Bits


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Everything that differs between two versions.

    Attributes:
        specs: The layout: all tensors, also those without a change.
        flats: The old tensors by place in it.
        runs: (place, run), as a sender finds them.
        tensors: The same, for coders that are not ours.
    """

    specs: tuple[ParameterSpec, ...]
    flats: dict[int, Flat]
    runs: list[tuple[int, Run]]
    tensors: list[Changed]

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.specs)

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(spec.numel * spec.dtype.item_size for spec in self.specs)

    @property
    def count(self) -> int:
        """Elements that differ."""
        return sum(len(tensor.indices) for tensor in self.tensors)


def change_of(pair: Pair) -> Change:
    """Compare the versions of a pair, bit for bit."""
    specs, flats, runs, tensors = [], {}, [], []
    for number, (name, old) in enumerate(pair.old.items()):
        flat = flats[number] = Flat.of(old, name=name)
        specs.append(ParameterSpec(names=(name,), shape=tuple(old.shape), dtype=flat.dtype))
        new = pair.new[name]
        patch = diff(old, new, name=name, policy=_SPARSE)
        found = [] if patch is None else runs_of(patch)
        runs += [(number, run) for run in found]
        if found:
            tensors.append(_changed(number, flat, new, found))
    return Change(tuple(specs), flats, runs, tensors)


def same(left: Sequence[NDArray[np.generic]], right: Sequence[NDArray[np.generic]]) -> bool:
    """Whether two lists of arrays hold the same numbers."""
    pairs = zip(left, right, strict=True)
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in pairs)


def _changed(number: int, flat: Flat, new: torch.Tensor, runs: list[Run]) -> Changed:
    kind = unsigned_dtype(flat.dtype)
    old, whole = (as_bits(t).reshape(-1).numpy().view(kind) for t in (flat.tensor, new))
    indices = np.concatenate([run.positions().numpy() for run in runs]).astype(np.int32)
    shape = flat.tensor.shape
    cols = shape[-1] if len(shape) else 1
    return Changed(number, flat.dtype, cols, indices, whole[indices], old, whole)
