"""Objects on this machine: fetched in parts, checked by length and SHA-256 before they are read."""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from deltasync.delta.bits import Live
from deltasync.errors import (
    ConfigError,
    ObjectDamaged,
    ProtocolViolation,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    SyncError,
    TargetMoved,
    TransportTimeout,
    WireError,
)
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.frame_file import FrameFile
from deltasync.files.one_way import one_way_frames
from deltasync.store.manifest import StoredFile, Way
from deltasync.store.merged import Merged, of_anchor, plan_of_anchor, plan_of_deltas
from deltasync.store.objects import ObjectFacts, Objects, started
from deltasync.store.routes import Route, Step
from deltasync.store.scratch import ScratchFolder
from deltasync.transports.base import Frame
from deltasync.wire.frame import decode
from deltasync.wire.messages import ParameterSpec

logger = logging.getLogger(__name__)
Advance = Callable[[int], None]

_FIRST_BYTES, _LEAST_BYTES = 1 << 18, 1 << 16  # of a part, while the link is not known
_SPARED = 10  # an altered object is not fetched again for so many times as long as that took
_SOON_S, _LATE_S, _LOOK_S = 0.5, 2.0, 0.1  # how long a part should take, and between two looks


@dataclass(slots=True)
class Progress:
    """How far a fetch has come; another thread may read it.

    Attributes:
        version: The version that is fetched; None before the first.
        fetched_bytes, total_bytes: Of its way; what an earlier attempt has left counts as fetched.
        bytes_per_s: How fast they have come, without what was left.
        advanced: Called with the bytes that have come.
    """

    version: int | None = None
    fetched_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0
    advanced: Advance = lambda num_bytes: None
    _began_s: float = 0.0
    _new_bytes: int = 0

    def begin(self, version: int, total_bytes: int) -> None:
        """Count from 0."""
        self.version, self.fetched_bytes, self.total_bytes = version, 0, total_bytes
        self.bytes_per_s, self._began_s, self._new_bytes = 0.0, time.monotonic(), 0

    def advance(self, num_bytes: int, *, is_new: bool = True) -> None:
        """So many bytes have come, or were kept of an earlier attempt."""
        self.fetched_bytes += num_bytes
        self._new_bytes += num_bytes if is_new else 0
        self.bytes_per_s = self._new_bytes / max(time.monotonic() - self._began_s, 1e-6)
        self.advanced(num_bytes)

    def __str__(self) -> str:
        came = f"{self.fetched_bytes} of {self.total_bytes} bytes"
        return f"v{self.version}: {came}, {self.bytes_per_s / 1e6:.1f} MB/s"


