"""An engine rank's end: stages while the engine serves, commits in its pause."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from torch import Tensor

from deltasync.delta.ledger import digest_text
from deltasync.delta.modes import plain_mode
from deltasync.delta.streams import own_stream
from deltasync.errors import (
    CallOrderError,
    DeltaSyncError,
    PeerLost,
    SyncAborted,
    TransportClosed,
    TransportError,
    TransportTimeout,
)
from deltasync.sync.arguments import check_receiver
from deltasync.sync.events import subscriptions
from deltasync.sync.options import ReceiverOptions
from deltasync.sync.protocol.links import ReceiverLinks, check_seconds
from deltasync.sync.protocol.receiver_session import PATIENT, ReceiverSession, ReceiverState
from deltasync.sync.receiver_base import BaseReceiver
from deltasync.sync.target.base import WeightTarget
from deltasync.transports.base import ReceiveTransport
from deltasync.wire import messages
from deltasync.wire.frame import FORMAT_VERSION

logger = logging.getLogger(__name__)
_MEMBER = (ReceiverState.WAITING, ReceiverState.READY)  # that takes part in no sync
_REPLY_TIMEOUT_S, _MAX_SENDER_TIMEOUT_S = 30.0, 3600.0


class WeightReceiver(BaseReceiver):
    """Receives the trainer's weights into one engine rank.

    `receive_weights` does a sync in the calling thread. It consists of `stage`, which does
    everything that can fail while the engine serves, and `commit`, which writes in the engine's
    pause. After an error the old version is intact unless `is_dirty`; the next call rejoins.

    Args:
        target: The live weights.
        transport: The receiver's end of a link. The receiver owns it: `close` closes it.
        lanes: For a trainer with several ranks: the links to its ranks 1, 2 ... Owned too.
        engine: Name of the inference engine, unique among the sender's receivers.
        rank: This rank, of the engine's `world` ranks (tensor, pipeline, expert parallel).
        options: Memory, scrub.
        half_written: Whether an earlier receiver of these weights ended with `is_half_written`.

    Attributes:
        name: In logs and in `SyncStats.lost`: engine[rank/world].
    """

    _cure, _heal = "receive a full sync", "rejoin to heal"
    _refusal = "a sync is under way; a WeightReceiver is used by one thread"

    def __init__(
        self,
        target: WeightTarget,
        transport: ReceiveTransport,
        *,
        lanes: Sequence[ReceiveTransport] = (),
        engine: str = "engine",
        rank: int = 0,
        world: int = 1,
        options: ReceiverOptions | None = None,
        half_written: bool = False,
    ) -> None:
        check_receiver(target, (transport, *lanes), options, engine)
        session = ReceiverSession(
            engine, world, 1 + len(lanes), dirty=half_written, half_written=half_written
        )
        super().__init__(target, session, f"{engine}[{rank}/{world}]", options)
        self._links = ReceiverLinks([transport, *lanes])
        self._weights.progress = self._links.progress
        self._weights.are_private = self._links.are_private
        self._engine, self._rank, self._world = engine, rank, world
        self._deadline = 0.0  # of a call, for a sync to begin
        self._silence_s = 0.0  # how long the sender of a sync may be silent

    def _recover(self) -> None:
        self._fail(PeerLost("interrupted"))

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to the sender, as far as can be told without waiting."""
        if self._session.state is ReceiverState.COMMITTING:  # nobody listens, and nothing is said
            try:
                self._links.receive(timeout_s=0)
            except DeltaSyncError as error:
                return isinstance(error, TransportTimeout)
        return self._session.state is not ReceiverState.OUTSIDE

    @property
    def is_unchanged(self) -> bool:
        """Whether the version that is staged changes no weight."""
        return self._session.is_unchanged

    @property
    def upcoming(self) -> int | None:
        """The version that is staged, or arrives, and is not written yet; None if there is none."""
        begun = self._session.begun
        return None if begun is None else begun.version

    def receive_weights(self, *, timeout_s: float = 60.0) -> int:
        """Receive one sync, or join without one. Returns the version held.

        Call it from the engine's thread: the engine must not serve meanwhile, and storage must not
        be replaced. That is checked as a sync begins; `commit` checks it in the pause.

        Args:
            timeout_s: For a sync to begin, and for the next one after an aborted one. Within a sync
                `stall_timeout_s` applies.

        Raises:
            TransportTimeout: No sync came. The receiver stays a member; call again.
            DeltaSyncError: The sync failed; call again to rejoin.
        """
        check_seconds("timeout_s", timeout_s)
        with plain_mode(), self._caller.call(), self._watched(pauses=True):
            self._weights.still_since = time.monotonic()
            try:
                while self._stage(timeout_s):
                    if (version := self._commit()) is not None:
                        return version
            finally:
                self._weights.still_since = math.inf
        if self._session.version is None:
            raise SyncAborted("invalidated while joining; call again")
        return self._session.version

    def _watched(
        self, *, pauses: bool = False, defers: bool = False
    ) -> AbstractContextManager[None]:
        if not subscriptions:  # nor is anything noted for events
            return nullcontext()
        return self._record.watched(pauses=pauses, defers=defers)

    def stage(self, *, timeout_s: float = 60.0) -> bool:
        """Receive a sync until it is decided; the engine may serve meanwhile.

        Joins first if necessary. Returns True if `commit` must be called next, in the engine's
        pause, and False if there is nothing to write (joined by digest alone). If a sync needs more
        memory than `max_staged_bytes`, returns True at once: `commit` then receives and writes it
        in place, and if that breaks off, the receiver is dirty.
        """
        check_seconds("timeout_s", timeout_s)
        with plain_mode(), self._caller.call(), self._watched():
            return self._stage(timeout_s)

    def _stage(self, timeout_s: float) -> bool:
        with self._failing_safely(), self._stream.entered() if self._stream else nullcontext():
            if self._is_in_place:
                raise CallOrderError("a sync is written in place: call commit, in the pause")
            self._deadline = time.monotonic() + timeout_s
            self._check_between_syncs()
            if self._session.state is ReceiverState.OUTSIDE:
                self._greet()
            while self._session.state is not ReceiverState.COMMITTING:
                under_way = self._session.begun, self._session.declined
                message = self._take_next()
                if self._is_in_place:
                    return True
                if isinstance(message, messages.Abort) and under_way != (None, None):
                    self._deadline = time.monotonic() + timeout_s  # it may try again
                elif not isinstance(message, messages.Welcome):
                    if self._session.state in _MEMBER and not self._left_s:
                        raise TransportTimeout("much came in time, and no sync began")
                elif self.state != ReceiverState.WAITING:
                    logger.info("%s joined at v%d: same digest", self.name, self.version)
                    if subscriptions:
                        self._record.joined()
                    return False
            return True

    def commit(self) -> int:
        """Write what `stage` received. Returns the version held now.

        The engine must be paused; it may resume when this returns or raises, unless
        `is_dirty`. Writes and reads back; the ranks of an engine wait for each other.

        Raises:
            CallOrderError: Nothing is staged: call `stage` first. The receiver stays a member.
            ConfigError: Another thread commits or receives; it is not affected.
            TargetMoved: Storage was replaced. Nothing staged was written; in place, it is dirty.
            SyncAborted: The sender gave up, or another rank of the engine failed; see `may_follow`.
            DigestMismatch: What was read back is not what was written.
        """
        state = self._session.state
        if state not in (ReceiverState.COMMITTING, ReceiverState.OUTSIDE) and not self._is_in_place:
            raise CallOrderError(f"commit while {state.name}: nothing is staged; call stage first")
        with plain_mode(), self._caller.call(), self._watched(pauses=True, defers=True):
            version = self._commit()
        if version is None:
            raise SyncAborted("given up before anything was written; stage again", may_follow=True)
        return version

    def _commit(self) -> int | None:
        """`commit`; None if the sender gave up while nothing was written in place."""
        with self._failing_safely():
            if self._stream is not None:
                self._stream.join()
            while self._session.state is not ReceiverState.COMMITTING and self._is_in_place:
                if isinstance(self._take_next(), messages.Abort):
                    if self._session.state is not ReceiverState.OUTSIDE:
                        return None
                    raise SyncAborted("the sender gave up; weights written in place are dirty")
            with self._lock:
                begun, state = self._session.begun, self._session.state
                if state is not ReceiverState.COMMITTING or begun is None:
                    raise CallOrderError(f"commit while {state.name}; call stage first")
                commit_s = self._write(begun)
            if self._world > 1:
                self._wait_for_engine()
            if subscriptions:
                self._record.committed(commit_s, self._weights.staging)
            self._weights.staging, self._scrub_is_due = None, True
            return begun.version

    def close(self) -> None:
        """Close the connection. The weights stay as they are."""
        self._is_closed = True
        self._attached.set()
        self._links.close()
        self._record.flush()

    @property
    def _is_in_place(self) -> bool:
        is_under_way = self._session.state in (ReceiverState.STAGING, ReceiverState.PREPARED)
        staging = self._weights.staging
        return is_under_way and staging is not None and staging.in_place

    def _check_between_syncs(self) -> None:
        """Leave if the weights have changed while they were detached; after a sync, scrub once.

        The sender is busy comparing meanwhile.
        """
        with self._lock:
            if self._session.state is not ReceiverState.READY or self._session.detached:
                return
            if self._weights.may_differ and not self._weights.are_kept():
                self._session.on("lost")
            elif self._scrub_is_due:
                self._scrub()

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _greet(self) -> None:
        hello = messages.Hello(
            parameters=self._parameters(),  # before anything else: this may take long
            engine=self._engine,
            rank=self._rank,
            world=self._world,
            format_versions=(FORMAT_VERSION,),
            connection=None,  # the links say which, if there are lanes
            lanes=0,
        )
        self._weights.staging = None
        self._links.connect(hello, timeout_s=self._left_s)
        self._session.on("greeted")

    def _parameters(self) -> tuple[messages.Entry, ...]:
        """What the target holds, when it may be asked. Raises TransportTimeout, TransportClosed."""
        if self._session.detached:
            self._links.disconnect()  # nobody is to wait for this receiver
        self._attached.wait(self._left_s)
        with self._lock:
            if self._is_closed:
                raise TransportClosed("this receiver was closed")
            if self._session.detached:
                raise TransportTimeout("the weights are detached: no sync comes before `attach`")
            return messages.entries(self._weights.target.parameters())

    def _take_next(self) -> messages.Message:
        """Receive one message, act on it, and return it."""
        lane, message, payload = self._links.receive(
            timeout_s=self._left_s if self._session.state in PATIENT else self._silence_s
        )
        with self._lock:
            if self._links.follows_loss and self._session.state is ReceiverState.STAGING:
                self._session.on("cut off")
            self._session.on(message, lane=lane)
            self._handle(message, payload, lane)
        return message

    def _handle(self, message: messages.Message, payload: Tensor | None, lane: int) -> None:
        match message:
            case messages.Layout():
                self._bind(message)
            case messages.Welcome() if self._session.state is ReceiverState.READY:
                self._weights.proved = self._weights.live.ledger
            case messages.Upcoming() if not self._session.detached:
                self._weights.check_early()
            case messages.Begin() if self._session.declined is None:
                self._begin(message)
            case messages.Shares() if self._session.declined is None:
                self._weights.payloads.take_shares(payload, lane)
            case messages.Bucket() if self._session.declined is None:
                self._weights.stage(message, payload, lane)
            case messages.Prepare() if self._session.declined is not None and not lane:
                self._reply(self._session.asleep())
            case messages.Prepare() if self._session.state is ReceiverState.PREPARED:
                self._prepared(message)
            case messages.Prepare() if self._session.awaits_abort:
                self._reply(self._session.cut_off())
            case messages.Commit():
                if subscriptions:
                    self._record.note("ready")
            case messages.Abort():
                self._weights.staging = None
                if self._session.state is not ReceiverState.OUTSIDE:  # where it is an error
                    self._record.aborted()

    def _bind(self, layout: messages.Layout) -> None:
        """Find the weights of the layout and measure them."""
        weights, session = self._weights, self._session
        weights.bind(layout.specs(), lanes=session.lanes, world=self._world)
        self._stream = own_stream(weights.live.device, self._stream)
        self._reply(weights.held(half_written=session.half_written))

    def _begin(self, begin: messages.Begin) -> None:
        # The sender may itself be waiting for others.
        theirs = 2 * min(begin.timeout_s, _MAX_SENDER_TIMEOUT_S)
        self._silence_s = max(self._options.stall_timeout_s, theirs)
        if subscriptions:
            self._record.begin(begin, begin.payload_bytes)
        self._weights.begin(begin)

    def _prepared(self, prepare: messages.Prepare) -> None:
        digest, staged_bytes = self._weights.predict()
        if subscriptions:
            self._record.note("wait")
        text = digest_text(digest)
        self._reply(
            messages.Prepared(version=prepare.version, digest=text, staged_bytes=staged_bytes)
        )

    def _write(self, begun: messages.Begin) -> float:
        """The pause: write, read back, answer. Returns the seconds of the first two."""
        digest, commit_s = self._weights.write(heals=self._session.heals)
        text = digest_text(digest)
        with suppress(TransportError):  # the version is decided, and the next receive will tell
            self._reply(messages.Committed(version=begun.version, digest=text, commit_s=commit_s))
        kind = "full" if begun.base_version is None else "delta"
        num_bytes = begun.payload_bytes
        what = (self.name, begun.version, kind, num_bytes, commit_s * 1e3)
        logger.info("%s wrote v%d: %s, %d bytes of patches, %.1f ms", *what)
        return commit_s

    def _wait_for_engine(self) -> None:
        """Learn whether the engine's other ranks have committed too; if not, undo, and raise."""
        before = self._session.version
        self._take_next()
        with self._lock:
            if self._session.state is ReceiverState.READY:
                return
            if self._session.undone:
                self._weights.undo()
        outcome = "weights are dirty" if self._session.dirty else f"v{before} was put back"
        raise SyncAborted(f"another rank of the engine failed: {outcome}")

    def _reply(self, message: messages.Message) -> None:
        self._links.reply(message, timeout_s=_REPLY_TIMEOUT_S)

    @contextmanager
    def _failing_safely(self) -> Iterator[None]:
        """Whatever goes wrong: the old version stands, or the receiver is dirty. The sender is
        told, and a later call rejoins.
        """
        try:
            yield
        except BaseException as error:
            if not (isinstance(error, TransportTimeout) and self._session.state in PATIENT):
                self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._weights.staging = None
        failed = self._session.fail(error)
        if not isinstance(error, PeerLost | TransportClosed):
            with suppress(TransportError):
                self._reply(failed)
        self._links.disconnect()
