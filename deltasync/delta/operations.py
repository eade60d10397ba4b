"""What an operation of torch takes, writes and returns, by its schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor


def tensors_in(value: object) -> list[Tensor]:
    """The tensors in the arguments or results of an operation."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for one in value for t in tensors_in(one)] if isinstance(value, list | tuple) else []


@cache
def is_view(func: Any) -> bool:
    """Whether all that an operation returns are views, by its schema, and it writes nothing."""
    returned = func._schema.returns
    return bool(returned) and not _places_written(func) and all(one.alias_info for one in returned)


@cache
def _places_written(func: Any) -> tuple[tuple[int, str], ...]:
    """Which arguments an operation writes, by its schema: places and names."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_OF_RANKS = ("c10d", "_c10d_functional")  # torch.distributed


@cache
def is_collective(func: Any) -> bool:
    """Whether an operation waits for other processes: torch's, or an engine's of a like name."""
    namespace, _, name = func._schema.name.partition("::")
    return namespace in _OF_RANKS or any(word in name for word in _COLLECTIVES)


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call writes."""
    places = _places_written(func)
    return [
        tensor
        for place, name in places
        for tensor in tensors_in(args[place] if place < len(args) else kwargs.get(name))
    ]


def as_returned(func: Any, written: Sequence[Tensor]) -> Any:
    """What a call that writes would return."""
    count = len(func._schema.returns)
    return None if count == 0 else written[0] if count == 1 else tuple(written)


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """Where its first and its last element lie in its storage, in elements."""
    begin, count = int(tensor.storage_offset()), tensor.numel()
    if count and not tensor.is_contiguous():
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in dims)
    return begin, begin + max(0, count - 1)
