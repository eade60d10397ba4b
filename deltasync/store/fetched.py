"""Objects on this machine: fetched in parts, checked by length and SHA-256 before they are read."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from deltasync.delta.bits import Flat, Live
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
from deltasync.store.folding import FoldedDeltas, named_in
from deltasync.store.manifest import StoredFile, Way, sha256_of
from deltasync.store.objects import Objects, started
from deltasync.store.routes import Route, Step
from deltasync.store.scratch import ScratchFolder
from deltasync.transports.base import Frame
from deltasync.wire.frame import decode
from deltasync.wire.messages import Layout, ParameterSpec

logger = logging.getLogger(__name__)
Advance = Callable[[int], None]

_FIRST_BYTES, _LEAST_BYTES = 1 << 18, 1 << 16  # of a part, while the link is not known
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
    _began: float = 0.0
    _kept_bytes: int = 0

    def begin(self, version: int, total_bytes: int) -> None:
        """Count from 0."""
        self.version, self.fetched_bytes, self.total_bytes = version, 0, total_bytes
        self.bytes_per_s, self._began, self._kept_bytes = 0.0, time.monotonic(), 0

    def advance(self, num_bytes: int, *, kept_bytes: int = 0) -> None:
        """So many bytes have come; and so many more were kept of an earlier attempt."""
        self.fetched_bytes += num_bytes + kept_bytes
        self._kept_bytes += kept_bytes
        took_s = max(time.monotonic() - self._began, 1e-6)
        self.bytes_per_s = (self.fetched_bytes - self._kept_bytes) / took_s
        self.advanced(num_bytes + kept_bytes)

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
            progress: Told of what comes.

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
        with made.open("a+b") as out:
            out.seek(0)
            sha256 = hashlib.file_digest(out, "sha256")
            kept_bytes = out.tell()
            if kept_bytes:
                progress.advance(0, kept_bytes=kept_bytes)
            for part in self._parts(file, kept_bytes) if kept_bytes < file.bytes else ():
                out.write(part)
                sha256.update(part)
                progress.advance(len(part))
                self._check()
        if sha256.hexdigest() == file.sha256:
            return True
        made.unlink()
        if not kept_bytes:
            raise ObjectDamaged(f"{file.key} was altered: its SHA-256 is another")
        progress.advance(0, kept_bytes=-max(kept_bytes, file.bytes))
        return False

    def _parts(self, file: StoredFile, start: int) -> Iterator[memoryview]:
        """The bytes of an object from `start` on, in order, a few parts in flight."""
        facts = self._objects.head(file.key)
        if facts is None or facts.num_bytes != file.bytes:
            missing = "is missing: somebody, perhaps gc, deleted it"
            what = missing if facts is None else f"has {facts.num_bytes} bytes"
            raise ObjectDamaged(f"{file.key} {what}; {file.bytes} bytes are expected")
        flying = deque[Future[tuple[memoryview, float]]]()
        while flying or start < file.bytes:
            while start < file.bytes and len(flying) < self._objects.options.parallel:
                stop = min(start + self._step, file.bytes)
                flying.append(started(self._timed_range, file.key, start, stop))
                start = stop
            while not flying[0].done():
                self._check()
                wait((flying[0],), _LOOK_S)
            part, took_s = flying.popleft().result()
            # Parts take a while, and not so long that much is lost with them.
            if took_s < _SOON_S:
                self._step = min(2 * self._step, self._objects.options.part_bytes)
            elif took_s > _LATE_S:
                self._step = max(self._step // 2, _LEAST_BYTES)
            yield part

    def _timed_range(self, key: str, start: int, stop: int) -> tuple[memoryview, float]:
        began = time.monotonic()
        return self._objects.get_range(key, start, stop), time.monotonic() - began


class FetchedRoute:
    """A route whose objects are fetched.

    Args:
        route: At least one step.
        objects: Where they are kept.
        progress: Told of what comes.
        specs: The layout of the version.
        flats: The weights of the version that the route begins at, by parameter, if it has one:
            deltas are decoded by them. Not owned.

    Attributes:
        route: The same.
        objects: The same.
        later: The deltas of the route, without an anchor, if they are not a single one; else None.
        blamed: If `load` has failed: the keys of the objects that it is about.
    """

    def __init__(
        self,
        route: Route,
        objects: Fetched,
        progress: Progress,
        *,
        specs: Sequence[ParameterSpec],
        flats: Mapping[int, Live],
    ) -> None:
        self.route, self.objects, self._progress = route, objects, progress
        self._specs, self._flats = specs, flats
        self._folders: list[Path] = []
        self.later: FoldedDeltas | None = None
        self.blamed: frozenset[str] = frozenset()

    def load(self) -> None:
        """Fetch all objects, check each, and merge deltas.

        Raises:
            StoreError, WireError, SyncError: An object is missing or wrong, see `blamed`; or the
                store did not answer.
            ConfigError: The disk is full, or cannot be written.
        """
        self._progress.begin(self.route.target.version, self.route.num_bytes)
        self.objects.keep(step.way for step in self.route.steps)
        for step in self.route.steps:
            self.blamed = step.keys
            self._folders.append(self.objects.fetch(step.way, self._progress))
        later = list(zip(self.route.steps, self._folders, strict=True))
        if self.route.base is None:
            del later[0]
        elif len(later) == 1:
            later = []
        if later:
            self.later = FoldedDeltas(self._base())
        for step, folder in later:
            self.blamed = step.keys
            assert self.later is not None
            self.later.take(_frames_of(step, folder))
            self._check_named(self.later, step)
        # From here on, one object cannot be told from another.
        self.blamed = frozenset().union(*(step.keys for step in self.route.steps))

    def _base(self) -> Mapping[int, Live]:
        """The weights that the first delta applies to."""
        if self.route.base is not None:
            return self._flats
        return flats_of(self.anchor(), self._specs)

    def frames(self) -> FrameFile:
        """Those of the first object, which is a delta."""
        return _frames_in(self.route.steps[0], self._folders[0])

    def anchor(self, *, writable: bool = False) -> Checkpoint:
        """The first object, which is an anchor. Raises ObjectDamaged if it is no checkpoint."""
        try:
            return Checkpoint(self._folders[0], writable=writable)
        except ConfigError as error:
            raise ObjectDamaged(f"the anchor is no checkpoint: {error}") from error

    def move_anchor(self, path: Path) -> None:
        """Make the anchor's files a folder of that name. It can be done once."""
        self._folders[0].rename(path)

    def deltas(self) -> FoldedDeltas | None:
        """All deltas of the route, after the anchor if there is one; None if there are none."""
        if self.route.base is None or self.later is not None:
            return self.later
        single = FoldedDeltas(self._flats)
        single.take(_frames_of(self.route.steps[0], self._folders[0]))
        self._check_named(single, self.route.steps[0])
        return single

    def _check_named(self, deltas: FoldedDeltas, step: Step) -> None:
        """Rule S5: whether deltas up to a step say of themselves what the manifests say."""
        start, end = (self.route.base or self.route.steps[0].to).manifest, step.to.manifest
        digests = int(start.digest, 16), int(end.digest, 16)
        found = deltas.stream_id, deltas.base_version, deltas.version, deltas.specs
        named = end.run, start.version, end.version, tuple(self._specs)
        if found != named or (deltas.base_digest, deltas.digest) != digests:
            raise ProtocolViolation(
                f"frames up to v{deltas.version} of {deltas.stream_id!r} have other versions, "
                f"digests or parameters than the manifests up to v{end.version} of {end.run!r}"
            )


