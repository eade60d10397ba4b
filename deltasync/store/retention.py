"""Retention: deletes old versions of a run, and what was never finished, and nothing else.

What is deleted is always a beginning of the chain: versions older than an anchor from which all
that is kept can be fetched. Manifests go first, oldest first, so that no manifest is left whose
objects are gone. Ages count back from the newest object of the run, by the times of the store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from numbers import Real
from pathlib import Path

from deltasync.errors import ConfigError
from deltasync.store import keys
from deltasync.store.catalogue import Run
from deltasync.store.manifest import Way
from deltasync.store.objects import ObjectFacts, Objects, StoreOptions

_LEFTOVER = re.compile(r"#\d+$")  # what obstore writes before it renames

Advance = Callable[[int], None]
"""Called with the number of objects deleted since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcStats:
    """What was deleted, or would be.

    Attributes:
        oldest, newest: Versions that are left; None if there is none.
        versions: How many versions were deleted.
        objects, num_bytes: Objects deleted, with their bytes; manifests included.
        unfinished: Of these, objects that no manifest names.
    """

    oldest: int | None
    newest: int | None
    versions: int
    objects: int
    num_bytes: int
    unfinished: int


def gc(
    url: str | Path,
    *,
    keep: int,
    keep_s: float = 86400.0,
    dry_run: bool = False,
    options: StoreOptions | None = None,
    advance: Advance = lambda objects: None,
) -> GcStats:
    """Delete all versions of a run but the newest ones and the young ones.

    Readers that hold nothing can fetch each version that is kept. More stays than that: deltas
    follow an anchor, so everything from that anchor on stays. A reader that is fetching an older
    version goes on with the newest one.

    Args:
        url: Where the store is.
        keep: How many of the newest versions stay, at least 1.
        keep_s: Whatever was written less than so many seconds before the newest object stays as
            well: versions, and objects that no manifest names yet. Longer than any upload or fetch
            of a version takes; infinite to delete nothing.
        dry_run: Only count.
        options: How the store is reached. Give the key if manifests are signed.
        advance: Called to report progress.

    Raises:
        ConfigError: `keep` is less than 1, or `keep_s` is no time.
        VersionMissing: There is no version, nor what is left of one.
        StoreError: The store cannot be read, or a manifest is not what it should be: then nothing
            was deleted. If a deletion fails, call it again.
    """
    if keep < 1:
        raise ConfigError(f"keep={keep}: at least one version has to stay")
    if not (isinstance(keep_s, Real) and keep_s >= 0):
        raise ConfigError(f"keep_s={keep_s!r}: give 0 seconds or more")
    found = Run(Objects(url, options))
    manifests = _manifests(found)
    floor, old, unnamed = _due(found, manifests, keep, keep_s)
    if not (manifests or unnamed):
        found.refuse_empty()
    if not dry_run:
        for facts in (*old, *unnamed):  # manifests first, the oldest one first
            version = keys.version_of(facts.key) or 0
            if version < floor or facts.key not in _named(found, version):  # nor named meanwhile
                found.objects.delete(facts.key)
            advance(1)
    return GcStats(
        oldest=floor if manifests else None,
        newest=max(manifests, default=None),
        versions=sum(version < floor for version in manifests),
        objects=len(old) + len(unnamed),
        num_bytes=sum(facts.num_bytes for facts in (*old, *unnamed)),
        unfinished=len(unnamed),
    )


def _due(
    run: Run, manifests: dict[int, ObjectFacts], keep: int, keep_s: float
) -> tuple[int, list[ObjectFacts], list[ObjectFacts]]:
    """(the oldest version that stays, what belongs to older ones, what no manifest names)."""
    named = cache(lambda version: _named(run, version))
    objects = [
        *run.objects.listed(keys.ANCHORS),
        *run.objects.listed(keys.OBJECTS),
        *_leftovers(run),
    ]
    before_s = max(map(_written_s, (*manifests.values(), *objects)), default=0.0) - keep_s
    floor = _floor(run, manifests, objects, keep, before_s)
    old, unnamed = [one for v, one in manifests.items() if v < floor], list[ObjectFacts]()
    for facts in objects:
        if (version := keys.version_of(facts.key)) is None:
            continue
        is_due = facts.key.startswith(keys.OBJECTS) and _written_s(facts) <= before_s
        if version < floor:
            old.append(facts)
        elif is_due and facts.key not in named(version):
            unnamed.append(facts)
    return floor, old, unnamed


def _written_s(facts: ObjectFacts) -> float:
    return facts.modified.timestamp()


def _manifests(run: Run) -> dict[int, ObjectFacts]:
    """The manifests by version, in order."""
    found = {keys.version_of(facts.key): facts for facts in run.objects.listed(keys.MANIFESTS)}
    return {version: found[version] for version in sorted(v for v in found if v is not None)}


def _floor(
    run: Run,
    manifests: dict[int, ObjectFacts],
    objects: list[ObjectFacts],
    keep: int,
    before_s: float,
) -> int:
    """The oldest version that stays: the newest one with a whole anchor that is old enough."""
    young = (version for version, facts in manifests.items() if _written_s(facts) > before_s)
    kept = min([*list(manifests)[-keep:], *young], default=0)
    has_anchor = {keys.version_of(facts.key) for facts in objects if "-anchor-" in facts.key}
    for version in sorted(manifests.keys() & has_anchor, reverse=True):
        if version > kept or (published := run.published(version)) is None:
            continue
        if any(_is_whole(run, way) for way in run.ways(published)):
            return version
    return min(manifests, default=0)


def _is_whole(run: Run, way: Way) -> bool:
    """Whether a way is an anchor whose files are all there, at their lengths."""
    if way.kind != "anchor":
        return False
    facts = [run.objects.head(file.key) for file in way.files]
    return all(
        one is not None and one.num_bytes == file.bytes
        for one, file in zip(facts, way.files, strict=True)
    )


def _named(run: Run, version: int) -> set[str]:
    """The objects that the manifest of a version and its later anchor name."""
    published = run.published(version)
    ways = [] if published is None else run.ways(published)
    return {file.key for way in ways for file in way.files}


def _leftovers(run: Run) -> Iterator[ObjectFacts]:
    """Files of uploads into a folder that were killed; lists of objects leave them out."""
    folder = run.objects.folder
    if folder is None:
        return
    for path in (folder / keys.OBJECTS).rglob("*#*"):
        with suppress(OSError):
            facts = path.stat()
            if _LEFTOVER.search(path.name):
                modified = datetime.fromtimestamp(facts.st_mtime, UTC)
                key = path.relative_to(folder).as_posix()
                yield ObjectFacts(key, facts.st_size, modified)
