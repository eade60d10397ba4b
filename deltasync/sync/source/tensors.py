"""What a sender reads: tensors with checkpoint names, or the parts of them that are held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from deltasync.delta.bits import check_plain, dtype_of
from deltasync.delta.readers import Reader
from deltasync.delta.shard import ShardSpec, is_sharded, local_of, narrowed, overlap, shard_of
from deltasync.dtypes import Dtype
from deltasync.errors import ConfigError
from deltasync.wire.messages import ParameterSpec

Index: TypeAlias = tuple[int | slice, ...]
"""Selects a part of a tensor, as in `tensor[index]`; slices have no steps."""

NameMap: TypeAlias = Callable[[str, tuple[int, ...]], Mapping[str, Index] | None]
"""Maps the name and full shape of a parameter to the checkpoint tensors that it contains."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which maxima a rank knows something of.

    Attributes:
        name: Of a run of maxima, the same on all ranks.
        size: How many they are.
        begin, count: Those that this rank knows something of.
        crosses: Whether other ranks may know more of them; if none may, there is nothing to agree.
    """

    name: str
    size: int
    begin: int
    count: int
    crosses: bool


@dataclass(frozen=True, slots=True)
class Maxima:
    """Largest magnitudes that a computed tensor depends on, and ranks hold parts of.

    Attributes:
        place: Which.
        device: Where they are.
        own: Computes bfloat16[count] of what is held here, as it is now. NaN is above all others.
        agree: Takes bfloat16[count], the largest of all ranks'. Not owned. It holds until `tensors`
            is called the next time.
    """

    place: Place
    device: torch.device
    own: Callable[[], Tensor]
    agree: Callable[[Tensor], None]


class Computed(Reader, Protocol):
    """Reads a checkpoint tensor that is computed from another one, such as its quantized codes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint tensor, or of the part of it that is computed here."""
        ...

    def sent(
        self, spec: ParameterSpec, part: tuple[ShardSpec, ShardSpec] | None = None
    ) -> list[Reader]:
        """Readers of it in the dtype of `spec`: one of all, or one for each of `rows_of(box)`.

        Raises ConfigError for a dtype that has not all its values, and for parts of rows.

        Args:
            spec: What it is sent as.
            part: (what is computed here, the `box` that is sent of that).
        """
        ...

    def maxima(self) -> Sequence[Maxima]:
        """What ranks have to agree on before it is read. Not repeated by others of its source."""
        ...

    def check(self) -> None:
        """Raise ConfigError, by name, if it cannot be computed of the weights as they are now."""
        ...


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One tensor of a model and all of its names.

    Attributes:
        names: The canonical name, then the names tied to it.
        tensor: The live tensor, or the part of it that this trainer rank holds. Not owned.
        shard: Which part is held; None for a whole tensor, and for a DTensor, which says so itself.
        full_shape: Shape of the checkpoint tensor, if `shard` views it in more dimensions: a rank
            that fuses heads by groups holds a part of each group.
        computed: What is sent instead of `tensor`, and computed from it; None to send `tensor`.
    """

    names: tuple[str, ...]
    tensor: Tensor
    shard: ShardSpec | None = None
    full_shape: tuple[int, ...] | None = None
    computed: Computed | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a tensor without plain storage, or that contradicts its shard."""
        if not is_sharded(self.tensor):
            check_plain(self.tensor, self.name)
        if self.shard is None:
            return
        held = tuple(self.tensor.shape) if self.computed is None else self.computed.shape
        if held != self.shard.size or prod(self.shape) != prod(self.shard.shape):
            raise ConfigError(
                f"{self.name}: {held} is held of {self.shape}, the shard says "
                f"{self.shard.size} of {self.shard.shape}"
            )

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint tensor."""
        if self.full_shape is not None:
            return self.full_shape
        if self.shard is not None:
            return self.shard.shape
        return tuple(self.tensor.shape) if self.computed is None else self.computed.shape

    @property
    def dtype(self) -> Dtype:
        """Dtype of the checkpoint tensor. Raises ConfigError for one that cannot be sent."""
        if self.computed is not None:
            return self.computed.dtype
        return dtype_of(self.tensor, name=self.name)


def maxima_of(tensors: Iterable[NamedTensor]) -> dict[str, Maxima]:
    """What ranks have to agree on before these are read, by name."""
    computed = (entry.computed for entry in tensors if entry.computed is not None)
    return {one.place.name: one for reader in computed for one in reader.maxima()}


def held_of(entry: NamedTensor) -> tuple[ShardSpec, Tensor]:
    """The part held here, and its elements, or those that it is computed from.

    Raises ConfigError for unsupported DTensors.
    """
    if entry.shard is not None:
        return entry.shard, entry.tensor
    if entry.computed is not None:
        return ShardSpec.whole(entry.shape), entry.tensor
    return shard_of(entry.tensor), local_of(entry.tensor)


def parts_of(entry: NamedTensor, places: Mapping[str, Index]) -> Iterator[NamedTensor]:
    """The checkpoint tensors that this one contains, as views of what is held here.

    Leaves out tensors of which nothing is held. Raises ConfigError for an invalid index.
    """
    held, local = held_of(entry)
    if entry.computed is not None:
        raise ConfigError(f"{entry.name}: is computed; split what it is computed from")
    if held.shape != entry.shape:
        raise ConfigError(f"{entry.name}: has its dimensions split, parts of it are not known")
    for name, index in places.items():
        box, shape = _box_of(name, index, entry.shape)
        here = overlap(box, held)
        if here.numel:
            view = narrowed(local, held, here).detach()
            view.requires_grad_(entry.tensor.requires_grad)
            inside = tuple(map(int.__sub__, here.offset, box.offset))
            yield NamedTensor((name,), view, ShardSpec(box.size, inside, here.size), shape)


class WeightSource(Protocol):
    """The trainer's parameters, in checkpoint coordinates."""

    def tensors(self) -> list[NamedTensor]:
        """Return the live tensors as they are now, tied ones once, always in the same order.

        Called at every sync; storage may have been replaced since the last call. Return the same
        list object only if no tensor has changed its storage, shape, strides or dtype. Do return it
        then: with another list everything is looked up anew, which takes about 10 us a tensor.
        """
        ...


def _box_of(name: str, index: Index, full: tuple[int, ...]) -> tuple[ShardSpec, tuple[int, ...]]:
    """The part of a tensor that `index` selects, and its shape. Raises ConfigError."""
    slices = [slice(at, at + 1) if isinstance(at, int) and at >= 0 else at for at in index]
    slices += [slice(None)] * (len(full) - len(index))
    ranges = [
        range(length)[at] if isinstance(at, slice) else range(0)
        for length, at in zip(full, slices, strict=False)
    ]
    if len(slices) > len(full) or not all(found and found.step == 1 for found in ranges):
        raise ConfigError(f"{name}: {index} is no part of a tensor of shape {full}")
    size = tuple(map(len, ranges))
    dropped = {dim for dim, at in enumerate(index) if isinstance(at, int)}
    shape = tuple(length for dim, length in enumerate(size) if dim not in dropped)
    return ShardSpec(full, tuple(found[0] for found in ranges), size), shape