def take_cheapest(
    find: Callable[[set[str]], Route],
    take: Callable[[FetchedRoute], None],
    *,
    fetched_of: Callable[[Route], FetchedRoute],
    failed: Callable[[], None] = lambda: None,
) -> bool:
    """Fetch a route and take it; where an object turns out to be wrong, another route.

    Args:
        find: Returns the cheapest route without objects of these keys. Raises StoreError.
        take: Uses what was fetched.
        fetched_of: Makes what fetches a route.
        failed: Called when a route was of no use, before another one is found.

    Returns:
        False if nothing had to be fetched.

    Raises:
        StoreError, WireError, SyncError: What was wrong with the last route there is.
    """
    refused = set[str]()
    route = find(refused)
    while route.steps:
        fetched = fetched_of(route)
        try:
            fetched.load()
            take(fetched)
            return True
        except (StoreError, WireError, SyncError) as error:
            if isinstance(error, StoreUnavailable | StoreRefused | TargetMoved):
                raise
            failed()
            refused |= fetched.blamed
            try:
                route = find(refused)
            except StoreError:
                raise error from None
            logger.warning("v%d by another way: %s", route.target.version, error)
    return False


def flats_of(checkpoint: Checkpoint, specs: Sequence[ParameterSpec]) -> dict[int, Live]:
    """The tensors of a checkpoint by their number in a layout; those that it lacks are left out."""
    names = {n: name for n, spec in enumerate(specs) if (name := named_in(checkpoint, spec))}
    return {number: Flat.of(checkpoint.tensor(name)) for number, name in names.items()}


def _name_of(way: Way) -> str:
    """A folder's name that no other way has, though its files may begin with the same content."""
    return sha256_of("\n".join(f"{file.key} {file.sha256}" for file in way.files).encode())


def _frames_of(step: Step, folder: Path) -> Iterator[Frame]:
    """The frames of a delta, whose rows are then decoded by weights of the manifest's layout.

    Raises ProtocolViolation if they are of another one.
    """
    for number, frame in enumerate(_frames_in(step, folder)):
        if not number:
            message, _ = decode(frame.header)
            if not isinstance(message, Layout) or message.hash != step.to.manifest.layout_hash:
                raise ProtocolViolation(
                    f"{step.way.files[0].key}: its frames have other parameters than the manifest"
                )
        yield frame


def _frames_in(step: Step, folder: Path) -> FrameFile:
    (file,) = step.way.files
    return FrameFile(folder / Path(file.key).name)
