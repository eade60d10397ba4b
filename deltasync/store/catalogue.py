"""The versions of a run: finds the run, reads manifests, and checks that they belong together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from deltasync.errors import (
    ConfigError,
    ManifestInvalid,
    ObjectDamaged,
    RunUnknown,
    SeveralRuns,
    StoreUnavailable,
    UnknownDtype,
    VersionMissing,
)
from deltasync.store import keys
from deltasync.store.manifest import (
    MAX_MANIFEST_BYTES,
    Anchor,
    Manifest,
    Parent,
    RunRecord,
    Way,
    check_mac,
    decode,
    first_fault,
    sha256_of,
)
from deltasync.store.objects import Objects, StoreOptions
from deltasync.sync.target.base import some_of
from deltasync.wire.messages import Entries, Entry, ParameterSpec, entries, parameter_specs

_MAX_LAYOUT_BYTES = 256 << 20
_Any = TypeVar("_Any", Manifest, Anchor)
_ENTRIES: TypeAdapter[tuple[Entry, ...]] = TypeAdapter(Entries)


@dataclass(frozen=True, slots=True)
class Published:
    """A manifest as it lies in the store.

    Attributes:
        manifest: Checked: its form, its key, its run, its MAC.
        sha256: Of its bytes; what children and later anchors name.
    """

    manifest: Manifest
    sha256: str

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def as_parent(self) -> Parent:
        """What a child says of it."""
        return Parent(version=self.version, sha256=self.sha256)

    def check_child(self, child: Published) -> None:
        """Raise ManifestInvalid unless the next version names this one as it is: rule S4."""
        if child.manifest.parent != self.as_parent:
            raise ManifestInvalid(
                f"v{child.version} is not a child of v{self.version} as it is: one of the two "
                "manifests was altered; restore it, or fetch a version that has an anchor"
            )


class Run:
    """One run of a store, to read.

    Args:
        objects: The objects of the run.
        name: Its id.

    Attributes:
        objects: As given; keys are relative to the run.
        name: As given.
    """

    def __init__(self, objects: Objects, name: str) -> None:
        self.objects, self.name = objects, name

    @classmethod
    def open(
        cls, url: str | Path, run: str | None = None, options: StoreOptions | None = None
    ) -> Run:
        """The run that a URL names, or `run` below it, or the only one below it.

        Raises:
            RunUnknown: There is no such run.
            SeveralRuns: There are several, and none is named.
            StoreError: The store cannot be read.
        """
        objects = Objects(url, options)
        if run is not None:
            keys.check_run(run)
            if (found := record_of(objects)) is not None and found.run == run:
                return cls(objects, run)
            below = objects.under(run)
            if (found := record_of(below)) is None or found.run != run:
                raise RunUnknown(f"{url}: has no run {run!r}; {_listed(runs_below(objects))}")
            return cls(below, run)
        if (found := record_of(objects)) is not None:
            return cls(objects, found.run)
        runs = runs_below(objects)
        if len(runs) != 1:
            raise (SeveralRuns if runs else RunUnknown)(f"{url}: {_listed(runs)}")
        return cls(objects.under(runs[0]), runs[0])

    def published(self, version: int) -> Published | None:
        """The manifest of a version; None if there is no such version.

        Raises ManifestInvalid or MacMismatch for one that must not be used.
        """
        key = keys.manifest_key(version)
        data = self.objects.get(key, max_bytes=MAX_MANIFEST_BYTES)
        if data is None:
            return None
        return Published(self._checked(data, Manifest, key), sha256_of(data))

    def require(self, version: int) -> Published:
        """The same. Raises VersionMissing if there is no such version."""
        found = self.published(version)
        if found is None:
            raise VersionMissing(
                f"{self.objects.url}: has no v{version}; deltasync log lists what it has"
            )
        return found

    def newest(self, at_least: int | None = None) -> Published | None:
        """The newest version; None if there is none.

        Args:
            at_least: A version that the caller knows to exist: nothing is listed while it is the
                newest.

        Raises StoreUnavailable if what was listed is gone: newer ones are not listed yet.
        """
        found = None if at_least is None else self.published(at_least)
        following = None if found is None else self._following(found)
        if found is not None and following is None:
            return found
        found = following
        if listed := self.versions(after=at_least):
            found = self.published(listed[-1]) or following
            if found is None:
                raise StoreUnavailable(
                    f"{self.objects.url}: v{listed[-1]} is listed and gone, and no newer one is "
                    "listed yet: try again"
                )
        while found is not None and (following := self._following(found)) is not None:
            found = following
        return found

    def _following(self, found: Published) -> Published | None:
        """The next version; None if there is none. Raises ManifestInvalid if it is no child."""
        following = self.published(found.version + 1)
        if following is not None:
            found.check_child(following)
        return following

    def newer(self, than: Published) -> Published | None:
        """The newest version, for a reader that was overtaken: None if it is not newer."""
        newest = self.newest(than.version)
        return newest if newest is not None and newest.version > than.version else None

    def versions(self, after: int | None = None) -> list[int]:
        """Versions that have manifests, in order; those after a version. They are not read."""
        offset = None if after is None else keys.manifest_key(after)
        found = (keys.version_of(o.key) for o in self.objects.listed(keys.MANIFESTS, after=offset))
        return sorted(version for version in found if version is not None)

    def ways(self, published: Published) -> list[Way]:
        """All ways to a version: that of its manifest, and an anchor that came later.

        An anchor of another manifest does not count. Raises ManifestInvalid or MacMismatch.
        """
        key, found = keys.anchor_key(published.version), [published.manifest.way]
        data = self.objects.get(key, max_bytes=MAX_MANIFEST_BYTES)
        if data is not None:
            anchor = self._checked(data, Anchor, key)
            if anchor.manifest == published.sha256:
                found.append(anchor.way)
        return found

    def chain(self, versions: Sequence[int]) -> Iterator[Published]:
        """Manifests of consecutive versions, from the last one back, until one is gone.

        Raises ManifestInvalid if one is none, or two do not belong together.
        """
        child: Published | None = None
        for version in reversed(versions):
            published = self.published(version)
            if published is None:  # deleted meanwhile
                return
            if child is not None:
                published.check_child(child)
            yield published
            child = published

    def layout(self, layout_hash: str) -> tuple[ParameterSpec, ...]:
        """The parameters of a layout.

        Raises ObjectDamaged if they are missing or altered, UnknownDtype for one of a later build.
        """
        key = keys.layout_key(layout_hash)
        data = self.objects.get(key, max_bytes=_MAX_LAYOUT_BYTES)
        if data is None or sha256_of(data) != layout_hash:
            what = "does not exist" if data is None else "was altered"
            raise ObjectDamaged(f"{key} {what}: no version of this layout can be fetched")
        try:
            return parameter_specs(_ENTRIES.validate_json(data, strict=True))
        except (ValidationError, UnknownDtype) as error:
            why = first_fault(error) if isinstance(error, ValidationError) else error
            raise ManifestInvalid(f"{key}: not a layout that this build reads: {why}") from None

    def _checked(self, data: bytes, model: type[_Any], key: str) -> _Any:
        found = decode(data, model, key=key)
        check_mac(found, self.objects.options.mac, key=key)
        if found.run != self.name:
            raise ManifestInvalid(f"{key}: is of run {found.run!r}, not of {self.name!r}")
        if found.version != keys.version_of(key):
            raise ManifestInvalid(f"{key}: is of version {found.version}: it was moved")
        return found


def record_of(objects: Objects) -> RunRecord | None:
    """What marks a folder as that of a run; None if nothing does."""
    data = objects.get(keys.RUN, max_bytes=1 << 16)
    return None if data is None else decode(data, RunRecord, key=keys.RUN)


def runs_below(objects: Objects) -> list[str]:
    """Ids of the runs whose folders are right below."""
    found = []
    for name in objects.folders():
        try:
            keys.check_run(name)
        except ConfigError:
            continue
        record = record_of(objects.under(name))
        if record is not None and record.run == name:
            found.append(name)
    return found


def _listed(runs: list[str]) -> str:
    if not runs:
        return "there is no run here: check the URL, or wait for the first version"
    return f"its runs are {some_of(runs)}: name one"


def layout_bytes(specs: tuple[ParameterSpec, ...]) -> bytes:
    """The object of a layout; its SHA-256 is the layout's hash."""
    return _ENTRIES.dump_json(entries(specs))
