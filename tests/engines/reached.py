"""Every tensor that Python can reach from a model: an oracle, of which the product knows nothing.

It imports nothing of the product. What it does not see is memory behind an integer: the handles of
compiled kernels.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

# Ends of the walk: nothing that is a model's own lies behind them.
_ENDS = (
    ModuleType,
    type,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.Generator,
    BuiltinFunctionType,
)
_REGISTERED = ("_parameters", "_buffers", "_modules")
_OURS = "_deltasync"  # attributes that begin so hold what the product keeps itself


@dataclass(frozen=True)
class Seen:
    """A tensor as it was: its bits, and where they lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: Tensor
    address: int

    @staticmethod
    def of(tensor: Tensor) -> Seen:
        here = tensor.detach()
        if here.is_meta:
            bits = torch.empty(0, dtype=torch.uint8)
        else:
            dense = here.to_dense() if here.layout != torch.strided else here
            bits = dense.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        address = 0 if here.is_meta or here.layout != torch.strided else here.data_ptr()
        return Seen(here.dtype, tuple(here.shape), bits, address)

    def has_bits_of(self, other: Seen) -> bool:
        same = (self.dtype, self.shape) == (other.dtype, other.shape)
        return same and torch.equal(self.bits, other.bits)


def reached(root: object) -> dict[str, Tensor]:
    """Tensors by the path of attributes, items, closures and arguments that leads to each.

    A tensor stands under every object that holds it; an object is entered once, modules first.
    """
    found: dict[str, Tensor] = {}
    entered = {id(root)}
    kept: list[object] = [root]  # what was entered, so that no id is used twice
    modules, others = deque([("", root)]), deque[tuple[str, object]]()
    while modules or others:
        path, holder = (modules or others).popleft()
        for step, value in _within(holder):
            there = path + step
            if isinstance(value, np.ndarray) and value.dtype != object:
                value = _as_tensor(value)
            if isinstance(value, FakeTensor):  # of a compiled model: it has no memory
                continue
            if isinstance(value, Tensor):
                found[there] = value
            if isinstance(value, _ENDS) or id(value) in entered:
                continue
            entered.add(id(value))
            kept.append(value)
            (modules if isinstance(value, nn.Module) else others).append((there, value))
    return found


def seen(root: object) -> dict[str, Seen]:
    """What `reached` finds, copied."""
    return {path: Seen.of(tensor) for path, tensor in reached(root).items()}


def _as_tensor(array: Any) -> object:
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # of dates or text
        return None


def _within(holder: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, in an order that depends on names alone."""
    if isinstance(holder, Mapping):
        yield from _items(holder)
    elif isinstance(holder, list | tuple | deque):
        yield from ((f"[{n}]", value) for n, value in enumerate(list(holder)))
    elif isinstance(holder, set | frozenset):
        members = sorted(holder, key=lambda one: (type(one).__name__, repr(one)[:64]))
        yield from ((f"{{{n}}}", value) for n, value in enumerate(members))
    elif isinstance(holder, CellType):
        yield from _cell(holder)
    elif isinstance(holder, weakref.ref):
        yield "()", holder()
    elif isinstance(holder, MethodType):
        yield ".__self__", holder.__self__
        yield ".__func__", holder.__func__
    elif isinstance(holder, functools.partial):
        yield from ((".func", holder.func), (".args", holder.args), (".keywords", holder.keywords))
    elif isinstance(holder, FunctionType):
        yield from _function(holder)
    yield from _attributes(holder)


def _items(holder: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    try:
        items = list(holder.items())
    except (RuntimeError, NotImplementedError, AttributeError, KeyError):
        return  # a mapping that is not one: lazy modules, proxies
    named = [(repr(key) if isinstance(key, str | int | tuple) else "?", key, v) for key, v in items]
    for number, (name, key, value) in enumerate(sorted(named, key=lambda one: one[0][:256])):
        step = f"[{number}]" if name == "?" else f"[{name[:256]}]"
        yield step, value
        if name == "?":
            yield f"{step}.key", key


def _cell(cell: CellType) -> Iterator[tuple[str, Any]]:
    try:
        yield "", cell.cell_contents
    except ValueError:  # empty
        return


def _function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=False):
        yield from ((f"<{name}>", value) for _, value in _cell(cell))
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__


def _attributes(holder: Any) -> Iterator[tuple[str, Any]]:
    try:
        own = dict(object.__getattribute__(holder, "__dict__"))
    except (AttributeError, TypeError):
        own = {}
    for kind in type(holder).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                try:
                    own.setdefault(name, object.__getattribute__(holder, name))
                except (AttributeError, TypeError):
                    continue
    for registered in _REGISTERED if isinstance(holder, nn.Module) else ():
        yield from ((f".{name}", value) for name, value in own.pop(registered, {}).items())
    for name in sorted(own, key=str):
        if not str(name).startswith(_OURS):
            yield f".{name}", own[name]
