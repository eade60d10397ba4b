"""Whether a store has what its manifests say, object by object and version by version."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deltasync.delta.bits import Flat
from deltasync.delta.digests import DigestLedger, digest_text
from deltasync.delta.patch import CHUNK_NUMEL
from deltasync.delta.shard import whole
from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    DigestMismatch,
    ManifestInvalid,
    ObjectDamaged,
    StoreRefused,
    StoreUnavailable,
)
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.comparing import measure_digests
from deltasync.files.frame_file import FrameFile
from deltasync.store.catalogue import Published, Run
from deltasync.store.checkpoints import Phase, no_phase
from deltasync.store.fetched import Fetched, flats_of
from deltasync.store.folding import FoldedDeltas
from deltasync.store.manifest import Way
from deltasync.store.objects import StoreOptions
from deltasync.wire.digest import MASK
from deltasync.wire.frame import MAX_PAYLOAD_BYTES, decode
from deltasync.wire.messages import Begin, Layout, ParameterSpec, Sealed


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
        published: Published | None = None
        with self._noting(version, "manifest"):
            published = self._run.require(version)
            self._check_parent(published)
        if published is None:
            return
        with self._noting(version, "manifest"):
            self._run.layout(published.manifest.layout_hash)
            for way in self._run.ways(published):
                with self._noting(version, way.kind):
                    held = self._look_at(published, way, held)
        if held is not None and held.version == version:
            self._held = held
            self._result.proved.append(version)
        elif held is not None:
            held.close()

    def _check_parent(self, published: Published) -> None:
        before, self._before = self._before, published
        parent = published.manifest.parent
        if before is None or before.version + 1 != published.version:
            return
        if parent != before.as_parent:
            raise ManifestInvalid("does not name the version before as it is")

    def _look_at(self, published: Published, way: Way, held: _Held | None) -> _Held | None:
        """Fetch a way and check it. Returns a copy of the version if it leads there."""
        folder = self._objects.fetch(way)
        self._result.num_bytes += way.num_bytes
        if way.kind == "anchor":
            made = _Held(folder, published)
            if held is not None:
                held.close()
            return made
        (path,) = folder.iterdir()
        try:
            self._check_frames(published, way, path)
            if way.kind == "delta" and held is not None and held.version == way.base:
                held.apply(path, self._run.layout(published.manifest.layout_hash), published)
        finally:
            path.unlink()
        return held

    def _check_frames(self, published: Published, way: Way, path: Path) -> None:
        """Whether frames say of themselves what the manifest says of them."""
        manifest = published.manifest
        for frame in FrameFile(path):
            message, _ = decode(frame.header, max_payload_bytes=MAX_PAYLOAD_BYTES)
            facts: tuple[object, ...] | None = None
            match message:
                case Layout():
                    facts = message.stream_id, message.version, message.hash
                    said: tuple[object, ...] = manifest.run, way.base, manifest.layout_hash
                case Begin():
                    facts = message.base_version, message.version
                    said = way.base, manifest.version
                case Sealed():
                    facts, said = (message.digest,), (manifest.digest,)
            if facts is not None and facts != said:
                raise ObjectDamaged(f"its {message.kind} says {facts}, the manifest {said}")

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
        try:
            self._checkpoint = Checkpoint(folder, writable=True)
        except ConfigError as error:
            if isinstance(error.__cause__, OSError):
                raise
            raise ObjectDamaged(f"the anchor is no checkpoint: {error}") from error
        ledger = measure_digests(self._checkpoint)
        found = ledger.by_parameter().tolist()
        self._digests = {spec.name: int(one) for spec, one in zip(ledger.specs, found, strict=True)}
        self._check(published)

    def apply(self, path: Path, specs: Sequence[ParameterSpec], published: Published) -> None:
        """Go on to the next version. Raises DigestMismatch, WireError, SyncError."""
        delta = FoldedDeltas(flats_of(self._checkpoint, specs))
        delta.take(FrameFile(path))
        for number in delta.changed:
            spec = delta.specs[number]
            flat = Flat.of(self._checkpoint.tensor(spec.name))
            for run in delta.runs(number):
                assert run.bits is not None
                run.write(flat, run.bits)
            ledger = DigestLedger(whole([spec]), chunk_numel=CHUNK_NUMEL)
            ledger.measure(0, flat.read)
            self._digests[spec.name] = ledger.total
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
