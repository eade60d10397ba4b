"""Whether a store has what its manifests say, object by object and version by version."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deltasync.delta.digests import DigestLedger, digest_text
from deltasync.delta.patch import CHUNK_NUMEL
from deltasync.delta.shard import whole
from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    DigestMismatch,
    StoreRefused,
    StoreUnavailable,
)
from deltasync.files.comparing import measure_digests
from deltasync.store.catalogue import Published, Run
from deltasync.store.checkpoints import Phase, apply_delta, no_phase
from deltasync.store.fetched import Fetched, checkpoint_of, frames_of
from deltasync.store.manifest import Way
from deltasync.store.objects import StoreOptions
from deltasync.transports.base import Frame
from deltasync.wire.digest import MASK
from deltasync.wire.messages import ParameterSpec


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a version.

    Attributes:
        version: Which one.
        what: "manifest", or the kind of the way: "anchor", "delta".
        why: What was found.
    """

    version: int
    what: str
    why: str


@dataclass(slots=True)
class Verified:
    """A run that was read from end to end.

    Attributes:
        run: Its id.
        versions: Number of its manifests.
        proved: Versions to which an undamaged way leads, from an anchor of the run.
        num_bytes: Read of objects.
        faults: All that is wrong, in order of versions.
    """

    run: str
    versions: int = 0
    proved: list[int] = field(default_factory=list)
    num_bytes: int = 0
    faults: list[Fault] = field(default_factory=list)


def verify_run(
    url: str | Path,
    run: str | None = None,
    *,
    options: StoreOptions | None = None,
    spool: str | Path | None = None,
    phase: Phase = no_phase,
) -> Verified:
    """Read every manifest and every object of a run, and put each version together.

    Takes disk space for the largest version twice. What `gc` deletes meanwhile is no fault.

    Args:
        url: The store, or a run in it.
        run: The run below `url`; needed if there are several.
        options: How the store is reached. With a key, every manifest must be signed with it.
        spool: Folder for what is fetched; None for the system's.
        phase: Called to report progress, in versions.

    Raises:
        StoreError: The store cannot be read.
        ConfigError: The disk is full, or cannot be written.
    """
    found = Run.open(url, run, options)
    versions = found.versions()
    advance, result = phase("verifying", len(versions)), Verified(found.name, len(versions))
    objects = Fetched(found.objects, spool)
    try:
        check = _Check(found, objects, result)
        for version in versions:
            check.look(version)
            advance(1)
    finally:
        objects.close()
    return result


class _Check:
    """Goes along the chain, with a copy of the version that it has arrived at."""

    def __init__(self, run: Run, objects: Fetched, result: Verified) -> None:
        self._run, self._objects, self._result = run, objects, result
        self._before: Published | None = None
        self._held: _Held | None = None  # the version before

    def look(self, version: int) -> None:
        """Check the next version."""
        held, self._held = self._held, None
        before, self._before = self._before, None
        with self._noting(version, "manifest"):
            self._before = published = self._run.require(version)
            if before is not None:
                before.check_child(published)
        if (published := self._before) is None:
            return
        with self._noting(version, "manifest"):
            self._run.layout(published.manifest.layout_hash)
            for way in self._run.ways(published):
                with self._noting(version, way.kind):
                    held = self._look_at(published, way, before, held)
        if held is not None and held.version == version:
            self._held = held
            self._result.proved.append(version)
        elif held is not None:
            held.close()

    def _look_at(
        self, published: Published, way: Way, before: Published | None, held: _Held | None
    ) -> _Held | None:
        """Fetch a way and check it. Returns a copy of the version if it leads there."""
        folder = self._objects.fetch(way)
        self._result.num_bytes += way.num_bytes
        if way.kind == "anchor":
            made = _Held(folder, published)
            if held is not None:
                held.close()
            return made
        try:
            frames = frames_of(way, folder, before, published)
            if held is not None and held.version + 1 == published.version:
                held.apply(frames, self._run.layout(published.manifest.layout_hash), published)
            for _ in frames:
                pass
        finally:
            shutil.rmtree(folder)
        return held

    @contextmanager
    def _noting(self, version: int, what: str) -> Iterator[None]:
        try:
            yield
        except (StoreUnavailable, StoreRefused, ConfigError):  # of this machine, or of the store
            raise
        except DeltaSyncError as error:
            if version < min(self._run.versions(), default=0):
                return  # it was deleted meanwhile
            self._result.faults.append(Fault(version, what, f"{type(error).__name__}: {error}"))


class _Held:
    """A version as a checkpoint that is changed from one version to the next.

    Raises ObjectDamaged, DigestMismatch if it is not the version.
    """

    def __init__(self, folder: Path, published: Published) -> None:
        self._folder, self.version = folder, published.version
        self._checkpoint = checkpoint_of(folder, writable=True)
        ledger = measure_digests(self._checkpoint)
        found = ledger.by_parameter().tolist()
        self._digests = {spec.name: int(one) for spec, one in zip(ledger.specs, found, strict=True)}
        self._check(published)

    def apply(
        self, frames: Iterable[Frame], specs: Sequence[ParameterSpec], published: Published
    ) -> None:
        """Go on to the next version. Raises DigestMismatch, WireError, SyncError."""
        for number, flat in apply_delta(self._checkpoint, specs, frames).items():
            ledger = DigestLedger(whole([specs[number]]), chunk_numel=CHUNK_NUMEL)
            ledger.measure(0, flat.read)
            self._digests[specs[number].name] = ledger.total
        self._check(published)
        self.version = published.version

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check(self, published: Published) -> None:
        total = digest_text(sum(self._digests.values()) & MASK)
        if total != published.manifest.digest:
            raise DigestMismatch(
                f"it makes weights of digest {total}, the manifest says {published.manifest.digest}"
            )
