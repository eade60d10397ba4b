"""One round of a sync at the sender: begin, buckets, prepare, decision, commit, finish."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deltasync.delta.coding import Coding, coded
from deltasync.delta.snapshot import Bucket as Packing
from deltasync.delta.snapshot import Plan
from deltasync.delta.staging import staged_bytes_of
from deltasync.delta.tiles import table_of
from deltasync.errors import DeltaSyncError, SyncAborted, TransportError
from deltasync.sync.events import Phase
from deltasync.sync.protocol.links import SenderLink, reason_of
from deltasync.sync.protocol.receiver_session import DETACHED, INCOMPLETE
from deltasync.sync.protocol.sender_session import Engine, SenderPhase, SenderSession
from deltasync.sync.source.weights import LocalWeights
from deltasync.wire.compression import Compression
from deltasync.wire.frame import encode
from deltasync.wire.messages import (
    Abort,
    Begin,
    Bucket,
    Commit,
    Committed,
    Failed,
    Finish,
    Message,
    Prepare,
    Prepared,
    Shares,
    as_text,
)

if TYPE_CHECKING:  # which knows what a round has sent
    from deltasync.sync.group.weights import GroupWeights


@dataclass(slots=True)
class SentBuckets:
    """What was sent to each receiver.

    Attributes:
        num_buckets: Number of payloads.
        bucket_bytes: Size of the largest payload.
        lost: Why receivers were lost, by their connection.
        bytes_by_codec: Bytes of the payloads, by what was done to them.
    """

    num_buckets: int = 0
    bucket_bytes: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    bytes_by_codec: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: SentBuckets) -> SentBuckets:
        """What two ranks have sent to the same receivers."""
        return SentBuckets(
            self.num_buckets + other.num_buckets,
            max(self.bucket_bytes, other.bucket_bytes),
            self.lost | other.lost,
            self.bytes_by_codec + other.bytes_by_codec,
        )


class Emitter:
    """Makes the messages that carry one plan: `begin`, its `frames`, `prepare`, in this order.

    A round sends all of them, a lane those after `begin`, a file keeps them all. Use it once.

    Args:
        plan: What is sent.
        version: The version that the plan leads to.
        compression: Of the payloads.
        buffer: Returns uint8[num_bytes] memory for the next payload as it travels.

    Attributes:
        sent: The buckets that the caller has sent: each counts when the next one is asked for.
    """

    def __init__(
        self,
        plan: Plan,
        version: int,
        *,
        compression: Coding,
        buffer: Callable[[int], Tensor],
    ) -> None:
        self._plan, self._version = plan, version
        self._buffer, self._coding, self.sent = buffer, compression, SentBuckets()
        self._raw: Tensor | None = None

    def begin(
        self, *, stream_id: str, layout_hash: str, timeout_s: float, attempt: int = 0
    ) -> Begin:
        """The message that announces the plan. Arguments as in `Begin`."""
        plan = self._plan
        return Begin(
            stream_id=stream_id,
            version=self._version,
            base_version=plan.base_version,
            layout_hash=layout_hash,
            payload_bytes=plan.payload_bytes,
            places=plan.places,
            timeout_s=timeout_s,
            attempt=attempt,
        )

    def frames(self, *, with_shares: bool = False) -> Iterator[tuple[Message, Tensor]]:
        """Each bucket's message, and its uint8[n] payload.

        The payload is a buffer, which the caller sends or keeps before it asks for the next one.

        Args:
            with_shares: Whether somebody has to be told first what buckets carry: without it they
                take it for all of the layout.
        """
        sent = self.sent
        if with_shares:
            table, space = torch.from_numpy(table_of(self._plan.space)), self._plan.space
            shares = Shares(version=self._version, num_shares=len(space.given))
            yield shares, self._buffer(len(table)).copy_(table)
        for bucket in self._plan.buckets():
            payload, compression = self._packed(bucket)
            sizes = bucket.sizes
            message = Bucket(
                version=self._version,
                sequence=sent.num_buckets,
                item_size=sizes.item_size,  # type: ignore[arg-type]
                tiles=sizes.tiles,
                places=sizes.places,
                whole=sizes.whole,
                compression=compression,
            )
            yield message, payload
            sent.bytes_by_codec[compression] += len(payload)
            sent.num_buckets += 1
            sent.bucket_bytes = max(sent.bucket_bytes, len(payload))

    def _packed(self, bucket: Packing) -> tuple[Tensor, Compression]:
        """A bucket's payload as it travels, and what was done to it."""
        coding = self._coding
        if coding == "none":
            sent = self._buffer(bucket.sizes.num_bytes)
            raw = sent if sent.device == bucket.device else self._scratch(bucket)
            bucket.pack(raw, lambda: None)
            return sent if raw is sent else sent.copy_(raw), "none"
        raw, made = self._scratch(bucket), list[tuple[Tensor, Compression]]()
        bucket.pack(raw, lambda: made.append(coded(coding, raw, bucket)))
        [(data, compression)] = made
        return self._buffer(len(data)).copy_(data), compression

    def _scratch(self, bucket: Packing) -> Tensor:
        """Memory to pack a bucket into before it is coded."""
        raw, num_bytes = self._raw, bucket.sizes.num_bytes
        if raw is None or len(raw) < num_bytes or raw.device != bucket.device:
            self._raw = None  # its memory first
            raw = self._raw = torch.empty(num_bytes, dtype=torch.uint8, device=bucket.device)
        return raw[:num_bytes]

    def prepare(self, digest: str | None = None) -> Prepare:
        """The message that ends the buckets."""
        count = self.sent.num_buckets
        return Prepare(version=self._version, num_buckets=count, digest=digest)


