"""Watches an engine's loader once, with checkpoint tensors that have no data."""

from __future__ import annotations

import gc
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from deltasync.delta.bits import dtype_of, extent_of, identity, storage_of
from deltasync.delta.memory import is_lack_of_memory
from deltasync.delta.naming import suggested
from deltasync.delta.region import Region
from deltasync.dtypes import Dtype
from deltasync.engines.routes.operations import (
    Join,
    Watching,
    as_returned,
    is_view,
    refuse_waits,
    tensors_in,
    written_by,
)
from deltasync.engines.routes.regions import ordered, select
from deltasync.engines.routes.route import Piece, covers, joined
from deltasync.errors import ConfigError

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""An engine's `load_weights`: takes (checkpoint name, tensor) pairs."""

_aten = torch.ops.aten
_COPY = _aten.copy_.default
# What they return has the same elements.
_COPIES = (_aten.clone.default, _aten._to_copy.default, _aten.contiguous.default)
_JOINS = (_aten.cat.default, _aten.stack.default)
_FILLS = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)
_MOST_OVERLAPPING = 64  # live tensors that interleave; a copy to one beyond is refused


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a checkpoint, as a loader knows it.

    Attributes:
        aliases: Names that are tied to `name`: a loader may take the tensor under any of them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, and those tied to it."""
        return (self.name, *self.aliases)

    @property
    def numel(self) -> int:
        return prod(self.shape)


def without_data(one: CheckpointTensor) -> Tensor:
    """A tensor of this shape and dtype on the meta device."""
    return torch.empty(one.shape, dtype=one.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Recording:
    """What a loader does with a checkpoint.

    Attributes:
        pieces: Where the elements of each checkpoint tensor go: for each that is only copied. A
            tensor that this rank takes nothing of has none.
        given: The names under which the loader takes each checkpoint tensor, or ignores it.
        dtypes: What each of those has to be sent as: the dtype that the engine keeps it in.
        refused: By name as it was given, why there is no route.
        uncovered: By live name, why it does not follow the checkpoint alone.
        written: Names of live tensors that the loader writes, with the name that it was given then.
        fixed: Names of tensors that may not change, because the engine does not keep each of them.
            Pieces of these lead to tensors beside the engine.
    """

    pieces: dict[str, tuple[Piece, ...]]
    given: dict[str, tuple[str, ...]]
    dtypes: dict[str, Dtype]
    refused: dict[str, str]
    uncovered: dict[str, str]
    written: dict[str, str]
    fixed: frozenset[str] = frozenset()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """All that is made here is kept, and would be searched for garbage again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_garbage_collection()
def record(
    load: Load,
    checkpoint: Sequence[CheckpointTensor],
    live: Mapping[str, Tensor],
    *,
    may_raise: int = 0,
) -> Recording:
    """Run `load` on tensors without data. Live tensors are not written, and nothing is copied.

    A tensor that the engine keeps in another dtype is recorded as of that dtype. A tied one is
    given under each of its names but those at which the loader raises, if another one is left.

    Args:
        load: The engine's loader. Whatever Python state it changes, it has changed.
        checkpoint: What it is given, in order.
        live: The engine's tensors by name: parameters and buffers.
        may_raise: At how many tensors the loader may raise. These are left out.

    Raises:
        ConfigError: The loader raised; the text names the checkpoint tensor it was given last.
    """
    # Of names that lead to one tensor the first stands for all. Empty ones share the null pointer.
    first = {identity(tensor): name for name, tensor in reversed(list(live.items()))}
    live = {n: t for n, t in live.items() if not t.numel() or first[identity(t)] == n}
    recorder = _run(load, checkpoint, live, may_raise)
    if recorder.casts:
        again = [replace(one, dtype=recorder.cast_of(one)) for one in recorder.checkpoint]
        recorder = _run(load, again, live)
    return recorder.recording()


def _run(
    load: Load,
    checkpoint: Sequence[CheckpointTensor],
    live: Mapping[str, Tensor],
    may_raise: int = 0,
) -> _Recorder:
    """All in one call. Raises ConfigError if the loader raises at all names of a tensor."""
    given = {one.name: list(one.names) for one in checkpoint}
    while True:
        recorder = _Recorder([one for one in checkpoint if one.name in given], given, live)
        try:
            _watch(load, recorder, live)
        except ConfigError as error:
            if _left_out(given, recorder.given, error):
                continue
            why = error.__cause__
            is_its_own = isinstance(why, Exception) and not is_lack_of_memory(why)
            if not (may_raise and is_its_own and recorder.given in given):
                raise
            del given[recorder.given]
            may_raise -= 1
        else:
            recorder.miss()
            return recorder


