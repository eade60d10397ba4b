"""What an operation of torch takes, writes and returns, by its schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from deltasync.errors import ConfigError


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
def _is_collective(func: Any) -> bool:
    """Whether an operation waits for other processes: torch's, or an engine's of a like name."""
    namespace, _, name = func._schema.name.partition("::")
    return namespace in _OF_RANKS or any(word in name for word in _COLLECTIVES)


def refuse_waits(func: Any) -> None:
    """Raise ConfigError for an operation that waits for other ranks of an engine.

    A rank that refuses does not come there, nor one of which a sync touches nothing.
    """
    if _is_collective(func):
        raise ConfigError(
            "the engine cannot be kept in sync: its ranks talk to each other while it loads "
            f"({func}), and a rank that a sync does not touch would keep the others waiting"
        )


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
