"""The trainer's end: compares, sends, and decides when a version is final."""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from deltasync.delta.modes import plain_mode
from deltasync.delta.snapshot import Plan
from deltasync.errors import (
    ConfigError,
    EngineFailed,
    LayoutMismatch,
    SyncAborted,
    TransportTimeout,
    WireError,
)
from deltasync.sync.arguments import (
    check_coding,
    check_options,
    check_transport,
    local_weights,
)
from deltasync.sync.events import report, reporting, subscriptions
from deltasync.sync.group.group import TrainerGroup
from deltasync.sync.group.weights import GroupWeights
from deltasync.sync.options import SenderOptions
from deltasync.sync.protocol.links import (
    CallTimeout,
    OneCaller,
    SenderLink,
    check_seconds,
    message_of,
    reason_of,
)
from deltasync.sync.protocol.lobby import Greetings, Lobby, join
from deltasync.sync.protocol.round import Owner, Round, SentBuckets
from deltasync.sync.protocol.sender_session import Engine, SenderSession
from deltasync.sync.source.layout import SentLayout, check_engine, specs_of
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.source.weights import LocalWeights, Weights
from deltasync.sync.stats import (
    DeltaWatch,
    SenderCall,
    SyncStats,
    nothing_sent,
    reasons,
    stats_of,
)
from deltasync.transports.base import Closing, SendTransport
from deltasync.wire.messages import Failed, ParameterSpec, Upcoming

logger = logging.getLogger(__name__)