def _watch(load: Load, recorder: _Recorder, live: Mapping[str, Tensor]) -> None:
    """Raises ConfigError if the loader does."""
    before = {name: tensor.detach() for name, tensor in live.items()}
    mode = torch.inference_mode(any(map(Tensor.is_inference, live.values())))
    try:
        with mode, torch.no_grad(), recorder:
            load(recorder.give())
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the loader cannot be watched: at {recorder.given!r} it raised "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
            f"{suggested([recorder.given], (), are_sent=True)}"
            f"{_leaving_out(recorder.given, error, live)}"
        ) from error
    finally:
        recorder.put_back(before)


def _leaving_out(given: str, error: Exception, held: Collection[str]) -> str:
    """Proposes to leave a tensor out, if a loader looked for it by name and the engine has none.

    Args:
        given: The tensor that the loader was given.
        error: What it raised. What it names there is that tensor, what the tensor is fused into, or
            a module above it.
        held: Names of the engine's tensors.

    Returns:
        Text to append; empty where the engine may have the tensor, which would stay as it is.
    """
    if not isinstance(error, LookupError | AttributeError | ValueError):
        return ""
    for word in re.findall(r"\w[\w.]*\w", str(error)):
        is_above = f"{given}.".startswith(f"{word}.")
        is_meant = is_above or word.rpartition(".")[2] == given.rpartition(".")[2]
        if is_meant and not any(f".{word}." in f".{name}." for name in held):
            advice = f"leave it out: SenderOptions(leave_out=[{given!r}])"
            return f"; the engine has no such tensor: {advice}"
    return ""


def _left_out(given: Mapping[str, list[str]], last: str, error: ConfigError) -> bool:
    """Whether a name was taken off that the loader raises at, of a tensor that has another."""
    for names in given.values():
        for name in names if len(names) > 1 else ():
            if name == last or f"{name!r}" in repr(error.__cause__):
                names.remove(name)
                return True
    return False


