"""A receiver's end of a sync as a table: what may come when, and what follows. Does no I/O.

`RECEIVER`, at the end, has it all, and docs/wire-format.md shows it with a diagram. What it does
not allow raises and changes nothing.

Besides its state a receiver is *dirty* or not: dirty weights may mix two versions or be corrupted,
and must not serve. A *detached* one takes no message that needs its weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from deltasync.errors import (
    CallOrderError,
    DirtyReceiver,
    ProtocolViolation,
    VersionGap,
    WrongStream,
)
from deltasync.sync.protocol.table import Rule, When, by_state
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
    Shares,
    Upcoming,
    Welcome,
    as_text,
)

DETACHED = "Detached"
"""The error of a receiver whose weights were detached when a sync began."""

INCOMPLETE = "Incomplete"
"""The error of a receiver that misses a payload, which was lost with another receiver."""


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
Event = Literal[
    "greeted",  # said hello on a new connection
    "writing",  # from here to `committed` or `restored` the weights mix two versions
    "committed",  # the version is written and read back
    "restored",  # the old version is back, and was read back
    "corrupted",  # weights changed that no sync touched
    "detached",  # the weights must not be read
    "attached",  # they may be
    "cut off",  # a payload was lost with another receiver: the sync under way can only be aborted
    "invalidated",  # somebody else wrote the weights: no delta fits them
    "lost",  # the connection is gone, or must end
]
"""What happens to a receiver besides messages."""


@dataclass
class ReceiverSession:
    """What a receiver may do next.

    Attributes:
        engine: Its engine's name.
        world: Ranks of that engine.
        lanes: Connections on which buckets come.
        version: The version held, or None when unknown.
        stream_id: The training run it belongs to.
        dirty: The weights may mix two versions or be corrupted; they must not serve.
        half_written: A write, or what the engine derives from it, has not ended: whatever digest
            the weights have, a full sync has to write all once more.
        undone: The last sync was committed here and has to be taken back.
        detached: The weights must not be read.
        declined: The version of a sync that began while they must not, until it is aborted.
        incomplete: A payload of the sync under way does not come.
        begun: The sync under way.
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
    incomplete: bool = False
    begun: Begin | None = None
    _offered: Layout | None = None
    _layout_hash: str = ""
    _before: tuple[bool, bool] = (False, False)  # dirty and half_written, as this sync began
    _has_written: bool = False  # since Begin
    _next_bucket: list[int] = field(default_factory=list)
    _ended: frozenset[int] = frozenset()
    _told: frozenset[int] = frozenset()  # lanes whose shares this sync has said

    def on(self, what: Message | Event, *, lane: int = 0) -> None:
        """Follow the table, or raise and leave everything as it was.

        Raises:
            ProtocolViolation, VersionGap, WrongStream: The message may not come now.
            CallOrderError: The local event may not.
        """
        begun = self.begun
        if begun is None or getattr(what, "version", begun.version) == begun.version:
            kind = what if isinstance(what, str) else type(what)
            for rule in RECEIVER[self.state].get(kind, ()):
                if rule.when is None or rule.when.holds(self, what, lane):
                    if rule.do is not None:
                        rule.do(self, what, lane)
                    for name, value in rule.sets.items():
                        setattr(self, name, value)
                    assert rule.then is not None
                    self.state = rule.then
                    return
        self._refuse(what)

    def _refuse(self, what: Message | Event) -> None:
        if isinstance(what, str):
            raise CallOrderError(f"{what} while {self.state.name}")
        if self.detached and not isinstance(what, Upcoming | Abort | Finish):
            raise ProtocolViolation(
                f"{what.kind} while the weights are detached, as when an engine sleeps: wake it "
                "up, or attach them, before a sync"
            )
        raise ProtocolViolation(f"{what.kind} while {self.state.name}")

    @property
    def is_unchanged(self) -> bool:
        """Whether the sync under way is a delta, all of it has come, and that is nothing."""
        begun = self.begun
        is_delta = begun is not None and begun.base_version is not None
        has_come = self._has_ended and not self.incomplete
        return is_delta and has_come and not any(self._next_bucket)

    @property
    def awaits_abort(self) -> bool:
        """Whether nothing else of the sync under way will come, and a payload was lost."""
        return self.state is ReceiverState.STAGING and self.incomplete and self._has_ended

    @property
    def _has_ended(self) -> bool:
        """Whether all connections have said that nothing more comes."""
        return len(self._ended) == self.lanes

    @property
    def heals(self) -> bool:
        """Whether the sync under way writes weights that an earlier one left half written."""
        return self._before[1]

    def fail(self, error: BaseException) -> Failed:
        """End the connection because of `error`. Returns the message for the sender."""
        begun, kind, reason = self.begun, type(error).__name__, str(error)
        self.on("lost")
        if begun is not None and self.half_written and self._has_written:
            kind, reason = DirtyReceiver.__name__, f"{kind}: {reason}; the weights are a mixture"
        version = None if begun is None else begun.version
        return Failed(version=version, error=kind, reason=as_text(reason))

    def asleep(self) -> Failed:
        """The reply of a member that sits out a sync."""
        reason = "the engine's weights sleep, or are detached: wake them up, or attach them, first"
        return Failed(version=self.declined, error=DETACHED, reason=reason)

    def cut_off(self) -> Failed:
        """The reply of a member that waits for the abort of a sync."""
        assert self.begun is not None
        reason = "a payload was lost, as when another receiver of it is lost"
        return Failed(version=self.begun.version, error=INCOMPLETE, reason=reason)

    # What the table asks for. The documentation shows the docstrings.

    def _keep(self, layout: Layout, lane: int) -> None:
        """Keeps the layout."""
        self._layout_hash, self._offered = layout.hash, layout

    def _hold(self, what: Message | Event, lane: int) -> None:
        """Holds the version."""
        held = self.begun or self._offered
        assert held is not None
        self.version, self.stream_id, self.dirty = held.version, held.stream_id, False

    def _decline(self, begin: Begin, lane: int) -> None:
        """Sits the sync out."""
        self.declined = begin.version

    def _begin(self, begin: Begin, lane: int) -> None:
        """Refuses another stream, layout or base version, a delta that does not lead to a later
        version, and a full sync that it does not need.
        """
        if self._offered is None or begin.stream_id != self._offered.stream_id:
            raise WrongStream(f"begin of stream {begin.stream_id}: not the run that was joined")
        if begin.layout_hash != self._layout_hash:
            raise ProtocolViolation("begin of another layout than the one that was joined")
        is_ready = self.state is ReceiverState.READY
        if begin.base_version is None and is_ready:
            raise ProtocolViolation("a full sync that was not asked for")
        if begin.base_version is not None:
            if not is_ready or begin.base_version != self.version:
                raise VersionGap(held=self.version, base=begin.base_version, offered=begin.version)
            if begin.version <= begin.base_version:
                raise ProtocolViolation(f"v{begin.version} does not follow v{begin.base_version}")
        self.begun, self._next_bucket = begin, [0] * self.lanes
        self._ended = self._told = frozenset()

    def _tell(self, shares: Shares, lane: int) -> None:
        """Notes that they have come."""
        self._told |= {lane}

    def _count(self, bucket: Bucket, lane: int) -> None:
        """Refuses a bucket that is not the next one of its connection."""
        expected = self._next_bucket[lane]
        if bucket.sequence != expected or lane in self._ended:
            raise ProtocolViolation(f"bucket {bucket.sequence} instead of {expected}")
        self._next_bucket[lane] += 1

    def _end_lane(self, prepare: Prepare, lane: int) -> None:
        """Refuses another number of buckets than has come, unless one was lost."""
        arrived = self._next_bucket[lane]
        is_whole = prepare.num_buckets == arrived or self.incomplete
        if lane in self._ended or not is_whole:
            raise ProtocolViolation(f"{arrived} buckets arrived, {prepare.num_buckets} were sent")
        self._ended |= {lane}

    def _write(self, event: Event, lane: int) -> None:
        """Notes whether it was dirty, and half written, before."""
        if not self._has_written:
            self._before = self.dirty, self.half_written

    def _restore(self, event: Event, lane: int) -> None:
        """Is dirty, and half written, if it was so before."""
        self.dirty, self.half_written = self._before

    def _leave(self, event: Event, lane: int) -> None:
        """Ends the sync under way; dirty if the version was committed here and not finished, since
        other ranks of the engine may not have it.
        """
        self.dirty = self.dirty or self.state is ReceiverState.COMMITTED
        self.undone, self.begun, self.declined = False, None, None


