"""Whether a store has what its manifests say, object by object and version by version."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deltasync.errors import ConfigError, DeltaSyncError, StoreRefused, StoreUnavailable
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.comparing import Phase, no_phase
from deltasync.files.patch_file import apply_frames
from deltasync.store.catalogue import Published, Run
from deltasync.store.checkpoints import check_version
from deltasync.store.fetched import Fetched, checkpoint_of, frames_of
from deltasync.store.manifest import Way
from deltasync.store.objects import StoreOptions
from deltasync.store.routes import Step


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
        versions: Number of its manifests.
        proved: Versions to which an undamaged way leads, from an anchor of the run.
        num_bytes: Read of objects.
        faults: All that is wrong, in order of versions.
    """

    versions: int
    proved: list[int] = field(default_factory=list)
    num_bytes: int = 0
    faults: list[Fault] = field(default_factory=list)


def verify_run(
    url: str | Path,
    *,
    options: StoreOptions | None = None,
    phase: Phase = no_phase,
) -> Verified:
    """Read every manifest and every object of a run, and put each version together.

    Takes space in the system's temporary folder for the largest version twice. What `gc` deletes
    meanwhile is no fault.

    Args:
        url: The store.
        options: How the store is reached. With a key, every manifest must be signed with it.
        phase: Called to report progress, in versions.

    Raises:
        VersionMissing: There is no version.
        StoreError: The store cannot be read.
        ConfigError: The disk is full, or cannot be written.
    """
    found = Run.open(url, options)
    versions = found.versions()
    advance, result = phase("verifying", len(versions)), Verified(len(versions))
    objects = Fetched(found.objects)
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
        self._checkpoint: Checkpoint | None = None  # what it has, made in the folder of `_anchor`
        self._anchor: Way | None = None

    def look(self, version: int) -> None:
        """Check the next version."""
        before, base = self._before, self._checkpoint
        self._before = self._checkpoint = None
        with self._noting(version, "manifest"):
            self._before = published = self._run.require(version)
            if before is not None:
                before.check_child(published)
            specs = self._run.layout(published.manifest.layout_hash)
            for way in self._run.ways(published):
                with self._noting(version, way.kind):
                    folder = self._objects.fetch(way)
                    self._result.num_bytes += way.num_bytes
                    if way.kind == "anchor":
                        self._begin_at(published, way, folder)
                        continue
                    frames = frames_of(Step(before, published, way), folder)
                    if base is None:  # what the frames make of it is not known
                        deque(frames, maxlen=0)
                        continue
                    apply_frames(base, specs, frames)
                    check_version(base, published)
                    self._checkpoint = base
        if self._checkpoint is not None:
            self._result.proved.append(version)
        self._objects.keep([] if self._anchor is None else [self._anchor])

    def _begin_at(self, published: Published, anchor: Way, folder: Path) -> None:
        made = checkpoint_of(folder, writable=True)
        check_version(made, published)
        self._checkpoint, self._anchor = made, anchor

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
