"""An nn.Module at either end: what a sender reads, and where a receiver writes."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from deltasync.delta.bits import Flat, check_plain, has_storage, identity, refuse_part
from deltasync.delta.shard import is_sharded
from deltasync.errors import ConfigError, TargetMoved
from deltasync.sync.source.layout import source_specs
from deltasync.sync.source.tensors import NamedTensor, NameMap, parts_of
from deltasync.sync.target.base import WeightTarget, match_parameters, refuse_overlap, some_of
from deltasync.wire.messages import ParameterSpec


class ModuleSource:
    """The parameters and persistent buffers of an nn.Module, or of the part that a rank holds.

    These are the tensors of its `state_dict`, including DTensors. Frozen tensors are compared too:
    each sync reads them once. Tied tensors (the same storage under several names) are sent once.

    Args:
        module: The trainer's model; read at every sync, never written.
        rename: Maps a name in the module to the checkpoint name that receivers know, for
            wrappers that add a prefix. If it returns None, the tensor is left out.
        name_map: Splits parameters that contain several checkpoint tensors, such as stacked
            experts. It gets the name from `rename` and returns the index of each checkpoint
            tensor in the whole parameter, or None if the parameter is one checkpoint tensor.
            What it leaves out is not sent.

    Attributes:
        module: The same.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        rename: Callable[[str], str | None] | None = None,
        name_map: NameMap | None = None,
    ) -> None:
        self.module = module
        self._rename = rename
        self._name_map = name_map
        self._watch: ModuleWatch | None = None
        self._tensors: list[NamedTensor] = []

    def tensors(self) -> list[NamedTensor]:
        """Return the module's tensors: the list of the last call if nothing moved."""
        if self._watch is None or not self._watch.is_unmoved():
            self._watch, watch = None, ModuleWatch(self.module)
            self._tensors, self._watch = self._listed(), watch
        return self._tensors

    def _listed(self) -> list[NamedTensor]:
        """What the module has now, by the names that are sent; subclasses know others."""
        tensors = tied_tensors(named_tensors(self.module, self._rename))
        return tensors if self._name_map is None else _mapped(tensors, self._name_map)

    def glance(self, last: list[NamedTensor]) -> Callable[[], bool] | None:
        """Begin the work of `tensors` in a sync. Returns None if that has to be called at once.

        Otherwise the addresses of `last` may be read, and what is returned is called before what
        was read there counts: it returns whether `tensors` would return `last`.

        Args:
            last: What `tensors` returned to the caller. Somebody else may have called it since.
        """
        if self._watch is None or last is not self._tensors:
            return None
        return self._watch.glance()


class ModuleTarget(WeightTarget):
    """The parameters and persistent buffers of an nn.Module, written in place.

    Args:
        module: The engine's model. It must keep its storage between syncs; if storage is
            replaced, call the receiver's `invalidate`.
        rename: Maps a name in the module to its checkpoint name. If it returns None, the tensor is
            left out.
    """

    def __init__(
        self, module: nn.Module, *, rename: Callable[[str], str | None] | None = None
    ) -> None:
        self._module = module
        self._rename = rename
        self._places: list[tuple[object, ...]] = []
        self._watch = ModuleWatch(module)

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Return the module's tensors as they are now."""
        return source_specs(tied_tensors(named_tensors(self._module, self._rename)))

    def bind(self, layout: Sequence[ParameterSpec]) -> dict[int, Flat]:
        """Find each parameter of the layout in the module."""
        tensors = tied_tensors(named_tensors(self._module, self._rename))
        held = source_specs(tensors)
        numbers = match_parameters(held, layout)
        live = [Flat.of(tensor.tensor, name=tensor.name) for tensor in tensors]
        refuse_overlap(held, live)
        self._places = places(self._module, self._rename)
        self._watch = ModuleWatch(self._module)
        return dict(zip(numbers, live, strict=True))

    def check_unmoved(self) -> None:
        """Raise TargetMoved if a tensor's address, size, strides or dtype has changed."""
        if self._watch.is_unmoved():
            return
        now = places(self._module, self._rename)
        if now != self._places:
            moved = sorted({str(place[0]) for place in set(now) ^ set(self._places)})
            raise TargetMoved(f"storage of {some_of(moved)} was replaced; rejoin")
        self._watch = ModuleWatch(self._module)


