"""Retention: deletes old versions of a run, and what was never finished, and nothing else.

What is deleted is always a beginning of the chain: versions older than an anchor from which all
that is needed can be fetched. Manifests go first, oldest first, so that no manifest is left whose
objects are gone. Time is the store's own: when objects were written, as the store says.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from numbers import Real
from pathlib import Path

from deltasync.errors import ConfigError, ManifestInvalid, StoreUnavailable
from deltasync.store import keys
from deltasync.store.catalogue import Published, Run
from deltasync.store.manifest import Lease, Way, decode
from deltasync.store.objects import ObjectFacts, StoreOptions

_SLACK_S = 2  # stores tell the time in seconds
_LONGEST_LEASE_S = 30 * 86400
_LEFTOVER = re.compile(r"#\d+$")  # what obstore writes before it renames
_CLOCK, _CLOCK_S = "clock", 3600

Advance = Callable[[int], None]
"""Called with the number of objects deleted since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcStats:
    """What was deleted, or would be.

    Attributes:
        run: Of which run.
        oldest, newest: Versions that are left; None if the run has none.
        versions: How many versions were deleted.
        objects, num_bytes: Objects deleted, with their bytes; manifests and leases included.
        unfinished: Of these, objects that no manifest names.
        leases: Leases that live, and keep what they need.
    """

    run: str
    oldest: int | None
    newest: int | None
    versions: int
    objects: int
    num_bytes: int
    unfinished: int
    leases: int


@dataclass(frozen=True, slots=True)
class _Doomed:
    """What is to be deleted, in this order."""

    manifests: list[ObjectFacts]
    old: list[ObjectFacts]
    unfinished: list[ObjectFacts]
    expired: list[ObjectFacts]

    def __iter__(self) -> Iterator[ObjectFacts]:
        for group in (self.manifests, self.old, self.unfinished, self.expired):
            yield from group


def gc(
    url: str | Path,
    run: str | None = None,
    *,
    keep: int,
    unfinished_after_s: float = 86400.0,
    dry_run: bool = False,
    options: StoreOptions | None = None,
    advance: Advance = lambda objects: None,
) -> GcStats:
    """Delete versions of a run that nobody needs.

    Readers that hold nothing can still fetch each of the newest `keep` versions afterwards, and
    readers with a lease what the lease names. More is kept than that: deltas follow an anchor, so
    everything from that anchor on stays.

    Args:
        url, run: As of `Run.open`.
        keep: How many versions stay, at least 1.
        unfinished_after_s: Objects that no manifest names are deleted when they are older. Longer
            than any upload of a version takes; infinite for never.
        dry_run: Only count.
        options: How the store is reached. Give the key if manifests are signed.
        advance: Called to report progress.

    Raises:
        ConfigError: `keep` is less than 1, or `unfinished_after_s` is no time.
        StoreError: The store cannot be read, or a manifest is not what it should be: then nothing
            was deleted. If a deletion fails, call it again.
    """
    if keep < 1:
        raise ConfigError(f"keep={keep}: at least one version has to stay")
    if not (isinstance(unfinished_after_s, Real) and unfinished_after_s >= 0):
        raise ConfigError(f"unfinished_after_s={unfinished_after_s!r}: give 0 seconds or more")
    found = Run.open(url, run, options)
    now = _clock(found)
    live, expired = _leases(found, now)
    newest = found.newest()
    floor = None if newest is None else _floor(found, newest, live, keep)
    before_s = now.timestamp() - unfinished_after_s
    doomed, leftovers = _doomed(found, floor, expired, before_s), _leftovers(found, before_s)
    if not dry_run:
        _delete(found, doomed, advance)
        for path, _ in leftovers:
            with suppress(FileNotFoundError):
                path.unlink()
    everything = list(doomed)
    return GcStats(
        run=found.name,
        oldest=floor,
        newest=None if newest is None else newest.version,
        versions=len(doomed.manifests),
        objects=len(everything) + len(leftovers),
        num_bytes=sum(facts.num_bytes for facts in everything) + sum(n for _, n in leftovers),
        unfinished=len(doomed.unfinished) + len(leftovers),
        leases=len(live),
    )


def _clock(run: Run) -> datetime:
    """What time it is in the store."""
    key = f"{keys.LEASES}/{_CLOCK}-{secrets.token_hex(8)}"
    run.objects.put(key, b"")
    try:
        facts = run.objects.head(key)
    finally:
        run.objects.delete(key)
    if facts is None:
        raise StoreUnavailable(f"{run.objects.url}: what was just written is not there; try again")
    return facts.modified


