"""Shards: which elements of a checkpoint tensor a trainer rank holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deltasync.delta.modes import writable
from deltasync.delta.region import Region, row_major
from deltasync.errors import ConfigError
from deltasync.wire.messages import ParameterSpec

SPLIT_ABOVE = 1 << 20
"""Bytes up to which a box that several ranks hold is sent by one of them, whatever the model."""

_SHARE_OF_A_RANK = 64
"""What is smaller than such a part of all that a rank sends need not be cut to even loads out."""

_MOST_STRIDE = (1 << 31) - 1  # elements from a row to the next: kernels count them in 32 bits

Split = tuple[int, int]
"""(dimension, split factor) of a shard. The factor says how many shards of that dimension were
made before: 1 unless it is FSDP's of what tensor parallelism has split already.
"""


@dataclass(frozen=True, slots=True)
class Share:
    """What a trainer rank compares and sends of a parameter, in the checkpoint's order.

    Attributes:
        number: Of the parameter in the layout.
        spec: The parameter.
        region: Which elements of it: a run, or rows of one length. Rows are not spread over more
            elements than kernels count in 32 bits.
        cols, gap: Elements in a row, and between two rows; a run has no gap.
    """

    number: int
    spec: ParameterSpec
    region: Region
    cols: int = field(init=False, compare=False)
    gap: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        rows = self.region.rows
        assert rows is not None, f"{self.region} is no rows of one length"
        cols, gap = rows
        object.__setattr__(self, "cols", cols)
        object.__setattr__(self, "gap", gap)

    @property
    def numel(self) -> int:
        return self.region.numel


def whole(specs: Iterable[ParameterSpec]) -> tuple[Share, ...]:
    """All of each parameter of a layout."""
    return tuple(
        Share(number, spec, Region.run(0, spec.numel)) for number, spec in enumerate(specs)
    )


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A box of a checkpoint tensor.

    The local tensor has its elements in the checkpoint's order. Where a trainer fuses or
    interleaves, a view of its tensor is given with this.

    Attributes:
        shape: Of the checkpoint tensor.
        offset: Where the box begins in each dimension.
        size: Its shape, and the local tensor's.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises ConfigError for a box that is not within the tensor."""
        bounds = zip(self.offset, self.size, self.shape, strict=False)
        if not len(self.shape) == len(self.offset) == len(self.size) or any(
            not 0 <= begin <= begin + size <= full for begin, size, full in bounds
        ):
            raise ConfigError(f"{self.size} at {self.offset} is no box of {self.shape}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> ShardSpec:
        """All of a tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements held."""
        return prod(self.size)


def shard_of(tensor: Tensor) -> ShardSpec:
    """What this rank holds of a DTensor; all of any other tensor.

    Raises:
        ConfigError: It is a sum that was not made yet (`Partial`), split in a way that neither
            FSDP2 nor tensor parallelism has, or of another shape than its placements say.
    """
    if not is_sharded(tensor):
        return ShardSpec.whole(tensor.shape)
    dtensor: Any = tensor
    mesh = dtensor.device_mesh
    splits = [_split_of(one, tensor.dim()) for one in dtensor.placements]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ShardSpec(tuple(tensor.shape), (0,) * tensor.dim(), (0,) * tensor.dim())
    # Not compute_local_shape_and_global_offset: wrong of uneven FSDP2 with TP in 2.11, 2.13.
    spec = placed(tensor.shape, mesh.shape, coordinate, splits)
    local = local_of(tensor)
    if local.shape != spec.size and (local.numel() or spec.numel):
        raise ConfigError(
            f"{tuple(local.shape)} is held here, {dtensor.placements} say {spec.size}"
        )
    return spec


def placed(
    shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    splits: Sequence[Split | None],
) -> ShardSpec:
    """What one rank of a mesh holds: cut as `torch.chunk` cuts, the last may have less or none.

    Args:
        shape: Of the checkpoint tensor.
        mesh: How many ranks each of its dimensions has.
        coordinate: Of the rank.
        splits: What each dimension of the mesh does; None where it repeats.
    """
    offset, size = [0] * len(shape), list(shape)
    for place in _in_order(mesh, splits):
        split = splits[place]
        assert split is not None
        dim, step = split[0], -(-size[split[0]] // mesh[place])
        low = min(size[dim], step * coordinate[place])
        offset[dim], size[dim] = offset[dim] + low, min(size[dim] - low, step)
    return ShardSpec(tuple(shape), tuple(offset), tuple(size))


def cut(box: ShardSpec, ways: int) -> list[ShardSpec]:
    """At most so many boxes that make up this one: of rows, if there are enough of them."""
    if not box.size:
        return [box]
    dim = 0 if box.size[0] >= ways else max(range(len(box.size)), key=box.size.__getitem__)
    made = [placed(box.size, (ways,), (index,), [(dim, 1)]) for index in range(ways)]
    return [
        ShardSpec(box.shape, tuple(map(int.__add__, box.offset, one.offset)), one.size)
        for one in made
        if one.numel
    ]


def rows_of(box: ShardSpec) -> Iterator[tuple[tuple[int | slice, ...], Region]]:
    """(index, region): boxes `local[index]` that make up this one, as the region of a `Share`."""
    if not box.numel:
        return
    strides = row_major(box.shape)
    dims = list(zip(box.size, strides, strict=True))
    for dim in range(len(dims) + 1):
        inner = Region(0, tuple(dims[dim:]))
        if inner.is_run or (inner.rows is not None and strides[dim] <= _MOST_STRIDE):
            break
    first = sum(map(int.__mul__, box.offset, strides))
    for index in product(*map(range, box.size[:dim])):
        start = first + sum(map(int.__mul__, index, strides))
        if inner.is_run:
            yield index, Region(start, inner.dims)
            continue
        size, stride = dims[dim]
        step = _MOST_STRIDE // stride
        for low in range(0, size, step):
            high = min(low + step, size)
            rows = (high - low, stride), *dims[dim + 1 :]
            yield (*index, slice(low, high)), Region(start + low * stride, rows)


def overlap(box: ShardSpec, other: ShardSpec) -> ShardSpec:
    """What lies in both boxes of a tensor."""
    low = tuple(map(max, box.offset, other.offset))
    ends = ([b + n for b, n in zip(s.offset, s.size, strict=True)] for s in (box, other))
    size = tuple(max(0, min(a, b) - at) for at, a, b in zip(low, *ends, strict=True))
    return ShardSpec(box.shape, low, size)


def narrowed(local: Tensor, held: ShardSpec, box: ShardSpec) -> Tensor:
    """`box` in the local tensor of `held`, which contains it: a view."""
    for dim, (begin, before) in enumerate(zip(box.offset, held.offset, strict=True)):
        local = local.narrow(dim, begin - before, box.size[dim])
    return local


def share_out(
    held: Sequence[Mapping[str, ShardSpec]],
    item_sizes: Mapping[str, int],
    *,
    split_above: int = SPLIT_ABOVE,
) -> list[dict[str, ShardSpec]]:
    """What each rank sends, so that everything is sent once and all send about as much.

    What several ranks hold (norms under tensor parallelism, everything under HSDP) is sent by the
    one that has least to send, or if it is large by each of them a part. All ranks find the same.

    Args:
        held: What each rank holds, by name.
        item_sizes: Bytes of an element, by name.
        split_above: Bytes up to which no box is cut; nor is what is small beside a rank's load.

    Raises:
        ConfigError: Ranks disagree about a shape, or do not hold each element equally often.
    """
    holders: dict[tuple[str, ShardSpec], list[int]] = defaultdict(list)
    for rank, specs in enumerate(held):
        for name, spec in specs.items():
            if spec.numel:
                holders[name, spec].append(rank)
    _refuse_gaps(held, holders.keys())
    loads, shares = [0] * len(held), [dict[str, ShardSpec]() for _ in held]

    def size(box: tuple[str, ShardSpec]) -> int:
        return box[1].numel * item_sizes[box[0]]

    total = sum(map(size, holders))
    split_above = max(split_above, total // (len(held) * _SHARE_OF_A_RANK))
    for name, spec in sorted(holders, key=lambda box: (-size(box), box[0], box[1].offset)):
        ranks = holders[name, spec]
        boxes = cut(spec, len(ranks)) if size((name, spec)) > split_above else [spec]
        for box, rank in zip(boxes, sorted(ranks, key=lambda r: (loads[r], r)), strict=False):
            shares[rank][name] = box
            loads[rank] += size((name, box))
    return shares


def _refuse_gaps(
    held: Sequence[Mapping[str, ShardSpec]], boxes: Iterable[tuple[str, ShardSpec]]
) -> None:
    """Different boxes of a tensor have to add up to it."""
    shapes = {(name, spec.shape) for specs in held for name, spec in specs.items()}
    missing = {name: prod(shape) for name, shape in shapes}
    for name, spec in boxes:
        missing[name] -= spec.numel
    wrong = sorted(name for name, count in missing.items() if count)
    if len(missing) < len(shapes) or wrong:
        names = wrong or [name for name, _ in shapes]
        raise ConfigError(f"{len(names)} tensors, {names[0]!r} among them, are not whole together")


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Does not import them for others."""
    if not is_traceable_wrapper_subclass(tensor):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """The elements that this rank holds: a view of a DTensor's, or the tensor itself. Not owned."""
    if not is_sharded(tensor):
        return writable(tensor)
    with torch.no_grad():
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return writable(local)


def _split_of(placement: Any, num_dims: int) -> Split | None:
    if placement.is_replicate():
        return None
    if placement.is_partial():
        raise ConfigError(f"{placement}: ranks hold terms of a sum that was not made yet")
    return placement.dim % num_dims, getattr(placement, "split_factor", 1)


def _in_order(mesh: Sequence[int], splits: Sequence[Split | None]) -> list[int]:
    """Dimensions of the mesh in the order in which they split the tensor.

    From left to right; but a factor says that others, further right, have come before.
    """
    orders: dict[int, list[int]] = {}
    for place, split in reversed(list(enumerate(splits))):
        if split is None:
            continue
        dim, factor = split
        order = orders.setdefault(dim, [])
        before = list(accumulate((mesh[other] for other in order), int.__mul__, initial=1))
        if factor not in before:
            raise ConfigError(f"a dimension is split in {factor} parts by nothing that is known")
        order.insert(before.index(factor), place)
    return [place for order in orders.values() for place in order]
