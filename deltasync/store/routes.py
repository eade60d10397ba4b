"""The cheapest way, in bytes, from what a reader holds to a version of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from deltasync.errors import ManifestInvalid, VersionMissing
from deltasync.store.catalogue import Published, Run
from deltasync.store.manifest import Way


@dataclass(frozen=True, slots=True)
class Step:
    """One way to be taken.

    Attributes:
        to: The version that it leads to.
        way: What to fetch.
    """

    to: Published
    way: Way

    @property
    def keys(self) -> frozenset[str]:
        """The objects that it takes."""
        return frozenset(file.key for file in self.way.files)


@dataclass(frozen=True, slots=True)
class Route:
    """How to arrive at a version.

    Attributes:
        base: The version held that the first step applies to; None if the first is an anchor.
        steps: In order; none if the version is held.
        target: The version.
        lineage: The manifests after `base`, or after the anchor's version, up to the target, in
            order. They say which parameters have changed.
    """

    base: Published | None
    steps: tuple[Step, ...]
    target: Published
    lineage: tuple[Published, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes to fetch."""
        return sum(step.way.num_bytes for step in self.steps)


@dataclass(slots=True)
class _Map:
    """What is known so far, seen from the target backwards.

    Attributes:
        cost: Bytes from a version to the target.
        step: The first step of that.
        seen: The manifests that were read, from the target on.
        anchor: The cheapest one: bytes from nothing to the target, and its step.
    """

    cost: dict[int, int]
    step: dict[int, Step] = field(default_factory=dict)
    seen: list[Published] = field(default_factory=list)
    anchor: tuple[int, Step] | None = None

    def look(self, published: Published, ways: list[Way], refused: Collection[str]) -> None:
        """Take in the ways that lead to a version."""
        self.seen.append(published)
        here = self.cost.get(published.version)
        if here is None:
            return
        for way in ways:
            step = Step(published, way)
            if not step.keys.isdisjoint(refused):
                continue
            cost = here + way.num_bytes
            if way.base is None:
                if self.anchor is None or cost < self.anchor[0]:
                    self.anchor = cost, step
            elif cost < self.cost.get(way.base, cost + 1):
                self.cost[way.base], self.step[way.base] = cost, step

    def is_settled(self, version: int) -> bool:
        """Whether nothing below a version can be cheaper than the anchor that is known."""
        below = [cost for base, cost in self.cost.items() if base < version]
        return not below or (self.anchor is not None and min(below) >= self.anchor[0])

    def route(self, base: Published | None) -> Route | None:
        """The cheapest route from `base`, or from an anchor; None if there is none."""
        target = self.seen[0]
        via_base = None if base is None else self.cost.get(base.version)
        steps: list[Step] = []
        if via_base is not None and (self.anchor is None or via_base <= self.anchor[0]):
            assert base is not None
            at = base.version
        elif self.anchor is not None:
            base, at = None, self.anchor[1].to.version
            steps.append(self.anchor[1])
        else:
            return None
        lineage = tuple(one for one in reversed(self.seen) if one.version > at)
        while at != target.version:
            steps.append(self.step[at])
            at = steps[-1].to.version
        return Route(base, tuple(steps), target, lineage)


def find_route(
    run: Run,
    target: Published,
    holds: Callable[[Published], bool],
    *,
    refused: Collection[str] = (),
) -> Route:
    """The route of the fewest bytes. Reads manifests from the target back, no more than needed.

    Args:
        run: The run.
        target: Where to arrive.
        holds: Whether the reader holds a version.
        refused: Keys of objects that were found to be missing or damaged.

    Raises:
        VersionMissing: Nothing leads there.
        ManifestInvalid, MacMismatch: A manifest on the only way must not be used.
    """
    found, base = _Map({target.version: 0}), None
    at: Published | None = target
    fault: ManifestInvalid | None = None
    while at is not None:
        if at.version in found.cost and holds(at):
            found.seen.append(at)
            base = at
            break
        found.look(at, run.ways(at), refused)
        if found.is_settled(at.version):
            break
        try:
            at = _parent(run, at)
        except ManifestInvalid as error:
            at, fault = None, error
    route = found.route(base)
    if route is not None:
        return route
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
    named = child.manifest.parent
    parent = None if named is None else run.published(named.version)
    if parent is None or named is None:
        return None
    if parent.sha256 != named.sha256:
        raise ManifestInvalid(
            f"v{parent.version} is not the one that v{child.version} was made from: one of the two "
            "manifests was altered; restore it, or fetch a version that has an anchor"
        )
    return parent if parent.manifest.layout_hash == child.manifest.layout_hash else None
