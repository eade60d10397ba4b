"""What proves that receivers hold a version: digests, of each rank or of some together.

The digest is a sum over elements. A rank that holds parameters whole has a digest of its own to
arrive at. Ranks that hold parts add up to the digests of those parameters, each as often as all of
them together hold it: once where they are split, several times where they are replicated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import LayoutMismatch
from deltasync.sync.protocol.session import Member
from deltasync.wire.digest import MASK
from deltasync.wire.messages import ParameterSpec


class Digests(Protocol):
    """The digests of a version, wherever they are kept."""

    @property
    def total(self) -> int:
        """Of the whole model."""
        ...

    def digest_of(self, copies: NDArray[np.uint64] | None) -> int:
        """Of uint64[parameters] copies of each parameter together; None for one of each."""
        ...


Parts = Mapping[int, int]
"""Elements held by a rank, of each parameter that it holds in part."""


def copies(
    specs: Sequence[ParameterSpec], held: Iterable[tuple[Collection[int] | None, Parts]]
) -> NDArray[np.uint64]:
    """uint64[parameters]: how often some ranks of an engine hold each parameter, all together.

    Args:
        specs: The layout.
        held: Of each rank the parameters that it holds something of, None for all, and the parts.

    Raises:
        LayoutMismatch: They do not hold every element of a parameter equally often.
    """
    numels = np.array([spec.numel for spec in specs], np.int64)
    total = np.zeros(len(specs), np.int64)
    for numbers, parts in held:
        here = np.zeros(len(specs), np.int64)
        known = np.arange(len(specs)) if numbers is None else np.array(sorted(numbers), np.int64)
        here[known] = numels[known]
        for number, numel in parts.items():
            if number >= len(specs) or here[number] == 0 or not 0 < numel <= numels[number]:
                raise LayoutMismatch(f"{numel} elements of parameter {number} cannot be held")
            here[number] = numel
        total += here
    times, rest = np.divmod(total, np.maximum(numels, 1))
    if rest.any():
        number = int(np.flatnonzero(rest)[0])
        raise LayoutMismatch(
            f"its ranks hold {total[number]} elements of {specs[number].name!r}, which has "
            f"{numels[number]}"
        )
    return times.astype(np.uint64)


def peers_with_wrong_digest(
    members: Iterable[Member], digests: Mapping[int, int], version: Digests, num_parameters: int
) -> set[int]:
    """Peers that do not hold, or would not arrive at, a version.

    Args:
        members: All ranks of some engines.
        digests: What they said, by peer. Ranks that prove themselves together are left out if one
            of them said nothing.
        version: Its digests.
        num_parameters: Of the layout.
    """
    wrong: set[int] = set()
    together: dict[str, list[Member]] = defaultdict(list)
    for member in members:
        if member.copies is not None:
            together[member.engine].append(member)
        elif member.peer in digests:
            held = _once(member.holds, num_parameters)
            if digests[member.peer] != version.digest_of(held):
                wrong.add(member.peer)
    for group in together.values():
        peers = {member.peer for member in group}
        assert group[0].copies is not None
        if peers <= digests.keys():
            found = sum(digests[peer] for peer in peers) & MASK
            if found != version.digest_of(group[0].copies):
                wrong |= peers
    return wrong


def _once(numbers: Collection[int] | None, num_parameters: int) -> NDArray[np.uint64] | None:
    """uint64[parameters]: one copy of each of these; None for all."""
    if numbers is None:
        return None
    copies = np.zeros(num_parameters, np.uint64)
    copies[list(numbers)] = 1
    return copies