def _leases(run: Run, now: datetime) -> tuple[list[Lease], list[ObjectFacts]]:
    """Leases that live, and the objects of those that do not."""
    live, expired = list[Lease](), list[ObjectFacts]()
    for facts in run.objects.listed(keys.LEASES):
        age_s = (now - facts.modified).total_seconds()
        if facts.key.startswith(f"{keys.LEASES}/{_CLOCK}-"):
            if age_s > _CLOCK_S:  # of a collector that was killed
                expired.append(facts)
            continue
        data = run.objects.get(facts.key, max_bytes=1 << 16)
        if data is None:
            continue
        try:
            lease = _lease_of(run, data, facts.key)
        except ManifestInvalid:
            if age_s <= _LONGEST_LEASE_S:  # it may be of a newer release
                raise
            expired.append(facts)
            continue
        if age_s > lease.seconds + _SLACK_S:
            expired.append(facts)
        else:
            live.append(lease)
    return live, expired


def _lease_of(run: Run, data: bytes, key: str) -> Lease:
    """Raises ManifestInvalid, also for one of another run."""
    lease = decode(data, Lease, key=key)
    if lease.run != run.name:
        raise ManifestInvalid(f"{key}: is of run {lease.run!r}, not of {run.name!r}: it was moved")
    return lease


def _delete(run: Run, doomed: _Doomed, advance: Advance) -> None:
    unfinished = {facts.key for facts in doomed.unfinished}
    for facts in doomed:
        if not _is_needed_now(run, facts, is_unfinished=facts.key in unfinished):
            run.objects.delete(facts.key)
        advance(1)


def _is_needed_now(run: Run, facts: ObjectFacts, *, is_unfinished: bool) -> bool:
    """Whether it is a lease that was written again, or an upload that was finished, meanwhile."""
    if is_unfinished:
        version = keys.version_of(facts.key)
        return version is not None and facts.key in _named(run, version)
    if not facts.key.startswith(keys.LEASES):
        return False
    now = run.objects.head(facts.key)
    return now is not None and now.modified != facts.modified


def _floor(run: Run, newest: Published, leases: list[Lease], keep: int) -> int:
    """The oldest version that stays."""
    versions = run.versions()
    oldest = versions[0] if versions else newest.version
    anchored = _anchored(run)
    floor = _anchor_before(run, anchored, newest.version - keep + 1, oldest)
    for lease in leases:
        held = lease.holds
        if held is None:
            held = _anchor_before(run, anchored, lease.version, oldest)
        floor = min(floor, held)
    return max(floor, oldest)


def _anchored(run: Run) -> list[int]:
    """Versions that may have an anchor, in order."""
    found = set()
    for facts in run.objects.listed(keys.OBJECTS):
        version = keys.version_of(facts.key)
        if version is not None and "-anchor-" in facts.key:
            found.add(version)
    return sorted(found)


def _anchor_before(run: Run, anchored: list[int], version: int, oldest: int) -> int:
    """The newest version up to this one with a whole anchor; the oldest one if there is none."""
    for candidate in reversed(anchored):
        if candidate > version:
            continue
        published = run.published(candidate)
        if published is None:
            continue
        if any(_is_whole(run, way) for way in run.ways(published)):
            return candidate
    return oldest


def _is_whole(run: Run, way: Way) -> bool:
    """Whether a way is an anchor whose files are all there, at their lengths."""
    if way.kind != "anchor":
        return False
    facts = [run.objects.head(file.key) for file in way.files]
    return all(
        one is not None and one.num_bytes == file.bytes
        for one, file in zip(facts, way.files, strict=True)
    )


def _doomed(run: Run, floor: int | None, expired: list[ObjectFacts], before_s: float) -> _Doomed:
    below = -1 if floor is None else floor
    manifests = [
        facts
        for facts in run.objects.listed(keys.MANIFESTS)
        if (version := keys.version_of(facts.key)) is not None and version < below
    ]
    manifests.sort(key=lambda facts: facts.key)
    old, unfinished = list[ObjectFacts](), list[ObjectFacts]()
    named: dict[int, set[str]] = {}
    for folder in (keys.WAYS, keys.OBJECTS):
        for facts in run.objects.listed(folder):
            version = keys.version_of(facts.key)
            if version is None:
                continue
            if version < below:
                old.append(facts)
            elif folder == keys.OBJECTS and facts.modified.timestamp() < before_s:
                if version not in named:
                    named[version] = _named(run, version)
                if facts.key not in named[version]:
                    unfinished.append(facts)
    return _Doomed(manifests, old, unfinished, expired)


def _named(run: Run, version: int) -> set[str]:
    """The objects that the manifest of a version, and its later ways, name."""
    published = run.published(version)
    if published is None:
        return set()
    return {file.key for way in run.ways(published) for file in way.files}


def _leftovers(run: Run, before_s: float) -> list[tuple[Path, int]]:
    """(file, bytes) of uploads into a folder that were killed; lists of objects leave them out."""
    folder = run.objects.folder
    found = []
    for path in () if folder is None else folder.rglob("*#*"):
        with suppress(OSError):
            facts = path.stat()
            if _LEFTOVER.search(path.name) and facts.st_mtime < before_s:
                found.append((path, facts.st_size))
    return found
