"""The history of a run, version by version, as people want to see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deltasync.errors import ManifestInvalid
from deltasync.store.catalogue import Run
from deltasync.store.manifest import Manifest, Way
from deltasync.store.objects import StoreOptions


@dataclass(frozen=True, slots=True)
class Entry:
    """One version.

    Attributes:
        manifest: What the store says of it.
        ways: How to get it, later ones included.
    """

    manifest: Manifest
    ways: tuple[Way, ...]

    @property
    def density(self) -> float:
        """Share of the elements that changed, 0 to 1."""
        return self.manifest.nnz / self.manifest.numel if self.manifest.numel else 0.0


@dataclass(frozen=True, slots=True)
class History:
    """The newest versions of a run, newest first.

    Attributes:
        run: Its id.
        entries: The versions that were asked for.
        older: How many older versions the store has.
    """

    run: str
    entries: tuple[Entry, ...]
    older: int


def history_of(
    url: str | Path,
    run: str | None = None,
    *,
    limit: int | None = None,
    options: StoreOptions | None = None,
    advance: Callable[[int], None] = lambda versions: None,
) -> History:
    """Read the newest versions of a run, and check that each is the parent of the next.

    Args:
        url, run: As of `Run.open`.
        limit: How many versions; None for all.
        options: How the store is reached. Give the key if manifests are signed.
        advance: Called to report progress, in versions.

    Raises:
        ManifestInvalid: A manifest is none, or two do not belong together.
        StoreError: The store cannot be read.
    """
    found = Run.open(url, run, options)
    versions = found.versions()
    chosen = versions if limit is None else versions[max(len(versions) - limit, 0) :]
    entries = list[Entry]()
    child: Manifest | None = None
    for version in reversed(chosen):
        published = found.published(version)
        if published is None:  # deleted meanwhile
            break
        if child is not None and child.parent != published.as_parent:
            raise ManifestInvalid(
                f"v{child.version} is not a child of v{version} as it is: one of the two was "
                "altered; restore it"
            )
        child = published.manifest
        entries.append(Entry(child, tuple(found.ways(published))))
        advance(1)
    return History(found.name, tuple(entries), len(versions) - len(entries))
