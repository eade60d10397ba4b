"""Proves, with other weights than its own, that an engine that is kept in sync computes with what
a fresh one would compute with.

Weights with other bits are given to a second instance of the model as the engine does when it
starts (see `cold`), and to the live one as a sync does. Every tensor that can be reached has to be
the same then. Loading what was loaded before has to leave the live one as it was, where it was.
That is done for one layer after the other, so that the memory it takes is a layer's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deltasync.delta.bits import are_equal, as_bits, identity, storage_of
from deltasync.delta.routes.recorder import Recording
from deltasync.errors import ConfigError
from deltasync.sync.proof.cold import ColdModel, Startup, Weights
from deltasync.sync.proof.reach import Found, Reach, is_handle, settle

_LAYER = re.compile(r".*?\.\d+(?=\.|$)|\d+(?=\.|$)")
Bits = Mapping[str, Tensor]
Given = Callable[[], Weights]


def scope_of(name: str) -> str:
    """The layer that a tensor or module is in: up to the first number. "" outside of all."""
    found = _LAYER.match(name)
    return found.group() if found else ""


class Scopes:
    """A model's modules by layer, and the rest of them.

    Args:
        model: Whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._stop = {id(module) for module in self._modules.values()}

    def names(self) -> list[str]:
        """The rest, which is called "", and the layers, in order."""
        return list(dict.fromkeys(scope_of(name) for name in self._modules))

    def modules(self, scopes: Collection[str]) -> dict[str, nn.Module]:
        """Those of some layers, by name."""
        return {n: m for n, m in self._modules.items() if scope_of(n) in scopes}

    def reach(self, scopes: Collection[str]) -> Reach:
        """What is reached from them, and not through others."""
        return Reach(self.roots(scopes), stop=self.stop(scopes))

    def roots(self, scopes: Collection[str]) -> list[tuple[str, nn.Module]]:
        """Their outermost modules, by name."""
        return [(n, m) for n, m in self._modules.items() if n in scopes]

    def stop(self, scopes: Collection[str]) -> set[int]:
        """`id`s of all other modules."""
        return self._stop - {id(module) for module in self.modules(scopes).values()}


class Kept:
    """The bits of what was reached, on the host, and a way back to them.

    Args:
        reach: Where, as it is now. What has no memory there is left alone: compilers keep such
            tensors.
        shared: Addresses of tensors that belong to others too; left alone.
        late: Paths of those that came after loading; left alone.

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
        """The same tensors, in the same storage, with the same bits."""
        self.reach.put_back()
        for path, found in self.founds.items():
            here = _each_once(found.alias)
            bits = self.bits[path][tuple(map(slice, here.shape))]
            as_bits(here).copy_(as_bits(bits))

    def changed(self, expected: Bits | None = None) -> list[str]:
        """Paths of what is elsewhere, or has other bits than these, or than expected."""
        wanted = self.bits if expected is None else {**self.bits, **expected}
        return [
            path
            for path, found in self.founds.items()
            if not (found.is_moved and is_handle(found.alias))  # made anew
            if found.is_moved or not same_bits(found.alias, wanted[path])
        ]

    def unlike(self, values: Mapping[str, Any]) -> list[str]:
        """Paths of these values where others are now."""
        now = self.reach.again().values() if values else {}
        return [path for path, value in values.items() if not is_same(now.get(path), value)]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same to the bit."""
    alike = (left.shape, left.dtype, left.is_meta) == (right.shape, right.dtype, right.is_meta)
    return alike and are_equal(as_bits(left), as_bits(right).to(left.device))


def _each_once(tensor: Tensor) -> Tensor:
    """Without the dimensions along which it is expanded."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@dataclass(frozen=True, slots=True)
class Step:
    """What brings up to date what is derived from some weights.

    Attributes:
        names: Checkpoint tensors whose live values are loaded again.
        modules: What the engine works on then, as it does when it starts.
    """

    names: tuple[str, ...] = ()
    modules: tuple[nn.Module, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share weights: mostly one.

    Attributes:
        scopes: The layers.
        names: The checkpoint tensors that go there.
    """

    scopes: frozenset[str]
    names: tuple[str, ...]


@dataclass(slots=True)
class Upkeep:
    """What has to follow after weights were written, found by `prove_routes`.

    Attributes:
        startup: The engine's.
        model: Its model.
        given: The names under which its loader takes each checkpoint tensor.
        steps: By group what it takes; only where it takes something.
        moved: What steps put elsewhere: it is written to where it was.
    """

    startup: Startup
    model: nn.Module
    given: Mapping[str, tuple[str, ...]]
    steps: dict[Group, Step] = field(default_factory=dict)
    moved: dict[str, Found] = field(default_factory=dict)

    def run(self, read: Callable[[str], Tensor], changed: Collection[str] | None = None) -> None:
        """Bring up to date what is derived of checkpoint tensors; of all, or of some.

        Args:
            read: Gives the live value of a checkpoint tensor.
            changed: Their names.
        """
        if not self.steps:
            return
        touched = [
            step
            for group, step in self.steps.items()
            if changed is None or not set(changed).isdisjoint(group.names)
        ]
        names = tuple(name for step in touched for name in step.names)
        self.take(Step(names, tuple(m for step in touched for m in step.modules)), read)
        settle(self.moved)

    def take(self, step: Step, read: Callable[[str], Tensor]) -> None:
        """Do what a step says."""
        with torch.no_grad():
            if step.names:
                live = [(name, read(name)) for name in step.names]
                self.startup.load(self.model, under(self.given, live))
            if step.modules:
                self.startup.work_on(step.modules)


