"""An engine rank's end of a store: stages while the engine serves, commits in its pause."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from deltasync.delta.modes import plain_mode
from deltasync.delta.streams import own_stream
from deltasync.errors import (
    CallOrderError,
    DeltaSyncError,
    DirtyReceiver,
    ProtocolViolation,
    StoreUnavailable,
    TransportClosed,
    TransportTimeout,
    VersionMissing,
)
from deltasync.store.catalogue import Published, Run
from deltasync.store.fetched import Fetched, Progress, frames_along, take_cheapest
from deltasync.store.manifest import sha256_of
from deltasync.store.objects import Objects, StoreOptions
from deltasync.store.polling import Poll
from deltasync.store.routes import Route, find_route
from deltasync.store.staging import StoredSync, check_digests, is_version, join
from deltasync.sync.arguments import check_options, check_target
from deltasync.sync.options import ReceiverOptions
from deltasync.sync.protocol.links import check_seconds
from deltasync.sync.protocol.receiver_session import ReceiverSession, ReceiverState
from deltasync.sync.receiver_base import BaseReceiver
from deltasync.sync.staging_thread import Pause, StagingThread
from deltasync.sync.target.base import WeightTarget
from deltasync.wire import messages

logger = logging.getLogger(__name__)

_LOOK_BACK = 256  # versions among which that of weights is looked for by digest


class StoreReceiver(BaseReceiver):
    """Brings versions of a store into one engine rank.

    `fetch` does everything in the calling thread. It consists of `stage`, which fetches, checks and
    predicts while the engine serves, and `commit`, which writes in the engine's pause. A
    `StagingThread` takes it as it takes a `WeightReceiver`; `follow` makes one. After an error the
    old version is intact unless `is_dirty`; the next call continues from there.

    The fewest bytes are fetched that lead to the version: deltas, or an anchor and the deltas after
    it. A receiver begins at the version that its weights have by digest, if it is among the newest
    256 or newer than the last anchor. One that holds parameters in part (a rank of tensor
    parallelism) knows only versions that it has committed itself, and begins at an anchor
    otherwise.

    The ranks of an engine read by themselves. The engine chooses the version: it calls
    `stage(to=v)` on each rank, and `commit` when all have returned. If a rank fails in `commit`,
    the engine must not serve before each rank has fetched the same version.

    Args:
        target: The live weights.
        url: The store: a folder, or a URL such as "s3://bucket/prefix".
        options: Memory, scrub.
        store: How the store is reached, and the key that manifests are signed with.
        spool: Folder for what is fetched, until it is written: the next receiver of this run and
            rank goes on with it, in this process or another. None for the system's, where nothing
            is left.
        rank: This rank, of the engine's `world` ranks.
        half_written: Whether an earlier receiver of these weights ended with `is_half_written`.

    Attributes:
        name: In logs: store[rank/world].
        progress: How far the version that is being fetched has come; `advanced` is called with each
            part if it is set.
    """

    _cure, _heal = "fetch one", "fetch to heal"
    _refusal = "a version is being fetched; a StoreReceiver is for one thread"
    resumes = True

    def __init__(
        self,
        target: WeightTarget,
        url: str | Path,
        *,
        options: ReceiverOptions | None = None,
        store: StoreOptions | None = None,
        spool: str | Path | None = None,
        rank: int = 0,
        world: int = 1,
        half_written: bool = False,
    ) -> None:
        check_target(target)
        check_options(options, ReceiverOptions)
        check_options(store, StoreOptions)
        session = ReceiverSession("store", dirty=half_written, half_written=half_written)
        super().__init__(target, session, f"store[{rank}/{world}]", options)
        self._url, self._store_options = url, store
        self._run: Run | None = None
        self._spool_folder, self._world = spool, world
        self._label = None if spool is None else f"{rank}of{world}"
        self._objects: Fetched | None = None  # what was fetched, also by attempts that failed
        self.progress = Progress()
        self._layout_hash: str | None = None  # hash of the layout that the weights are bound to
        self._current: Published | None = None
        self._unfinished: Published | None = None  # of which something has come
        self._staged: StoredSync | None = None
        self._is_broken_off = False
        self._poll = Poll(self._check_wanted)

    def _recover(self) -> None:
        self.invalidate()

    def _forked(self) -> None:
        super()._forked()
        self._objects = self._staged = None  # the parent's

    def fetch(self, to: int | None = None, *, timeout_s: float = 600.0) -> int:
        """Bring a version into the weights. Returns the version held.

        Call it from the engine's thread: the engine must not serve meanwhile.

        Args:
            to: The version; None for the newest one. It may be older than the one held.
            timeout_s: For the version to be published. For its bytes to come, `StoreOptions` limits
                each request, and `break_off` all of them.

        Raises:
            VersionMissing: It was not published in time, or no complete way leads to it.
            StoreError: The store cannot be used. The old version is held.
            TransportTimeout: Another thread called `break_off`. The old version is held.
            DeltaSyncError: As of `commit`.
        """
        with plain_mode(), self._caller.call(), self._record.watched(pauses=True):
            self._weights.still_since = time.monotonic()
            try:
                if self._stage(to, timeout_s, wants_newer=False):
                    return self._commit()
            finally:
                self._weights.still_since = math.inf
        assert self._session.version is not None
        return self._session.version

    def stage(self, to: int | None = None, *, timeout_s: float = 60.0) -> bool:
        """Fetch a version and stage it; the engine may serve meanwhile.

        Returns True if `commit` must be called next, in the engine's pause, and False if the
        weights have the version already. If it needs more memory than `max_staged_bytes`, `commit`
        writes it in place from what was fetched, and if that breaks off, the receiver is dirty.

        Args:
            to: The version; None for the newest one, other than the one that is known to be held,
                or for the one that an earlier call like this was fetching when it broke off.
            timeout_s: As of `fetch`.

        Raises:
            TransportTimeout: There is no newer version, or another thread called `break_off`.
            StoreError: As of `fetch`.
            CallOrderError: A version is staged: commit it first, or call `discard`.
        """
        with plain_mode(), self._caller.call(), self._record.watched():
            return self._stage(to, timeout_s, wants_newer=True)

    def break_off(self) -> None:
        """End the `stage` or `fetch` under way, if there is one, before it has fetched everything.

        Any thread may call it. The next call goes on with what has come.
        """
        self._is_broken_off = True

    def commit(self) -> int:
        """Write what `stage` has staged, and read it back. Returns the version held now.

        The engine must be paused; it may resume when this returns or raises, unless `is_dirty`.

        Raises:
            CallOrderError: Nothing is staged: call `stage` first.
            TargetMoved: Storage was replaced. Nothing staged was written; in place, it is dirty.
            DigestMismatch: What was read back is not what was written.
        """
        with plain_mode(), self._caller.call(), self._record.watched(pauses=True, defers=True):
            return self._commit()

    def discard(self) -> None:
        """Forget what is staged. Nothing was written."""
        with plain_mode(), self._caller.call(), self._lock:
            if self._staged is not None:
                self._leave()
            self._forget()

    def follow(self, *, pause: Pause | None = None) -> StagingThread:
        """Return a thread that stages each new version while the engine serves.

        Use it as a context manager. Versions that are published while one waits to be committed are
        fetched together, in one commit.

        Args:
            pause: Returns a context manager in which the engine does not use its weights. The
                thread then commits in it by itself. None: the engine calls `commit` of the follower
                when `is_staged`, in a pause of its own.
        """
        return StagingThread(self, pause)

    def invalidate(self) -> None:
        """Report that something else released, reloaded or wrote the weights. Any thread may."""
        with self._lock:
            super().invalidate()
            self._layout_hash = self._current = self._weights.staging = None

    def detach(self) -> None:
        """Do not touch the weights until `attach`: for an engine that sleeps or moves them."""
        with self._lock:
            super().detach()
            self._weights.staging = None

    def close(self) -> None:
        """Remove what was fetched unless it is in a `spool`. The weights stay. Any thread may."""
        self._is_closed = True
        self._attached.set()
        with self._lock:
            self._leave()
            if self._objects is not None:
                self._objects.close()
        self._record.flush()

    def _opened(self) -> Run:
        if self._run is None:
            self._run = Run(Objects(self._url, self._store_options))
        return self._run

    def _stage(self, to: int | None, timeout_s: float, *, wants_newer: bool) -> bool:
        check_seconds("timeout_s", timeout_s)
        self._is_broken_off = False
        if self._staged is not None and self._session.state is not ReceiverState.OUTSIDE:
            if to in (None, self._staged.route.target.version):
                return True
            raise CallOrderError("another version is staged: commit or discard it first")
        self._weights.staging = self._staged = None
        deadline = time.monotonic() + timeout_s
        self._attached.wait(max(0.0, deadline - time.monotonic()))
        self._check_wanted()
        self._scrub_after_commit()
        find = partial(self._found, to, wants_newer=wants_newer)
        follows = wants_newer and to is None
        target = self._poll.wait(find, deadline, at_once=not follows)
        if target is None and follows:
            sought = f"nothing newer than v{self.version} within the timeout"
            raise TransportTimeout(f"{self._url}: {sought}")
        if target is None:
            sought = "no version" if to is None else f"no v{to}"
            raise VersionMissing(f"{self._url}: {sought}; deltasync log lists what there is")
        if follows:  # else calls that break off would never arrive
            target = self._unfinished or target
        self._unfinished = None
        try:
            with self._failing_safely():
                is_staged = self._bring(target)
            self._poll.reset()
            return is_staged
        except (TransportTimeout, StoreUnavailable) as error:
            came, is_off = self.progress, isinstance(error, TransportTimeout)
            if to is None and (came.fetched_bytes if is_off else came.bytes_per_s):
                self._unfinished = target  # if the store brings no more of it, a newer one may come
            raise
        except DeltaSyncError as error:
            self._poll.put_off(error)
            raise

    def _found(self, to: int | None, *, wants_newer: bool) -> Published | None:
        """The version that is asked for, if it is there and not the one known to be held."""
        run = self._opened()
        found = run.newest(self._session.version) if to is None else run.published(to)
        return None if found is not None and wants_newer and self._is_known(found) else found

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportClosed("this receiver was closed")

    def _check_wanted(self) -> None:
        """Raise what ends the wait for a version, or for its bytes."""
        self._check_open()
        self._check_attached()
        if self._is_broken_off:
            raise TransportTimeout(f"{self.progress}: broken off; the next call goes on from there")

    def _is_known(self, found: Published) -> bool:
        """Whether it is the version that was committed here last, and the weights are in order."""
        is_in_order = self._layout_hash is not None and not self._session.dirty
        return is_in_order and self._current is not None and self._current.sha256 == found.sha256

    def _bring(self, target: Published) -> bool:
        """Stage a version over the cheapest way that turns out to be in order."""
        run = self._opened()
        self._record.begin(None, phase="fetch")
        with self._lock:
            self._bind(run, target)
        label = self._label and f"{self._label}-{sha256_of(run.objects.url.encode())[:16]}"
        objects = self._objects = self._objects or Fetched(
            run.objects, self._spool_folder, label=label, check=self._check_wanted
        )
        oldest = target.version - _LOOK_BACK if self._current is None else self._current.version
        if take_cheapest(
            lambda refused: find_route(run, target, self._holds, oldest=oldest, refused=refused),
            objects,
            self.progress,
            self._take,
            failed=self._leave,
        ).steps:
            return True
        self._forget()
        self._join(target)
        return False

    def _bind(self, run: Run, target: Published) -> None:
        """Find the weights of the target's layout and measure them, unless that was done."""
        if self._session.state is not ReceiverState.OUTSIDE:
            self._session.on("lost")
        layout_hash = target.manifest.layout_hash
        if self._layout_hash == layout_hash and self._weights.are_kept():
            return
        self._layout_hash = self._current = None
        self._weights.bind(run.layout(layout_hash), lanes=1, world=self._world)
        self._layout_hash = layout_hash
        self._stream = own_stream(self._weights.live.device, self._stream)

    def _holds(self, published: Published) -> bool:
        """Whether the weights are a version: by what was committed here, or by digest."""
        if self._session.half_written or published.manifest.layout_hash != self._layout_hash:
            return False
        if self._current is not None:
            return self._current.sha256 == published.sha256
        return is_version(self._weights, published)

    def _join(self, target: Published) -> None:
        """The weights are a version already."""
        with self._lock:
            join(self._session, target, self._weights, is_full=False)
            self._current = target
        self._record.joined()
        logger.info("%s holds v%d: same digest", self.name, target.version)

    def _take(self, route: Route, folders: list[Path]) -> None:
        """Stage what was fetched; if it has to be written in place, only begin."""
        live = self._weights.live
        frames = frames_along(route, folders, live.specs, live.flats)
        sync = StoredSync(route, frames)
        with self._lock, self._stream.entered() if self._stream else nullcontext():
            self._check_attached()
            is_full = route.base is None
            join(self._session, route.base or route.target, self._weights, is_full=is_full)
            while self._session.begun is None:
                if (frame := next(frames, None)) is None:
                    raise ProtocolViolation("frames end before `begin`")
                sync.take(frame, self._session, self._weights)
            self._record.begin(self._session.begun, route.num_bytes)
            self._staged = sync
        staging = self._weights.staging
        if staging is None or not staging.in_place:
            self._replay(sync)

    def _check_attached(self) -> None:
        if self._session.detached:
            raise TransportTimeout("the weights are detached: nothing is fetched before `attach`")

    def _replay(self, sync: StoredSync) -> None:
        """Stage each bucket; in place, write it. Then compare what comes of it."""
        for frame in sync.frames:
            with self._lock, self._stream.entered() if self._stream else nullcontext():
                self._check_begun()
                sync.take(frame, self._session, self._weights)
        with self._lock, self._stream.entered() if self._stream else nullcontext():
            self._check_begun()
            check_digests(sync.route, self._weights, sync.reached)
            self._session.on(messages.Commit(version=sync.route.target.version))
        self._record.note("ready")

    def _check_begun(self) -> None:
        if self._session.begun is None:
            raise TransportTimeout("detached, or invalidated, while a version was staged")

    def _commit(self) -> int:
        sync = self._staged
        if sync is None or self._session.begun is None:
            raise CallOrderError("nothing is staged; call stage first")
        with self._failing_safely():
            if self._stream is not None:
                self._stream.join()
            if self._session.state is ReceiverState.STAGING:
                self._replay(sync)
            with self._lock:
                self._check_begun()
                _, commit_s = self._weights.write(heals=self._session.heals)
                self._record.committed(commit_s, self._weights.staging)
                self._weights.staging, self._current = None, sync.route.target
                self._scrub_is_due = True
        self._weights.staging = self._staged = None
        self._forget()
        what = (self.name, version := sync.route.target.version, sync.route.num_bytes)
        logger.info("%s wrote v%d: %d bytes fetched, %.1f ms", *what, commit_s * 1e3)
        return version

    def _scrub_after_commit(self) -> None:
        with self._lock:
            if not self._scrub_is_due or self._session.detached or not self._weights.are_kept():
                return
            try:
                self._scrub()
            except DirtyReceiver:
                self._layout_hash = None
                raise

    def _forget(self) -> None:
        """Remove what was fetched."""
        objects, self._objects = self._objects, None
        if objects is not None:
            objects.keep()
            objects.close()

    def _leave(self) -> None:
        with self._lock:
            self._weights.staging = self._staged = None
            self._session.on("lost")

    @contextmanager
    def _failing_safely(self) -> Iterator[None]:
        """Whatever goes wrong: the old version stands, and a later call starts over."""
        try:
            yield
        except BaseException:
            with self._lock:
                has_begun = self._session.begun is not None
                self._session.on("lost")
                if has_begun or self._session.dirty:
                    self._layout_hash = self._current = None
                self._weights.staging = self._staged = None
            self._check_open()
            raise