class WeightSender(Closing):
    """Sends the trainer's weights to all receivers.

    The first sync captures the source; later syncs send only changes. A version becomes final when
    every member that takes it has staged it and predicts the sender's digest. Until then no
    receiver changes, except in syncs that are written as they arrive. Use it from one thread. The
    source must not change during `send_weights`.

    Args:
        source: The trainer's parameters; read, never written. Or `StreamedWeights`, which have
            their own options.
        transport: The sender's end of a link. The sender owns it: `close` closes it.
        options: Sizes, codec, dtypes.
        owner: Whose engines these are, for engines that have to be let in, or asked to pause.
        group: The other ranks of the trainer, if it has several. This end is then rank 0, and
            every other rank uses a `TrainerRank`. Receivers have a lane to each of them.

    Attributes:
        source: What is sent: the source without what `leave_out` names; None of other weights.
        lost: Why members left in the last call of `send_weights`, also if that raised.
        were_asleep: Whether all members skipped the last sync because their weights sleep, and
            nobody joined.
    """

    def __init__(
        self,
        source: WeightSource | LocalWeights,
        transport: SendTransport,
        *,
        options: SenderOptions | None = None,
        owner: Owner | None = None,
        group: TrainerGroup | None = None,
    ) -> None:
        check_transport(transport, "Sender")
        check_options(options, SenderOptions)
        self._owner = owner or Owner()
        own = self._own = local_weights(source, options)
        self.source: WeightSource | None = getattr(own, "source", None)
        self.stream_id = self.options.stream_id or uuid.uuid4().hex
        self._link = SenderLink(transport, message_of)
        check_coding(self.options)
        self._lobby = Lobby(self._link, self._owner, num_lanes=group.world - 1 if group else 0)
        self._session, self._group = SenderSession(), group
        if group is not None:
            group.version = lambda: self.version
        self._peer_ranks = (
            GroupWeights(own, self._group) if self._group and self._group.world > 1 else None
        )
        self._weights: Weights = self._peer_ranks or own
        refusal = "a sync is under way; a WeightSender is used by one thread"
        self._caller = OneCaller(refusal, self._recover)
        self._whole_call = OneCaller("", self._group.recover if self._group else lambda: None)
        self.were_asleep = self._is_between = False  # the snapshot: an aborted delta may mix it
        self.lost = dict[str, str]()
        self._lost_between = dict[str, str]()  # syncs: the next one says so
        self._done: SyncStats | None = None
        self._watch, self._call = DeltaWatch(), SenderCall(self.stream_id, 0)

    def _recover(self) -> None:
        """Part with all receivers after an interrupt, and wait a moment until they are back."""
        members, count = self._session.members.values(), self.num_receivers + len(self._lobby)
        for engine in members:
            self._lost_between |= engine.named("a call was interrupted: it rejoins")
        self._session.reset()
        self._link.reset()
        end = time.monotonic() + 1.0  # those that wait for a sync connect again at once
        self._lobby.listen(timeout_s=1.0)
        while len(self._lobby) < count and (left_s := end - time.monotonic()) > 0:
            self._lobby.listen(timeout_s=left_s)

    @property
    def world(self) -> int:
        """Number of ranks of the trainer."""
        return self._group.world if self._group else 1

    @property
    def options(self) -> SenderOptions:
        """How it sends."""
        return self._own.options

    @property
    def version(self) -> int:
        """The last version decided; 0 before the first sync."""
        return self._session.version

    @property
    def num_receivers(self) -> int:
        """Receivers that hold `version`."""
        return self.holders().total()

    @property
    def engines(self) -> frozenset[str]:
        """Names of the engines that hold `version`."""
        return frozenset(self._session.members)

    def holders(self) -> Counter[str]:
        """The number of ranks of each engine that holds `version`."""
        return Counter({name: len(e.ranks) for name, e in self._session.members.items()})

    def wait_for_receivers(self, count: int, *, timeout_s: float = 60.0) -> None:
        """Return when `count` receivers are members or have greeted; they join at the next sync.

        Raises:
            TransportTimeout: Fewer than `count` receivers connected in time.
            EngineFailed: A receiver reported that it cannot take part; the message says why.
        """
        check_seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + timeout_s
        with plain_mode(), self._caller.call():
            self._hear(0)  # who has greeted may be gone
            while True:
                if declined := self._lobby.declined():
                    raise EngineFailed("; ".join(sorted(set(map(reason_of, declined)))))
                if self.num_receivers + len(self._lobby) >= count:
                    return
                rest = deadline - time.monotonic()
                if rest <= 0:
                    came = f"{self.num_receivers + len(self._lobby)} of {count} receivers came"
                    refused = self._lobby.last_refusal()
                    why = f"; the last one refused: {refused}" if refused else ""
                    raise TransportTimeout(f"{came} in {timeout_s} s{why}")
                self._hear(rest)

    def let_go_of_strangers(self, why: str) -> None:
        """Part with engines that are admitted no more. They keep the weights that they have."""
        with plain_mode(), self._caller.call():
            self._lobby.forget_strangers()
            admits = self._owner.admits
            self._part_with(why, [name for name in self._session.members if not admits(name)])

    def refresh_source(self) -> None:
        """Look up the source's tensors now, so that the next `send_weights` need not.

        Use it if `send_weights` runs in another thread: see `on_source_read`. Raises SourceChanged.
        """
        with plain_mode(), self._caller.call():
            self._own.refresh_source()

    def send_weights(
        self,
        *,
        timeout_s: float = 60.0,
        total_timeout_s: float | None = None,
        join_timeout_s: float | None = None,
        on_source_read: Callable[[], None] | None = None,
    ) -> SyncStats:
        """Send the source's current weights to every receiver, as one version.

        Members get the delta. If a member fails before the decision, it is dropped and the others
        are served; `SyncStats.lost` names it. Receivers that have greeted join afterwards, by a
        full sync if their weights differ.

        Args:
            timeout_s: For each wait for receivers.
            total_timeout_s: For the whole call: no wait takes longer than what is left of it. A
                receiver that has not answered by then is dropped. Comparing and packing are not
                interrupted. None for no limit.
            join_timeout_s: For each full sync of receivers that join when others hold the version:
                all of it, so that these are not held up longer. None for no limit.
            on_source_read: Called when the source has been read for the last time. From then on it
                may change, while receivers still stage and write, so another thread can train.
                That thread must call `refresh_source` before this call begins, and may change the
                source only after `on_source_read`, or after this call has ended. Such a call sends
                deltas to members only; if it would have to read the source a second time, it raises
                SyncAborted.

        Raises:
            NoReceivers: No receiver is connected.
            TransportTimeout: `total_timeout_s` has passed; the next sync covers this one.
            ConfigError: The weights of every receiver sleep: wake them up first. All stay members.
            SyncAborted: Every receiver failed; nothing is lost, the next sync covers it.
            SourceChanged: The source is no longer the same model.
        """
        limit = CallTimeout(timeout_s, total_timeout_s)
        if join_timeout_s is not None:
            check_seconds("join_timeout_s", join_timeout_s)
        with (
            plain_mode(),
            self._caller.call(),
            self._own.one_call(on_source_read),
            one_call(self, limit),
        ):
            self._done = stats = self._send_weights(limit, join_timeout_s, on_source_read)
        for who, why in stats.lost.items():
            logger.warning("lost %s in v%d: %s", who, stats.version, why)
        logger.info("sent %s", stats)
        return stats

    def _send_weights(
        self,
        limit: CallTimeout,
        join_timeout_s: float | None,
        on_source_read: Callable[[], None] | None,
    ) -> SyncStats:
        self._link.limit = limit
        self._hear(0)
        self.lost = self._call.lost = self._lobby.lost = self._lost_between
        self._lost_between, self.were_asleep = {}, False
        if self._weights.is_lost:
            self._part_with("a rank of the trainer has lost its snapshot", self._session.members)
        has_joined = self._joined_first(join_timeout_s)
        delta = self._sync_members() if self._session.members else None
        if delta is None and limit.is_over:
            raise nothing_sent(self.lost, is_too_late=limit.is_over)
        if on_source_read is not None and (delta is None or not self._session.members):
            why = reasons(self.lost) or "no receiver is a member"
            raise SyncAborted(f"{why}; the next sync covers this one")
        engines = {} if has_joined else self._newcomers()
        if engines and limit.is_over:
            engines = {}
        if self.were_asleep and not engines:
            raise ConfigError(f"no weights were sent ({reasons(self.lost)})")
        if self.were_asleep:
            self._forget(*self.engines)
            self.were_asleep = False  # those that join are written
        if not self._session.members:
            delta, self._call.sent, self._call.receiver_commit_s = None, SentBuckets(), 0.0
            if not engines or not self._capture(engines):
                raise nothing_sent(self.lost, is_too_late=limit.is_over)
        self._join(engines, join_timeout_s)
        if not self._session.members:
            raise nothing_sent(self.lost, is_too_late=limit.is_over)
        return stats_of(
            self._weights,
            delta,
            self._call,
            session=self._session,
            watch=self._watch,
            options=self._own.options,
        )

    def close(self) -> None:
        """Close every connection. Receivers keep serving what they hold."""
        self._link.transport.close()
        if self._group is not None:
            self._group.close()

    def _sync_members(self) -> Plan | None:
        """One more version for all members; None if none of them is left to hold it."""
        version, is_between, call = self.version + 1, self._is_between, self._call
        self._link.hint(Upcoming(version=version))
        while self._session.members and not (self._own.is_released or self._link.limit.is_over):
            if call.attempts:
                what = (version, self.num_receivers, reasons(self.lost))
                logger.warning("sending v%d again, to %d receivers: %s", *what)
            members = list(self._session.members.values())
            began = time.perf_counter()
            self._is_between = True
            delta = self._weights.delta(self.version)
            call.phases.append(("compare", began, time.perf_counter()))
            call.attempts += 1
            besides = self._newcomers() if is_between else ()
            if self._run(delta, members, besides, version):
                self._is_between = False
                return delta
            asleep = [name for name, engine in self._session.members.items() if engine.asleep]
            if asleep and len(asleep) == len(self.engines):
                self.were_asleep = True
                break
            self._forget(*asleep)  # the others go on to a version that these miss
        return None

    def _capture(self, engines: Greetings) -> bool:
        """Start from the source as it is, in the dtypes that the first engine holds.

        Whether one of them fits. Raises SyncAborted if they are too few.
        """
        began, is_captured = time.perf_counter(), False
        self._weights.declared()  # what the source cannot give is no fault of an engine
        self._owner.turns(engines, ())
        for hellos in engines.values():
            try:
                held = [spec for hello in hellos.values() for spec in hello.specs()]
                self._weights.capture(held)
            except (ConfigError, WireError) as error:
                self._lobby.refuse_all(hellos, error)
                continue
            self._session.captured(self.version + 1)
            is_captured, self._is_between = True, False
            break
        self._call.phases.append(("capture", began, time.perf_counter()))
        return is_captured

    def _joined_first(self, timeout_s: float | None) -> bool:
        """Let in who has greeted before a delta, if members are too few for one without them.

        Without a version to join with, they only count. Returns whether they were let in. Raises
        SyncAborted if there are too few.
        """
        if not self._session.members or self._owner.are_enough(self.engines):
            return False
        engines = self._newcomers()
        if self._is_between or not engines:
            self._owner.turns(self.engines, engines)
            return False
        self._join(engines, timeout_s)
        return True

    def _join(self, engines: Greetings, timeout_s: float | None) -> None:
        """Let in who has greeted: by digest alone, or by a full sync from the snapshot."""
        if not engines:
            return
        try:
            layout = self._weights.layout
            taken = [self._lobby.take(name, hellos, layout) for name, hellos in engines.items()]
            joiners = [engine for engine in taken if engine is not None]
            agreed, differ = join(self._link, joiners, self._weights, self.stream_id, self.version)
            for engine in joiners:
                self.lost |= engine.named(engine.failures)
            self._session.members |= {engine.name: engine for engine in agreed}
            self._call.joined += sum(len(engine.ranks) for engine in agreed)
            self._full_syncs(differ, timeout_s)
        finally:  # whoever has not come in by now has to greet again
            for name in engines.keys() - self._session.members:
                for peer in engines[name]:
                    self._lobby.forget(peer)

    def _full_syncs(self, engines: list[Engine], timeout_s: float | None) -> None:
        """Together; or in turns, if there are enough engines without those that join."""
        held, turns = self.engines, [frozenset(engine.name for engine in engines)]
        if held and engines and self._owner.are_enough(held):
            turns = [frozenset(turn) for turn in self._owner.turns(turns[0], held)]
        while turns:
            turn = turns.pop(0)
            if self._full_sync([e for e in engines if e.name in turn], timeout_s) and turns:
                turns = [frozenset().union(*turns)]  # or each that is late would cost a timeout

    def _full_sync(self, engines: list[Engine], timeout_s: float | None) -> bool:
        """One full sync, repeated with who is left. Returns whether one may have been late."""
        limit, call = self._link.limit, self._call
        if timeout_s is not None and self._session.members:
            self._link.limit = limit.within(timeout_s)
        one_wait = CallTimeout(0, self._link.timeout_s)
        while engines and not self._link.limit.is_over:
            is_decided = self._run(self._weights.full(), engines, self.engines, self.version)
            engines = [engine for engine in engines if not engine.failures]
            if is_decided:
                count = sum(len(engine.ranks) for engine in engines)
                call.joined += count
                call.full_synced += count
                break
        self._link.limit = limit
        return one_wait.is_over

    def _run(
        self, plan: Plan, engines: list[Engine], besides: Collection[str], version: int
    ) -> bool:
        """One round; notes what it does, and who is lost. Arguments and result as of `Round`."""
        is_join, call = plan.base_version is None and bool(self.engines), self._call
        work = Round(
            self._link,
            self._session,
            plan,
            self._own,
            owner=self._owner,
            besides=besides,
            peer_ranks=self._peer_ranks,
        )
        try:
            is_decided = work.run(engines, version=version, stream_id=self.stream_id)
            if is_join:
                call.joined_sent += work.sent
            elif is_decided:
                call.sent = work.sent
            call.receiver_bytes = max(call.receiver_bytes, work.receiver_bytes)
            if not is_join:
                call.receiver_commit_s = max(call.receiver_commit_s, work.receiver_commit_s)
            return is_decided
        finally:
            phases = work.phases
            if is_join and phases:
                phases = [("join", phases[0][1], phases[-1][2])]
            call.phases += phases
            for engine in engines:
                if engine.failures:
                    self.lost |= engine.named(engine.failures)

    def _newcomers(self) -> Greetings:
        """Complete engines in the lobby, without those whose name is taken."""
        free = self._lobby.newcomers(self.engines)
        return {name: hellos for name, hellos in free.items() if self._owner.joins(name)}

    def _hear(self, timeout_s: float) -> None:
        """Take in who has connected, and drop every engine that has lost a rank."""
        self._lobby.listen(timeout_s=timeout_s)
        is_connected = self._link.transport.is_connected
        lost = [e for e in self._session.members.values() if not all(map(is_connected, e.ranks))]
        if not lost:
            return
        said = self._link.last_words([peer for engine in lost for peer in engine.ranks])
        for engine in lost:
            why = {p: said.get(p, "PeerLost: disconnected between syncs") for p in engine.ranks}
            self._lost_between |= engine.named(why)
            self._forget(engine.name)

    def _part_with(self, reason: str, names: Iterable[str]) -> None:
        for name in list(names):
            self.lost |= self._session.members[name].named(reason)
            self._forget(name)

    def _forget(self, *names: str) -> None:
        """They must rejoin; digests then show whether they need a full sync."""
        for name in names:
            for peer in self._session.members.pop(name).ranks:
                self._link.drop(peer)


