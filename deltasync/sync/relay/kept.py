"""What syncs have brought, kept until it is forwarded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from deltasync.delta.bits import Run
from deltasync.delta.bucket import ReadBucket
from deltasync.delta.fold import fold_runs
from deltasync.sync.target.bound import Follower
from deltasync.wire.messages import Begin, ParameterSpec


@dataclass(slots=True)
class Delta:
    """What one delta changes.

    Attributes:
        base_version, version: What it leads from, and to.
        buckets: Of each payload (parameter, run) in layout order. Payloads of different ranks of
            the trainer may be of the same parameter, never of the same element.
        num_bytes: Of the payloads, which are kept.
    """

    base_version: int
    version: int
    buckets: list[list[tuple[int, Run]]] = field(default_factory=list)
    num_bytes: int = 0


class KeptDeltas(Follower):
    """The deltas that lead from what was forwarded last to what is held, in order.

    A full sync, and a delta that is written as it comes, are not kept: they and what was before
    them are forgotten. So is a chain of over `max_bytes` payloads.

    Args:
        max_bytes: Called for the limit.
    """

    def __init__(self, max_bytes: Callable[[], int]) -> None:
        self._max_bytes = max_bytes
        self._coming: Delta | None = None
        self._chain: list[Delta] = []

    def begin(self, begin: Begin, *, is_staged: bool) -> None:
        self._coming = None
        if is_staged and begin.base_version is not None:
            self._coming = Delta(begin.base_version, begin.version)

    def take(self, rows: ReadBucket) -> None:
        delta = self._coming
        if delta is None:
            return
        if delta.num_bytes + len(rows.payload) > self._max_bytes():
            self._coming = None
            return
        copy = replace(rows, payload=rows.payload.clone())
        delta.buckets.append(list(copy.runs()))
        delta.num_bytes += len(copy.payload)

    def written(self) -> None:
        delta, self._coming = self._coming, None
        if delta is None or (self._chain and self._chain[-1].version != delta.base_version):
            self._chain.clear()
        if delta is not None:
            self._chain.append(delta)
        while sum(one.num_bytes for one in self._chain) > self._max_bytes():
            del self._chain[0]

    def between(self, base_version: int, version: int) -> list[Delta] | None:
        """The deltas that lead from one version to another; None if they are not kept."""
        chain = [one for one in self._chain if base_version < one.version <= version]
        ends = (chain[0].base_version, chain[-1].version) if chain else (version, version)
        return chain if ends == (base_version, version) else None

    def forget(self, version: int) -> None:
        """What leads to this version was forwarded."""
        self._chain = [one for one in self._chain if one.version > version]


def runs_of(deltas: Sequence[Delta], specs: Sequence[ParameterSpec]) -> list[tuple[int, Run]]:
    """(parameter, run) of what all these deltas change, ordered and disjoint. Later bits win.

    Runs of a single delta are views of its payloads, unless they meet.
    """
    found: dict[int, list[list[Run]]] = defaultdict(list)
    for delta in deltas:
        for bucket in delta.buckets:
            here: dict[int, list[Run]] = defaultdict(list)
            for parameter, run in bucket:
                here[parameter].append(run)
            for parameter, runs in here.items():
                found[parameter].append(runs)
    is_one = len(deltas) == 1
    return [
        (parameter, run)
        for parameter in sorted(found)
        for run in _joined(found[parameter], specs[parameter].numel, is_one=is_one)
    ]


def _joined(parts: list[list[Run]], numel: int, *, is_one: bool) -> list[Run]:
    runs = sorted((run for part in parts for run in part), key=lambda run: run.start)
    if is_one and all(left.stop <= right.start for left, right in pairwise(runs)):
        return runs
    return fold_runs(parts, numel)
