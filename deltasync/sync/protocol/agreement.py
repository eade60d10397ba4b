"""What proves that receivers hold a version: digests, of each rank or of some together.

The digest is a sum over elements. A rank that holds parameters whole has a digest of its own to
arrive at. Ranks that hold parts add up to the digests of those parameters, each as often as all of
them together hold it: once where they are split, several times where they are replicated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.backend import Digests
from deltasync.errors import LayoutMismatch
from deltasync.sync.protocol.sender_session import Member
from deltasync.wire.digest import MASK
from deltasync.wire.messages import ParameterSpec

Copies = NDArray[np.uint64]
"""uint64[parameters]: how often some ranks hold each parameter."""

Parts = Mapping[int, int]
"""Elements held by a rank, of each parameter that it holds in part."""


def copies(
    specs: Sequence[ParameterSpec], held: Iterable[tuple[Collection[int] | None, Parts]]
) -> Copies:
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


@dataclass(frozen=True, slots=True)
class DigestCheck:
    """Receivers whose digests prove together that they hold a version.

    Attributes:
        peers: One receiver; or the ranks of an engine that hold parts.
        copies: uint64[parameters]: how often they hold each parameter; None for once, all of them.
    """

    peers: frozenset[int]
    copies: Copies | None


def digest_checks(members: Iterable[Member], num_parameters: int) -> list[DigestCheck]:
    """What is compared of members, given all ranks of their engines."""
    together: dict[str | int, list[Member]] = defaultdict(list)
    for member in members:
        together[member.peer if member.copies is None else member.engine].append(member)
    return [
        DigestCheck(frozenset(m.peer for m in ranks), _copies_of(ranks[0], num_parameters))
        for ranks in together.values()
    ]


def peers_with_wrong_digest(
    checks: Iterable[DigestCheck], digests: Mapping[int, int], version: Digests
) -> set[int]:
    """Peers that do not hold, or would not arrive at, a version.

    Args:
        checks: Of the members in question.
        digests: What they said, by peer. A check is left out if one of its peers said nothing.
        version: The digests of the version.
    """
    wrong: set[int] = set()
    for check in checks:
        if check.peers <= digests.keys():
            found = sum(digests[peer] for peer in check.peers) & MASK
            if found != version.digest_of(check.copies):
                wrong |= check.peers
    return wrong


def _copies_of(member: Member, num_parameters: int) -> Copies | None:
    """What a member holds, or its engine together; None for one copy of everything."""
    if member.copies is not None or member.holds is None:
        return member.copies
    copies = np.zeros(num_parameters, np.uint64)
    copies[list(member.holds)] = 1
    return copies
