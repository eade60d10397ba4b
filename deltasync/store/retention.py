"""Retention: deletes old versions of a run, and what was never finished, and nothing else.

What is deleted is always a beginning of the chain: versions older than an anchor from which all
that is kept can be fetched. Manifests go first, oldest first, so that no manifest is left whose
objects are gone. Time is the store's own: when objects were written, as the store says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from deltasync.errors import ConfigError, StoreUnavailable
from deltasync.store import keys
from deltasync.store.catalogue import Run
from deltasync.store.manifest import Way
from deltasync.store.objects import ObjectFacts, StoreOptions

_LEFTOVER = re.compile(r"#\d+$")  # what obstore writes before it renames

Advance = Callable[[int], None]
"""Called with the number of objects deleted since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcStats:
    """What was deleted, or would be.

    Attributes:
        run: Of which run.
        oldest, newest: Versions that are left; None if the run has none.
        versions: How many versions were deleted.
        objects, num_bytes: Objects deleted, with their bytes; manifests included.
        unfinished: Of these, objects that no manifest names.
    """

    run: str
    oldest: int | None
    newest: int | None
    versions: int
    objects: int
    num_bytes: int
    unfinished: int


def gc(
    url: str | Path,
    run: str | None = None,
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
        url: As of `Run.open`.
        run: Likewise.
        keep: How many of the newest versions stay, at least 1.
        keep_s: Whatever was written less than so many seconds ago stays as well: versions, and
            objects that no manifest names yet. Longer than any upload or fetch of a version takes;
            infinite to delete nothing.
        dry_run: Only count.
        options: How the store is reached. Give the key if manifests are signed.
        advance: Called to report progress.

    Raises:
        ConfigError: `keep` is less than 1, or `keep_s` is no time.
        StoreError: The store cannot be read, or a manifest is not what it should be: then nothing
            was deleted. If a deletion fails, call it again.
    """
    if keep < 1:
        raise ConfigError(f"keep={keep}: at least one version has to stay")
    if not (isinstance(keep_s, Real) and keep_s >= 0):
        raise ConfigError(f"keep_s={keep_s!r}: give 0 seconds or more")
    found = Run.open(url, run, options)
    garbage = _Garbage(found, keep, _now_s(found) - keep_s)
    if not dry_run:
        garbage.delete(advance)
    return garbage.stats()


class _Garbage:
    """What is to be deleted of a run: all but the newest versions, and what is young."""

    def __init__(self, run: Run, keep: int, before_s: float) -> None:
        self._run, self._manifests = run, _manifests(run)
        self._floor = _floor(run, self._manifests, keep, before_s)
        self._old = [one for version, one in self._manifests.items() if version < self._floor]
        self._versions, unnamed = len(self._old), list[ObjectFacts]()
        for facts in (*run.objects.listed(keys.ANCHORS), *run.objects.listed(keys.OBJECTS)):
            if (version := keys.version_of(facts.key)) is not None and version < self._floor:
                self._old.append(facts)
            elif facts.key.startswith(keys.OBJECTS) and _written_s(facts) <= before_s:
                unnamed.append(facts)
        self._unnamed, self._leftovers = _unnamed(run, unnamed), _leftovers(run, before_s)

    def delete(self, advance: Advance) -> None:
        """Manifests first, the oldest one first."""
        for facts in self._old:
            self._run.objects.delete(facts.key)
            advance(1)
        for facts in self._unnamed:
            if _unnamed(self._run, [facts]):  # it was not finished meanwhile
                self._run.objects.delete(facts.key)
            advance(1)
        for key, _ in self._leftovers:
            self._run.objects.delete(key)

    def stats(self) -> GcStats:
        """What there is."""
        objects = [*self._old, *self._unnamed]
        sizes = [one.num_bytes for one in objects] + [size for _, size in self._leftovers]
        return GcStats(
            run=self._run.name,
            oldest=self._floor if self._manifests else None,
            newest=max(self._manifests, default=None),
            versions=self._versions,
            objects=len(sizes),
            num_bytes=sum(sizes),
            unfinished=len(self._unnamed) + len(self._leftovers),
        )


def _now_s(run: Run) -> float:
    """What time it is in the store, in seconds since the Unix epoch."""
    run.objects.put(keys.CLOCK, b"")
    facts = run.objects.head(keys.CLOCK)
    if facts is None:
        raise StoreUnavailable(f"{run.objects.url}: what was just written is not there; try again")
    return _written_s(facts)


def _written_s(facts: ObjectFacts) -> float:
    return facts.modified.timestamp()


def _manifests(run: Run) -> dict[int, ObjectFacts]:
    """The manifests by version, in order."""
    found = {keys.version_of(facts.key): facts for facts in run.objects.listed(keys.MANIFESTS)}
    return {version: found[version] for version in sorted(v for v in found if v is not None)}


def _floor(run: Run, manifests: dict[int, ObjectFacts], keep: int, before_s: float) -> int:
    """The oldest version that stays: the newest one with a whole anchor that is old enough."""
    young = (version for version, facts in manifests.items() if _written_s(facts) > before_s)
    kept = min([*list(manifests)[-keep:], *young], default=0)
    has_anchor = {
        keys.version_of(facts.key)
        for facts in run.objects.listed(keys.OBJECTS)
        if "-anchor-" in facts.key
    }
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


def _unnamed(run: Run, objects: list[ObjectFacts]) -> list[ObjectFacts]:
    """Those that neither the manifest of their version nor its later anchor name."""
    named: dict[int, set[str]] = {}
    for facts in objects:
        version = keys.version_of(facts.key)
        if version is not None and version not in named:
            published = run.published(version)
            ways = [] if published is None else run.ways(published)
            named[version] = {file.key for way in ways for file in way.files}
    return [
        facts
        for facts in objects
        if (version := keys.version_of(facts.key)) is not None and facts.key not in named[version]
    ]


def _leftovers(run: Run, before_s: float) -> list[tuple[str, int]]:
    """(key, bytes) of uploads into a folder that were killed; lists of objects leave them out."""
    folder = run.objects.folder
    found = list[tuple[str, int]]()
    if folder is None:
        return found
    for path in folder.rglob("*#*"):
        with suppress(OSError):
            facts = path.stat()
            if _LEFTOVER.search(path.name) and facts.st_mtime <= before_s:
                found.append((path.relative_to(folder).as_posix(), facts.st_size))
    return found
