"""Every tensor that can be reached from a model, and the path to it."""

from __future__ import annotations

import logging
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import (
    CellType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deltasync.delta.bits import are_equal, as_bits, identity
from deltasync.errors import ConfigError

_ATTRIBUTES = object()  # the key of an object's own dict
# Objects of the types below hold nothing that belongs to one model.
_BUFFERS = bytes, bytearray, memoryview, array
_PLAIN = bool, int, float, complex, str, np.generic, *_BUFFERS
_ATOMS = (
    *(type(None), *_PLAIN, type, ModuleType, range),
    *(logging.Logger, logging.Handler, threading.Thread, torch.fx.Graph, torch.Generator),
    *(OpOverload, OpOverloadPacket, torch.Size, torch.dtype, torch.device),
)
_SETS = set, frozenset
_REGISTERED = ("_parameters", "_buffers", "_modules")

Link = tuple[Any, Any]
"""An object, and the key under which it holds the next."""
News = list[tuple[object, ...]]
"""Paths and types of what has come into objects."""


def named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, by name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor, or a numpy array, and where it was found.

    Attributes:
        tensor: The tensor or array.
        links: The objects and keys that led to it, from the root on. Each is kept alive.
        alias: A tensor over the same storage, as it was when it was found.
    """

    tensor: Any
    links: tuple[Link, ...]
    alias: Tensor

    def now(self) -> Any:
        """The tensor or array that is there now; None if there is none."""
        return at(self.links)

    @property
    def is_moved(self) -> bool:
        """Whether another tensor, or one with other storage, is there now."""
        return self.now() is not self.tensor or self.is_elsewhere

    @property
    def is_elsewhere(self) -> bool:
        """Whether it has other storage now."""
        now = as_tensor(self.tensor)
        return now is None or identity(now) != identity(self.alias)

    def put_back(self) -> None:
        """Restore the same tensor in the same storage."""
        following = [*(one for one, _ in self.links[1:]), self.tensor]
        for (one, key), after in zip(self.links, following, strict=True):
            if _peek(one, key) is not after:
                _set(one, key, after)
                break
        if self.is_elsewhere:
            self.tensor.data = self.alias


class Reach:
    """What is reached from some modules: parameters, buffers, and whatever else holds tensors.

    The search follows attributes and slots of any object, dicts, lists, tuples, sets, partial and
    bound functions, closures and defaults. It does not follow globals of functions, modules,
    classes, or what only C code holds. It always finds things in the same order: an object once, a
    tensor at each of its places.

    Args:
        roots: Modules to begin with, by path.
        stop: `id`s of objects that the search does not enter.

    Attributes:
        tensors: By path, in the order found; only those with plain dense storage.
        opaque: By path, tensors that cannot be read: sparse, quantised, packed ones.
    """

    def __init__(
        self, roots: Iterable[tuple[str, nn.Module]], *, stop: Collection[int] = ()
    ) -> None:
        self.tensors: dict[str, Place] = {}
        self.opaque: dict[str, Tensor] = {}
        self._roots, self._stop = tuple(roots), frozenset(stop)
        self._links = dict[int, tuple[Link, ...]]()
        self._kept: list[Any] = []
        self._contents: dict[int, tuple[str, Any, Any]] = {}
        self._looked_into: list[tuple[str, Any]] = []
        queue: deque[tuple[str, Any]] = deque()
        for path, root in self._roots:  # all modules before other paths to them
            self._enter_module(queue, path, root, ())
        while queue:
            path, one = queue.popleft()
            self._looked_into.append((path, one))
            self._remember(path, one)
            for key, label, value in () if _is_plain_sequence(one) else _children(one):
                if isinstance(value, bytearray):
                    self._remember(path + label, value)
                elif not isinstance(value, _ATOMS):
                    self._enter(queue, path + label if path else label[1:], value, (one, key))

    def again(self) -> Reach:
        """What is reached now from the same roots."""
        return Reach(self._roots, stop=self._stop)

    def values(self) -> dict[str, Any]:
        """Numbers, text and bytes by path, as they are now. A sequence of them is one value."""
        found: dict[str, Any] = {}
        for path, one in self._looked_into:
            if _is_plain_sequence(one):
                found[path] = sorted(map(repr, one)) if isinstance(one, _SETS) else tuple(one)
            elif isinstance(one, np.ndarray):
                if as_tensor(one) is None:
                    found[path] = one.tolist() if one.dtype.hasobject else one.tobytes()
            else:
                for _, label, value in _children(one):
                    if isinstance(value, _PLAIN):
                        plain = bytes(value) if isinstance(value, _BUFFERS) else value
                        found[path + label if path else label[1:]] = plain
        return found

    @property
    def is_unchanged(self) -> bool:
        """Whether all objects hold what they held when they were found, and tensors lie there."""
        with DisableTorchFunctionSubclass():
            return all(
                _is_as(one, before) for _, one, before in self._contents.values()
            ) and not any(found.is_elsewhere for found in self.tensors.values())

    def news(self) -> News:
        """An outline of what has come into these objects since: two are equal if paths, types and
        shapes are, whatever the values.
        """
        outline: News = []
        entered: set[int] = set()
        with DisableTorchFunctionSubclass():
            queue = deque[tuple[str, Any]](
                (path, one)
                for path, one, before in self._contents.values()
                if not _is_as(one, before)
            )
            for path, found in self.tensors.items():  # those with other memory now have other dicts
                own = _own_dict(found.tensor)
                if own is not None and id(own) not in self._contents:
                    queue.append((path, own))
            while queue:
                path, one = queue.popleft()
                if isinstance(one, _SETS):  # in no order
                    outline.append((path, sorted(type(value).__name__ for value in one)))
                    continue
                for _, label, value in _children(one):
                    is_known = id(value) in self._links or id(value) in self._stop
                    place = path + label
                    layout = (value.shape, value.dtype) if isinstance(value, Tensor) else ()
                    outline.append((place, type(value), is_known, *layout))
                    if not (is_known or isinstance(value, _ATOMS) or id(value) in entered):
                        entered.add(id(value))
                        queue.append((place, value))
        return outline

    def put_back(self) -> None:
        """Restore what all objects held, and the storage of tensors, but not its content.

        Raises ConfigError for what cannot be restored.
        """
        with DisableTorchFunctionSubclass():
            for _, one, before in self._contents.values():
                if not _is_as(one, before):
                    _restore(one, before)
            for found in self.tensors.values():
                if found.is_elsewhere:
                    found.tensor.data = found.alias
                is_there = found.now() is found.tensor
                if not (is_there or is_handle(found.alias)):  # it was in a slot or a set
                    found.put_back()

    def _enter_module(
        self, queue: deque[tuple[str, Any]], path: str, module: nn.Module, way: tuple[Link, ...]
    ) -> None:
        """Enter a module and the modules that are registered in it."""
        if id(module) in self._links or id(module) in self._stop:
            return
        own, inside = vars(module), module._modules
        to_own = (*way, (module, _ATTRIBUTES))
        to_inside = (*to_own, (own, "_modules"))
        for value, link in ((module, way), (own, to_own), (inside, to_inside)):
            self._look_into(value, link)
        for one in (own, inside, module._parameters, module._buffers):
            self._remember(path, one)
        queue.append((path, own))
        for name, child in inside.items():
            if child is not None:
                below = f"{path}.{name}" if path else name
                self._enter_module(queue, below, child, (*to_inside, (inside, name)))

    def _enter(self, queue: deque[tuple[str, Any]], path: str, value: Any, link: Link) -> None:
        if id(value) in self._stop:
            return
        way = (*self._links[id(link[0])], link)
        if isinstance(value, Tensor | np.ndarray):
            self._note(path, value, way)
        if id(value) in self._links:
            return
        if isinstance(value, nn.Module):
            self._enter_module(queue, path, value, way)
        else:
            self._look_into(value, way)
            queue.append((path, value))

    def _look_into(self, value: Any, way: tuple[Link, ...]) -> None:
        self._links[id(value)] = way
        self._kept.append(value)  # so that no other object has its id

    def _note(self, path: str, one: Any, way: tuple[Link, ...]) -> None:
        if isinstance(one, torch._subclasses.FakeTensor):
            return
        if (tensor := as_tensor(one)) is not None:
            self.tensors[path] = Place(one, way, tensor.detach())
        elif isinstance(one, Tensor) and not _has_parts(one):
            self.opaque[path] = one

    def _remember(self, path: str, one: Any) -> None:
        if id(one) not in self._contents and (held := _held(one)) is not None:
            self._contents[id(one)] = (path, one, held)


def at(links: Sequence[Link]) -> Any:
    """The tensor or array to which the keys lead now, from the first object on; None for none."""
    one = links[0][0]
    for _, key in links:
        one = _peek(one, key)
    return one if isinstance(one, Tensor | np.ndarray) else None


class Copies:
    """Copies of tensors on the host, to restore their bits where they lay."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._copies = [(one, one.to("cpu", copy=True)) for one in tensors]

    def changed(self) -> Iterator[Tensor]:
        """Those that have other bits now."""
        return (one for one, before in self._copies if not same_bits(one, before))

    def put_back(self) -> None:
        """Restore them."""
        for one, before in self._copies:
            if not same_bits(one, before):
                as_bits(one).copy_(as_bits(before))


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    alike = (left.shape, left.dtype, left.is_meta) == (right.shape, right.dtype, right.is_meta)
    return alike and are_equal(as_bits(left), as_bits(right).to(left.device))


def is_handle(tensor: Tensor) -> bool:
    """Whether it is one int64, such as a library's handle, whose bits mean nothing here."""
    return tensor.dtype == torch.int64 and tensor.numel() == 1


def settle(founds: Mapping[str, Place]) -> None:
    """Copy what has replaced these tensors into their storage, and put the tensors back.

    New handles stay: what they refer to belongs to the object that made them.

    Raises ConfigError if a replacement has another shape or dtype, or is missing.
    """
    moved = {path: (found, found.now()) for path, found in founds.items() if found.is_moved}
    moved = {path: one for path, one in moved.items() if not is_handle(one[0].alias)}
    for path, (found, now) in moved.items():
        here = found.alias
        now = as_tensor(now)
        if now is None or (now.shape, now.dtype, now.device) != (
            *(here.shape, here.dtype, here.device),
        ):
            raise ConfigError(f"the engine puts something else in the place of {path!r}")
        if identity(now) != identity(here):
            here.copy_(now.detach())
    for found, _ in moved.values():
        found.put_back()


def as_tensor(one: Any) -> Tensor | None:
    """A tensor, or one over an array's storage; None if that is not dense, or is read-only."""
    if isinstance(one, Tensor):
        return one if _is_plain(one) else None
    if not isinstance(one, np.ndarray) or not one.flags.writeable:
        return None
    try:
        return torch.from_numpy(one)
    except (TypeError, ValueError):  # an array of objects, or with negative strides
        return None


def _has_parts(tensor: Tensor) -> bool:
    """Whether it wraps other tensors, which it holds, or has no values yet."""
    return is_traceable_wrapper_subclass(tensor) or isinstance(
        tensor, UninitializedParameter | UninitializedBuffer
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has dense storage, of its own or of a tensor that it is a view of."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_quantized
        and not is_traceable_wrapper_subclass(tensor)
        and not tensor.is_nested
        and not (tensor.is_conj() or tensor.is_neg())
        and not isinstance(tensor, UninitializedParameter | UninitializedBuffer)
    )


def _children(one: Any) -> Iterator[tuple[Any, str, Any]]:
    """(key, addition to the path, value) of everything that an object holds."""
    match one:
        case dict() | MappingProxyType():
            for key, value in list(one.items()):
                yield key, _label(key), value
        case list() | tuple() | deque() | set() | frozenset():
            for n, value in enumerate(list(one)):
                yield n, f".{n}", value
        case CellType():
            if (held := _peek(one, 0)) is not None:
                yield 0, "", held
        case FunctionType():
            names = one.__code__.co_freevars
            for name, cell in zip(names, one.__closure__ or (), strict=True):
                yield ("__closure__", names.index(name)), f".<{name}>", cell
            yield "__defaults__", ".<defaults>", one.__defaults__
            yield "__kwdefaults__", ".<defaults>", one.__kwdefaults__
        case MethodType():
            yield "__self__", ".<self>", one.__self__
            yield "__func__", "", one.__func__
        case partial():
            for name in ("func", "args", "keywords"):
                yield name, f".<{name}>", getattr(one, name)
    if not isinstance(one, MethodType) and isinstance(own := _own_dict(one), dict):
        yield _ATTRIBUTES, "", own
    for slot in _slots(type(one)):
        value = _peek(one, slot)
        if value is not None:
            yield slot, f".{slot}", value


def _label(key: Any) -> str:
    if key in _REGISTERED if isinstance(key, str) else False:
        return ""
    return f".{key}"[:256] if isinstance(key, str | int) else f".<{type(key).__name__}>"


def _own_dict(one: Any) -> Any:
    try:
        return object.__getattribute__(one, "__dict__")
    except AttributeError:
        return None


_slots_of: dict[type, tuple[str, ...]] = {}


def _slots(kind: type) -> Sequence[str]:
    """Names of the slots of a class that was made in Python."""
    if kind not in _slots_of:
        names = []
        for cls in kind.__mro__:
            if "__slots__" in vars(cls):  # these names are mangled as the attributes are
                names += [n for n, v in vars(cls).items() if isinstance(v, MemberDescriptorType)]
        _slots_of[kind] = tuple(names)
    return _slots_of[kind]


def _get(one: Any, key: Any) -> Any:
    """What an object holds under a key of `_children`."""
    if key is _ATTRIBUTES:
        return object.__getattribute__(one, "__dict__")
    if isinstance(one, dict | MappingProxyType):
        return one[key]
    if isinstance(one, set | frozenset):
        return list(one)[key]
    if isinstance(one, list | tuple | deque) and isinstance(key, int):
        return one[key]
    if isinstance(one, CellType):
        return one.cell_contents
    if isinstance(key, tuple):
        return one.__closure__[key[1]]
    return getattr(one, key)


def _peek(one: Any, key: Any) -> Any:
    """The same; None if there is nothing."""
    try:
        return _get(one, key)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError):
        return None


