"""Proves that an engine kept in sync computes with the same tensors as a freshly started one.

The proof uses weights with other bits than the engine's own. A second instance of the model gets
them as an engine does when it starts (see `cold`), the live one as a sync writes them. Every tensor
that can be reached must then be equal in both. Writing the original weights again must leave the
live instance as it was, where it was. Layers are proved one by one, so that the proof takes the
memory of one layer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deltasync.delta.bits import as_bits, identity, storage_of
from deltasync.engines.proof.cold import ColdModel, Startup, Weights
from deltasync.engines.proof.reach import Copies, Place, Reach, is_handle, same_bits, settle
from deltasync.engines.routes.recorder import Recording
from deltasync.errors import ConfigError

_LAYER = re.compile(r".*?\.\d+(?=\.|$)|\d+(?=\.|$)")
Bits = Mapping[str, Tensor]
Given = Callable[[], Weights]


def scope_of(name: str) -> str:
    """The layer of a tensor or module: its name up to the first number; "" outside all layers."""
    found = _LAYER.match(name)
    return found.group() if found else ""


class Scopes:
    """A model's modules by layer, and those outside all layers.

    Args:
        model: The model.
        others: As of `Startup`.
    """

    def __init__(self, model: nn.Module, others: Iterable[nn.Module] = ()) -> None:
        self._modules = dict(model.named_modules())
        self._stop = {id(module) for module in (*self._modules.values(), *others)}

    def names(self) -> list[str]:
        """The layers in order, and "" for what is outside all layers."""
        return list(dict.fromkeys(scope_of(name) for name in self._modules))

    def modules(self, scopes: Collection[str]) -> dict[str, nn.Module]:
        """The modules of some layers, by name."""
        return {n: m for n, m in self._modules.items() if scope_of(n) in scopes}

    def reach(self, scopes: Collection[str]) -> Reach:
        """What is reached from some layers: not through other modules."""
        roots = [(name, module) for name, module in self._modules.items() if name in scopes]
        return Reach(roots, stop=self._stop - set(map(id, self.modules(scopes).values())))


class Snapshot:
    """A copy of what was reached, on the host, to compare with and to restore.

    Args:
        reach: What was reached, as it is now. Tensors without memory, which compilers keep, are
            left out.
        shared: Addresses of tensors that others use too; left out.
        late: Paths of tensors that were made after loading; left out.

    Attributes:
        values: Numbers, text and bytes, by path.
    """

    def __init__(self, reach: Reach, shared: Collection[int], late: Collection[str]) -> None:
        self.reach = reach
        self.founds = {
            path: found
            for path, found in reach.tensors.items()
            if path not in late
            and not found.alias.is_meta
            and found.alias.data_ptr() not in shared
            and found.alias.numel()
        }
        self.values = reach.values()
        by_place: dict[tuple[object, ...], Tensor] = {}
        self.bits: dict[str, Tensor] = {}
        for path, found in self.founds.items():
            key = identity(found.alias)
            if key not in by_place:
                by_place[key] = found.alias.to("cpu", copy=True)
            self.bits[path] = by_place[key]

    def put_back(self) -> None:
        """Restore the same tensors, in the same storage, with the same bits."""
        self.reach.put_back()
        for path, found in self.founds.items():
            here = _each_once(found.alias)
            bits = self.bits[path][tuple(map(slice, here.shape))]
            as_bits(here).copy_(as_bits(bits))

    def changed(self, expected: Bits | None = None) -> list[str]:
        """Paths of tensors that have moved, or whose bits differ from the copy or `expected`."""
        wanted = self.bits if expected is None else {**self.bits, **expected}
        return [
            path
            for path, found in self.founds.items()
            if not (found.is_moved and is_handle(found.alias))  # a new handle
            if found.is_moved or not same_bits(found.alias, wanted[path])
        ]

    def unlike(self, values: Mapping[str, Any]) -> list[str]:
        """Paths at which other values than these are now."""
        now = self.reach.again().values() if values else {}
        return [path for path, value in values.items() if not is_same(now.get(path), value)]


def _each_once(tensor: Tensor) -> Tensor:
    """The tensor without the repetitions of expanded dimensions."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@dataclass(frozen=True, slots=True)