class EngineSender(WeightSender):
    """A `WeightSender` whose owner starts, asks and drops the engines."""

    def declared(self, timeout_s: float) -> tuple[ParameterSpec, ...]:
        """What all ranks of the trainer hold, in the source's dtypes, or those of `wire_dtypes`.

        Raises SyncAborted if a rank does not come to `send_weights`, which is where it declares it.
        """
        with plain_mode(), self._caller.call():
            specs = self._weights.declared(timeout_s=timeout_s)
            return specs_of(specs, (), self.options.wire_dtypes)

    def check_newcomers(self, declared: Sequence[ParameterSpec]) -> None:
        """Raise ConfigError, by name, if engines that have greeted could not take these."""
        with plain_mode(), self._caller.call():
            for hellos in self._lobby.engines().values():
                held = [spec for hello in hellos.values() for spec in hello.specs()]
                specs = specs_of(declared, held, self.options.wire_dtypes)
                try:
                    check_engine(SentLayout(specs), hellos.values())
                except LayoutMismatch as error:
                    raise ConfigError(str(error)) from error

    def listen(self, *, timeout_s: float) -> tuple[Counter[str], list[Failed]]:
        """Hear who has connected, for at most `timeout_s`, less if somebody does.

        Returns the number of ranks of each engine that is a member or has greeted with all of them,
        and why workers declined since the last call.
        """
        with plain_mode(), self._caller.call():
            self._hear(timeout_s)
            greeted = {name: len(hellos) for name, hellos in self._lobby.engines().items()}
            return self.holders() + Counter(greeted), self._lobby.declined()

    def ended_as(self, stats: SyncStats) -> SyncStats:
        """Return what the call under way comes to: so it is reported, and told other ranks."""
        self._done = stats
        return stats

    def last_refusal(self) -> str:
        """Why the last connection was refused, if one was since the last call."""
        return self._lobby.last_refusal()


@contextmanager
def one_call(sender: WeightSender, limit: CallTimeout) -> Iterator[None]:
    """Everything inside counts as one call of `send_weights`, of which the end is reported.

    A call inside another one is part of the outer one. The trainer's other ranks take part until
    that ends, and learn how. Raises SyncAborted if one does not come.
    """
    is_inner, group = sender._whole_call.is_called, sender._group
    call = nullcontext() if is_inner else sender._whole_call.call(depth=4)
    is_told, session = bool(subscriptions) and not is_inner, sender._session
    told = reporting(lambda e: sender._call.failed(e, session)) if is_told else nullcontext()
    with call, told:
        sender._done, sender.lost = None, {}
        sender._call = SenderCall(sender.stream_id, sender.version + 1)
        if group is None or is_inner:
            yield
        else:
            with group.one_call(lambda: sender._done, limit):
                yield
    if subscriptions and not is_inner and sender._done is not None:
        report(sender._done)
