"""Versions of a store as checkpoints: fetched whole, or made of a checkpoint that is there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deltasync.delta.digests import digest_text
from deltasync.errors import DigestMismatch, VersionMissing
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.comparing import Advance, measure_digests
from deltasync.files.output import appearing, flush_to_disk, refuse_existing
from deltasync.files.patch_file import apply_frames, copy_checkpoint
from deltasync.store.catalogue import Published, Run
from deltasync.store.fetched import (
    Fetched,
    FetchedRoute,
    Progress,
    checkpoint_of,
    frames_of,
    take_cheapest,
)
from deltasync.store.objects import StoreOptions
from deltasync.store.routes import Route, find_route

Phase = Callable[[str, int], Advance]
"""Called with the name of a phase and its bytes; returns what to call with its progress."""


def no_phase(_: str, __: int) -> Advance:
    """Report nothing."""
    return lambda num_bytes: None


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenVersion:
    """A checkpoint that was made of a store.

    Attributes:
        run, version: Which version of which run.
        digest: The state digest of the version, and of the files.
        fetched_bytes: What came from the store.
        num_bytes, num_tensors: Of the checkpoint.
        ways: The kinds of what was fetched, in order.
    """

    run: str
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
    run: str | None = None,
    base: Checkpoint | None = None,
    options: StoreOptions | None = None,
    phase: Phase = no_phase,
) -> WrittenVersion:
    """Write a version as a safetensors checkpoint, bit for bit what the trainer had.

    What was written is read again, and has the digest of the version before it gets its name. A
    `base` that is itself a version of the run saves bytes: its files and their sharding are kept.

    Args:
        url: The store, or a run in it.
        out: The new folder (or file, if `base` is one). It appears as a whole or not at all.
        to: The version; None for the newest one.
        run: The run below `url`; needed if there are several.
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
    found = Run.open(url, run, options)
    target = found.newest() if to is None else found.require(to)
    if target is None:
        raise VersionMissing(f"{url}: run {found.name} has no version yet")
    digest = None
    if base is not None:
        digest = measure_digests(base, advance=phase("reading", base.num_bytes)).total
    with appearing(path) as made:
        return _Writer(found, target, base, digest, made, phase).write()


class _Writer:
    """Makes one checkpoint."""

    def __init__(
        self,
        run: Run,
        target: Published,
        base: Checkpoint | None,
        digest: int | None,
        made: Path,
        phase: Phase,
    ) -> None:
        self._run, self._target, self._made, self._phase = run, target, made, phase
        self._base, self._digest = base, digest
        self._ways: tuple[str, ...] = ()
        self._progress = Progress()

    def write(self) -> WrittenVersion:
        objects = Fetched(self._run.objects, self._made.parent)
        try:
            if not take_cheapest(
                self._route, objects, self._progress, self._take, failed=self._undo
            ):
                self._check(self._copied())
        finally:
            objects.close()
        written = Checkpoint(self._made)
        return WrittenVersion(
            run=self._run.name,
            version=self._target.version,
            digest=int(self._target.manifest.digest, 16),
            fetched_bytes=self._progress.fetched_bytes,
            num_bytes=written.num_bytes,
            num_tensors=len(written.specs),
            ways=self._ways,
        )

    def _holds(self, published: Published) -> bool:
        return self._digest == int(published.manifest.digest, 16)

    def _route(self, refused: set[str]) -> Route:
        oldest = self._target.version if self._digest is None else 0
        route = find_route(self._run, self._target, self._holds, oldest=oldest, refused=refused)
        if route.steps:
            self._progress.advanced = self._phase("fetching", route.num_bytes)
        return route

    def _copied(self) -> Checkpoint:
        assert self._base is not None
        copy_checkpoint(self._base.path, self._made)
        return Checkpoint(self._made, writable=True)

    def _take(self, fetched: FetchedRoute) -> None:
        specs = self._run.layout(self._target.manifest.layout_hash)
        written = None if fetched.route.base is None else self._copied()
        for step, folder in fetched.folders():
            if step.base is None:
                checkpoint_of(folder)
                folder.rename(self._made)
                written = Checkpoint(self._made, writable=True)
            else:
                assert written is not None
                apply_frames(written, specs, frames_of(step.way, folder, step.base, step.to))
        assert written is not None
        written.flush()
        self._check(written)
        self._ways = tuple(step.way.kind for step in fetched.route.steps)

    def _check(self, written: Checkpoint) -> None:
        advance = self._phase("verifying", written.num_bytes)
        check_version(written, self._target, advance=advance)
        for file in written.files:
            flush_to_disk(file)

    def _undo(self) -> None:
        if self._made.is_dir():
            shutil.rmtree(self._made)
        else:
            self._made.unlink(missing_ok=True)


def check_version(
    written: Checkpoint, published: Published, *, advance: Advance = lambda num_bytes: None
) -> None:
    """Read all of a checkpoint. Raises DigestMismatch unless it has the digest of the version."""
    found = digest_text(measure_digests(written, advance=advance).total)
    if found != published.manifest.digest:
        raise DigestMismatch(
            f"what came for v{published.version} has the digest {found}, its manifest says "
            f"{published.manifest.digest}; deltasync verify says more"
        )