class Owner:
    """Whose engines a sender serves: lets them come in and join, and lets them pause and write.

    By default all join, and write at the same time. The sending thread calls it; it must not block.
    """

    def admits(self, engine: str) -> bool:
        """Whether an engine of this name may connect."""
        return True

    def joins(self, engine: str) -> bool:
        """Whether one that was admitted joins now; if not, it waits for a later sync."""
        return True

    def turns(
        self, engines: Collection[str], besides: Collection[str]
    ) -> Sequence[Collection[str]]:
        """Which of these engines, which can take a version, write at the same time, in order.

        An engine that waits for its turn serves its old version meanwhile. One that is in none is
        left out, and has to rejoin; if all are, nothing is decided.

        Args:
            engines: Names of those that can take it.
            besides: Those that hold it already, or join with it.

        Raises SyncAborted to abort the version for all of them, because they are too few.
        """
        return [engines]

    def are_enough(self, engines: Collection[str]) -> bool:
        """Whether these alone may take a version."""
        try:
            self.turns(engines, ())
        except SyncAborted:
            return False
        return True

    def begun(self, version: int, engines: Collection[str], plan: Plan) -> None:
        """A sync has begun, and its first payload is ready.

        Args:
            version: What it brings.
            engines: Those that take part.
            plan: What is sent. A full sync is written as it arrives, or may be, and so is what
                takes more memory to stage than a receiver has.
        """

    def decided(self, version: int, engines: Collection[str], *, is_unchanged: bool) -> None:
        """Receivers that have staged a version write it now, those of engines whose turn it is.

        Args:
            version, engines: Which.
            is_unchanged: Whether it is known to change no weight. Never so if a trainer has several
                ranks, which know only their own changes.
        """

    def held(self, version: int, engine: str) -> None:
        """All ranks of an engine have written a version and read it back."""


def writes_as_it_arrives(plan: Plan, max_staged_bytes: int) -> bool:
    """Whether receivers write what is sent as it arrives, or may, with so much memory to stage."""
    staged = staged_bytes_of(payload_bytes=plan.payload_bytes, places=plan.places)
    return plan.base_version is None or staged > max_staged_bytes