# What must not change in a tensor, besides its identity and address. Reading sizes is slow: they
# follow from these facts while a tensor is contiguous.
_FACTS: tuple[Callable[[Tensor], object], ...] = (
    Tensor.numel,
    Tensor.stride,
    attrgetter("dtype"),
)


_LOCAL = attrgetter("_local_tensor")  # of a DTensor, which itself is nowhere
_TRANSIENT = attrgetter("_non_persistent_buffers_set")  # of a module

# Modules that are checked together: what is read of them stays in a core's cache meanwhile.
_PART = 256


class ModuleWatch:
    """Checks whether every tensor of a module is still where it was at construction.

    It runs at every sync, for models with tens of thousands of tensors. Therefore all loops run in
    C, and it creates no objects that the garbage collector would have to visit.

    The proof covers each tensor and submodule that is registered, by identity, name and order, and
    each tensor's address, size, strides and dtype. It misses what leaves all of these as they are:
    memory that is mapped to other pages at the same address, and a module that is given other
    dicts to register its tensors in.

    Args:
        module: Every call checks its current tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._gathering = _fsdp_modules(module)
        _reshard(self._gathering)
        owners = list(module.modules())
        begins = range(0, len(owners), _PART)
        self._parts = [_Part(owners[begin : begin + _PART]) for begin in begins]

    def is_unmoved(self) -> bool:
        """Whether the same tensors use the same storage with the same layout."""
        _reshard(self._gathering)
        return all(part.is_in_place() and part.is_as_it_was() for part in self._parts)

    def glance(self) -> Callable[[], bool] | None:
        """Look at addresses alone. Returns what looks at the rest, or None if one has changed.

        If none has, the old addresses can be read, even if the module has other tensors by now.
        """
        _reshard(self._gathering)
        if not all(part.is_in_place() for part in self._parts):
            return None
        return lambda: all(part.is_as_it_was() for part in self._parts)


class _Part:
    """What a watch records of some modules, without their submodules."""

    def __init__(self, modules: list[nn.Module]) -> None:
        dicts: list[dict[str, Any]] = []
        for owner in modules:
            dicts += owner._parameters, owner._buffers, owner._modules
        self._filled = [entries for entries in dicts if entries]
        self._empty = [entries for entries in dicts if not entries]
        self._lengths = list(map(len, self._filled))
        self._keys = list(chain.from_iterable(self._filled))
        self._values = gc.get_referents(*self._filled)
        tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._sharded = [tensor for tensor in tensors if is_sharded(tensor)]
        self._locals = list(map(_LOCAL, self._sharded))
        plain = [t for t in tensors if has_storage(t) and not is_sharded(t)]
        self._tensors = plain + self._locals
        self._with_buffers = [owner for owner in modules if owner._buffers]
        self._transient = [set(_TRANSIENT(owner)) for owner in self._with_buffers]
        self._facts = [(fact, list(map(fact, self._tensors))) for fact in _FACTS]
        self._pointers = list(map(Tensor.data_ptr, self._tensors))
        self._odd = [tensor for tensor in self._tensors if not tensor.is_contiguous()]
        self._sizes = list(map(Tensor.size, self._odd))

    def is_in_place(self) -> bool:
        """Whether the tensors that were there have their addresses."""
        return list(map(Tensor.data_ptr, self._tensors)) == self._pointers

    def is_as_it_was(self) -> bool:
        """Whether everything else is the same."""
        values = gc.get_referents(*self._filled)  # in one call; lengths and keys say whose they are
        return (
            not any(self._empty)
            and list(map(len, self._filled)) == self._lengths
            and list(chain.from_iterable(self._filled)) == self._keys
            and len(values) == len(self._values)
            and all(map(is_, values, self._values))
            and all(map(is_, map(_LOCAL, self._sharded), self._locals))
            and all(list(map(fact, self._tensors)) == known for fact, known in self._facts)
            and list(map(Tensor.size, self._odd)) == self._sizes
            and list(map(_TRANSIENT, self._with_buffers)) == self._transient
        )


def _mapped(tensors: list[NamedTensor], name_map: NameMap) -> list[NamedTensor]:
    """The same tensors, with those split that `name_map` knows."""
    found: list[NamedTensor] = []
    for entry in tensors:
        places = name_map(entry.name, entry.shape)
        if places is not None and len(entry.names) > 1:
            raise ConfigError(
                f"{entry.name!r} is tied to {entry.names[1]!r}, but `name_map` splits it: return "
                "None for it"
            )
        found += [entry] if places is None else parts_of(entry, places)
    often = [n for n, count in Counter(n for e in found for n in e.names).items() if count > 1]
    if often:
        raise ConfigError(f"two tensors are named {often[0]!r}; change `name_map`")
    return found


def _fsdp_modules(module: nn.Module) -> list[Any]:
    """The modules that FSDP2 shards, in `module` and around it. Does not import FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(fsdp, "FSDPModule", ())  # another thread may be importing it
    within = [one for one in module.modules() if isinstance(one, kind)]
    states = sys.modules.get("torch.distributed._composable_state")  # torch has no other list
    others = {*getattr(states, "_module_state_mapping", ())}.difference(within)
    around = [one for one in others if isinstance(one, kind) and module in set(one.modules())]
    return [*around, *within]


