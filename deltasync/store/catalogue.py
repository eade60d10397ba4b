"""The versions of a run: reads manifests, and checks that they belong together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from deltasync.errors import (
    ManifestInvalid,
    ObjectDamaged,
    StoreUnavailable,
    UnknownDtype,
    VersionMissing,
)
from deltasync.store import keys
from deltasync.store.manifest import (
    Anchor,
    Manifest,
    Way,
    check_mac,
    decode,
    first_fault,
    sha256_of,
)
from deltasync.store.objects import Objects, StoreOptions
from deltasync.wire.messages import Entries, Entry, ParameterSpec, entries, parameter_specs

_MAX_MANIFEST_BYTES, _MAX_LAYOUT_BYTES = 64 << 20, 256 << 20
_Any = TypeVar("_Any", Manifest, Anchor)
_ENTRIES: TypeAdapter[tuple[Entry, ...]] = TypeAdapter(Entries)


@dataclass(frozen=True, slots=True)
class Published:
    """A manifest as it lies in the store.

    Attributes:
        manifest: Checked: its form, its key, its MAC.
        sha256: Of its bytes; what children and later anchors name.
    """

    manifest: Manifest
    sha256: str

    @property
    def version(self) -> int:
        return self.manifest.version

    def check_child(self, child: Published) -> None:
        """Raise ManifestInvalid unless the next version is of this run, and names this: rule S4."""
        if (child.manifest.parent, child.manifest.run) != (self.sha256, self.manifest.run):
            raise ManifestInvalid(
                f"v{child.version} is not a child of v{self.version} as it is: one of the two "
                "manifests was altered; restore it, or fetch a version that has an anchor"
            )


class Run:
    """The run that a store keeps, to read.

    Args:
        objects: Its objects.

    Attributes:
        objects: As given.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    @classmethod
    def open(cls, url: str | Path, options: StoreOptions | None = None) -> Run:
        """The run at a URL. Raises VersionMissing if there is none, StoreError."""
        found = cls(Objects(url, options))
        if next(found.objects.listed(keys.MANIFESTS), None) is None:
            found.refuse_empty()
        return found

    def refuse_empty(self) -> NoReturn:
        """Raise VersionMissing for a URL that is perhaps another than it should be."""
        raise VersionMissing(
            f"{self.objects.url}: has no version: check the URL, or wait for the first one"
        )

    def published(self, version: int) -> Published | None:
        """The manifest of a version; None if there is no such version.

        Raises ManifestInvalid or MacMismatch for one that must not be used.
        """
        key = keys.manifest_key(version)
        data = self.objects.get(key, max_bytes=_MAX_MANIFEST_BYTES)
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
        data = self.objects.get(key, max_bytes=_MAX_MANIFEST_BYTES)
        if data is not None:
            anchor = self._checked(data, Anchor, key)
            if anchor.manifest == published.sha256:
                found.append(anchor.way)
        return found

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
        if found.version != keys.version_of(key):
            raise ManifestInvalid(f"{key}: is of version {found.version}: it was moved")
        return found


def layout_bytes(specs: tuple[ParameterSpec, ...]) -> bytes:
    """The object of a layout; its SHA-256 is the layout's hash."""
    return _ENTRIES.dump_json(entries(specs))
