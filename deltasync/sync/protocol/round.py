"""One round of a sync at the sender: begin, buckets, prepare, decision, commit, finish."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from deltasync.delta.coding import Coding
from deltasync.delta.snapshot import Plan
from deltasync.delta.staging import staged_bytes_of
from deltasync.errors import DeltaSyncError, TransportError
from deltasync.sync.events import Phase
from deltasync.sync.protocol.frames import Emitter, SentBuckets
from deltasync.sync.protocol.links import SenderLink, reason_of
from deltasync.sync.protocol.receiver_session import DETACHED, INCOMPLETE
from deltasync.sync.protocol.sender_session import Member, SenderPhase, SenderSession, judge
from deltasync.sync.source.layout import SentLayout
from deltasync.wire.frame import encode
from deltasync.wire.messages import (
    Abort,
    Attempt,
    Commit,
    Committed,
    Failed,
    Finish,
    Message,
    Prepared,
    as_text,
)


@dataclass(slots=True)
class RoundResult:
    """What a round did. Fields as in SyncStats, and which peers had to leave, or sat it out."""

    decided: bool = False
    left: set[int] = field(default_factory=set)
    asleep: set[int] = field(default_factory=set)
    sent: SentBuckets = field(default_factory=SentBuckets)
    coding: Coding = "none"
    transfer_s: float = 0.0
    wait_s: float = 0.0
    commit_s: float = 0.0
    receiver_commit_s: float = 0.0
    receiver_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SyncPhase:
    """Where a sync stands, for who has to let engines pause.

    Attributes:
        version: What it brings.
        is_decided: Whether receivers that have staged it write now. Otherwise it has begun, and its
            first payload is ready.
        is_full: Whether it is a full sync: receivers write it as it arrives, or may do so.
        staged_bytes: The most memory that staging takes. Receivers that have less write as it
            arrives.
        is_unchanged: Whether it is known to change no weight. Never so if a trainer has several
            ranks, which know only their own changes, or when it has only begun.
        engines: The engines that are meant: those that take part; once it is decided, those whose
            turn it is to write; once it is held, the one that has it.
        is_held: Whether all ranks of the engine have written it and read it back.
    """

    version: int
    is_decided: bool
    is_full: bool
    staged_bytes: int
    is_unchanged: bool
    engines: frozenset[str] = frozenset()
    is_held: bool = False


Turns = Callable[[Collection[str], Collection[str]], Sequence[Collection[str]]]
"""Given the engines that can take a version, and others that hold it already or join with it,
returns which of the former write at the same time, in order.

