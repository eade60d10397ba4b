"""The two state machines of a sync: which message is legal when. Does no I/O.

Receiver:

    OUTSIDE --greet--> JOINING --Layout--> JOINING --Welcome--> READY, or WAITING for a full sync
    READY --Upcoming--> READY
    READY, WAITING --Begin--> STAGING --Bucket--> STAGING --Prepare--> PREPARED
    PREPARED --Commit--> COMMITTING --committed--> READY, or with several ranks in the engine
    COMMITTING --committed--> COMMITTED --Finish--> READY or OUTSIDE
    STAGING, PREPARED --Abort--> where Begin found it, or OUTSIDE if something was written in place
    any --failed, lost, invalidate--> OUTSIDE
    READY --detach, attach--> READY; any other --detach--> OUTSIDE
    READY, detached --Begin, Bucket, Prepare, Abort--> READY

Beside its state a receiver is *dirty* or not: dirty weights mix two versions and must not serve. A
*detached* one takes no message that needs its weights.
An illegal message raises and changes nothing.

Sender, for each sync: begin, prepared for every participant, decide, committed for each, finish.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import (
    CallOrderError,
    DirtyReceiver,
    ProtocolViolation,
    VersionGap,
    WrongStream,
)
from deltasync.wire.messages import (
    Abort,
    Begin,
    Bucket,
    Commit,
    Failed,
    Finish,
    Layout,
    Message,
    Prepare,
    Upcoming,
    Welcome,
)

DETACHED = "Detached"
"""The error of a receiver of which the weights were detached when a sync began."""


def asleep(version: int) -> Failed:
    """What a member answers that has sat out a sync."""
    reason = "the engine's weights sleep, or are detached: wake them up, or attach them, first"
    return Failed(version=version, error=DETACHED, reason=reason)


class ReceiverState(Enum):
    """Where a receiver stands."""

    OUTSIDE = auto()  # no member: has to greet the sender
    JOINING = auto()  # greeted, not yet welcome
    WAITING = auto()  # welcome, needs a full sync
    READY = auto()  # member, holds `version`
    STAGING = auto()  # patches arrive; the old version serves
    PREPARED = auto()  # everything that can fail is done; waits for the decision
    COMMITTING = auto()  # decided: being written
    COMMITTED = auto()  # written; waits for the rest of its engine


# Where no sync is under way: waiting longer loses nothing.
PATIENT = (ReceiverState.JOINING, ReceiverState.WAITING, ReceiverState.READY)
_MAX_SENDER_TIMEOUT_S = 3600.0
SERVES = frozenset(ReceiverState) - {ReceiverState.WAITING}  # what a welcome can lead to


@dataclass
class ReceiverSession:
    """What a receiver may do next.

    Attributes:
        engine: Its engine's name.
        world: Ranks of that engine.
        lanes: Connections on which buckets come.
        version: The version held, or None when unknown.
        stream_id: The training run it belongs to.
        dirty: The weights are a mixture and must not serve.
        half_written: A write, or what the engine derives from it, has not ended: whatever digest
            the weights have, a full sync has to write all once more.
        undone: The last sync was committed here and has to be taken back.
        detached: The weights must not be looked at.
        declined: The version of a sync that began while they must not, until it is aborted.
    """

    engine: str
    world: int = 1
    lanes: int = 1
    state: ReceiverState = ReceiverState.OUTSIDE
    version: int | None = None
    stream_id: str | None = None
    dirty: bool = False
    half_written: bool = False
    undone: bool = False
    detached: bool = False
    declined: int | None = None
    begun: Begin | None = None
    _before: tuple[bool, bool] = (False, False)  # dirty and half_written, as this sync began
    _has_written: bool = False  # since Begin
    _next_bucket: list[int] = field(default_factory=list)
    _ended: frozenset[int] = frozenset()
    _resume: ReceiverState = ReceiverState.OUTSIDE
    _layout_hash: str = ""
    _offered: Layout | None = None

    def on(self, message: Message, *, lane: int = 0) -> None:
        """Advance, or raise and leave everything as it was."""
        if self._is_declined(message):
            return
        if self.detached and not isinstance(message, Upcoming | Abort | Finish):
            raise ProtocolViolation(
                f"{message.kind} while the weights are detached, as when an engine sleeps: wake it "
                "up, or attach them, before a sync"
            )
        match message:
            case Layout() if self.state is ReceiverState.JOINING and self._offered is None:
                self._offered = message
            case Welcome() if self.state is ReceiverState.JOINING and self._offered is not None:
                self._welcome(self._offered, full=self.engine in message.full_sync)
            case Upcoming() if self.state is ReceiverState.READY:
                pass  # it may never begin
            case Begin() if self.state in (ReceiverState.READY, ReceiverState.WAITING):
                self._begin(message)
            case Bucket() if self._in(ReceiverState.STAGING, message.version):
                self._bucket(message, lane)
            case Prepare() if self._in(ReceiverState.STAGING, message.version):
                self._prepare(message, lane)
            case Commit() if self._in(ReceiverState.PREPARED, message.version):
                self.state = ReceiverState.COMMITTING
            case Finish() if self._in(ReceiverState.COMMITTED, message.version):
                self._finish(keep=self.engine not in message.undo)
            case Abort() if self._in(ReceiverState.STAGING, message.version) or self._in(
                ReceiverState.PREPARED, message.version
            ):
                self._abort()
            case Finish() if self._is_late(message):
                pass  # an engine of one rank has not waited for it
            case Abort() if self.state in (ReceiverState.READY, ReceiverState.WAITING):
                self.declined = None  # or the sender broke off before it began
            case _:
                raise ProtocolViolation(f"{message.kind} while {self.state.name}")

    def _is_declined(self, message: Message) -> bool:
        """Whether it is of a sync that began while the weights were detached: a member sits that
        out, says so when it is asked to be prepared, and is a member still after the abort.
        """
        if isinstance(message, Begin):
            is_asleep = self.detached and self.state is ReceiverState.READY
            self.declined = message.version if is_asleep else None
        return isinstance(message, Begin | Bucket | Prepare) and message.version == self.declined

    def patience_s(self, stall_timeout_s: float) -> float:
        """How long the sender may be silent: it may itself be waiting for others."""
        theirs = 0.0 if self.begun is None else min(self.begun.timeout_s, _MAX_SENDER_TIMEOUT_S)
        return max(stall_timeout_s, 2 * theirs)

    def greet(self) -> None:
        """The receiver said hello on a new connection."""
        self.lost()
        self.state = ReceiverState.JOINING
        self._offered = None

    def set_layout_hash(self, layout_hash: str) -> None:
        """The hash of the layout that was bound to the target."""
        self._layout_hash = layout_hash

    def writing(self) -> None:
        """From here to `committed` or `restored` the weights mix two versions."""
        if not self._has_written:
            self._before = self.dirty, self.half_written
        self.dirty = self.half_written = self._has_written = True

    def committed(self) -> None:
        """The version is written and read back."""
        if self.state is not ReceiverState.COMMITTING:
            raise CallOrderError(f"committed while {self.state.name}")
        self.state = ReceiverState.COMMITTED
        self.dirty = self.half_written = False
        if self.world == 1 and self.begun is not None:  # there is nobody to wait for
            self._hold(self.begun)
            self.state, self.begun = ReceiverState.READY, None

    @property
    def heals(self) -> bool:
        """Whether the sync under way writes weights that an earlier one left half written."""
        return self._before[1]

    def restored(self) -> None:
        """The old version is back, and was read back."""
        self.dirty, self.half_written = self._before

    def failed(self) -> None:
        """Something local went wrong: no member any more."""
        self.state, self.begun, self.declined = ReceiverState.OUTSIDE, None, None

    def corrupted(self) -> None:
        """Weights changed that no sync touched."""
        self.dirty = True

    def lost(self) -> None:
        """The connection is gone.

        Between commit and finish nobody here knows whether the engine's other ranks have the
        version too, so that the engine must not serve.
        """
        self.dirty = self.dirty or self.state is ReceiverState.COMMITTED
        self.undone = False
        self.failed()

    def fail(self, error: BaseException) -> Failed:
        """The connection ends for this reason. What the sender is told."""
        begun, kind, reason = self.begun, type(error).__name__, str(error)
        self.lost()
        if begun is not None and self.half_written and self._has_written:
            kind, reason = DirtyReceiver.__name__, f"{kind}: {reason}; the weights are a mixture"
        version = None if begun is None else begun.version
        return Failed(version=version, error=kind, reason=reason[:4096])

    def invalidate(self) -> None:
        """Somebody else wrote the weights: no delta fits them until the receiver has rejoined."""
        self.lost()
        self.version = None

    def detach(self) -> None:
        """The weights must not be looked at until `attach`. A sync under way has failed."""
        if self.state is not ReceiverState.READY:
            self.lost()
        self.detached = True

    def attach(self) -> None:
        """They may be, and hold the version still if the state is READY."""
        self.detached = False

    def _in(self, state: ReceiverState, version: int) -> bool:
        return self.state is state and self.begun is not None and self.begun.version == version

    def _is_late(self, finish: Finish) -> bool:
        is_ready = self.state is ReceiverState.READY and self.world == 1
        return is_ready and finish.version == self.version and self.engine not in finish.undo

    def _welcome(self, offered: Layout, *, full: bool) -> None:
        if full:
            self.state = ReceiverState.WAITING
            return
        self.version, self.stream_id = offered.version, offered.stream_id
        self.dirty = False
        self.state = ReceiverState.READY

    def _begin(self, begin: Begin) -> None:
        if self._offered is None or begin.stream_id != self._offered.stream_id:
            raise WrongStream(f"begin of stream {begin.stream_id}: not the run that was joined")
        if begin.layout_hash != self._layout_hash:
            raise ProtocolViolation("begin of another layout than the one that was joined")
        if begin.base_version is None and self.state is not ReceiverState.WAITING:
            raise ProtocolViolation("a full sync that was not asked for")
        if begin.base_version is not None and (
            self.state is not ReceiverState.READY or begin.base_version != self.version
        ):
            raise VersionGap(held=self.version, base=begin.base_version, offered=begin.version)
        if begin.base_version is not None and begin.version <= begin.base_version:
            raise ProtocolViolation(f"v{begin.version} does not follow v{begin.base_version}")
        self._resume, self.state = self.state, ReceiverState.STAGING
        self.undone = self._has_written = False
        self.begun, self._next_bucket, self._ended = begin, [0] * self.lanes, frozenset()

    def _bucket(self, bucket: Bucket, lane: int) -> None:
        expected = self._next_bucket[lane]
        if bucket.sequence != expected or lane in self._ended:
            raise ProtocolViolation(f"bucket {bucket.sequence} instead of {expected}")
        self._next_bucket[lane] += 1

    def _prepare(self, prepare: Prepare, lane: int) -> None:
        arrived = self._next_bucket[lane]
        if prepare.num_buckets != arrived or lane in self._ended:
            raise ProtocolViolation(f"{arrived} buckets arrived, {prepare.num_buckets} were sent")
        self._ended |= {lane}
        if len(self._ended) == self.lanes:
            self.state = ReceiverState.PREPARED

    def _finish(self, *, keep: bool) -> None:
        assert self.begun is not None
        if keep:
            self._hold(self.begun)
            self.state = ReceiverState.READY
        else:
            self.state, self.undone = ReceiverState.OUTSIDE, True
            self.dirty = self.half_written = True
        self.begun = None

    def _hold(self, begin: Begin) -> None:
        self.version, self.stream_id, self.dirty = begin.version, begin.stream_id, False

    def _abort(self) -> None:
        """What was written in place cannot be taken back: only a full sync heals it."""
        self.state = ReceiverState.OUTSIDE if self._has_written else self._resume
        self.begun = None


@dataclass(frozen=True, slots=True)
class Member:
    """A receiver as its sender knows it.

    Attributes:
        peer: Its number at the transport.
        engine, rank, world: Which engine it serves, and its place there.
        holds: Numbers of the layout's parameters that it holds something of; None for all.
        copies: If it holds parts: uint64[parameters], how often the ranks of its engine that do so
            hold each parameter, all together.
        connection: What names it on the lanes of the trainer's other ranks, if there are any.
    """

    peer: int
    engine: str
    rank: int = 0
    world: int = 1
    holds: frozenset[int] | None = None
    copies: NDArray[np.uint64] | None = field(default=None, compare=False)
    connection: str = ""

    def __str__(self) -> str:
        return f"{self.engine}[{self.rank}/{self.world}]"


class SenderPhase(Enum):
    """Where the sender stands in a sync."""

    IDLE = auto()
    STAGING = auto()
    DECIDED = auto()


@dataclass
class SenderSession:
    """Who takes part, and what may be decided. The unit of failure is the engine.

    Attributes:
        version: The last version decided.
        members: Those that hold it, by peer.
        failures: Why participants of the current sync failed, by peer.
    """

    version: int = 0
    phase: SenderPhase = SenderPhase.IDLE
    members: dict[int, Member] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    participants: dict[int, Member] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)
    _offered: int = 0

    def captured(self) -> None:
        """A new version was taken from the source; nobody holds it yet."""
        self._require(SenderPhase.IDLE)
        if self.members:
            raise CallOrderError("members would miss the version")
        self.version += 1

    def admit(self, members: Iterable[Member]) -> None:
        """Receivers hold the version already."""
        self._require(SenderPhase.IDLE)
        self.members.update({member.peer: member for member in members})

    def begin(self, participants: Iterable[Member], *, version: int) -> None:
        """A sync to `version` begins."""
        self._require(SenderPhase.IDLE)
        if version < self.version:
            raise CallOrderError(f"v{version} after v{self.version}")
        self.participants = {member.peer: member for member in participants}
        self._done, self.failures, self._offered = set(), {}, version
        self.phase = SenderPhase.STAGING

    def prepared(self, peer: int) -> None:
        """A participant can commit, and would arrive at the sender's digest."""
        self._require(SenderPhase.STAGING)
        self._done.add(self.participants[peer].peer)

    def failed(self, peer: int, reason: str) -> None:
        """A participant failed, in whatever phase."""
        if self.phase is SenderPhase.IDLE:
            raise CallOrderError("no sync is under way")
        self.failures.setdefault(self.participants[peer].peer, reason)
        self._done.discard(peer)

    def decide(self) -> None:
        """The version is final. Raises CallOrderError unless every participant has prepared."""
        self._require(SenderPhase.STAGING)
        if not self.participants or self._done != set(self.participants):
            raise CallOrderError("not every participant has prepared")
        self.phase, self.version, self._done = SenderPhase.DECIDED, self._offered, set()

    def abort(self, asleep: Collection[int] = ()) -> list[Member]:
        """The version will never be. Returns who has to leave: every rank of a failed engine.

        Peers that are `asleep` have failed, and need not leave for that.
        """
        self._require(SenderPhase.STAGING)
        return self._leave(asleep)

    def committed(self, peer: int) -> None:
        """A participant has written the version and read back the sender's digest."""
        self._require(SenderPhase.DECIDED)
        self._done.add(self.participants[peer].peer)

    def undone(self) -> tuple[str, ...]:
        """Engines of which a rank has not committed: their other ranks undo."""
        self._require(SenderPhase.DECIDED)
        missing = set(self.participants) - self._done
        return tuple(sorted({self.participants[peer].engine for peer in missing}))

    def finish(self) -> list[Member]:
        """The sync is over. Returns who has to leave: every rank of an undone engine."""
        for peer in set(self.participants) - self._done:
            self.failures.setdefault(peer, "did not commit")
        self._require(SenderPhase.DECIDED)
        leaving = self._leave()
        gone = {member.peer for member in leaving}
        self.members.update({peer: m for peer, m in self.participants.items() if peer not in gone})
        return leaving

    def _leave(self, asleep: Collection[int] = ()) -> list[Member]:
        self.phase = SenderPhase.IDLE
        engines = {self.participants[peer].engine for peer in self.failures if peer not in asleep}
        leaving = [m for m in self.participants.values() if m.engine in engines]
        for member in leaving:
            self.members.pop(member.peer, None)
        return leaving

    def _require(self, phase: SenderPhase) -> None:
        if self.phase is not phase:
            raise CallOrderError(f"legal while {phase.name}, not while {self.phase.name}")
