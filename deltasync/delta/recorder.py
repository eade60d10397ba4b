"""Watches an engine's loader once, with checkpoint tensors that have no data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltasync.delta.bits import dtype_of, identity
from deltasync.delta.route import Piece, covers, joined
from deltasync.dtypes import Dtype
from deltasync.errors import ConfigError

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""An engine's `load_weights`: takes (checkpoint name, tensor) pairs."""

_aten = torch.ops.aten
# They copy, and what they return has the same elements: here the same tensor does for both.
_COPIES = (_aten.clone.default, _aten._to_copy.default, _aten.contiguous.default)
_FILLS = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a checkpoint, as a loader knows it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Recording:
    """What a loader does with a checkpoint.

    Attributes:
        pieces: Where the elements of each checkpoint tensor go: for each that is only copied. A
            tensor that this rank takes nothing of has none.
        dtypes: What each of those has to be sent as: the dtype that the engine keeps it in.
        refused: By checkpoint name, why there is no route.
        uncovered: By live name, why it does not follow the checkpoint alone.
        untouched: Names of live tensors that the loader does nothing with.
        padding: By live name, what the loader fills with a constant.
    """

    pieces: dict[str, tuple[Piece, ...]]
    dtypes: dict[str, Dtype]
    refused: dict[str, str]
    uncovered: dict[str, str]
    untouched: tuple[str, ...]
    padding: dict[str, tuple[Piece, ...]]


def record(
    load: Load, checkpoint: Sequence[CheckpointTensor], live: Mapping[str, Tensor]
) -> Recording:
    """Run `load` on tensors without data. Live tensors are not written, and nothing is copied.

    A tensor that the engine keeps in another dtype is recorded as of that dtype.

    Args:
        load: The engine's loader. Whatever Python state it changes, it has changed.
        checkpoint: What it is given, in order.
        live: The engine's tensors by name: parameters and buffers.

    Raises:
        ConfigError: The loader raised; the text names the checkpoint tensor it was given last.
    """
    # Of names that lead to one tensor the first stands for all.
    first = {identity(tensor): name for name, tensor in reversed(list(live.items()))}
    live = {name: tensor for name, tensor in live.items() if first[identity(tensor)] == name}
    recorder = _run(load, checkpoint, live)
    if recorder.casts:
        casts = {name: dtypes.pop() for name, dtypes in recorder.casts.items() if len(dtypes) == 1}
        again = [CheckpointTensor(c.name, c.shape, casts.get(c.name, c.dtype)) for c in checkpoint]
        recorder = _run(load, again, live)
    return recorder.recording()