class Fetched:
    """A folder of fetched objects. What has come of them is kept until `keep` or `close`.

    Args:
        objects: The objects of a run.
        folder: Where the folder is made; None for the system's folder for temporary files.
        label: As of `ScratchFolder`: then `close` leaves what is there to the next one.
        check: Called often during `fetch`; what it raises ends the call.

    Raises:
        ConfigError: It cannot be made.
    """

    def __init__(
        self,
        objects: Objects,
        folder: str | Path | None = None,
        *,
        label: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._objects, self._check = objects, check
        try:
            self._scratch = ScratchFolder(folder, label)
        except OSError as error:
            where = folder or tempfile.gettempdir()
            raise ConfigError(f"{where}: {error.strerror or error}") from error
        self.path = self._scratch.path
        self._step = _FIRST_BYTES
        self._facts: ObjectFacts | None = None  # of what is fetched
        self._altered = dict[ObjectFacts | None, float]()  # not fetched again before that time

    def close(self) -> None:
        """Remove everything, or leave it to the next one with the label. Idempotent."""
        self._scratch.close()

    def keep(self, ways: Iterable[Way] = ()) -> None:
        """Remove all but what has come of these."""
        names = {_name_of(way) for way in ways}
        for folder in self.path.glob("*"):
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)

    def fetch(self, way: Way, progress: Progress | None = None) -> Path:
        """Fetch the files of a way, or find them here. Returns their folder.

        If it raises, what has come stays, and the next call goes on from there.

        Args:
            way: What to fetch.
            progress: Counts what comes.

        Raises:
            ObjectDamaged: An object is missing, or is not what the manifest names.
            StoreError: The store did not answer.
            ConfigError: The disk is full, or cannot be written.
        """
        folder, progress = self.path / _name_of(way), progress or Progress()
        try:
            folder.mkdir(exist_ok=True)
            for file in way.files:
                made = folder / Path(file.key).name
                while not self._is_fetched(file, made, progress):
                    logger.info("%s is fetched again: what was kept of it is damaged", file.key)
        except (StoreError, OSError) as error:
            if isinstance(error, TransportTimeout | ConnectionError):  # not of store or disk
                raise
            self._step = _LEAST_BYTES  # who knows what the link brings now, or the disk takes
            if isinstance(error, StoreError):
                raise
            raise ConfigError(
                f"{self.path}: {error.strerror or error}: free some space, or name another folder "
                "for what is fetched"
            ) from error
        return folder

    def _is_fetched(self, file: StoredFile, made: Path, progress: Progress) -> bool:
        """Fetch what is missing of a file, and check all. False if what there was is of no use."""
        began = time.monotonic()
        with made.open("a+b") as out:
            out.seek(0)
            sha256 = hashlib.file_digest(out, "sha256")
            kept_bytes = out.tell()
            if kept_bytes:
                progress.advance(kept_bytes, is_new=False)
            for part in self._parts(file, kept_bytes) if kept_bytes < file.bytes else ():
                out.write(part)
                sha256.update(part)
                progress.advance(len(part))
                self._check()
        if sha256.hexdigest() == file.sha256:
            return True
        made.unlink()
        if not kept_bytes:
            self._altered[self._facts] = (now := time.monotonic()) + _SPARED * (now - began)
            raise ObjectDamaged(f"{file.key} was altered: its SHA-256 is another")
        progress.advance(-max(kept_bytes, file.bytes), is_new=False)
        return False

    def _parts(self, file: StoredFile, start: int) -> Iterator[memoryview]:
        """The bytes of an object from `start` on, in order, a few parts in flight."""
        facts = self._objects.head(file.key)
        if facts is None or facts.num_bytes != file.bytes:
            missing = "is missing: somebody, perhaps gc, deleted it"
            what = missing if facts is None else f"has {facts.num_bytes} bytes"
            raise ObjectDamaged(f"{file.key} {what}; {file.bytes} bytes are expected")
        if self._altered.get(facts, 0.0) > time.monotonic():
            raise ObjectDamaged(f"{file.key} was altered, and has not been written since")
        self._facts = facts
        flying, least_s = deque[Future[tuple[memoryview, float]]](), math.inf
        while flying or start < file.bytes:
            while start < file.bytes and len(flying) < self._objects.options.parallel:
                stop = min(start + self._step, file.bytes)
                flying.append(started(self._timed_range, file.key, start, stop))
                start = stop
            while not flying[0].done():
                self._check()
                wait((flying[0],), _LOOK_S)
            part, took_s = flying.popleft().result()
            # Parts take a while, and not so long that much is lost with them. What the store takes
            # for any part, however small, says nothing of the link.
            least_s = min(least_s, took_s)
            if took_s < _SOON_S + 1.5 * least_s:
                self._step = min(2 * self._step, self._objects.options.part_bytes)
            elif took_s > _LATE_S + 2 * least_s:
                self._step = max(self._step // 2, _LEAST_BYTES)
            yield part

    def _timed_range(self, key: str, start: int, stop: int) -> tuple[memoryview, float]:
        began = time.monotonic()
        return self._objects.get_range(key, start, stop), time.monotonic() - began


def frames_along(
    route: Route,
    folders: Sequence[Path],
    specs: Sequence[ParameterSpec],
    flats: Mapping[int, Live],
) -> Iterator[Frame]:
    """A route as one sync. Several deltas, or an anchor and deltas, are merged before.

    Args:
        route: At least one step.
        folders: What was fetched, by step.
        specs: The layout of the version.
        flats: The weights by parameter, of which others are left out. Those of a version that the
            route begins at decode deltas. Not owned.

    Raises:
        WireError, SyncError, ObjectDamaged: An object is not what the manifests say.
    """
    target = route.target.manifest
    if route.base is not None and len(route.steps) == 1:
        return frames_of(route.steps[0], folders[0])
    merged, digest = Merged(flats, specs), int(target.digest, 16)
    for step, folder in zip(route.steps, folders, strict=True):
        if step.base is None:
            anchor = checkpoint_of(folder)
            merged = Merged(of_anchor(anchor, specs, flats.keys()), specs)
        else:
            merged.add(frames_of(step, folder))
    if route.base is None:
        plan = plan_of_anchor(merged, anchor, digest=digest)
    else:
        plan = plan_of_deltas(merged, base_version=route.base.version, digest=digest)
    return one_way_frames(
        plan,
        specs,
        stream_id=target.run,
        version=target.version,
        digest=int((route.base or route.target).manifest.digest, 16),
    )


def take_cheapest(
    find: Callable[[set[str]], Route],
    objects: Fetched,
    progress: Progress,
    take: Callable[[Route, list[Path]], None],
    *,
    failed: Callable[[], None],
) -> Route:
    """Fetch a route and take it; where an object turns out to be wrong, another route.

    Args:
        find: Returns the cheapest route without objects of these keys. Raises StoreError.
        objects: Where they are kept.
        progress: Counts what comes.
        take: Uses what was fetched: the folder of each step.
        failed: Called when a route was of no use, before another one is found.

    Returns:
        What was taken, of no steps if nothing had to be fetched.

    Raises:
        StoreError, WireError, SyncError: What was wrong with the last route there is.
    """
    refused = set[str]()
    route = find(refused)
    while route.steps:
        blamed = route.keys
        progress.begin(route.target.version, route.num_bytes)
        objects.keep(step.way for step in route.steps)
        try:
            folders = list[Path]()
            for step in route.steps:
                blamed = step.way.keys
                folders.append(objects.fetch(step.way, progress))
            blamed = route.keys
            take(route, folders)
            return route
        except (StoreError, WireError, SyncError) as error:
            if isinstance(error, StoreUnavailable | StoreRefused | TargetMoved):
                raise
            failed()
            refused |= blamed
            try:
                route = find(refused)
            except StoreError:
                raise error from None
            logger.warning("v%d by another way: %s", route.target.version, error)
    return route


def checkpoint_of(folder: Path, *, writable: bool = False) -> Checkpoint:
    """An anchor. Raises ObjectDamaged if it is no checkpoint."""
    try:
        return Checkpoint(folder, writable=writable)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):
            raise
        raise ObjectDamaged(f"the anchor is no checkpoint: {error}") from error


