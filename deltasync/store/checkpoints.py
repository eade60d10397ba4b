"""Versions of a store as checkpoints: fetched whole, or made of a checkpoint that is there."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from deltasync.errors import VersionMissing
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.comparing import Phase, check_digest, measure_digests, no_phase
from deltasync.files.output import appearing, flush_to_disk, refuse_existing
from deltasync.files.patch_file import apply_frames, copy_checkpoint
from deltasync.store.catalogue import Published, Run
from deltasync.store.fetched import (
    Fetched,
    Progress,
    checkpoint_of,
    frames_of,
    take_cheapest,
)
from deltasync.store.objects import StoreOptions
from deltasync.store.routes import Route, find_route


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenVersion:
    """A checkpoint that was made of a store.

    Attributes:
        version: Which one.
        digest: The state digest of the version, and of the files.
        fetched_bytes: What came from the store.
        num_bytes, num_tensors: Of the checkpoint.
        ways: The kinds of what was fetched, in order.
    """

    version: int
    digest: int
    fetched_bytes: int
    num_bytes: int
    num_tensors: int
    ways: tuple[str, ...]


def fetch_checkpoint(
    url: str | Path,
    out: str | Path,
    *,
    to: int | None = None,
    base: Checkpoint | None = None,
    options: StoreOptions | None = None,
    phase: Phase = no_phase,
) -> WrittenVersion:
    """Write a version as a safetensors checkpoint, bit for bit what the trainer had.

    What was written is read again, and has the digest of the version before it gets its name. A
    `base` that is itself a version of the run saves bytes: its files and their sharding are kept.

    Args:
        url: The store.
        out: The new folder (or file, if `base` is one). It appears as a whole or not at all.
        to: The version; None for the newest one.
        base: A checkpoint that is there already; only read.
        options: How the store is reached.
        phase: Called to report progress.

    Raises:
        VersionMissing: The store has no such version, or nothing leads to it.
        StoreError: The store cannot be used, or an object is damaged and there is no other way.
        DigestMismatch: What came is not what the manifest says, and there is no other way.
        ConfigError: `out` exists or cannot be written, or the disk is full.
    """
    path = Path(out)
    refuse_existing(path)
    found = Run.open(url, options)
    target = found.newest() if to is None else found.require(to)
    if target is None:
        raise VersionMissing(f"{url}: all versions were deleted just now: try again")
    digest = None
    if base is not None:
        digest = measure_digests(base, advance=phase("reading", base.num_bytes)).total
    with appearing(path) as made:
        return _Writer(found, target, base, digest, made, phase).write()


@dataclass(slots=True)
class _Writer:
    """Makes one checkpoint."""

    run: Run
    target: Published
    base: Checkpoint | None
    digest: int | None  # of the base
    made: Path
    phase: Phase
    progress: Progress = field(default_factory=Progress)

    def write(self) -> WrittenVersion:
        objects = Fetched(self.run.objects, self.made.parent)
        try:
            take, failed = self._take, self._undo
            route = take_cheapest(self._route, objects, self.progress, take, failed=failed)
            if not route.steps:
                self._check(self._copied())
        finally:
            objects.close()
        written = Checkpoint(self.made)
        return WrittenVersion(
            version=self.target.version,
            digest=int(self.target.manifest.digest, 16),
            fetched_bytes=self.progress.fetched_bytes,
            num_bytes=written.num_bytes,
            num_tensors=len(written.specs),
            ways=tuple(step.way.kind for step in route.steps),
        )

    def _holds(self, published: Published) -> bool:
        return self.digest == int(published.manifest.digest, 16)

    def _route(self, refused: set[str]) -> Route:
        oldest = self.target.version if self.digest is None else 0
        route = find_route(self.run, self.target, self._holds, oldest=oldest, refused=refused)
        if route.steps:
            self.progress.advanced = self.phase("fetching", route.num_bytes)
        return route

    def _copied(self) -> Checkpoint:
        assert self.base is not None
        copy_checkpoint(self.base.path, self.made)
        return Checkpoint(self.made, writable=True)

    def _take(self, route: Route, folders: list[Path]) -> None:
        specs = self.run.layout(self.target.manifest.layout_hash)
        written = None if route.base is None else self._copied()
        for step, folder in zip(route.steps, folders, strict=True):
            if step.base is None:
                checkpoint_of(folder)
                folder.rename(self.made)
                written = Checkpoint(self.made, writable=True)
            else:
                assert written is not None
                apply_frames(written, specs, frames_of(step, folder))
        assert written is not None
        written.flush()
        self._check(written)

    def _check(self, written: Checkpoint) -> None:
        check_version(written, self.target, phase=self.phase)
        for file in written.files:
            flush_to_disk(file)

    def _undo(self) -> None:
        if self.made.is_dir():
            shutil.rmtree(self.made)
        else:
            self.made.unlink(missing_ok=True)


def check_version(written: Checkpoint, published: Published, *, phase: Phase = no_phase) -> None:
    """Read all of a checkpoint. Raises DigestMismatch unless it has the digest of the version."""
    fault = f"not v{published.version}, and deltasync verify says more"
    check_digest(written, int(published.manifest.digest, 16), fault, phase=phase)
