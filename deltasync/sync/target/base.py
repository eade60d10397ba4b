"""Where a receiver writes parameters, and how they are matched with those that are sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from deltasync.delta.bits import Live, overlapping
from deltasync.delta.naming import suggested
from deltasync.errors import LayoutMismatch
from deltasync.wire.messages import ParameterSpec


class WeightTarget(Protocol):
    """An engine rank's live weights, in checkpoint coordinates."""

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Return what is held: names, full shapes, and the dtypes that the sender must send."""
        ...

    def bind(self, layout: Sequence[ParameterSpec]) -> Mapping[int, Live]:
        """Find the storage of each parameter of the sender's layout that is held here.

        Returns:
            The storage, by the parameter's number in `layout`. Replaces an earlier binding.

        Raises:
            LayoutMismatch: A name, shape, dtype or tie does not match, or two parameters that are
                not tied share memory.
        """
        ...

    def check_unmoved(self) -> None:
        """Raise TargetMoved if live storage is not where `bind` found it."""
        ...

    def check_full_sync(self) -> None:
        """Raise ConfigError if no full sync may be written. By default, each may."""
        return

    def finish(self, changed: Collection[int] | None = None) -> None:
        """Update what the engine derives from its weights. Called after they were written.

        By default, nothing is derived.

        Args:
            changed: Numbers of the parameters written, in the bound layout; None for all.
        """
        return


def match_parameters(held: Sequence[ParameterSpec], layout: Sequence[ParameterSpec]) -> list[int]:
    """Return the number in `layout` of each parameter that a receiver holds.

    Raises:
        LayoutMismatch: A held parameter is missing from the layout, has another shape or dtype
            there, or is tied to others on one side only.
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


def refuse_overlap(specs: Sequence[ParameterSpec], live: Iterable[Live]) -> None:
    """Raise LayoutMismatch if parameters share bytes: a write to one would change the other.

    Args:
        specs: The parameters that are held.
        live: The storage of each of them.
    """
    names = (spec.name for spec in specs)
    if found := overlapping(zip(names, live, strict=True)):
        both = some_of(sorted(set(found)))
        raise LayoutMismatch(f"{both} share memory without being tied; give each its own")


def some_of(names: Sequence[str]) -> str:
    """The first few names, for an error message."""
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