_FIRST_LAYOUT = When(
    "No layout has come yet, and the weights are attached",
    lambda r, layout, lane: r._offered is None and not r.detached,
)
_NEEDS_FULL_SYNC = When(
    "A layout has come, and `full_sync` has its engine",
    lambda r, welcome, lane: r._offered is not None and r.engine in welcome.full_sync,
)
_NEEDS_NO_FULL_SYNC = When(
    "A layout has come, and `full_sync` does not have its engine",
    lambda r, welcome, lane: r._offered is not None and r.engine not in welcome.full_sync,
)
_DETACHED = When("The weights are detached", lambda r, begin, lane: r.detached)
_DECLINED = When(
    "It is of the sync that the receiver sits out",
    lambda r, message, lane: message.version == r.declined,
)
_FIRST = When(
    "Nothing of the sync has come on this connection",
    lambda r, shares, lane: not r._next_bucket[lane] and lane not in r._ended | r._told,
)
_LAST_LANE = When(
    "It has come on every other connection, and no payload was lost",
    lambda r, prepare, lane: len(r._ended | {lane}) == r.lanes and not r.incomplete,
)
_WRITTEN = When("Something was written since `begin`", lambda r, what, lane: r._has_written)
_FULL = When(
    "It was to be a full sync",
    lambda r, abort, lane: r.begun is not None and r.begun.base_version is None,
)
_ALONE = When("Its engine has one rank", lambda r, event, lane: r.world == 1)
_UNDONE = When("`undo` has its engine", lambda r, finish, lane: r.engine in finish.undo)