class Round:
    """Takes members from one version to the next, all or nothing for each engine.

    Use it once: `run`. Whoever fails leaves alone, and the others go on; but if payloads may not
    have reached the others either, the version is aborted before it is decided. In both cases the
    engines then know why, and those that failed have been dropped. This rank's `own` weights are
    released when nothing of the plan is read from the source any more; `peer_ranks` are the
    trainer's other ranks.

    Attributes:
        phases: "send", "wait" and "commit", by `time.perf_counter`.
        sent: To each receiver.
        receiver_bytes, receiver_commit_s: As in `SyncStats`.
    """

    def __init__(
        self,
        link: SenderLink[Message],
        session: SenderSession,
        plan: Plan,
        own: LocalWeights,
        *,
        owner: Owner,
        besides: Collection[str] = (),
        peer_ranks: GroupWeights | None = None,
    ) -> None:
        self._link, self._session, self._plan = link, session, plan
        self._own, self._owner, self._besides = own, owner, besides
        self._peer_ranks = peer_ranks
        self.phases, self.sent = list[Phase](), SentBuckets()
        self.receiver_bytes, self.receiver_commit_s = 0, 0.0
        self._finished: set[Engine] = set()
        self._is_answering = self._has_asked = self._has_begun = False
        self._is_unchanged = self._has_sent_all = self._is_repeated = self._is_released = False

    def run(self, engines: Sequence[Engine], *, version: int, stream_id: str) -> bool:
        """Do the round. Returns whether the version was decided."""
        self._version, self._engines = version, engines
        try:
            self._session.begin(engines, version=version)
            self._stage(stream_id)
            ready = self._ready()
            if not ready:
                failures = "; ".join(why for e in engines for why in e.failures.values())
                self._abort(failures or "no time is left to write it")
                return False
            turns = [frozenset(turn) for turn in self._owner.turns(ready, self._besides)]
            if len(turns) > 1 and self._writes_as_it_arrives():
                turns = [frozenset().union(*turns)]  # they are paused, all of them
            taking = frozenset().union(*turns)
            if leaving := [engine for engine in engines if engine.name not in taking]:
                self._session.narrow(leaving)
                self._drop(leaving)
            if not self._session.participants:
                self._abort("no engine is to take it")
                return False
            self._commit(turns)
        except BaseException as error:
            self._break_off(error)
            raise
        return True

    def _stage(self, stream_id: str) -> None:
        began, session = time.perf_counter(), self._session
        failed = self._link.open(list(session.participants))
        for peer, error in failed.items():
            session.failed(peer, reason_of(error))
        if failed:
            return
        coding = self._own.options.compression
        emitter = Emitter(self._plan, self._version, compression=coding, buffer=self._buffer)
        begin = emitter.begin(
            stream_id=stream_id,
            layout_hash=self._own.layout.hash,
            timeout_s=self._link.timeout_s,
            attempt=session.attempt,
        )
        self._send(begin)
        lost = self._lost()
        for peer in lost:
            session.failed(peer, "PeerLost: disconnected as the sync began")
        if lost:  # the others may write in place what would come now
            return
        self._send_buckets(emitter)
        sent = time.perf_counter()
        is_whole = len(self._sound()) == len(self._engines)
        if self._has_sent_all and (is_whole or self._goes_on()):
            self._is_answering = self._has_asked = True
            self._send(emitter.prepare())
            # Even if that lost somebody: an answer left unread would be taken for the next one.
            self._collect_prepared()
        self.phases += [("send", began, sent), ("wait", sent, time.perf_counter())]

    def _send_buckets(self, emitter: Emitter) -> None:
        """Send our own, and wait until the trainer's other ranks have sent theirs.

        The first bucket is packed before the phase is reported: an engine that writes what arrives
        does not wait, paused, for memory that is allocated then.
        """
        ranks, session, plan = self._peer_ranks, self._session, self._plan
        with_shares = ranks is not None and not self._link.knows(plan.space)
        if ranks is not None:
            ranks.start(
                self._engines,
                session.attempt,
                is_delta=plan.base_version is not None,
                with_shares=with_shares,
                timeout_s=self._link.timeout_s,
            )
        try:
            for message, payload in emitter.frames(with_shares=with_shares):
                self._report_begun()
                if not self._send(message, payload):
                    break
            else:
                self._has_sent_all, self._is_released = True, self._own.release()
                is_delta = plan.base_version is not None
                self._is_unchanged = ranks is None and is_delta and not emitter.sent.num_buckets
                self._report_begun()
        except TransportError as error:
            self._note_lost(error)
        self.sent = emitter.sent
        if ranks is not None:
            theirs = ranks.sent()
            self.sent += theirs
            for peer, engine in session.participants.items():
                if (connection := engine.ranks[peer].connection) in theirs.lost:
                    session.failed(peer, theirs.lost[connection])

    def _buffer(self, num_bytes: int) -> Tensor:
        while True:
            try:
                return self._link.buffer(num_bytes)
            except TransportError as error:
                if not self._note_lost(error):
                    raise

    def _sound(self) -> list[str]:
        """Engines of which no rank has failed."""
        return [engine.name for engine in self._engines if not engine.failures]

    def _goes_on(self) -> bool:
        """Whether engines that have not failed get all payloads, whoever was lost."""
        is_sure = self._link.transport.outlives_losses and self._peer_ranks is None
        return is_sure and bool(self._sound())

    def _ready(self) -> list[str]:
        """Engines of which all ranks have prepared; none if no time is left in which to write."""
        is_late = self._link.limit.is_over
        return self._sound() if self._has_asked and not (is_late or self._is_repeated) else []

    def _report_begun(self) -> None:
        """Once."""
        if not self._has_begun:
            self._has_begun = True
            self._owner.begun(self._version, self._sound(), self._plan)

    def _collect_prepared(self) -> None:
        session, incomplete, digests = self._session, dict[int, str](), dict[int, int]()
        is_delta = self._plan.base_version is not None
        replies = self._link.replies()
        self._is_answering = False
        for peer, reply in replies.items():
            if (engine := session.participants.get(peer)) is None:
                continue
            if peer in engine.failures:
                if isinstance(reply, Failed):
                    session.failed(peer, reason_of(reply), is_own=True)
            elif isinstance(reply, Failed) and reply.error == INCOMPLETE:
                incomplete[peer] = reason_of(reply)
            elif not isinstance(reply, Prepared) or reply.version != self._version:
                session.failed(peer, reason_of(reply))
                if is_delta and isinstance(reply, Failed) and reply.error == DETACHED:
                    engine.asleep.add(peer)
            else:
                digests[peer] = int(reply.digest, 16)
                self.receiver_bytes = max(self.receiver_bytes, reply.staged_bytes)
        if incomplete:
            self._spare(incomplete)
        session.judge(digests, self._plan.ledger)

    def _spare(self, incomplete: Mapping[int, str]) -> None:
        """Receivers that miss a payload stay if another attempt serves them, else have failed."""
        session = self._session
        lost = [engine for engine in self._engines if engine.must_leave]
        is_sure = self._link.transport.outlives_losses or self._is_released
        # An abort is dirty where it was written. Nobody else can have a payload that is missing.
        may_repeat = bool(lost) and not (is_sure or self._writes_as_it_arrives())
        for peer, reason in incomplete.items():
            if may_repeat and session.participants[peer] not in lost:
                self._is_repeated = True
            else:
                session.failed(peer, reason)

    def _commit(self, turns: Sequence[frozenset[str]]) -> None:
        began = time.perf_counter()
        self._session.decide()
        self._link.told(self._plan.space)
        self._send(Commit(version=self._version))
        waiting = deque(turns)
        while waiting:
            turn = waiting.popleft()
            self._owner.decided(self._version, turn, is_unchanged=self._is_unchanged)
            if turn is turns[0]:
                self._plan.decided()  # while the receivers write
            if self._finish(turn) and waiting:  # or each that is late would cost a timeout
                waiting = deque([frozenset().union(*waiting)])
        self.phases.append(("commit", began, time.perf_counter()))
        self._drop(self._session.finish())

    def _finish(self, engines: Collection[str]) -> bool:
        """Let each of these engines go on as soon as all its own ranks have answered.

        Returns whether all the time for that has passed.
        """
        deadline, session = time.monotonic() + self._link.timeout_s, self._session
        awaited = {peer for peer, engine in session.participants.items() if engine.name in engines}
        while awaited:
            came = self._link.some_replies(awaited, deadline)
            for peer, reply in came.items():
                self._note_committed(peer, reply)
            awaited -= came.keys()
            answered = dict.fromkeys(session.participants[peer] for peer in came)
            if done := [e for e in answered if awaited.isdisjoint(e.ranks)]:
                self._let_go_on(done)
        return time.monotonic() >= deadline

    def _note_committed(self, peer: int, reply: Message | DeltaSyncError) -> None:
        session = self._session
        if not isinstance(reply, Committed) or reply.version != self._version:
            session.failed(peer, reason_of(reply))
        elif int(reply.digest, 16) != session.participants[peer].digests[peer]:  # predicted
            session.failed(peer, "DigestMismatch: it read back other weights than ours")
        else:
            session.committed(peer)
            self.receiver_commit_s = max(self.receiver_commit_s, reply.commit_s)

    def _let_go_on(self, engines: Sequence[Engine]) -> None:
        """Tell the ranks of engines how all of them fared: if one failed, the others undo the
        version. No rank knows that by itself.
        """
        undo = sorted(engine.name for engine in engines if not engine.is_done)
        ranks = [peer for engine in engines if len(engine.ranks) > 1 for peer in engine.ranks]
        if peers := list(filter(self._link.transport.is_connected, ranks)):
            finish = encode(Finish(version=self._version, undo=tuple(undo)))
            try:
                self._link.transport.tell(peers, finish, timeout_s=self._link.timeout_s)
            except TransportError as error:
                self._note_lost(error)
        self._finished.update(engines)
        for engine in engines:
            if engine.name not in undo:
                self._owner.held(self._version, engine.name)

    def _abort(self, reason: str) -> None:
        self._link.hint(Abort(version=self._version, reason=as_text(reason)))
        if not self._has_asked:
            for peer, why in self._link.last_words(self._lost()).items():
                self._session.failed(peer, why, is_own=True)
        self._drop(self._session.abort())

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
                for peer, engine in self._session.participants.items():
                    if engine not in self._finished:
                        self._session.failed(peer, "the sender failed after the decision")
                self._drop(self._session.finish())

    def _drop(self, engines: Sequence[Engine]) -> None:
        for peer in [peer for engine in engines for peer in engine.ranks]:
            self._link.drop(peer)

    def _writes_as_it_arrives(self) -> bool:
        """Whether an engine may have written already what was sent."""
        room = min(engine.max_staged_bytes for engine in self._engines)
        return writes_as_it_arrives(self._plan, room)

    def _send(self, message: Message, payload: Tensor | None = None) -> bool:
        """Whether all that are not lost have it, or will."""
        try:
            self._link.send(message, payload)
        except TransportError as error:
            return self._note_lost(error)
        return True

    def _note_lost(self, error: TransportError) -> bool:
        """Losing a peer is no error here. Before the decision it has failed; later its answer says
        so, or has said that all is well before it left.

        Returns whether the others go on, which have not been lost before. Raises the error if
        nobody is lost.
        """
        lost, session = self._lost(), self._session
        if not lost:
            raise error
        if session.phase is not SenderPhase.STAGING:
            return False
        new = [peer for peer in lost if peer not in session.participants[peer].failures]
        for peer in new:
            session.failed(peer, reason_of(error))
        return bool(new) and self._goes_on()

    def _lost(self) -> list[int]:
        is_connected = self._link.transport.is_connected
        return [peer for peer in self._session.participants if not is_connected(peer)]
