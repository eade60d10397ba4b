"""What changed between the two versions of a pair, in the forms that coders take it in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.codec.pairs import Pair
from deltasync.delta.bits import Flat, Live, dtype_of
from deltasync.delta.choice import snapshot_of
from deltasync.delta.host import Bits
from deltasync.delta.kernels.host import unsigned
from deltasync.delta.readers import WireReader
from deltasync.delta.shard import whole
from deltasync.delta.snapshot import Bucket
from deltasync.dtypes import Dtype
from deltasync.wire.messages import ParameterSpec

Indices = NDArray[np.int32]
_BUCKET_BYTES = 64 << 20  # the default of a sender on CPUs


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
        payloads: What differs, as a sender packs it, and the bits before.
        tensors: The same, for coders that are not ours.
    """

    specs: tuple[ParameterSpec, ...]
    flats: dict[int, Live]
    payloads: list[tuple[Tensor, Bucket]]
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
    readers = [
        [WireReader.of(one, dtype_of(one), name=name) for name, one in weights.items()]
        for weights in (pair.old, pair.new)
    ]
    specs = tuple(
        ParameterSpec(names=(name,), shape=tuple(reader.flat.tensor.shape), dtype=reader.dtype)
        for name, reader in zip(pair.old, readers[0], strict=True)
    )
    plan = snapshot_of(whole(specs), readers[0]).compare(
        readers[1], bucket_bytes=_BUCKET_BYTES, max_held_bytes=1 << 62, base_version=0
    )
    tensors = [
        _changed(number, old.flat, new.flat)
        for number, (old, new) in enumerate(zip(*readers, strict=True))
    ]
    return Change(
        specs,
        {number: reader.flat for number, reader in enumerate(readers[0])},
        [_packed(bucket) for bucket in plan.buckets()],
        [tensor for tensor in tensors if len(tensor.indices)],
    )


def same(left: Sequence[NDArray[np.generic]], right: Sequence[NDArray[np.generic]]) -> bool:
    """Whether two lists of arrays hold the same numbers."""
    pairs = zip(left, right, strict=True)
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in pairs)


def _changed(number: int, old: Flat, new: Flat) -> Changed:
    before, after = unsigned(old.line), unsigned(new.line)
    indices = np.flatnonzero(before != after).astype(np.int32)
    shape = old.tensor.shape
    cols = shape[-1] if len(shape) else 1
    return Changed(number, old.dtype, cols, indices, after[indices], before, after)


def _packed(bucket: Bucket) -> tuple[Tensor, Bucket]:
    payload = torch.empty(bucket.sizes.num_bytes, dtype=torch.uint8)
    bucket.pack(payload, lambda: None)
    return payload, bucket