def _set(one: Any, key: Any, value: Any) -> None:
    """Store a value in an object. Raises ConfigError for an immutable one."""
    if isinstance(one, CellType):
        one.cell_contents = value
    elif isinstance(one, dict | list | deque):
        one[key] = value
    elif isinstance(one, tuple | set | frozenset | MappingProxyType) or not isinstance(key, str):
        raise ConfigError(f"a {type(one).__name__} that holds weights cannot be put back")
    else:
        setattr(one, key, value)


def _is_plain_sequence(one: Any) -> bool:
    """Whether it holds only numbers, text and immutable bytes."""
    return isinstance(one, list | tuple | deque | set | frozenset) and all(
        isinstance(each, _PLAIN) and not isinstance(each, bytearray) for each in one
    )


def _held(one: Any) -> Any:
    """What a mutable object holds, for `_restore`; None for other objects."""
    if isinstance(one, CellType):
        return (_peek(one, 0),)
    if isinstance(one, dict | list | bytearray | deque):
        return one.copy()
    if slots := _slots(type(one)):
        return {slot: getattr(one, slot) for slot in slots if hasattr(one, slot)}
    return None


def _is_as(one: Any, before: Any) -> bool:
    """Whether an object holds what it held."""
    if isinstance(one, dict):
        if not before:  # as most of a module's are
            return not one
        return (
            len(one) == len(before)
            and all(map(is_, one, before))
            and all(map(is_, one.values(), before.values()))
        )
    if isinstance(one, list | bytearray | deque):
        return len(one) == len(before) and all(map(is_, one, before))
    if isinstance(one, CellType):
        return _peek(one, 0) is before[0]
    return all(
        _peek(one, slot) is before[slot] if slot in before else not hasattr(one, slot)
        for slot in _slots(type(one))
    )


def _restore(one: Any, before: Any) -> None:
    """Restore what an object held; writes only what differs."""
    if isinstance(one, CellType):
        one.cell_contents = before[0]
    elif isinstance(one, list | bytearray):
        one[:] = before
    elif isinstance(one, deque):
        one.clear()
        one.extend(before)
    elif isinstance(one, dict):
        kind = OrderedDict if isinstance(one, OrderedDict) else dict
        kind.clear(one)
        kind.update(one, before)
    else:
        for slot in _slots(type(one)):
            member = getattr(type(one), slot)  # works for frozen classes too
            if slot not in before:
                if hasattr(one, slot):
                    member.__delete__(one)
            elif _peek(one, slot) is not before[slot]:
                member.__set__(one, before[slot])