def _reshard(modules: list[Any]) -> None:
    """Reshard FSDP2's root: a forward pass without gradients leaves it gathered, as copies."""
    for module in modules:
        module.reshard()


def named_tensors(
    module: nn.Module, rename: Callable[[str], str | None] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every parameter and persistent buffer, under each of its names.

    Raises ConfigError, by name, for parameters that FSDP1 has flattened and not gathered.
    """
    gathered = _gathered(module)
    for prefix, owner in module.named_modules(remove_duplicate=False):
        transient = owner._non_persistent_buffers_set
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is None or key in transient:
                continue
            name = f"{prefix}.{key}" if prefix else key
            for given, one in renamed([(name, tensor)], rename):
                if hasattr(one, "_fsdp_flattened") and id(one) not in gathered:
                    refuse_part(given, one.shape)
                yield given, one


def renamed(
    named: Iterable[tuple[str, Tensor]], rename: Callable[[str], str | None] | None
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors under other names, without those that `rename` returns None for."""
    for name, tensor in named:
        given = name if rename is None else rename(name)
        if given is not None:
            yield given, tensor


def _gathered(module: nn.Module) -> set[int]:
    """Parameters that FSDP1 flattens, by id. Raises ConfigError, by name, unless they are whole."""
    found, fsdp = set[int](), sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(fsdp, "FullyShardedDataParallel", ())
    handles: list[Any] = [one._handle for one in module.modules() if isinstance(one, kind)]
    for flat in (handle.flat_param for handle in handles if handle is not None):
        for (key, owner, path), shape in zip(flat._param_infos, flat._shapes, strict=True):
            held = owner._parameters.get(key)
            if held is None or held.shape != shape:
                refuse_part(f"{path}.{key}".lstrip("."), (0,) if held is None else held.shape)
            found.add(id(held))
    return found


def places(
    module: nn.Module, rename: Callable[[str], str | None] | None = None
) -> list[tuple[object, ...]]:
    """The name and storage of every tensor; two equal lists mean that nothing moved."""
    return [(name, *identity(tensor)) for name, tensor in named_tensors(module, rename)]


def tied_tensors(named: Iterator[tuple[str, Tensor]]) -> list[NamedTensor]:
    """One entry per distinct tensor, in order of first appearance.

    Raises ConfigError if two tensors have one name.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    tensors: list[Tensor] = []
    owners: dict[str, tuple[object, ...]] = {}
    for name, tensor in named:
        if not is_sharded(tensor):
            check_plain(tensor, name)
        # Empty tensors share the null pointer without being tied.
        key = identity(tensor) if tensor.numel() else (name,)
        if is_sharded(tensor):  # a rank may hold nothing of it
            key = (id(tensor),)
        if owners.setdefault(name, key) != key:
            raise ConfigError(f"two tensors are named {name!r}; change `rename`")
        if key not in groups:
            tensors.append(tensor)
        groups.setdefault(key, []).append(name)
    return [
        NamedTensor(tuple(dict.fromkeys(names)), tensor)
        for names, tensor in zip(groups.values(), tensors, strict=True)
    ]
