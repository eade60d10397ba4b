"""What all receivers have in common: the weights of one engine rank, and what the engine asks."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar

from deltasync.delta.staging import LiveWeights, Staging
from deltasync.delta.streams import OwnStream
from deltasync.errors import (
    CallOrderError,
    DirtyReceiver,
    TransportClosed,
    TransportError,
    TransportTimeout,
)
from deltasync.sync.events import (
    Phase,
    ReceiveStats,
    SyncEvent,
    SyncFailed,
    report,
    subscriptions,
)
from deltasync.sync.options import ReceiverOptions
from deltasync.sync.protocol.links import OneCaller
from deltasync.sync.protocol.receiver_session import ReceiverSession, ReceiverState
from deltasync.sync.target.base import WeightTarget
from deltasync.sync.target.bound import BoundWeights
from deltasync.transports import forks
from deltasync.transports.base import Closing
from deltasync.wire.messages import Begin


@dataclass(frozen=True, slots=True)
class Held:
    """Weights whose digests are those of a version.

    Attributes:
        stream_id, version: Of which training run, and which version.
        live: The weights and their digests. Not owned.
    """

    stream_id: str
    version: int
    live: LiveWeights


class ReceiverRecord:
    """What a receiver notes of its syncs, and what it reports of them.

    Args:
        name: Of the receiver.
        session: Its state.
    """

    def __init__(self, name: str, session: ReceiverSession) -> None:
        self._name, self._session = name, session
        self._marks: list[tuple[str, float]] = []  # when parts of the sync under way have begun
        self._begun: Begin | None = None  # what was announced of it
        self._num_bytes, self._was_dirty = 0, False
        self._pending: deque[SyncEvent] = deque()
        self._paused_at = 0.0
        self._corrupted = ""

    @contextmanager
    def watched(self, *, pauses: bool = False, defers: bool = False) -> Iterator[None]:
        """One call of the receiver: report what it comes to.

        Args:
            pauses: Whether the engine pauses for it.
            defers: Whether to report its success in the next call, since it pauses still.
        """
        self.flush()
        self._paused_at = time.perf_counter() if pauses else math.inf
        was_outside = self._session.state is ReceiverState.OUTSIDE
        try:
            yield
        except BaseException as error:
            self._failed(error, was_outside=was_outside)
            raise
        if not defers:
            self.flush()

    def begin(self, begun: Begin | None, num_bytes: int = 0, *, phase: str = "stage") -> None:
        """A part begins: the first of a sync, or that which follows its announcement.

        Args:
            begun: What was announced; None if nothing was so far.
            num_bytes: Of indices and values, or fetched.
            phase: Name of the part.
        """
        if not self._marks or self._begun is not None:
            self._marks, self._was_dirty = [], self._session.dirty
        self._marks.append((phase, time.perf_counter()))
        self._begun, self._num_bytes = begun, num_bytes

    def note(self, phase: str) -> None:
        """The last part of the sync has ended, and this one begins."""
        if self._marks:
            self._marks.append((phase, time.perf_counter()))

    def committed(self, commit_s: float, staging: Staging | None) -> None:
        """The sync has ended well; it took so long to write and to read back."""
        begun, marks, now = self._begun, self._marks, time.perf_counter()
        self.aborted()
        if not marks or begun is None or staging is None:
            return
        phases, began = _phases([*marks, ("commit", now - commit_s)], now), marks[0][1]
        self._pending.append(
            ReceiveStats(
                name=self._name,
                stream_id=begun.stream_id,
                version=begun.version,
                base_version=begun.base_version,
                kind="full" if begun.base_version is None else "delta",
                num_bytes=self._num_bytes,
                staged_bytes=staging.staged_bytes,
                is_in_place=staging.in_place,
                was_dirty=self._was_dirty,
                stage_s=sum(end - start for part, start, end in phases if part == "stage"),
                commit_s=commit_s,
                pause_s=now - max(self._paused_at, began),
                total_s=now - began,
                ended_at=time.time(),
                phases=phases,
            )
        )

    def aborted(self) -> None:
        """No sync is under way; the sender has given it up, and reports that itself."""
        self._marks, self._begun = [], None

    def corrupted(self, parameter: str, remedy: str) -> DirtyReceiver:
        """The error of a scrub that found other weights than were written."""
        self._corrupted = parameter
        return DirtyReceiver(f"{parameter}: weights changed that no sync touched; {remedy}")

    def joined(self) -> None:
        """The weights are those of the version already."""
        self.aborted()
        session = self._session
        assert session.version is not None
        self._pending.append(
            ReceiveStats(
                name=self._name,
                stream_id=session.stream_id or "",
                version=session.version,
                base_version=None,
                kind="joined",
                ended_at=time.time(),
            )
        )

    def _failed(self, error: BaseException, *, was_outside: bool) -> None:
        """Report it, unless no sync was to be had: the trainer is away, or nothing has come."""
        begun, now = self._begun, time.perf_counter()
        marks, corrupted = self._marks or [("wait", now)], self._corrupted
        is_idle = isinstance(error, TransportTimeout | TransportClosed | CallOrderError)
        is_idle = is_idle or (was_outside and isinstance(error, TransportError))
        is_idle, self._corrupted = is_idle and not self._marks, ""
        self.aborted()
        if is_idle or not subscriptions:
            return
        report(
            SyncFailed(
                role="receiver",
                error=error,
                name=self._name,
                stream_id=begun.stream_id if begun else self._session.stream_id,
                version=begun.version if begun else None,
                is_dirty=self._session.dirty,
                corrupted=corrupted,
                total_s=now - marks[0][1],
                ended_at=time.time(),
                phases=_phases(marks, now),
            )
        )

    def flush(self) -> None:
        """Report what has come to an end. Any thread may call it."""
        with suppress(IndexError):  # nothing is left
            while True:
                report(self._pending.popleft())


def _phases(marks: Sequence[tuple[str, float]], end: float) -> tuple[Phase, ...]:
    """Parts in seconds since the first one has begun; the last one ends at `end`."""
    ends, began = [mark for _, mark in marks[1:]] + [end], marks[0][1]
    return tuple(
        (name, mark - began, until - began) for (name, mark), until in zip(marks, ends, strict=True)
    )


class BaseReceiver(Closing):
    """Holds the weights of one engine rank. Subclasses bring versions into them.

    Args:
        target: The live weights.
        session: What has come so far.
        name: In logs and events.
        options: Memory, scrub.

    Attributes:
        name: As given.
    """

    _cure: ClassVar[str]  # what to do if the weights are dirty, for a message
    _heal: ClassVar[str]  # what to do if they were corrupted
    _refusal: ClassVar[str]  # of a call while another one is under way
    resumes: ClassVar[bool] = False  # whether `stage` goes on where another one has ended

    def __init__(
        self,
        target: WeightTarget,
        session: ReceiverSession,
        name: str,
        options: ReceiverOptions | None,
    ) -> None:
        self.name, self._session = name, session
        self._options = options or ReceiverOptions()
        self._weights = BoundWeights(target, self._options, on=session.on)
        self._record = ReceiverRecord(name, session)
        self._stream: OwnStream | None = None  # on a GPU, what stages
        self._scrub_is_due = self._is_closed = False
        self._caller = OneCaller(self._refusal, self._recover)
        self._attached = threading.Event()
        self._attached.set()
        self._lock = threading.RLock()  # held while weights are looked at or written
        forks.inert_in_children(self._forked)

    def stage(self, *, timeout_s: float = 60.0) -> bool:
        """Bring a version next to the weights. Returns whether `commit` must be called next."""
        raise NotImplementedError

    def commit(self) -> int:
        """Write what `stage` brought, in the engine's pause. Returns the version held now."""
        raise NotImplementedError

    def break_off(self) -> None:
        """End the `stage` under way, if there is one, and if another one can go on with it."""

    def _recover(self) -> None:
        """Put in order what a call has left that an interrupt has ended."""
        raise NotImplementedError

    def _forked(self) -> None:
        """A child writes nothing: it may share the weights' memory with its parent."""
        self._lock, self._attached = threading.RLock(), threading.Event()
        self._attached.set()
        self._session.on("lost")
        self._weights.staging = None
        self._record = ReceiverRecord(self.name, self._session)

    @property
    def version(self) -> int | None:
        """The version held; None before the first one and after `invalidate`."""
        return self._session.version

    @property
    def state(self) -> ReceiverState:
        """The receiver's state within a sync."""
        return self._session.state

    @property
    def is_detached(self) -> bool:
        """Whether the weights must not be read or written: from `detach` to `attach`."""
        return self._session.detached

    @property
    def is_dirty(self) -> bool:
        """Whether the weights may mix two versions or be corrupted; they must not serve."""
        return self._session.dirty

    @property
    def is_half_written(self) -> bool:
        """Whether they are dirty because a write, or the update of derived tensors, broke off."""
        return self._session.half_written

    def check_serving(self) -> None:
        """Raise DirtyReceiver if the weights must not serve. Costs nothing: call it often."""
        if self._session.dirty:
            raise DirtyReceiver(f"the weights mix two versions; {self._cure} before serving")

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """Inside, the weights of the version held stay as they are: syncs, and `detach`, wait.

        Raises:
            DirtyReceiver: The weights may mix two versions.
            CallOrderError: No version is held, or it is not known for certain now which one is.
        """
        with self._lock:
            self.check_serving()
            session, weights = self._session, self._weights
            if session.version is None or session.stream_id is None:
                raise CallOrderError(f"{self.name} holds no version yet: receive one first")
            if session.detached or weights.may_differ:
                raise CallOrderError(f"the weights of {self.name} are detached: attach and rejoin")
            if session.state is ReceiverState.COMMITTED or not weights.are_proved:
                raise CallOrderError(f"{self.name} is between two versions: try again after it")
            self._synchronize()
            yield Held(session.stream_id, session.version, weights.live)

    def invalidate(self) -> None:
        """Report that something else released, reloaded or wrote the weights.

        May be called from any thread. Deltas are refused until the weights have been compared with
        their digests again. The next call does that, and a `StagingThread` does it at once. It
        reads the weights: call `detach` first if they must not be read yet.
        """
        with self._lock:
            self._session.on("invalidated")
            self._scrub_is_due = False  # nothing of the weights is known
            self._synchronize()

    def detach(self) -> None:
        """Do not touch the weights until `attach`: for an engine that sleeps or moves them.

        Any thread may call it. When it returns, nothing here reads or writes the weights, and a
        sync in flight has failed. An up-to-date `WeightReceiver` stays a member until a sync
        completes without it. Calls that bring versions wait. Idempotent.
        """
        with self._lock:
            self._session.on("detached")
            self._attached.clear()
            self._synchronize()

    def attach(self) -> None:
        """Use the weights again, whether they are unchanged or the engine has loaded others.

        Any thread may call it once the weights can be read. The next `stage`, or the begin of a
        sync, compares them with the digests: if they have changed or moved, they are brought anew.
        If you know that they have, call `invalidate` first. Idempotent.
        """
        with self._lock:
            if self._session.detached:
                self._session.on("attached")
                self._weights.may_differ = True
            self._attached.set()

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()  # kernels of a bucket may still read

    def _scrub(self) -> None:
        """Raise DirtyReceiver if weights have changed that no sync has touched."""
        self._scrub_is_due = False
        name = self._weights.scrub()
        if name is not None:
            self._session.on("corrupted")
            raise self._record.corrupted(name, self._heal)
