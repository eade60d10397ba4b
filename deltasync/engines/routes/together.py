"""Which checkpoint tensors a loader has to be given in one call, as watching it shows."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

_NUMBER = re.compile(r"\d+")
_FEW = 64  # tensors of a group that is taken as it was seen

Names = tuple[str, ...]
Watch = Callable[[Sequence[Names]], Mapping[str, object] | None]
"""Records calls with some tensors each; what became of each tensor, or None if one raised."""


class Groups:
    """Disjoint groups of names: what is linked is in one."""

    def __init__(self) -> None:
        self._group: dict[str, set[str]] = {}

    def link(self, names: Iterable[str]) -> None:
        """Put all these into one group."""
        whole: set[str] = set()
        for name in names:
            if name not in whole:
                whole |= self._group.get(name, {name})
        self._group.update(dict.fromkeys(whole, whole))

    def found(self) -> list[set[str]]:
        """Those of several names."""
        return [g for g in {id(g): g for g in self._group.values()}.values() if len(g) > 1]

    def of(self, name: str) -> set[str]:
        return self._group.get(name, {name})


class HeldBack:
    """What a loader held back while it asked for more.

    A loader that copies each tensor before it asks for the next one holds nothing, and may be given
    any of them alone. One that copies a tensor later may have waited for another one, or may only
    read ahead: small groups are taken as they are, and larger ones are watched again in parts.
    """

    def __init__(self) -> None:
        self._late = Groups()
        self._joined = Groups()

    def copied(self, name: str, last: str) -> None:
        """A tensor was copied when the loader had asked for another one last."""
        if name != last:
            self._late.link((name, last))

    def joined(self, names: Iterable[str]) -> None:
        """Tensors were copied as one that was made of them."""
        self._joined.link(names)

    def together(
        self, names: Sequence[str], seen: Mapping[str, object], watch: Watch
    ) -> tuple[Names, ...]:
        """The groups that have to be loaded in one call, each in the order of the checkpoint.

        Args:
            names: All, in this order.
            seen: What became of each tensor when all were loaded in one call.
            watch: Records the loader again.
        """
        order = {name: number for number, name in enumerate(names)}
        groups: list[set[str]] = []
        for late in self._late.found():
            groups += [late] if len(late) <= _FEW else self._parted(late, order, seen, watch)
        groups = _with_unheld(groups, order, seen, watch)
        return tuple(tuple(sorted(group, key=order.__getitem__)) for group in groups)

    def _parted(
        self, names: set[str], order: Mapping[str, int], seen: Mapping[str, object], watch: Watch
    ) -> list[set[str]]:
        """Groups among many that one of them came after: what is joined, and what needs another.

        Each two units are in different calls of one watch at least; so one that comes out the same
        in all of them needs no other one.
        """
        units = self._units(names, order)
        needy = _needy(units, seen, watch)
        if needy is None:
            return [names]
        groups = [set(unit) for n, unit in enumerate(units) if n not in needy and len(unit) > 1]
        if needy:
            groups.append({name for number in needy for name in units[number]})
        return groups

    def _units(self, names: set[str], order: Mapping[str, int]) -> list[list[str]]:
        """What is joined, and all others one by one, in order."""
        units: list[list[str]] = []
        done: set[str] = set()
        for name in sorted(names, key=order.__getitem__):
            if name not in done:
                units.append(sorted(self._joined.of(name) & names, key=order.__getitem__))
                done.update(units[-1])
        return units


def _needy(
    units: Sequence[Sequence[str]], seen: Mapping[str, object], watch: Watch
) -> dict[int, int] | None:
    """Numbers of units that come out otherwise where another one is not in the same call.

    The value has the bits that tell it from that one's number, if it is one. None if a call raised.
    """
    needy = defaultdict[int, int](int)
    for bit in range((len(units) - 1).bit_length()):
        halves = defaultdict[int, list[str]](list)
        for number, unit in enumerate(units):
            halves[number >> bit & 1] += unit
        found = watch([tuple(half) for half in halves.values()])
        if found is None:
            return None
        for number, unit in enumerate(units):
            if any(found.get(name) != seen.get(name) for name in unit):
                needy[number] |= 1 << bit
    return needy


def _with_unheld(
    groups: Sequence[set[str]],
    order: Mapping[str, int],
    seen: Mapping[str, object],
    watch: Watch,
) -> list[set[str]]:
    """Groups, with tensors that a loader needs in one call though it holds none back: it looks
    whether another one has come.

    Of tensors whose names differ by numbers alone the first and the last are tried, and all only if
    one of these needs another.
    """
    held = set[str]().union(*groups)
    alone = [name for name in order if name not in held]
    kinds = [_NUMBER.sub("", name) for name in alone]
    ends = dict(zip(reversed(kinds), reversed(alone), strict=True)).values()
    tried = {*ends, *dict(zip(kinds, alone, strict=True)).values()}
    if not _needy([[name] for name in alone if name in tried], seen, watch):
        return list(groups)
    units = [sorted(g, key=order.__getitem__) for g in groups] + [[name] for name in alone]
    found = Groups()
    for unit in units[: len(groups)]:
        found.link(unit)
    for number, bits in (_needy(units, seen, watch) or {}).items():
        if number ^ bits < len(units):
            found.link((*units[number], *units[number ^ bits]))
    linked = [sorted(group, key=order.__getitem__) for group in found.found()]
    again = watch([tuple(group) for group in linked]) or {}
    if any(again.get(name) != seen.get(name) for group in linked for name in group):
        return [set(order)]
    return found.found()
