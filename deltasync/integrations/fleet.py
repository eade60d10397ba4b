"""The trainer's end for many engines: one comparison and one stream of frames for all of them."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Literal, get_args

from deltasync.delta.modes import plain_mode
from deltasync.errors import ConfigError, EngineTaken, NoReceivers, SyncAborted
from deltasync.integrations.engine import Terms, check_threads_can_start, reachable
from deltasync.integrations.fleet_engine import FleetEngine, ServerState
from deltasync.integrations.trainer_info import Server, Unproved, WithoutRoutes
from deltasync.sync.engine_sender import EngineSender
from deltasync.sync.group.group import TrainerGroup
from deltasync.sync.options import SenderOptions
from deltasync.sync.protocol.links import CallTimeout, OneCaller, check_seconds
from deltasync.sync.protocol.round import SyncPhase
from deltasync.sync.sender import one_call
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.source.weights import LocalWeights
from deltasync.sync.stats import OnLost, SyncStats, judged, reasons
from deltasync.transports import forks
from deltasync.transports.address import Address
from deltasync.transports.base import Closing, SendTransport
from deltasync.transports.control.connection import Deadline
from deltasync.wire.messages import ParameterSpec

logger = logging.getLogger(__name__)

Pauses = Literal["together", "rolling"]
"""Which servers pause for a staged version at the same time: all, or one after the other."""

_TURN_S = 0.02


class EngineFleet(Closing):
    """Sends a trainer's weights to any number of servers that come, go, restart and lag.

    The weights are compared once and sent once, whatever the number of servers. Each server is
    treated as by an `EngineSync`: its workers stage while they generate, it is asked to pause and
    write when the version is decided, and it either takes the whole version or keeps its own.

    A server that fails, or is later than `timeout_s`, is dropped from the version. The others take
    it, and resume as soon as their own workers have written. A server that was dropped, or was
    restarted, reconnects in a later call, and joins by digest or by a full sync. After a call it is
    in `SyncStats.lost`, by its name, until it has caught up; `servers` has the state of each.

    Use it as a context manager, or `close` it. `add`, `remove`, `servers` and `close` may be called
    from any thread, also while a sync is under way; all else by one thread.

    Args:
        source: The trainer's parameters, by checkpoint name, or `StreamedWeights` of them.
        transport: A listening sender of `shared_memory`, `cuda_ipc` or `collective`. Owned.
        min_engines: Servers that a version needs; None for all that the fleet has. With fewer, it
            is aborted: none of them takes it, `send_weights` raises SyncAborted, and the next call
            covers it.
        pauses: "together": servers pause at the same time. "rolling": one after the other, so that
            the others generate meanwhile. Servers that take a full sync, or a delta too large to
            stage, pause while it arrives; in a rolling fleet full syncs come one by one, too, once
            `min_engines` hold the version.
        without_routes: As of `EngineSync`.
        keep: Likewise.
        unproved: Likewise.
        max_staged_bytes: Likewise.
        options: Likewise.
        group: Likewise.
        timeout_s: For each wait, here and in the workers: how long a server may hold up a call.
    """

    def __init__(
        self,
        source: WeightSource | LocalWeights,
        transport: SendTransport,
        *,
        min_engines: int | None = 1,
        pauses: Pauses = "together",
        without_routes: WithoutRoutes = "refuse",
        keep: Collection[str] = (),
        unproved: Unproved = "refuse",
        max_staged_bytes: int = 1 << 30,
        options: SenderOptions | None = None,
        timeout_s: float = 60.0,
        group: TrainerGroup | None = None,
    ) -> None:
        if min_engines is not None and min_engines < 1:
            raise ConfigError(f"min_engines is {min_engines}; a version needs a server")
        check_seconds("timeout_s", timeout_s, may_be_zero=False)
        if pauses not in get_args(Pauses):
            raise ConfigError(f"pauses is {pauses!r}, neither 'together' nor 'rolling'")
        self._terms = Terms(
            address=reachable(Address.of(transport), rank=0),
            without_routes=without_routes,
            keep=tuple(keep),
            unproved=unproved,
            max_staged_bytes=max_staged_bytes,
            timeout_s=timeout_s,
        )
        self._at_least, self._pauses, self._timeout_s = min_engines, pauses, timeout_s
        self._limit = CallTimeout(timeout_s)  # of the call in progress
        self._caller = OneCaller("a sync is under way; an EngineFleet is used by one thread")
        self._lock = threading.Lock()  # of what `add` and `remove` change
        self._engines: dict[str, FleetEngine] = {}
        self._leaving: list[FleetEngine] = []
        self._num_added, self._is_closed = 0, False
        self._former: deque[str] = deque(maxlen=256)  # names of workers of removed servers
        self._taking: list[FleetEngine] = []  # those that were here as the sync under way began
        self._slow = set[Future[None]]()  # updates that were waited for in vain
        self._ranks = Counter[str]()  # here, by the names of their engines
        self._specs: tuple[ParameterSpec, ...] | None = None
        self.sender = EngineSender(
            source,
            transport,
            options=options,
            on_phase=self._follow,
            admits=lambda worker: self._engine_of(worker) is not None,
            joins=self._joins,
            turns=self._turns,
            group=group,
        )
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        self._caller.forked()
        self._lock = threading.Lock()

    def add(
        self,
        server: Server,
        *,
        workers: int = 1,
        paused: Callable[[], AbstractContextManager[object]] = nullcontext,
        name: str | None = None,
        take_over: bool = False,
    ) -> str:
        """Add a server; the next `send_weights` connects its workers.

        Args:
            server: Reaches the engine. Threads of this object call it.
            workers: Number of its processes that hold weights.
            paused: Returns the context manager that pauses its generation during an update.
            name: Of the server, here and in `SyncStats.lost`; by default its URL, or a number.
            take_over: Whether its first connect takes it from another trainer that it follows.
                Without it the server is lost, and the reason names that trainer.

        Returns its name. Raises ConfigError if the fleet has the server, or the name, already: each
        of two would take the workers from the other.
        """
        if workers < 1:
            raise ConfigError(f"workers is {workers}; a server has one or more")
        with self._lock:
            if self._is_closed:
                raise ConfigError("this EngineFleet was closed: make a new one")
            self._num_added += 1
            while (number := f"server-{self._num_added}") in self._engines:
                self._num_added += 1
            name = name or getattr(server, "url", None) or number
            twin = next((e for e in self._engines.values() if e.server is server), None)
            if name in self._engines or twin is not None:
                known = name if twin is None else twin.label
                raise ConfigError(f"the fleet has {known} already: remove it first, or add another")
            after = [e for e in self._leaving if e.server is server or e.label == name]
            terms = replace(self._terms, take_over=take_over, label=name)
            engine = FleetEngine(name, server, workers, paused, terms, after=after)
            self._engines[name] = engine
        return name

    def remove(self, name: str) -> Future[None]:
        """Remove a server. It keeps the weights that it has, and its workers disconnect.

        Returns at once; an update in flight ends first, in its thread. If generation is paused it
        is resumed, unless the weights may mix two versions: then an error is logged. The result is
        there when that is done. It raises EngineTaken, which is logged too, if another trainer has
        taken the server since: that one keeps it as it is.

        Raises ConfigError if there is no such server.
        """
        with self._lock:
            engine = self._engines.pop(name, None)
            if engine is None:
                has = ", ".join(self._engines) or "none"
                raise ConfigError(f"the fleet has no server {name!r}; it has {has}")
            self._leaving.append(engine)
            self._former.extend(engine.names)
        return engine.remove()

    def servers(self) -> dict[str, ServerState]:
        """The state of each server, by name, as of the last call."""
        newest = self.sender.version
        with self._lock:
            return {name: engine.state(newest) for name, engine in self._engines.items()}

    @property
    def world(self) -> int:
        """Ranks of the trainer."""
        return self.sender.world

    def refresh_source(self) -> None:
        """See `WeightSender.refresh_source`."""
        self.sender.refresh_source()

    def connect(self) -> dict[str, ServerState]:
        """Connect servers that are not connected, or reconnect them. Returns `servers`.

        `send_weights` does this itself. Waits for each server, at most `timeout_s` for all of them;
        one that takes longer joins in a later call. The first time, the trainer's other ranks must
        be in their `send_weights`.
        """
        with plain_mode(), self._caller.call():
            self._limit = CallTimeout(self._timeout_s)
            self._gather(may_ask_source=True)
        return self.servers()

    def send_weights(
        self,
        *,
        timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        on_source_read: Callable[[], None] | None = None,
        on_lost: OnLost = "continue",
    ) -> SyncStats:
        """`WeightSender.send_weights`, with the update of each server.

        `SyncStats.lost` also names each server that does not hold the version, and says why.

        Raises what that raises, and SyncAborted if fewer than `min_engines` servers can take the
        version. `total_timeout_s` does not interrupt calls to servers. Within `atexit` it raises
        ConfigError before anything is sent, because updates need threads and none can start any
        more.
        """
        check_threads_can_start()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        limit = CallTimeout(timeout_s, total_timeout_s)
        with plain_mode(), self._caller.call(), one_call(self.sender, limit):
            self._limit = limit
            self._gather(may_ask_source=on_source_read is None)
            self._check_enough()
            stats = self._send_weights(timeout_s, on_source_read)
        return judged(stats, on_lost)

    def disconnect(self) -> None:
        """Close the connections of all workers; they no longer touch the weights.

        Call it before anything else writes the weights of servers. The next `send_weights`
        reconnects and sends what differs. Waits at most `timeout_s`. A server that cannot be asked
        is no error: it reconnects as well.

        Raises EngineTaken, with their names, if other trainers have taken servers since: those keep
        them as they are. All others are disconnected.
        """
        with self._lock:
            asked = {engine.label: engine.hang_up() for engine in self._engines.values()}
        wait(asked.values(), self._timeout_s)
        errors = {name: left.exception() for name, left in asked.items() if left.done()}
        taken = {name: e for name, e in errors.items() if isinstance(e, EngineTaken)}
        if taken:
            raise EngineTaken("; ".join(f"{name}: {error}" for name, error in taken.items()))

    def close(self) -> None:
        """Close every connection. Servers keep their weights.

        Generation that an update has left paused is resumed or not as `EngineSync.close` does, of
        all servers at the same time, for which this waits at most `timeout_s`.
        """
        with self._lock:
            self._is_closed = True
            engines = [*self._engines.values(), *self._leaving]
        self.sender.close()
        wait([left for engine in engines for left in engine.close()], self._timeout_s)

    # Who is here

    @property
    def _min_engines(self) -> int:
        return len(self._engines) if self._at_least is None else self._at_least

    def _gather(self, *, may_ask_source: bool) -> None:
        """Let servers connect that are not, and wait until all are here that may come soon."""
        self._hear(0)
        engines, deadline = self._present(), Deadline(self._limit.wait_s)
        for engine in engines:
            engine.begin_call()
        while True:
            for engine in engines:
                if engine.look(self._ranks):
                    self._let_connect(engine, may_ask_source=may_ask_source)
            if deadline.passed or not self._is_awaited(engines):
                break
            self._hear(_TURN_S)
        for engine in engines:
            engine.end_wait()
        self.sender.let_go_of_strangers("its server reconnects, or was removed")

    def _is_awaited(self, engines: Sequence[FleetEngine]) -> bool:
        """Whether a server may come soon, or has to, because without it they are too few."""
        engines = [engine for engine in engines if not engine.is_removed]
        if sum(engine.is_here for engine in engines) >= self._min_engines:
            return any(engine.is_awaited() for engine in engines)
        return not all(engine.is_settled for engine in engines)

    def _hear(self, timeout_s: float) -> None:
        self._ranks, declined = self.sender.listen(timeout_s=timeout_s)
        for failed in declined:
            engine = self._engine_of(failed.reason.partition(": ")[0])
            if engine is not None:
                engine.declined(failed)

    def _let_connect(self, engine: FleetEngine, *, may_ask_source: bool) -> None:
        """Ask a server to connect."""
        if self._specs is None:
            if not may_ask_source:  # it may change now
                raise SyncAborted("the servers have to connect; the next sync connects them")
            self._specs = self.sender.declared(self._limit.wait_s)
        engine.start_connecting(self._specs, self.sender)

    def _present(self) -> list[FleetEngine]:
        with self._lock:
            self._leaving = [engine for engine in self._leaving if not engine.has_left]
            return list(self._engines.values())

    def _engine_of(self, worker: str) -> FleetEngine | None:
        with self._lock:
            return next((e for e in self._engines.values() if e.has(worker)), None)

    def _joins(self, worker: str) -> bool:
        engine = self._engine_of(worker)
        return engine is not None and engine.is_here

    def _whole(self, workers: Collection[str]) -> list[FleetEngine]:
        """Servers all of whose workers are in engines of these names."""
        with self._lock:
            engines = list(self._engines.values())
        return [e for e in engines if e.is_here and e.count(workers, self._ranks) == e.workers]

    def _turns(
        self, workers: Collection[str], besides: Collection[str]
    ) -> Sequence[Collection[str]]:
        """The `Turns` of the sender. Its engines are the replicas of servers."""
        able = self._whole({*workers, *besides})
        self._check_number(able)
        here = [{worker for worker in workers if engine.has(worker)} for engine in able]
        turns = [turn for turn in here if turn]
        return turns if self._pauses == "rolling" else [set().union(*turns)]

    def _check_number(self, able: Collection[FleetEngine]) -> None:
        if len(able) < self._min_engines:
            raise SyncAborted(
                f"{len(able)} of at least {self._min_engines} servers can take the version"
                f"{self._whys()}; none has changed, and the next sync covers it"
            )

    def _whys(self) -> str:
        absent = [engine for engine in self._present() if not engine.is_here]
        why = reasons({engine.label: engine.why for engine in absent})
        return f" ({why})" if why else ""

    def _check_enough(self) -> None:
        """Raise if servers are too few, before anything is read or sent."""
        present = self._present()
        if not present:
            raise NoReceivers("the fleet has no server: add one first")
        here = [engine for engine in present if engine.is_here]
        try:
            self._check_number(here)
        except SyncAborted as error:
            why = next((engine.error for engine in present if engine.error), None)
            raise error from why

    # A sync

    def _send_weights(
        self, timeout_s: float, on_source_read: Callable[[], None] | None
    ) -> SyncStats:
        engines = self._taking = [engine for engine in self._present() if engine.is_here]
        self._slow.clear()
        for engine in engines:
            engine.begin_sync()
        try:
            stats = self.sender.send_weights(
                timeout_s=timeout_s,
                total_timeout_s=self._limit.left_s,
                join_timeout_s=timeout_s,
                on_source_read=on_source_read,
            )
        except BaseException as error:
            self._give_up(engines, error)
            raise
        return self._end_sync(engines, stats)

    def _follow(self, phase: SyncPhase) -> None:
        with self._lock:
            engines = [*self._engines.values(), *self._leaving]
        is_turn = phase.is_decided and not (phase.is_held or self._terms.writes_at_once(phase))
        if is_turn and self._pauses == "rolling":
            self._await_resumed()
        is_join = phase.is_held and phase.is_full  # with the version that members hold already
        held = self.sender.holders().keys() if is_join else ()
        for engine in engines:
            if any(map(engine.has, phase.engines)):
                mine = frozenset(filter(engine.has, {*phase.engines, *held}))
                engine.follow(replace(phase, engines=mine))

    def _await_resumed(self) -> None:
        """Wait, once, for the servers that hold the version under way to generate again.

        Once it was waited for some in vain, for no others: that would cost a timeout for each.
        """
        if not self._slow:
            here = [e for e in self._taking if e.outcome.done() and not e.is_removed]
            resuming = {update for engine in here for update in engine.updates}
            self._slow = wait(resuming, self._limit.wait_s).not_done

    def _give_up(self, engines: Sequence[FleetEngine], error: BaseException) -> None:
        """No version was sent. Servers that were asked to write one learn it."""
        were_asleep, said, held = self.sender.were_asleep, self.sender.lost(), self.sender.holders()
        for engine in engines:
            engine.give_up(error, said, held)
        if were_asleep:  # no worker has written, or left
            wait([update for engine in engines for update in engine.updates], self._limit.wait_s)
            wait([engine.sleep_on() for engine in engines], self._limit.wait_s)

    def _end_sync(self, engines: Sequence[FleetEngine], stats: SyncStats) -> SyncStats:
        """Let servers name the version that they hold, and note which do not."""
        ranks, version = self.sender.holders(), stats.version
        for engine in engines:
            is_held = engine.count(ranks, ranks) == engine.workers
            engine.end_sync(version if is_held else None, stats.lost)
        ending = {each for e in engines if e.version == version for each in e.updates}
        wait(ending - self._slow, self._limit.wait_s)
        for engine in engines:
            engine.check_ended(version)
        present = self._present()
        behind = [engine for engine in present if engine.why]
        for engine in behind:
            logger.warning("%s is behind v%d: %s", engine, version, engine.why)
        with self._lock:
            names = (*self._former, *(name for engine in present for name in engine.names))
        others = {who: why for who, why in stats.lost.items() if not who.startswith(names)}
        lost = {**others, **{engine.label: engine.why for engine in behind}}
        hold = tuple(e.label for e in present if e.state(version).state == "current")
        return self.sender.ended_as(replace(stats, lost=lost, engines=hold))