def _run(
    load: Load, checkpoint: Sequence[CheckpointTensor], live: Mapping[str, Tensor]
) -> _Recorder:
    recorder = _Recorder(live)
    before = {name: tensor.detach() for name, tensor in live.items()}
    try:
        with torch.no_grad(), recorder:
            load(recorder.give(checkpoint))
    except Exception as error:
        raise ConfigError(
            f"the loader cannot be watched: at {recorder.given!r} it raised "
            f"{type(error).__name__}: {error}; leave that tensor out of the routes"
        ) from error
    finally:
        recorder.put_back(before)
    return recorder


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes copies from checkpoint tensors into live ones, and lets no live tensor be written.

    Attributes:
        given: The checkpoint tensor that the loader was given last.
        casts: Dtypes that checkpoint tensors were converted to.
    """

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = ""
        self.casts: dict[str, set[torch.dtype]] = defaultdict(set)
        self._live = dict(live)
        self._live_in: dict[int, list[str]] = defaultdict(list)
        for name, tensor in live.items():
            self._live_in[_storage(tensor)].append(name)
        self._checkpoint: dict[str, CheckpointTensor] = {}
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        self._padding: dict[str, list[Piece]] = defaultdict(list)
        self._refused: dict[str, str] = {}
        self._uncovered: dict[str, str] = {}
        # By storage: the checkpoint tensor it is, or those it was computed from and how.
        self._is: dict[int, str] = {}
        self._made_of: dict[int, tuple[frozenset[str], str]] = {}
        self._kept: list[Tensor] = []  # so that no storage is taken for one that is gone

    def give(self, checkpoint: Sequence[CheckpointTensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, meta tensor) of each, as the loader asks for them."""
        for one in checkpoint:
            tensor = torch.empty(one.shape, dtype=one.dtype, device="meta")
            self._checkpoint[one.name] = one
            self._is[_storage(tensor)] = self.given = one.name
            self._kept.append(tensor)
            yield one.name, tensor

    def put_back(self, before: Mapping[str, Tensor]) -> None:
        """Undo what goes past the dispatcher: storage that was exchanged."""
        for name, tensor in before.items():
            if identity(self._live[name]) != identity(tensor):
                self._live[name].data = tensor
                self._uncovered[name] = "the loader replaces its storage"

    def recording(self) -> Recording:
        """What was found."""
        pieces = {
            name: joined(self._pieces[name])
            for name in self._checkpoint
            if name not in self._refused
        }
        regions: dict[str, list[Piece]] = defaultdict(list)
        for found in (*pieces.values(), *self._padding.values()):
            for piece in found:
                regions[piece.live].append(piece)
        untouched = tuple(
            name for name in self._live if name not in self._uncovered and name not in regions
        )
        for name in regions:
            if not covers(self._live[name], regions[name]):
                why = "the loader does not copy to each element exactly once"
                self._uncovered.setdefault(name, why)
        return Recording(
            pieces=pieces,
            dtypes={
                name: dtype_of(torch.empty(0, dtype=self._checkpoint[name].dtype))
                for name in pieces
            },
            refused=self._refused,
            uncovered=self._uncovered,
            untouched=untouched,
            padding={name: joined(found) for name, found in self._padding.items()},
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if any(_storage(tensor) in self._live_in for tensor in written):
            self._write_live(func, args, written)
            return _as_returned(func, written)
        sources = self._sources(tree_leaves((args, kwargs)))
        if sources and written:
            self._refuse(sources, f"is changed in place, or put into a buffer, by {func}")
            return _as_returned(func, written)
        if func in _COPIES and _storage(args[0]) in self._is:
            return self._copied(args[0], kwargs)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and sources and _storage(tensor) not in self._is:
                self._made_of[_storage(tensor)] = (frozenset(sources), str(func))
                self._kept.append(tensor)
        return result

    def _copied(self, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        dtype = kwargs.get("dtype")
        if dtype is None or dtype == tensor.dtype:
            return _aten.alias.default(tensor)  # type: ignore[no-any-return]
        self._cast(self._is[_storage(tensor)], dtype)
        return torch.empty_like(tensor, dtype=dtype)

    def _write_live(self, func: Any, args: tuple[Any, ...], written: Sequence[Tensor]) -> None:
        """Note a write to live tensors, which is not done."""
        if func is _aten.copy_.default and args[1].is_meta:
            self._copy(args[0], args[1])
        elif func in _FILLS and (piece := self._region(args[0])) is not None:
            self._padding[piece.live].append(piece)
        else:
            self._refuse(self._sources(tree_leaves(args)), f"is not only copied: {func}")
            for tensor in written:
                self._spoil(tensor, f"the loader writes other values by {func}")

    def _copy(self, target: Tensor, source: Tensor) -> None:
        name = self._is.get(_storage(source))
        region = self._region(target)
        if name is None:
            names, how = self._made_of.get(_storage(source), (frozenset(), "something unknown"))
            self._refuse(names, f"is not only copied: {how}")
            self._spoil(target, f"the loader computes it: {how}")
        elif region is None or source.dtype != self._checkpoint[name].dtype:
            self._refuse([name], "is read or kept as another dtype than its own")
        elif source.dtype != target.dtype:
            self._cast(name, target.dtype)
        else:
            strides = source.expand(target.shape).stride()
            dims = zip(target.shape, strides, target.stride(), strict=True)
            start, live_start = _extent(source)[0], _extent(target)[0]
            self._pieces[name].append(Piece.of(region.live, start, live_start, dims))

    def _spoil(self, target: Tensor, why: str) -> None:
        """Something else than a checkpoint tensor's elements went to a live tensor."""
        for name in self._live_in.get(_storage(target), ()):
            self._uncovered[name] = why

    def _region(self, target: Tensor) -> Piece | None:
        """The live tensor that `target` is a part of, and which; None if it is seen as another."""
        begin, end = _extent(target)
        for name in self._live_in[_storage(target)]:
            live = self._live[name]
            first, last = _extent(live)
            if live.dtype == target.dtype and first <= begin and end <= last:
                dims = zip(target.shape, target.stride(), target.stride(), strict=True)
                return Piece.of(name, begin, begin, dims)
        return None

    def _cast(self, name: str, dtype: torch.dtype) -> None:
        self.casts[name].add(dtype)
        self._refuse([name], f"is converted to {dtype}, and to other dtypes elsewhere")

    def _refuse(self, names: Iterable[str], why: str) -> None:
        for name in names:
            self._refused.setdefault(name, why)

    def _sources(self, leaves: Iterable[Any]) -> set[str]:
        """Names of the checkpoint tensors that `leaves` are, or were made of."""
        found: set[str] = set()
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                key = _storage(leaf)
                found |= {self._is[key]} if key in self._is else set()
                found |= self._made_of.get(key, (frozenset[str](), ""))[0]
        return found


def _storage(tensor: Tensor) -> int:
    """What two tensors over the same storage share."""
    return int(tensor.untyped_storage()._cdata)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Where its first and its last element lie in its storage, in elements."""
    begin = int(tensor.storage_offset())
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (reach if tensor.numel() else 0)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call writes, by its schema."""
    found: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _as_returned(func: Any, written: Sequence[Tensor]) -> Any:
    """What a call that writes would return."""
    count = len(func._schema.returns)
    return None if count == 0 else written[0] if count == 1 else tuple(written)