An engine that is in none is left out, and has to rejoin; if all are, nothing is decided. Raises
SyncAborted to abort the version for all of them, because they are too few.
"""


def all_at_once(
    engines: Collection[str], besides: Collection[str] = ()
) -> Sequence[Collection[str]]:
    """The `Turns` of engines that need not wait for each other."""
    return [engines]


class PeerRanks(Protocol):
    """The other ranks of a trainer, which send to the same receivers what they hold."""

    def next_attempt(self) -> int:
        """Number the attempt that receivers are told of now, and the others by `start`."""
        ...

    def start(
        self,
        receivers: Sequence[str],
        version: int,
        base_version: int | None,
        *,
        timeout_s: float,
    ) -> None:
        """Let them begin; receivers by their connections."""
        ...

    def sent(self) -> SentBuckets:
        """Wait until they have sent everything. Raises SyncAborted if one has failed."""
        ...


class Round:
    """Takes members from one version to the next, all or nothing for each engine.

    Use it once: `run`. Whoever fails leaves alone, and the others go on; but if payloads may not
    have reached the others either, the version is aborted before it is decided. In both cases the
    session then knows why, and those that failed have been dropped. `packed` is called when nothing
    of the plan is read from the source any more, and returns whether that may change now.

    Attributes:
        phases: "send", "wait" and "commit", by `time.perf_counter`.
    """

    def __init__(
        self,
        link: SenderLink,
        session: SenderSession,
        plan: Plan,
        layout: SentLayout,
        *,
        compression: Coding,
        packed: Callable[[], bool],
        on_phase: Callable[[SyncPhase], None] | None = None,
        peer_ranks: PeerRanks | None = None,
        turns: Callable[[Collection[str]], Sequence[Collection[str]]] = all_at_once,
    ) -> None:
        self._turns = turns
        self._link, self._session, self._plan = link, session, plan
        self._on_phase, self._packed, self._peer_ranks = on_phase, packed, peer_ranks
        self._layout, self._compression = layout, compression
        self._result, self.phases = RoundResult(), list[Phase]()
        self._digests: dict[int, int] = {}  # that receivers would arrive at, by peer
        self._said: dict[int, str] = {}  # by those that were lost: why they left
        self._finished: set[str] = set()  # engines
        self._is_answering = self._has_asked = self._has_begun = False
        self._is_unchanged = self._has_sent_all = self._is_repeated = self._is_released = False

    def run(self, participants: Sequence[Member], *, version: int, stream_id: str) -> RoundResult:
        """Do the round. The result says whether the version was decided."""
        self._version = version
        self._engines = frozenset(member.engine for member in participants)
        self._is_alone = len(self._engines) == 1  # no other engine can go on without it
        try:
            self._session.begin(participants, version=version)
            self._stage(stream_id)
            ready = self._ready()
            if not ready:
                failures = "; ".join(self._session.failures.values())
                self._abort(failures or "no time is left to write it")
                return self._result
            turns = [frozenset(turn) for turn in self._turns(ready)]
            if len(turns) > 1 and self._writes_as_it_arrives():
                turns = [frozenset().union(*turns)]  # they are paused, all of them
            taking = frozenset().union(*turns)
            if self._session.failures or taking != self._engines:
                self._drop(self._session.narrow(taking, said=self._said))
            if not taking:
                self._abort("no engine is to take it")
                return self._result
            self._commit(turns)
        except BaseException as error:
            self._break_off(error)
            raise
        return self._result

    def _stage(self, stream_id: str) -> None:
        began = time.perf_counter()
        for peer, error in self._link.open(list(self._session.participants)).items():
            self._session.failed(peer, reason_of(error))
        if self._session.failures:
            return
        self._result.coding = self._compression
        buffer = self._link.buffer if self._is_alone else self._buffer
        emitter = Emitter(self._plan, self._version, compression=self._compression, buffer=buffer)
        if self._peer_ranks is not None:
            self._send(Attempt(number=self._peer_ranks.next_attempt()))
        self._send(
            emitter.begin(
                stream_id=stream_id,
                layout_hash=self._layout.hash,
                timeout_s=self._link.timeout_s,
            )
        )
        if self._has_lost():  # the others may write in place what would come now
            return
        if self._peer_ranks is not None:
            receivers = [member.connection for member in self._session.participants.values()]
            self._peer_ranks.start(
                receivers, self._version, self._plan.base_version, timeout_s=self._link.timeout_s
            )
        self._send_buckets(emitter)
        sent = time.perf_counter()
        if self._has_sent_all and (not self._session.failures or self._goes_on()):
            self._is_answering = self._has_asked = True
            self._send(emitter.prepare())
            # Even if that lost somebody: an answer left unread would be taken for the next one.
            self._collect_prepared()
        now = time.perf_counter()
        self._result.transfer_s, self._result.wait_s = now - began, now - sent
        self.phases += [("send", began, sent), ("wait", sent, now)]

    def _has_lost(self) -> bool:
        """Whether a participant is gone."""
        for peer in self._lost():
            self._session.failed(peer, "PeerLost: disconnected as the sync began")
        return bool(self._session.failures)

    def _send_buckets(self, emitter: Emitter) -> None:
        """Send our own, and wait until the trainer's other ranks have sent theirs.

        The first bucket is packed before the phase is reported: an engine that writes what arrives
        does not wait, paused, for memory that is allocated then.
        """
        try:
            is_plain = self._is_alone and self._on_phase is None
            send = self._link.send if is_plain else self._send_bucket
            is_part = self._peer_ranks is not None and not self._link.knows(self._plan.space)
            emitter.send_buckets(send, with_shares=is_part)
            self._has_sent_all = True
            self._is_released = self._packed()
            is_alone, is_full = self._peer_ranks is None, self._plan.base_version is None
            self._is_unchanged = is_alone and not (is_full or emitter.sent.num_buckets)
            self._report_begun()
        except TransportError as error:
            self._note_lost(error)
        self._result.sent = emitter.sent
        if self._peer_ranks is not None:
            theirs = self._peer_ranks.sent()
            self._result.sent += theirs
            for member in self._session.participants.values():
                if member.connection in theirs.lost:
                    self._session.failed(member.peer, theirs.lost[member.connection])

    def _send_bucket(self, bucket: Message, payload: Tensor) -> None:
        self._report_begun()
        try:
            self._link.send(bucket, payload)
        except TransportError as error:
            self._let_leave(error)

    def _buffer(self, num_bytes: int) -> Tensor:
        while True:
            try:
                return self._link.buffer(num_bytes)
            except TransportError as error:
                self._let_leave(error)

    def _let_leave(self, error: TransportError) -> None:
        """Note who was lost. Raises the error unless the others go on without them."""
        before = len(self._session.failures)
        self._note_lost(error)
        if len(self._session.failures) == before or not self._goes_on():
            raise error

    def _goes_on(self) -> bool:
        """Whether engines that have not failed get all payloads, whoever was lost."""
        is_sure = self._link.transport.capabilities.outlives_losses and self._peer_ranks is None
        return is_sure and bool(self._sound())

    def _sound(self) -> set[str]:
        """Engines of which no rank has failed."""
        here = self._session.participants
        failed = {here[peer].engine for peer in self._session.failures}
        return {member.engine for member in here.values()} - failed

    def _ready(self) -> set[str]:
        """Engines of which all ranks have prepared; none if no time is left in which to write."""
        is_late = self._link.limit.is_over
        return self._sound() if self._has_asked and not (is_late or self._is_repeated) else set()

    def _report_begun(self) -> None:
        """Once."""
        if not self._has_begun:
            self._has_begun = True
            self._report_phase(self._sound(), is_decided=False)

    def _collect_prepared(self) -> None:
        digests: dict[int, int] = {}
        incomplete: dict[int, str] = {}
        for peer, reply in self._replies():
            if peer in self._session.failures:
                if isinstance(reply, Failed):
                    self._said[peer] = reason_of(reply)
            elif isinstance(reply, Failed) and reply.error == INCOMPLETE:
                incomplete[peer] = reason_of(reply)
            elif not isinstance(reply, Prepared) or reply.version != self._version:
                self._session.failed(peer, reason_of(reply))
                is_delta = self._plan.base_version is not None
                if is_delta and isinstance(reply, Failed) and reply.error == DETACHED:
                    self._result.asleep.add(peer)
            else:
                digests[peer] = int(reply.digest, 16)
                self._result.receiver_bytes = max(self._result.receiver_bytes, reply.staged_bytes)
        if incomplete:
            may_repeat = not (
                self._link.transport.capabilities.outlives_losses or self._is_released
            )
            may_repeat = may_repeat and not self._writes_as_it_arrives()  # an abort is dirty then
            asleep = self._result.asleep
            self._is_repeated = self._session.spare(incomplete, asleep, may_repeat=may_repeat)
        judge(self._session, digests, self._plan.ledger, len(self._layout.specs))
        self._digests = digests

    def _commit(self, turns: Sequence[frozenset[str]]) -> None:
        began = time.perf_counter()
        self._session.decide()
        self._result.decided = True
        self._link.told(self._plan.space)
        self._send_decided(Commit(version=self._version))
        waiting = deque(turns)
        while waiting:
            self._report_phase(turn := waiting.popleft(), is_decided=True)
            if turn is turns[0]:
                self._plan.decided()  # while the receivers write
            if self._finish(turn) and waiting:  # or each that is late would cost a timeout
                waiting = deque([frozenset().union(*waiting)])
        now = time.perf_counter()
        self._result.commit_s = now - began
        self.phases.append(("commit", began, now))
        self._drop(self._session.finish())

    def _finish(self, engines: Collection[str]) -> bool:
        """Let each of these engines go on as soon as all its own ranks have answered.

        Returns whether all the time for that has passed.
        """
        if self._is_alone:
            for peer, reply in self._replies():
                self._note_committed(peer, reply)
            self._let_go_on(engines)
            return False
        deadline = time.monotonic() + self._link.timeout_s
        awaited: dict[str, set[int]] = {}
        for peer, member in self._session.participants.items():
            if member.engine in engines:
                awaited.setdefault(member.engine, set()).add(peer)
        while awaited:
            peers = frozenset().union(*awaited.values())
            for peer, reply in self._link.some_replies(peers, deadline).items():
                self._note_committed(peer, reply)
                awaited[self._session.participants[peer].engine].discard(peer)
            done = {engine for engine, rest in awaited.items() if not rest}
            self._let_go_on(done)
            awaited = {engine: rest for engine, rest in awaited.items() if rest}
        return time.monotonic() >= deadline

    def _note_committed(self, peer: int, reply: Message | DeltaSyncError) -> None:
        if not isinstance(reply, Committed) or reply.version != self._version:
            self._session.failed(peer, reason_of(reply))
        elif int(reply.digest, 16) != self._digests[peer]:  # which was that of our weights
            self._session.failed(peer, "DigestMismatch: it read back other weights than ours")
        else:
            self._session.committed(peer)
            self._result.receiver_commit_s = max(self._result.receiver_commit_s, reply.commit_s)

    def _let_go_on(self, engines: Collection[str]) -> None:
        """Tell the ranks of engines how all of them fared."""
        if not engines:
            return
        undo = self._session.undone(engines)
        finish = Finish(version=self._version, undo=undo)
        if self._is_alone:
            self._send_decided(finish)
        else:
            self._tell_decided(engines, finish)
        self._finished.update(engines)
        for engine in set(engines).difference(undo):
            self._report_phase(frozenset([engine]), is_decided=True, is_held=True)

    def _tell_decided(self, engines: Collection[str], message: Message) -> None:
        here, is_connected = self._session.participants.values(), self._link.transport.is_connected
        peers = [m.peer for m in here if m.engine in engines and is_connected(m.peer)]
        try:
            self._link.transport.tell(peers, encode(message), timeout_s=self._link.timeout_s)
        except TransportError:  # who is gone has answered, or is known to have failed
            if not self._lost():
                raise

    def _abort(self, reason: str) -> None:
        self._link.hint(Abort(version=self._version, reason=as_text(reason)))
        said = self._said if self._has_asked else self._link.last_words(self._lost())
        self._drop(self._session.abort(self._result.asleep, said=said))

    def _break_off(self, error: BaseException) -> None:
        """Leave nobody in doubt: an undecided version is aborted, after a decision all rejoin."""
        match self._session.phase:
            case SenderPhase.STAGING:
                for peer in self._session.participants:
                    # An answer that was not read must not be taken for the next one.
                    if self._is_answering or not self._link.transport.is_connected(peer):
                        self._session.failed(peer, "the sender broke off")
                self._abort(f"the sender failed: {type(error).__name__}")
            case SenderPhase.DECIDED:
                for peer, member in self._session.participants.items():
                    if member.engine not in self._finished:
                        self._session.failed(peer, "the sender failed after the decision")
                self._drop(self._session.finish())

    def _drop(self, members: Sequence[Member]) -> None:
        for member in members:
            self._result.left.add(member.peer)
            self._link.drop(member.peer)

    def _report_phase(
        self, engines: Collection[str], *, is_decided: bool, is_held: bool = False
    ) -> None:
        if self._on_phase is None:
            return
        self._on_phase(
            SyncPhase(
                self._version,
                is_decided,
                is_full=self._plan.base_version is None,
                staged_bytes=self._staged_bytes(),
                is_unchanged=self._is_unchanged,
                engines=frozenset(engines),
                is_held=is_held,
            )
        )

    def _staged_bytes(self) -> int:
        return staged_bytes_of(payload_bytes=self._plan.payload_bytes, places=self._plan.places)

    def _writes_as_it_arrives(self) -> bool:
        """Whether an engine may have written already what was sent."""
        room = min(member.max_staged_bytes for member in self._session.participants.values())
        return self._plan.base_version is None or self._staged_bytes() > room

    def _replies(self) -> list[tuple[int, Message | DeltaSyncError]]:
        replies = self._link.replies()
        self._is_answering = False
        return [item for item in replies.items() if item[0] in self._session.participants]

    def _send(self, message: Message) -> None:
        """Losing a peer is no error here: the session knows, and the round sees it there."""
        try:
            self._link.send(message)
        except TransportError as error:
            self._note_lost(error)

    def _send_decided(self, message: Message) -> None:
        """Losing a peer says nothing of the version: its answer does, or did before it left."""
        try:
            self._link.send(message)
        except TransportError:
            if not self._lost():
                raise

    def _note_lost(self, error: TransportError) -> None:
        lost = self._lost()
        if not lost:
            raise error
        for peer in lost:
            self._session.failed(peer, reason_of(error))

    def _lost(self) -> list[int]:
        is_connected = self._link.transport.is_connected
        return [peer for peer in self._session.participants if not is_connected(peer)]
