"""Where a receiver writes parameters: a protocol, and the one for a plain nn.Module."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from torch import nn

from deltasync.delta.bits import Flat, Live, dtype_of
from deltasync.delta.routes.loading import Loader
from deltasync.delta.routes.naming import suggested
from deltasync.delta.routes.overlap import overlapping
from deltasync.errors import LayoutMismatch, TargetMoved
from deltasync.sync.source.tensors import (
    ModuleWatch,
    NamedTensor,
    named_tensors,
    places,
    tied_tensors,
)
from deltasync.wire.messages import ParameterSpec


class WeightTarget(Protocol):
    """An engine rank's live weights, in checkpoint coordinates."""

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """What is held: names, full shapes, and the dtypes that the sender has to send."""
        ...

    def bind(self, layout: Sequence[ParameterSpec]) -> Mapping[int, Live]:
        """Find the storage of each parameter of the sender's layout that is held here.

        Returns it by the parameter's number. What was bound before is let go.

        Raises:
            LayoutMismatch: A name, shape, dtype or tie does not fit, or two parameters that are not
                tied share a byte of memory.
        """
        ...

    def check_unmoved(self) -> None:
        """Raises TargetMoved if live storage is not where `bind` found it."""
        ...

    def loader(self) -> Loader | None:
        """What has to write a full sync, or None if that can go to what `bind` returned."""
        ...

    def finish(self, changed: Collection[int] | None = None) -> None:
        """Weights were written: bring up to date what the engine has derived from them.

        Args:
            changed: Numbers of those that were, in the layout that was bound; None for all.
        """
        ...


class ModuleTarget:
    """The parameters and persistent buffers of an nn.Module, written in place.

    Args:
        module: The engine's model. It must keep its storage between syncs; if it is replaced,
            call the receiver's `invalidate`.
        rename: Maps a name of the module to its checkpoint name; None to leave a tensor out.
    """

    def __init__(
        self, module: nn.Module, *, rename: Callable[[str], str | None] | None = None
    ) -> None:
        self._module = module
        self._rename = rename
        self._places: list[tuple[object, ...]] = []
        self._watch = ModuleWatch(module)

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """The module's tensors as they are now."""
        return tuple(_spec(tensor) for tensor in self._tensors())

    def bind(self, layout: Sequence[ParameterSpec]) -> dict[int, Flat]:
        """Find each parameter of the layout in the module."""
        tensors = self._tensors()
        held = tuple(_spec(tensor) for tensor in tensors)
        numbers = match_parameters(held, layout)
        live = [Flat.of(tensor.tensor, name=tensor.name) for tensor in tensors]
        refuse_overlap(held, live)
        self._places = places(self._module, self._rename)
        self._watch = ModuleWatch(self._module)
        return dict(zip(numbers, live, strict=True))

    def check_unmoved(self) -> None:
        """Compare every tensor's address, size, strides and dtype with those bound."""
        if self._watch.is_unmoved():
            return
        now = places(self._module, self._rename)
        if now != self._places:
            moved = sorted({str(place[0]) for place in set(now) ^ set(self._places)})
            raise TargetMoved(f"storage of {some_of(moved)} was replaced; rejoin")
        self._watch = ModuleWatch(self._module)

    def loader(self) -> Loader | None:
        """None: the module's tensors are the checkpoint's."""
        return None

    def finish(self, changed: Collection[int] | None = None) -> None:
        """Nothing is derived."""

    def _tensors(self) -> list[NamedTensor]:
        return tied_tensors(named_tensors(self._module, self._rename))


def match_parameters(held: Sequence[ParameterSpec], layout: Sequence[ParameterSpec]) -> list[int]:
    """The number in `layout` of each parameter `held` by a receiver.

    Raises:
        LayoutMismatch: A held parameter is not in the layout, is there with another shape or dtype,
            or is tied to others on one side only.
    """
    numbers = {name: number for number, spec in enumerate(layout) for name in spec.names}
    found: list[int] = []
    for spec in held:
        known = {numbers[name] for name in spec.names if name in numbers}
        if not known:
            more = suggested([spec.name], numbers.keys(), are_sent=False)
            raise LayoutMismatch(f"the sender has no parameter {spec.name!r}{more}")
        if len(known) > 1:
            raise LayoutMismatch(
                f"{some_of(list(spec.names))} are tied here, not at the sender: tie them there, or "
                "untie them here"
            )
        number = known.pop()
        _check_same(spec, layout[number])
        found.append(number)
    twice = [layout[number].name for number, count in Counter(found).items() if count > 1]
    if twice:
        raise LayoutMismatch(
            f"names of {some_of(twice)} are tied at the sender, not here: tie them here, or untie "
            "them there"
        )
    return found


def _check_same(held: ParameterSpec, sent: ParameterSpec) -> None:
    if held.shape != sent.shape:
        raise LayoutMismatch(
            f"{held.name}: shape {held.shape} here, {sent.shape} at the sender: the models differ, "
            "or `rename` leads to another tensor"
        )
    if held.dtype != sent.dtype:
        raise LayoutMismatch(
            f"{held.name}: {held.dtype.name} here, {sent.dtype.name} on the wire; "
            "give the sender `wire_dtypes` or load the model in that dtype"
        )


def _spec(tensor: NamedTensor) -> ParameterSpec:
    dtype = dtype_of(tensor.tensor, name=tensor.name)
    return ParameterSpec(tensor.names, tuple(tensor.tensor.shape), dtype)


class EarlyCheck:
    """A target's `check_unmoved`, made before it is asked for."""

    def __init__(self, target: WeightTarget) -> None:
        self._target = target
        self._made_at = -math.inf
        self._found: TargetMoved | None = None

    @property
    def is_made(self) -> bool:
        """Whether it was, since `forget`."""
        return self._made_at > -math.inf

    def make(self, *, max_age_s: float = 0.0) -> None:
        """Check, unless that was done a moment ago. What is found is kept for `tell`."""
        now = time.monotonic()
        if now - self._made_at < max_age_s:
            return
        self._made_at, self._found = now, None
        try:
            self._target.check_unmoved()
        except TargetMoved as error:
            self._found = error

    def tell(self) -> None:
        """Raise the TargetMoved that was found."""
        if self._found is not None:
            raise self._found

    def forget(self) -> None:
        """What comes is to be checked anew."""
        self._made_at, self._found = -math.inf, None


def refuse_overlap(specs: Sequence[ParameterSpec], live: Iterable[Live]) -> None:
    """Raise LayoutMismatch for parameters over the same bytes: a write to one changes the other.

    Args:
        specs: What is held.
        live: Where each of them is.
    """
    names = (spec.name for spec in specs)
    if found := overlapping(zip(names, live, strict=True)):
        both = some_of(sorted(set(found)))
        raise LayoutMismatch(f"{both} share memory without being tied; give each its own")


def some_of(names: Sequence[str]) -> str:
    """The first few, for an error."""
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
