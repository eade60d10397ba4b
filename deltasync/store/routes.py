"""How a reader gets from what it holds to a version: the deltas in between, or an anchor first."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from deltasync.errors import ManifestInvalid, VersionMissing
from deltasync.store.catalogue import Published, Run
from deltasync.store.manifest import Way


@dataclass(frozen=True, slots=True)
class Step:
    """One way to be taken.

    Attributes:
        base: The version that it leads from; None for an anchor, or if that is not known.
        to: The version that it leads to.
        way: What to fetch.
    """

    base: Published | None
    to: Published
    way: Way


@dataclass(frozen=True, slots=True)
class Route:
    """How to arrive at a version.

    Attributes:
        base: The version held that the first step applies to; None if the first is an anchor.
        steps: In order, deltas but for that anchor; none if the version is held.
        target: The version.
    """

    base: Published | None
    steps: tuple[Step, ...]
    target: Published

    @property
    def num_bytes(self) -> int:
        """Bytes to fetch."""
        return sum(step.way.num_bytes for step in self.steps)

    @property
    def keys(self) -> frozenset[str]:
        """The objects that it takes."""
        return frozenset().union(*(step.way.keys for step in self.steps))


def find_route(
    run: Run,
    target: Published,
    holds: Callable[[Published], bool],
    *,
    oldest: int = 0,
    refused: Collection[str] = (),
) -> Route:
    """The route of the fewest bytes: from the version held, or from the nearest anchor.

    Reads manifests from the target back, no more than needed.

    Args:
        run: The run.
        target: Where to arrive.
        holds: Whether the reader holds a version.
        oldest: It holds none before this one.
        refused: Keys of objects that were found to be missing or damaged.

    Raises:
        VersionMissing: Nothing leads there.
        ManifestInvalid, MacMismatch: A manifest on the only way must not be used.
    """
    at, deltas, num_bytes = target, list[Step](), 0
    anchored: Route | None = None
    fault: ManifestInvalid | None = None
    while anchored is None or (at.version >= oldest and num_bytes <= anchored.num_bytes):
        if holds(at):
            return Route(at, tuple(reversed(deltas)), target)
        ways = run.ways(at) if anchored is None else [at.manifest.way]
        ways = [way for way in ways if way.keys.isdisjoint(refused)]
        anchor = next((way for way in ways if way.kind == "anchor"), None)
        if anchor is not None and anchored is None:
            anchored = Route(None, (Step(None, at, anchor), *reversed(deltas)), target)
        delta = next((way for way in ways if way.kind == "delta"), None)
        try:
            parent = None if delta is None else _parent(run, at)
        except ManifestInvalid as error:
            parent, fault = None, error
        if delta is None or parent is None:
            break
        deltas.append(Step(parent, at, delta))
        at, num_bytes = parent, num_bytes + delta.num_bytes
    if anchored is not None:
        return anchored
    if fault is not None:
        raise fault
    raise VersionMissing(
        f"{run.objects.url}: nothing that is left leads to v{target.version}: wait for the next "
        "anchor, or fetch another version; deltasync verify says what is missing"
    )


def _parent(run: Run, child: Published) -> Published | None:
    """The version before; None if the run begins here, or if it is gone or of another layout.

    Raises ManifestInvalid if it is not the one that the child names.
    """
    parent = None if child.manifest.parent is None else run.published(child.version - 1)
    if parent is None:
        return None
    parent.check_child(child)
    return parent if parent.manifest.layout_hash == child.manifest.layout_hash else None