def frames_of(step: Step, folder: Path) -> Iterator[Frame]:
    """The frames of a delta. Raises ProtocolViolation if they contradict the manifests, rule S5.

    Args:
        step: The delta.
        folder: Where its file is.
    """
    (file,), base, to = step.way.files, step.base, step.to
    run, after, before = to.manifest.run, to.manifest, to.version - 1
    expected: dict[str, dict[str, object]] = {
        "layout": {"stream_id": run, "version": before, "hash": after.layout_hash},
        "begin": {"stream_id": run, "base_version": before, "version": after.version},
        "prepare": {"version": after.version, "digest": after.digest},
    }
    if base is not None:
        expected["layout"]["digest"] = base.manifest.digest
    for number, frame in enumerate(FrameFile(folder / Path(file.key).name)):
        message, _ = decode(frame.header)
        if not number and message.kind != "layout":
            raise ProtocolViolation(f"{file.key}: begins with {message.kind}, not with a layout")
        for name, value in expected.get(message.kind, {}).items():
            if (there := getattr(message, name)) != value:
                raise ProtocolViolation(
                    f"{file.key}: its {message.kind} says {name} {there!r}, where the manifests "
                    f"have {value!r}"
                )
        yield frame


def _name_of(way: Way) -> str:
    """The part of its keys that is random, which no other way has."""
    return Path(way.files[0].key).parts[1]
