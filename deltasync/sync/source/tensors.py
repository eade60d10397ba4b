"""Where a sender reads parameters: a protocol, and the one for a plain nn.Module."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from operator import attrgetter, is_
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from deltasync.delta.bits import check_plain, has_storage, identity
from deltasync.delta.shard import ShardSpec, is_sharded, local_of, narrowed, overlap
from deltasync.errors import ConfigError

Index: TypeAlias = tuple[int | slice, ...]
"""Selects a part of a tensor, as in `tensor[index]`; slices have no steps."""

NameMap: TypeAlias = Callable[[str, tuple[int, ...]], Mapping[str, Index] | None]
"""Maps the name and full shape of a parameter to the checkpoint tensors that it contains."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One tensor of a model and all of its names.

    Attributes:
        names: The canonical name, then the names tied to it.
        tensor: The live tensor, or the part of it that this trainer rank holds. Not owned.
        shard: Which part is held; None for a whole tensor, and for a DTensor, which says so itself.
        full_shape: Shape of the checkpoint tensor, if `shard` views it in more dimensions: a rank
            that fuses heads by groups holds a part of each group.
    """

    names: tuple[str, ...]
    tensor: Tensor
    shard: ShardSpec | None = None
    full_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a tensor without plain storage, or that contradicts its shard."""
        if not is_sharded(self.tensor):
            check_plain(self.tensor, self.name)
        if self.shard is None:
            return
        if self.tensor.shape != self.shard.size or prod(self.shape) != prod(self.shard.shape):
            raise ConfigError(
                f"{self.name}: {tuple(self.tensor.shape)} is held of {self.shape}, the shard says "
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
        return tuple(self.tensor.shape) if self.shard is None else self.shard.shape


def held_of(entry: NamedTensor) -> tuple[ShardSpec, Tensor]:
    """The part held here, and its elements. Raises ConfigError for unsupported DTensors."""
    if entry.shard is not None:
        return entry.shard, entry.tensor
    return ShardSpec.of(entry.tensor), local_of(entry.tensor)


def parts_of(entry: NamedTensor, places: Mapping[str, Index]) -> Iterator[NamedTensor]:
    """The checkpoint tensors that this one contains, as views of what is held here.

    Leaves out tensors of which nothing is held. Raises ConfigError for an invalid index.
    """
    held, local = held_of(entry)
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
        list object only if no tensor has changed its storage, shape, strides or dtype.
        """
        ...


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
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        rename: Callable[[str], str | None] | None = None,
        name_map: NameMap | None = None,
    ) -> None:
        self._module = module
        self._rename, self._name_map = rename, name_map
        self._watch: ModuleWatch | None = None
        self._gathering: list[Any] = []
        self._tensors: list[NamedTensor] = []

    def tensors(self) -> list[NamedTensor]:
        """Return the module's tensors: the list of the last call if nothing moved."""
        _reshard(self._gathering)
        if self._watch is None or not self._watch.is_unmoved():
            self._gathering = _fsdp_modules(self._module)
            _reshard(self._gathering)
            self._watch, watch = None, ModuleWatch(self._module)
            tensors = tied_tensors(named_tensors(self._module, self._rename))
            self._tensors = tensors if self._name_map is None else _mapped(tensors, self._name_map)
            self._watch = watch
        return self._tensors


# What must not change in a tensor, besides its identity. Sizes are left out: reading them is slow,
# and they follow from these facts unless a tensor is not contiguous.
_FACTS: tuple[Callable[[Tensor], object], ...] = (
    Tensor.data_ptr,
    Tensor.numel,
    Tensor.stride,
    attrgetter("dtype"),
)


_LOCAL = attrgetter("_local_tensor")  # of a DTensor, which itself is nowhere

# Modules that are checked together: what is read of them stays in a core's cache meanwhile.
_PART = 256


class ModuleWatch:
    """Checks whether every tensor of a module is still where it was at construction.

    It runs at every sync, for models with tens of thousands of tensors. Therefore all loops run in
    C, and it creates no objects that the garbage collector would have to visit.

    Args:
        module: Every call checks its current tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = list(module.modules())
        begins = range(0, len(owners), _PART)
        self._parts = [_Part(owners[begin : begin + _PART]) for begin in begins]

    def is_unmoved(self) -> bool:
        """Whether the same tensors use the same storage with the same layout."""
        return all(part.is_unmoved() for part in self._parts)


class Registered:
    """The parameters and buffers that a module and its submodules have now."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = [
            (m, dict(m._parameters), dict(m._buffers), set(m._non_persistent_buffers_set))
            for m in module.modules()
        ]

    def put_back(self) -> None:
        """Restore them in the module."""
        for owner, parameters, buffers, transient in self._owners:
            for held, before in ((owner._parameters, parameters), (owner._buffers, buffers)):
                held.clear()
                held.update(before)  # type: ignore[arg-type]
            owner._non_persistent_buffers_set = set(transient)


class _Part:
    """What a watch records of some modules, without their submodules."""

    def __init__(self, modules: list[nn.Module]) -> None:
        dicts: list[dict[str, Any]] = []
        for owner in modules:
            dicts += owner._parameters, owner._buffers, owner._modules
        self._filled = [entries for entries in dicts if entries]
        self._empty = [entries for entries in dicts if not entries]
        self._lengths = list(map(len, self._filled))
        self._owners = [entries for entries in self._filled for _ in entries]
        self._keys = [key for entries in self._filled for key in entries]
        self._values = [value for entries in self._filled for value in entries.values()]
        tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._sharded = [tensor for tensor in tensors if is_sharded(tensor)]
        self._locals = list(map(_LOCAL, self._sharded))
        plain = [t for t in tensors if has_storage(t) and not is_sharded(t)]
        self._tensors = plain + self._locals
        self._with_buffers = [owner for owner in modules if owner._buffers]
        self._transient = [set(o._non_persistent_buffers_set) for o in self._with_buffers]
        self._facts = [(fact, list(map(fact, self._tensors))) for fact in _FACTS]

    def is_unmoved(self) -> bool:
        return (
            not any(self._empty)
            and list(map(len, self._filled)) == self._lengths
            and all(map(is_, map(dict.get, self._owners, self._keys), self._values))
            and all(map(is_, map(_LOCAL, self._sharded), self._locals))
            and all(list(map(fact, self._tensors)) == known for fact, known in self._facts)
            and [o._non_persistent_buffers_set for o in self._with_buffers] == self._transient
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


def _fsdp_modules(module: nn.Module) -> list[Any]:
    """The modules that FSDP2 shards. Does not import FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [one for one in module.modules() if isinstance(one, fsdp.FSDPModule)]


def _reshard(modules: list[Any]) -> None:
    """Reshard FSDP2's root: a forward pass without gradients leaves it gathered, as copies."""
    for module in modules:
        module.reshard()


def named_tensors(
    module: nn.Module, rename: Callable[[str], str | None] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every parameter and persistent buffer, under each of its names."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        transient = owner._non_persistent_buffers_set
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is None or key in transient:
                continue
            name: str | None = f"{prefix}.{key}" if prefix else key
            if rename is not None and name is not None:
                name = rename(name)
            if name is not None:
                yield name, tensor


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
