"""What ends note of a sync while it goes on, for the event that they report of it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from deltasync.delta.staging import Staging
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
    report_failure,
)
from deltasync.sync.protocol.receiver_session import ReceiverSession, ReceiverState
from deltasync.wire.messages import Begin


@dataclass(slots=True)
class SenderCall:
    """What a sender notes of one call of `send_weights`.

    Attributes:
        stream_id: The training run.
        version: What is attempted.
        lost: What is lost so far, see `SyncStats`. Not owned.
        began: When it began, by `time.perf_counter`.
        phases: Its parts so far, by the same clock.
    """

    stream_id: str
    version: int
    lost: Mapping[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)
    phases: list[Phase] = field(default_factory=list)

    def failed(self, error: BaseException, *, members: Collection[str]) -> SyncFailed:
        """What is reported of it if this was raised, and these have stayed, as those that sleep."""
        return SyncFailed(
            role="sender",
            error=error,
            stream_id=self.stream_id,
            version=self.version,
            lost={who: why for who, why in self.lost.items() if who not in members},
            receivers=len(members),
            total_s=time.perf_counter() - self.began,
            ended_at=time.time(),
            phases=since(self.began, self.phases),
        )


def since(began: float, phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """Parts in seconds since then."""
    return tuple((name, start - began, end - began) for name, start, end in phases)


class ReceiverRecord:
    """What a receiver notes of its syncs, and what it reports of them.

    Args:
        name: Of the receiver.
        session: Its state.
    """

    def __init__(self, name: str, session: ReceiverSession) -> None:
        self._name, self._session = name, session
        self._sync: _Reception | None = None  # under way
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
        if self._sync is None or self._sync.begun is not None:
            self._sync = _Reception(phase, was_dirty=self._session.dirty)
        else:
            self.note(phase)
        self._sync.begun, self._sync.num_bytes = begun, num_bytes

    def note(self, phase: str) -> None:
        """The last part of the sync has ended, and this one begins."""
        if self._sync is not None:
            self._sync.marks.append((phase, time.perf_counter()))

    def committed(self, commit_s: float, staging: Staging | None) -> None:
        """The sync has ended well; it took so long to write and to read back."""
        sync, self._sync = self._sync, None
        if sync is not None and sync.begun is not None and staging is not None:
            sync.marks.append(("commit", time.perf_counter() - commit_s))
            sync.is_in_place, sync.staged_bytes = staging.in_place, staging.staged_bytes
            self._pending.append(sync.stats(self._name, sync.begun, self._paused_at, commit_s))

    def aborted(self) -> None:
        """The sender has given the sync up, and reports that itself."""
        self._sync = None

    def corrupted(self, parameter: str, remedy: str) -> DirtyReceiver:
        """The error of a scrub that found other weights than were written."""
        self._corrupted = parameter
        return DirtyReceiver(f"{parameter}: weights changed that no sync touched; {remedy}")

    def joined(self) -> None:
        """The weights are those of the version already."""
        self._sync, session = None, self._session
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
        sync, self._sync = self._sync, None
        corrupted, self._corrupted = self._corrupted, ""
        if sync is None:
            is_idle = isinstance(error, TransportTimeout | TransportClosed | CallOrderError)
            if is_idle or (was_outside and isinstance(error, TransportError)):
                return
            sync = _Reception("wait", was_dirty=False)
        report_failure(
            error, lambda error: sync.failed(self._name, self._session, error, corrupted)
        )

    def flush(self) -> None:
        """Report what has come to an end. Any thread may call it."""
        with suppress(IndexError):  # nothing is left
            while True:
                report(self._pending.popleft())


class _Reception:
    """One sync at a receiver."""

    def __init__(self, phase: str, *, was_dirty: bool) -> None:
        self.began = time.perf_counter()
        self.marks = [(phase, self.began)]
        self.was_dirty = was_dirty
        self.begun: Begin | None = None
        self.num_bytes = self.staged_bytes = 0
        self.is_in_place = False

    def stats(self, name: str, begun: Begin, paused_at: float, commit_s: float) -> ReceiveStats:
        now = time.perf_counter()
        phases = self._phases(now)
        return ReceiveStats(
            name=name,
            stream_id=begun.stream_id,
            version=begun.version,
            base_version=begun.base_version,
            kind="full" if begun.base_version is None else "delta",
            num_bytes=self.num_bytes,
            staged_bytes=self.staged_bytes,
            is_in_place=self.is_in_place,
            was_dirty=self.was_dirty,
            stage_s=sum(end - start for part, start, end in phases if part == "stage"),
            commit_s=commit_s,
            pause_s=now - max(paused_at, self.began),
            total_s=now - self.began,
            ended_at=time.time(),
            phases=phases,
        )

    def failed(
        self, name: str, session: ReceiverSession, error: BaseException, corrupted: str
    ) -> SyncFailed:
        now = time.perf_counter()
        return SyncFailed(
            role="receiver",
            error=error,
            name=name,
            stream_id=session.stream_id if self.begun is None else self.begun.stream_id,
            version=None if self.begun is None else self.begun.version,
            is_dirty=session.dirty,
            corrupted=corrupted,
            total_s=now - self.began,
            ended_at=time.time(),
            phases=self._phases(now),
        )

    def _phases(self, end: float) -> tuple[Phase, ...]:
        """All of them, the last of which ends at `end`."""
        ends = [mark for _, mark in self.marks[1:]] + [end]
        return tuple(
            (name, mark - self.began, until - self.began)
            for (name, mark), until in zip(self.marks, ends, strict=True)
        )