def under(
    given: Mapping[str, tuple[str, ...]], weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Weights under all of the names that a loader takes them by."""
    return ((own, tensor) for name, tensor in weights for own in given[name])


class Proof:
    """What both ways of writing weights are held against.

    Args:
        model: The live one.
        startup: How the engine came to it.
        loaded: Paths of what was reached when it had just been loaded; None if that is not known.

    Raises:
        ConfigError: There is no second instance to compare it with.
    """

    def __init__(
        self, model: nn.Module, startup: Startup, loaded: Collection[str] | None = None
    ) -> None:
        self.model, self.startup, self._loaded = model, startup, loaded
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.cold = ColdModel(startup, device)
        self.scopes, self._cold_scopes = Scopes(model), Scopes(self.cold.model)
        own = _filled(self.cold.model)
        self._shared = {alias.data_ptr() for alias in own.values()} - {0}
        self._before: dict[str, tuple[object, ...]] = {}
        live = {alias.data_ptr() for alias in _filled(model).values()}
        self._common = [
            (alias, alias.to("cpu", copy=True))
            for alias in own.values()
            if alias.data_ptr() in live & self._shared
        ]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Put back what both instances have in common. Raises as `check_apart`."""
        self._before = {path: _state(one) for path, one in _filled(self.cold.model).items()}
        try:
            yield
            self.check_apart()
        finally:
            for here, bits in self._common:
                if not same_bits(here, bits):
                    as_bits(here).copy_(as_bits(bits))

    @contextmanager
    def _writing(self, reach: Reach) -> Iterator[None]:
        """Know again what is written meanwhile, of these, unless it was written before."""
        aliases = {path: found.alias for path, found in reach.tensors.items()}
        own = [p for p, alias in aliases.items() if self._before.get(p) == _state(alias)]
        yield
        self._before |= {path: _state(aliases[path]) for path in own}

    def check_apart(self) -> None:
        """Raise ConfigError, by path, for what starting a part has made outside of it.

        That is what the live instance has with other values, and what both have in common.
        """
        made = {
            path: alias
            for path, alias in _filled(self.cold.model).items()
            if self._before.get(path) != _state(alias)
        }
        live = _filled(self.model) if made else {}
        common = {here.data_ptr() for here, bits in self._common if not same_bits(here, bits)}
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

    def keep(self, scopes: Collection[str], weights: Iterable[Tensor] = ()) -> Kept:
        """Note what some layers hold.

        Raises ConfigError, by path, for what came after loading and is a copy of one of `weights`,
        and for tensors that cannot be compared.
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
        return Kept(reach, self._shared, late)

    def started(
        self,
        group: Group,
        given: Mapping[str, tuple[str, ...]],
        *,
        others: Given,
        own: Given,
        kept: Kept,
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

    def _started(self, group: Group, weights: Weights, kept: Kept) -> Fresh:
        """Says of values all that become other than they were, and than the live one's are."""
        roots, stop = self._cold_scopes.roots(group.scopes), self._cold_scopes.stop(group.scopes)
        with (
            self.cold.given_memory(roots, stop, kept.bits) as (fresh, filled),
            self._writing(fresh),
        ):
            before = {
                path: kept.bits[path] if path in filled else found.alias.clone()
                for path, found in fresh.tensors.items()
                if not found.alias.is_meta
            }
            values = fresh.values()
            modules = self._cold_scopes.modules(group.scopes)
            self.cold.start(weights, tuple(modules.values()))
            now = Reach(roots, stop=stop)
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
    """A part of the second instance, with other weights.

    Attributes:
        tensors: By path, those that have other bits then.
        values: By path, numbers, text and bytes of the live one that follow from its weights, as
            they are with these.
        alone: Paths of what the live one has, and this one has not.
    """

    tensors: Bits
    values: dict[str, Any]
    alone: list[str]


def _filled(model: nn.Module) -> dict[str, Tensor]:
    """What has memory of all that is reached from a model, by path."""
    founds = Reach([("", model)]).tensors
    return {path: f.alias for path, f in founds.items() if not f.alias.is_meta and f.alias.numel()}


def _state(tensor: Tensor) -> tuple[object, ...]:
    """What changes when a tensor is replaced, or written."""
    return (*identity(tensor), None if tensor.is_inference() else tensor._version)


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same to the bit, as far as Python shows bits."""
    return one is other or (type(one) is type(other) and repr(one) == repr(other))


def _is_address(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >> 32 != 0


def reached(model: nn.Module) -> set[str]:
    """Paths of all tensors with elements, and values, that are reached from a model now."""
    scopes = Scopes(model)
    paths: set[str] = set()
    for name in scopes.names():
        reach = scopes.reach((name,))
        paths |= {path for path, found in reach.tensors.items() if found.alias.numel()}
        paths |= reach.opaque.keys() | reach.values().keys()
    return paths


def _is_known(now: Tensor, before: Tensor | None) -> bool:
    """Whether loading has left it alone."""
    return before is not None and not now.is_meta and same_bits(now, before)


def _is_copy(tensor: Tensor, weights: Iterable[Tensor]) -> bool:
    """Whether it has the values of one of these, in any order, as far as its dtype tells them.

    What has no memory has no values, and what is over a weight's own storage is no copy of it:
    compilers keep both.
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
    """Which checkpoint tensors go to which layers; layers of one tensor are one group.

    Those that the recording refuses go by their own names, if layers are called so.
    """
    touched = {
        name: {scope_of(piece.live) for piece in pieces}
        for name, pieces in recording.pieces.items()
        if pieces
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
