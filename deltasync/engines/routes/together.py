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

    def groups(self) -> list[set[str]]:
        """Those of several names."""
        return [g for g in {id(g): g for g in self._group.values()}.values() if len(g) > 1]

    def in_order(self, order: Mapping[str, int]) -> tuple[Names, ...]:
        """The same; each group sorted by these numbers."""
        return tuple(tuple(sorted(group, key=order.__getitem__)) for group in self.groups())


def together(
    names: Sequence[str], late: Groups, seen: Mapping[str, object], watch: Watch
) -> tuple[Names, ...]:
    """The groups that have to be loaded in one call, each in the order of the checkpoint.

    A loader that copies each tensor before it asks for the next one may be given any of them alone,
    unless it looks whether another one has come. One that copies a tensor later may have waited for
    another one, or may only read ahead: small groups are taken as they are. For all others the
    loader is watched again in parts.

    Args:
        names: All, in this order.
        late: What the loader copied late, with what it had asked for last then.
        seen: What became of each tensor when all were loaded in one call.
        watch: Records the loader again.
    """
    order = {name: number for number, name in enumerate(names)}
    found = Groups()
    for group in late.groups():
        if len(group) <= _FEW:
            found.link(group)
    held = set[str]().union(*found.groups())
    units = [list(group) for group in found.in_order(order)]
    alone = [name for name in names if name not in held]
    # Of tensors whose names differ by numbers alone the first and the last are tried, and all only
    # if one of these needs another.
    kinds = [_NUMBER.sub("", name) for name in alone]
    ends = {**dict(zip(kinds, alone, strict=True))}.values()
    tried = {*ends, *dict(zip(reversed(kinds), reversed(alone), strict=True)).values()}
    if _needy([[name] for name in alone if name in tried], seen, watch):
        units += [[name] for name in alone]
        needy = _needy(units, seen, watch)
        for number, bits in needy.items():
            if number ^ bits < len(units):
                found.link((*units[number], *units[number ^ bits]))
        if not _are_enough(found.in_order(order), seen, watch):
            found.link(name for number in needy for name in units[number])
        if not _are_enough(found.in_order(order), seen, watch):
            found.link(names)
    return found.in_order(order)


def _needy(
    units: Sequence[Sequence[str]], seen: Mapping[str, object], watch: Watch
) -> dict[int, int]:
    """Numbers of units that come out otherwise where another one is not in the same call.

    Each two units are in different calls of one watch at least. The value has the bits that tell
    a unit from that other one's number, if it is one. If a call raises, all of its watch are needy.
    """
    needy = defaultdict[int, int](int)
    for bit in range((len(units) - 1).bit_length()):
        halves = defaultdict[int, list[str]](list)
        for number, unit in enumerate(units):
            halves[number >> bit & 1] += unit
        found = watch([tuple(half) for half in halves.values()]) or {}
        for number, unit in enumerate(units):
            if any(found.get(name) != seen.get(name) for name in unit):
                needy[number] |= 1 << bit
    return needy


def _are_enough(groups: Sequence[Names], seen: Mapping[str, object], watch: Watch) -> bool:
    """Whether these groups come out as they did when all were loaded in one call."""
    again = watch(groups) or {}
    return all(again.get(name) == seen.get(name) for group in groups for name in group)