def _rules() -> list[Rule[ReceiverState]]:
    outside, joining, waiting, ready, staging, prepared, committing, committed = ReceiverState
    anywhere = tuple(ReceiverState)
    not_ready = tuple(state for state in ReceiverState if state is not ready)
    in_sync = (staging, prepared, committing)
    after_write = (committing, committed, ready, outside)
    r = ReceiverSession
    new: dict[str, object] = {"undone": False, "declined": None, "incomplete": False}
    new |= {"_has_written": False}
    mixed: dict[str, object] = {"dirty": True, "half_written": True}
    whole: dict[str, object] = {"dirty": False, "half_written": False}
    over: dict[str, object] = {"begun": None}
    return [  # in states, on a message or event, the next state, when, what is done, what is set
        Rule((outside,), "greeted", joining, sets={"undone": False, "_offered": None}),
        Rule((joining,), Layout, when=_FIRST_LAYOUT, do=r._keep),
        Rule((joining,), Welcome, waiting, _NEEDS_FULL_SYNC),
        Rule((joining,), Welcome, ready, _NEEDS_NO_FULL_SYNC, r._hold),
        Rule((ready,), Upcoming),
        Rule((ready,), Begin, ready, _DETACHED, r._decline),
        Rule((ready, waiting), Begin, staging, do=r._begin, sets=new),
        Rule((ready,), Shares, when=_DECLINED),
        Rule((ready,), Bucket, when=_DECLINED),
        Rule((ready,), Prepare, when=_DECLINED),
        Rule((ready, waiting), Abort, sets={"declined": None}),
        Rule((staging,), Shares, when=_FIRST, do=r._tell),
        Rule((staging,), Bucket, do=r._count),
        Rule((staging,), "cut off", sets={"incomplete": True}),
        Rule((staging,), Prepare, prepared, _LAST_LANE, r._end_lane),
        Rule((staging,), Prepare, do=r._end_lane),
        Rule((staging, prepared), Abort, outside, _WRITTEN, sets=over),
        Rule((staging, prepared), Abort, waiting, _FULL, sets=over),
        Rule((staging, prepared), Abort, ready, sets=over),
        Rule((prepared,), Commit, committing),
        Rule((committing,), "committed", ready, _ALONE, r._hold, whole | over),
        Rule((committing,), "committed", committed, sets=whole),
        Rule((committed,), Finish, outside, _UNDONE, sets=mixed | over | {"undone": True}),
        Rule((committed,), Finish, ready, do=r._hold, sets=over),
        Rule(in_sync, "writing", do=r._write, sets=mixed | {"_has_written": True}),
        Rule(after_write, "restored", when=_WRITTEN, do=r._restore),
        Rule((outside, *PATIENT), "corrupted", sets={"dirty": True}),
        Rule((ready,), "detached", sets={"detached": True}),
        Rule(not_ready, "detached", outside, do=r._leave, sets={"detached": True}),
        Rule(anywhere, "attached", sets={"detached": False}),
        Rule(anywhere, "invalidated", outside, do=r._leave, sets={"version": None}),
        Rule(anywhere, "lost", outside, do=r._leave),
    ]


RECEIVER = by_state(_rules())
"""What a receiver may do next, by its state and what comes."""