class Step:
    """What updates the tensors that are derived from some weights.

    Attributes:
        names: Checkpoint tensors whose live values are reloaded.
        modules: Modules that the engine then processes, as it does when it starts.
    """

    names: tuple[str, ...] = ()
    modules: tuple[nn.Module, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share weights: mostly a single layer.

    Attributes:
        scopes: The layers.
        names: The checkpoint tensors that go there.
    """

    scopes: frozenset[str]
    names: tuple[str, ...]


@dataclass(slots=True)
class Upkeep:
    """What must follow each write of weights, found by `prove_routes`.

    Attributes:
        startup: The engine's startup.
        model: The engine's model.
        given: The names under which its loader takes each checkpoint tensor.
        steps: The step of each group that needs one, by the names of the group's tensors.
        moved: Tensors that steps replace; their values are copied back to the old storage.
    """

    startup: Startup
    model: nn.Module
    given: Mapping[str, tuple[str, ...]]
    steps: dict[frozenset[str], Step] = field(default_factory=dict)
    moved: dict[str, Place] = field(default_factory=dict)

    def run(self, read: Callable[[str], Tensor], changed: Set[str] | None = None) -> bool:
        """Update what is derived from checkpoint tensors. Returns whether there was any.

        Args:
            read: Returns the live value of a checkpoint tensor.
            changed: Names of the tensors that changed; None for all.
        """
        touched = [
            step
            for names, step in self.steps.items()
            if changed is None or not names.isdisjoint(changed)
        ]
        if not touched:
            return False
        names = tuple(name for step in touched for name in step.names)
        self.take(Step(names, tuple(m for step in touched for m in step.modules)), read)
        settle(self.moved)
        return True

    def take(self, step: Step, read: Callable[[str], Tensor]) -> None:
        """Do what a step requires."""
        with torch.no_grad():
            if step.names:
                live = [(name, read(name)) for name in step.names]
                self.startup.load(self.model, under(self.given, live))
            if step.modules:
                self.startup.work_on(step.modules)


def under(
    given: Mapping[str, tuple[str, ...]], weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under each name by which a loader takes them."""
    return ((own, tensor) for name, tensor in weights for own in given[name])


class Proof:
    """What both proofs, of routes and of reloads, compare the live model with.

    Args:
        model: The live model.
        startup: How the engine makes and loads it.
        loaded: Paths of what was reached right after loading; None if that is not known.

    Raises:
        ConfigError: There is no second instance to compare it with.
    """

    def __init__(
        self, model: nn.Module, startup: Startup, loaded: Collection[str] | None = None
    ) -> None:
        self.model, self.startup, self._loaded = model, startup, loaded
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.cold = ColdModel(startup, device)
        self.scopes, self._cold_scopes = Scopes(model, startup.others), Scopes(self.cold.model)
        own = _filled(self.cold.model)
        self._shared = {alias.data_ptr() for alias in own.values()} - {0}
        self._before: dict[str, tuple[object, ...]] = {}
        live = {alias.data_ptr() for alias in _filled(model).values()}
        common = live & self._shared
        self._common = Copies(alias for alias in own.values() if alias.data_ptr() in common)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """The context of a proof; restores what both instances share. Raises as `check_apart`."""
        self._before = {path: _state(one) for path, one in _filled(self.cold.model).items()}
        try:
            yield
            self.check_apart()
        finally:
            self._common.put_back()

    @contextmanager
    def _writing(self, reach: Reach) -> Iterator[None]:
        """Do not count writes inside, unless the tensor was already written before."""
        aliases = {path: found.alias for path, found in reach.tensors.items()}
        own = [p for p, alias in aliases.items() if self._before.get(p) == _state(alias)]
        yield
        self._before |= {path: _state(aliases[path]) for path in own}

    def check_apart(self) -> None:
        """Raise ConfigError if the start of a part has written outside of it; names the path.

        This concerns tensors whose values differ in the live instance, or that both share.
        """
        made = {
            path: alias
            for path, alias in _filled(self.cold.model).items()
            if self._before.get(path) != _state(alias)
        }
        live = _filled(self.model) if made else {}
        common = {here.data_ptr() for here in self._common.changed()}
        wrong = [
            path
            for path, alias in made.items()
            if path in live and (self._loaded is None or path in self._loaded)
            if alias.data_ptr() in common or not same_bits(alias, live[path])
        ]
        if wrong:
            raise ConfigError(
                f"{min(wrong)!r} is written by the start of another layer than its own, so that "
                "what a fresh engine would hold there cannot be found out"
            )

    def keep(self, scopes: Collection[str], weights: Iterable[Tensor] = ()) -> Snapshot:
        """Copy what some layers hold.

        Raises ConfigError, which names the path, for a tensor that cannot be compared, and for one
        that was made after loading as a copy of one of `weights`.
        """
        reach = self.scopes.reach(scopes)
        paths = {*reach.tensors, *reach.opaque}
        late = set() if self._loaded is None else paths - set(self._loaded)
        if opaque := reach.opaque.keys() - late:
            raise ConfigError(
                f"{min(opaque)!r} is sparse, quantised or packed by torch, so that what the "
                "engine computes with cannot be compared with what a fresh one would"
            )
        for path in late & reach.tensors.keys():
            if _is_copy(reach.tensors[path].alias, weights):
                raise ConfigError(
                    f"{path!r} is a copy of weights, which the engine made while it ran"
                )
        return Snapshot(reach, self._shared, late)

    def started(
        self,
        group: Group,
        given: Mapping[str, tuple[str, ...]],
        *,
        others: Given,
        own: Given,
        kept: Snapshot,
    ) -> Fresh:
        """Start a part of the second instance with other weights, and return what it is then.

        Args:
            group: The part.
            given: The names under which the loader takes each checkpoint tensor.
            others: Returns the other weights, by checkpoint name.
            own: Returns the weights that the live instance was started on.
            kept: What the live instance holds.
        """
        fresh = self._started(group, under(given, others()), kept)
        if first := fresh.values:  # among them are counts, names, times: of no weights
            same = self._started(group, under(given, own()), kept).values
            # The last start decides: what was made with values has the memory of all of them.
            fresh = self._started(group, under(given, others()), kept)
            fresh.values = {
                path: value
                for path, value in fresh.values.items()
                if is_same(first.get(path), value) and not is_same(same.get(path), value)
            }
        return fresh

    @contextmanager
    def processing(self, scope: str, given: Bits) -> Iterator[Reach]:
        """As of `ColdModel`, for a layer; yields what is reached from it afterwards."""
        before, modules = self.part(scope)
        with self.cold.processing(before, modules, given):
            yield before.again()

    def part(self, scope: str) -> tuple[Reach, tuple[nn.Module, ...]]:
        """What is reached from a layer of the second instance, and its modules."""
        self.cold.mend()
        modules = self._cold_scopes.modules((scope,))
        return self._cold_scopes.reach((scope,)), tuple(modules.values())

    def kind_of(self, scope: str) -> tuple[object, ...]:
        """What is equal for layers of which the modules are of the same classes."""
        modules = self._cold_scopes.modules((scope,))
        return tuple(
            (name.removeprefix(scope), type(one), type(getattr(one, "quant_method", None)))
            for name, one in modules.items()
        )

    def _started(self, group: Group, weights: Weights, kept: Snapshot) -> Fresh:
        """The part after its start; `values` has all that changed and differ from the live ones."""
        self.cold.mend()
        empty = self._cold_scopes.reach(group.scopes)
        with (
            self.cold.with_memory(empty, kept.bits) as filled,
            self._writing(fresh := empty.again()),
        ):
            before = {
                path: kept.bits[path] if path in filled else found.alias.clone()
                for path, found in fresh.tensors.items()
                if not found.alias.is_meta
            }
            values = fresh.values()
            modules = self._cold_scopes.modules(group.scopes)
            self.cold.start(weights, tuple(modules.values()))
            now = fresh.again()
            made = now.values()
        with_like = {
            storage_of(kept.founds[p].alias) for p in kept.founds.keys() & now.tensors.keys()
        }
        return Fresh(
            {p: f.alias for p, f in now.tensors.items() if not _is_known(f.alias, before.get(p))},
            {
                path: value
                for path, value in made.items()
                if path in kept.values and not is_same(kept.values[path], value)
                if not is_same(values.get(path), value) and not _is_address(value)
            },
            [p for p, f in kept.founds.items() if storage_of(f.alias) not in with_like],
        )


@dataclass(slots=True)
class Fresh:
    """A part of the second instance after its start with other weights.

    Attributes:
        tensors: By path, the tensors whose bits have changed.
        values: By path, the numbers, text and bytes that follow from the weights.
        alone: Paths of what only the live instance has.
    """

    tensors: Bits
    values: dict[str, Any]
    alone: list[str]


def _filled(model: nn.Module) -> dict[str, Tensor]:
    """The tensors with memory that are reached from a model, by path."""
    founds = Reach([("", model)]).tensors
    return {path: f.alias for path, f in founds.items() if not f.alias.is_meta and f.alias.numel()}


def _state(tensor: Tensor) -> tuple[object, ...]:
    """What changes when a tensor is replaced, or written."""
    return (*identity(tensor), None if tensor.is_inference() else tensor._version)


def is_same(one: Any, other: Any) -> bool:
    """Whether two values have the same type and `repr`, which shows every bit of a number."""
    return one is other or (type(one) is type(other) and repr(one) == repr(other))


def _is_address(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >> 32 != 0


def reached(model: nn.Module, others: Iterable[nn.Module] = ()) -> set[str]:
    """Paths of all values, and all tensors with elements, that are reached from a model now.

    Not through `others`, as of `Startup`.
    """
    scopes = Scopes(model, others)
    paths: set[str] = set()
    for name in scopes.names():
        reach = scopes.reach((name,))
        paths |= {path for path, found in reach.tensors.items() if found.alias.numel()}
        paths |= reach.opaque.keys() | reach.values().keys()
    return paths


def _is_known(now: Tensor, before: Tensor | None) -> bool:
    """Whether loading has not changed it."""
    return before is not None and not now.is_meta and same_bits(now, before)


def _is_copy(tensor: Tensor, weights: Iterable[Tensor]) -> bool:
    """Whether it has the values of one of these weights, in any order, rounded to its dtype.

    Tensors without memory, and views of a weight's own storage, are no copies: compilers keep both.
    """
    if tensor.is_meta:
        return False
    for weight in weights:
        if storage_of(tensor) != storage_of(weight) and tensor.numel() == weight.numel() > 1:
            mine, theirs = (
                t.flatten().to(weight.device, torch.float32).sort().values
                for t in (tensor, weight.to(tensor.dtype))
            )
            if mine[0] != mine[-1] and torch.equal(mine, theirs):
                return True
    return False


def groups_of(recording: Recording, scopes: Sequence[str]) -> list[Group]:
    """Group the layers, and the checkpoint tensors that go there. Layers that share a tensor form
    one group. Tensors that the recording refuses go to the layer of their own name, if any. Fixed
    tensors are in none.
    """
    touched = {
        name: {scope_of(piece.live) for piece in pieces}
        for name, pieces in recording.pieces.items()
        if pieces and name not in recording.fixed
    }
    for name in recording.refused:
        touched[name] = {scope_of(name) if scope_of(name) in scopes else ""}
    members: dict[str, set[str]] = {scope: {scope} for scope in scopes}
    for found in touched.values():
        together = set().union(*(members.setdefault(scope, {scope}) for scope in found))
        members |= dict.fromkeys(together, together)
    names: dict[frozenset[str], list[str]] = defaultdict(list)
    for scope in members:  # in order, so that all ranks of an engine go through them alike
        names[frozenset(members[scope])] = []
    for name, found in touched.items():
        names[frozenset(members[next(iter(found))])].append(name)
    return [Group(scopes, tuple(held)) for scopes, held in names.items()]
