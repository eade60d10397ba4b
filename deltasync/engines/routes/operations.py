"""What an operation of torch takes, writes, returns and joins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees each operation within its `with` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch would import its compiler, which takes a second."""
        return False


class Alone(Watching):
    """Raises ConfigError if code would wait for other ranks of its engine."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        refuse_waits(func)
        return func(*args, **(kwargs or {}))


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


@dataclass(frozen=True, slots=True)
class Join:
    """Checkpoint tensors, views or joins of them, one after another in a tensor of their own.

    Attributes:
        whole: That tensor.
        dim: Along which.
        parts: With as many dimensions as it has, or one less if they are stacked. Nobody else has
            these objects.
        is_stack: Whether they are.
    """

    whole: Tensor
    dim: int
    parts: tuple[Tensor, ...]
    is_stack: bool

    def split(self, view: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]] | None:
        """A copy of a view to `target` as copies of the parts: (target, source) of each.

        None unless the view is a box of the whole.
        """
        if view.dtype != self.whole.dtype or view.is_neg() or view.is_conj():
            return None
        if view.stride() != self.whole.stride() or view.shape != target.shape:
            return None
        starts, rest = [], int(view.storage_offset())
        for stride in self.whole.stride():
            starts.append(rest // stride)
            rest %= stride
        ends = map(int.__add__, starts, view.shape)
        if not self.whole.is_contiguous() or any(map(int.__gt__, ends, self.whole.shape)):
            return None
        return self._split(starts, target)

    def _split(self, starts: list[int], target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        begin, first = 0, starts[self.dim]
        others = [(n, dim) for dim, n in enumerate(starts) if dim != self.dim]
        for part in self.parts:
            end = begin + (1 if self.is_stack else part.shape[self.dim])
            low, high = max(first, begin), min(first + target.shape[self.dim], end)
            if low < high:
                there = target.narrow(self.dim, low - first, high - low)
                source = part if self.is_stack else part.narrow(self.dim, low - begin, high - low)
                for place, (start, dim) in enumerate(others):
                    own = place if self.is_stack else dim
                    source = source.narrow(own, start, target.shape[dim])
                yield (there.squeeze(self.dim) if self.is_stack else there), source
            begin = end