class _Recorder(Watching):  # type: ignore[no-untyped-call]
    """Notes copies from checkpoint tensors into live ones, and lets no live tensor be written.

    Attributes:
        given: The checkpoint tensor that the loader was given last.
        checkpoint: The checkpoint tensors.
        casts: Dtypes that they were converted to.
    """

    def __init__(
        self,
        checkpoint: Sequence[CheckpointTensor],
        names: Mapping[str, Sequence[str]],
        live: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self.given = ""
        self.checkpoint = tuple(checkpoint)
        self._names = {name: tuple(given) for name, given in names.items()}
        self._given = {name: without_data(one) for one in checkpoint for name in names[one.name]}
        self.casts: dict[str, set[torch.dtype]] = defaultdict(set)
        self._live = dict(live)
        # By storage: where live tensors begin and end in it, in order, and their names.
        self._live_in: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for name, tensor in live.items():
            self._live_in[storage_of(tensor)].append((*extent_of(tensor), name))
        for places in self._live_in.values():
            places.sort()
        self._checkpoint: dict[str, CheckpointTensor] = {}
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        self._padding: dict[str, list[Region]] = defaultdict(list)
        self._written: dict[int, str] = {}  # by storage, what was given last then
        self._refused: dict[str, str] = {}
        self._uncovered: dict[str, str] = {}
        # By storage: the checkpoint tensor of which it has these elements, in its own order; or
        # several tensors; or those it was computed from.
        self._is: dict[int, tuple[str, Region]] = {}
        self._joins: dict[int, Join] = {}
        self._made_of: dict[int, tuple[frozenset[str], str]] = {}
        self._kept: list[object] = []  # so that no storage is taken for one that is gone

    def give(self) -> Iterator[tuple[str, Tensor]]:
        """(name, meta tensor) of each, as the loader asks for them."""
        for one in self.checkpoint:
            for name in self._names[one.name]:
                tensor = self._given[name]
                self._checkpoint[name] = one
                self.given = name
                self._hold(tensor, name, Region.run(0, one.numel))
                yield name, tensor

    def miss(self) -> None:
        """Refuse what the loader never asked for."""
        self._refuse((n for n in self._given if n not in self._checkpoint), "is not asked for")

    def cast_of(self, one: CheckpointTensor) -> torch.dtype:
        """The dtype that a checkpoint tensor was converted to, if it was one."""
        found = {dtype for name in self._names[one.name] for dtype in self.casts.get(name, ())}
        return found.pop() if len(found) == 1 else one.dtype

    def put_back(self, before: Mapping[str, Tensor]) -> None:
        """Undo what goes past the dispatcher: storage that was exchanged."""
        for name, tensor in before.items():
            if identity(self._live[name]) != identity(tensor):
                self._live[name].data = tensor
                self._uncovered[name] = "the loader replaces its storage"

    def recording(self) -> Recording:
        """What was found."""
        pieces = {
            one.name: self._pieces_of(one)
            for one in self.checkpoint
            if self._refused.keys().isdisjoint(self._names[one.name])
        }
        pieces = {name: found for name, found in pieces.items() if name not in self._refused}
        regions = defaultdict(list, {name: [*found] for name, found in self._padding.items()})
        for found in pieces.values():
            for piece in found:
                regions[piece.live].append(piece.target)
        for name in regions:
            if not covers(self._live[name], regions[name]):
                why = (
                    "the loader does not copy to each of its elements exactly once: what it is "
                    "made of is not all sent, or some of it comes twice"
                )
                self._uncovered.setdefault(name, why)
        return Recording(
            pieces=pieces,
            given=self._names,
            dtypes={name: dtype_of(self._given[self._names[name][0]]) for name in pieces},
            refused=self._refused,
            uncovered=self._uncovered,
            written={
                name: self._written[key]
                for name, tensor in self._live.items()
                if (key := storage_of(tensor)) in self._written
            },
        )

    def _pieces_of(self, one: CheckpointTensor) -> tuple[Piece, ...]:
        """Under whichever name. Refuses a tied tensor that the engine keeps in several places."""
        found = {
            name: joined([p for p in self._pieces.get(name, ()) if p.source.numel or not one.numel])
            for name in self._names[one.name]
        }
        places = {pieces for pieces in found.values() if pieces}
        if len(places) > 1:
            lives = sorted({piece.live for pieces in places for piece in pieces})
            tied = " and ".join(repr(name) for name in found if found[name])
            self._refuse(
                [one.name],
                f"is tied at the trainer ({tied}), and kept apart by the engine, as "
                f"{' and '.join(map(repr, lives))}: start the engine with tied weights, or untie "
                "the trainer's",
            )
        return places.pop() if places else ()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_view(func):  # what a loader does most: the same storage, of which all is known
            return func(*args, **kwargs) if kwargs else func(*args)
        if func is _COPY and args[1].is_meta and storage_of(args[0]) in self._live_in:
            self._copy(args[0], args[1])
            return args[0]
        refuse_waits(func)
        kwargs = kwargs or {}
        written = written_by(func, args, kwargs)
        if any(storage_of(tensor) in self._live_in for tensor in written):
            self._write_live(func, args, written)
            return as_returned(func, written)
        given = [*tensors_in(args), *tensors_in(kwargs)]
        sources = self._sources(given)
        if sources and written:
            self._refuse(sources, f"is changed in place, or put into a buffer, by {func}")
            return as_returned(func, written)
        if func in _COPIES and storage_of(args[0]) in self._is:
            return self._copied(args[0], kwargs)
        result = func(*args, **kwargs)
        if func in _JOINS and self._joined(func is _JOINS[1], result, *args, **kwargs):
            return result
        if sources:
            known = map(self._made_of.get, map(storage_of, given))
            how = next((how for _, how in filter(None, known)), None) or str(func)
            self._derive(tensors_in(result), sources, how)
        return result

    def _joined(self, is_stack: bool, whole: Tensor, parts: Sequence[Tensor], dim: int = 0) -> bool:
        """Whether `whole` is known by its parts from now on."""
        known = self._is.keys() | self._joins.keys()
        if not whole.numel() or not all(storage_of(part) in known for part in parts):
            return False
        if any(p.dtype != whole.dtype or p.dim() + is_stack != whole.dim() for p in parts):
            return False
        held = tuple(part.detach() for part in parts)
        join = Join(whole.detach(), dim % whole.dim(), held, is_stack)
        self._joins[storage_of(whole)] = join
        return True

    def _derive(self, made: Sequence[Tensor], sources: set[str], how: str) -> None:
        """Remember of what `made` was computed, and by what at first."""
        for tensor in made:
            if storage_of(tensor) not in self._is:
                self._made_of.setdefault(storage_of(tensor), (frozenset(sources), how))
                self._kept.append(tensor.untyped_storage())

    def _copied(self, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """A copy without data, of which it is known where its elements come from."""
        name, held = self._is[storage_of(tensor)]
        dtype = kwargs.get("dtype") or tensor.dtype
        copy: Tensor = _aten.clone.default(tensor, memory_format=kwargs.get("memory_format"))
        if dtype != tensor.dtype:
            self._cast(name, dtype)
            return copy.to(dtype)
        source = None if self._is_reinterpreted(tensor, name) else select(held, Region.of(tensor))
        with suppress(ConfigError):
            if source is not None:
                target, source = ordered(Region.of(copy), source)
                if target == Region.run(0, target.numel):
                    self._hold(copy, name, source)
                    return copy
        self._derive([copy], {name}, "a rearrangement that cannot be followed")
        return copy

    def _hold(self, tensor: Tensor, name: str, elements: Region) -> None:
        self._is[storage_of(tensor)] = name, elements
        self._kept.append(tensor.untyped_storage())

    def _is_reinterpreted(self, tensor: Tensor, name: str) -> bool:
        """Whether bits of a checkpoint tensor are seen as something else."""
        own = self._checkpoint[name].dtype
        return tensor.dtype != own or tensor.is_neg() or tensor.is_conj()

    def _write_live(self, func: Any, args: tuple[Any, ...], written: Sequence[Tensor]) -> None:
        """Note a write to live tensors, which is not done."""
        self._written |= dict.fromkeys(map(storage_of, written), self.given)
        if not any(tensor.numel() for tensor in written):
            pass  # padding where there is none
        elif sources := self._sources(tensors_in(args)):
            self._refuse(sources, f"is not only copied: {func}")
            for tensor in written:
                self._spoil(tensor, f"the loader computes it: {func}")
        elif func in _FILLS and (name := self._live_name(args[0])) is not None:
            self._padding[name].append(Region.of(args[0]))
        else:
            for tensor in written:
                self._spoil(tensor, f"the loader writes other values by {func}")

    def _copy(self, target: Tensor, source: Tensor) -> None:
        self._written[storage_of(target)] = self.given
        key = storage_of(source)
        held = self._is.get(key)
        join = self._joins.get(key) if held is None else None
        if join is not None and (copies := join.split(source, target)) is not None:
            for there, part in copies:
                self._copy(there, part)
            return
        if held is None:
            names, how = self._made_of.get(key) or (
                self._sources([source]),
                "a rearrangement of several",
            )
            self._refuse(names, f"is not only copied: {how}")
            self._spoil(target, f"the loader computes it: {how}")
            return
        name, elements = held
        live = self._live_name(target)
        if live is None or self._is_reinterpreted(source, name):
            self._refuse([name], "is read or kept as another dtype than its own")
        elif source.dtype != target.dtype:
            self._cast(name, target.dtype)
        else:
            read = source if source.shape == target.shape else source.expand(target.shape)
            with suppress(ConfigError):
                if (found := select(elements, Region.of(read))) is not None:
                    self._pieces[name].append(Piece.of(live, found, Region.of(target)))
                    return
            self._refuse([name], "is not only copied: a rearrangement that cannot be followed")

    def _spoil(self, target: Tensor, why: str) -> None:
        """Something else than a checkpoint tensor's elements went to a live tensor."""
        for _, _, name in self._live_in.get(storage_of(target), ()):
            self._uncovered[name] = why

    def _live_name(self, target: Tensor) -> str | None:
        """The live tensor that `target` is a part of; None if it is seen as another."""
        if target.is_neg() or target.is_conj():
            return None
        begin, end = extent_of(target)
        places = self._live_in[storage_of(target)]
        before = bisect_right(places, begin, key=itemgetter(0)) if len(places) > 1 else 1
        for first, last, name in reversed(places[max(0, before - _MOST_OVERLAPPING) : before]):
            if first <= begin and end <= last and self._live[name].dtype == target.dtype:
                return name
        return None

    def _cast(self, name: str, dtype: torch.dtype) -> None:
        self.casts[name].add(dtype)
        self._refuse([name], f"is converted to {dtype}, and to other dtypes elsewhere")

    def _refuse(self, names: Iterable[str], why: str) -> None:
        for name in names:
            self._refused.setdefault(name, why)

    def _sources(self, tensors: Iterable[Tensor]) -> set[str]:
        """Names of the checkpoint tensors that `tensors` are, or were made of."""
        found: set[str] = set()
        for key in map(storage_of, tensors):
            if key in self._is:
                found.add(self._is[key][0])
            elif key in self._joins:
                found |= self._sources(self._joins[key].parts)
            elif key in self._made_of:
                found |= self._made_of[key][0]
        return found
