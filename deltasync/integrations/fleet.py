"""The trainer's end for any number of engines: one comparison and one stream of frames for all."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import ClassVar, Literal, TypedDict, get_args

from deltasync.delta.modes import plain_mode
from deltasync.delta.snapshot import Plan
from deltasync.errors import ConfigError, EngineTaken, NoReceivers, SyncAborted, TransportTimeout
from deltasync.integrations.engine import Engine, ServerState
from deltasync.integrations.trainer_info import Server, TrainerInfo, Unproved, WithoutRoutes
from deltasync.sync.group.group import TrainerGroup
from deltasync.sync.options import SenderOptions
from deltasync.sync.protocol.links import CallTimeout, OneCaller, check_seconds
from deltasync.sync.protocol.round import Owner, writes_as_it_arrives
from deltasync.sync.sender import EngineSender, one_call
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.source.weights import LocalWeights
from deltasync.sync.stats import SyncStats, reasons
from deltasync.transports import forks
from deltasync.transports.address import Address
from deltasync.transports.base import Closing, SendTransport
from deltasync.wire.messages import ParameterSpec

__all__ = ["EngineFleet", "Pauses", "ServerState"]

logger = logging.getLogger(__name__)

Pauses = Literal["together", "rolling"]
"""Which servers pause for a staged version at the same time: all, or one after the other."""

_TURN_S = 0.02
_REMEMBERED = 256  # servers that were removed


class FleetSettings(TypedDict, total=False):
    """Arguments of an `EngineFleet` that an `EngineSync` takes too."""

    without_routes: WithoutRoutes
    keep: Collection[str]
    unproved: Unproved
    max_staged_bytes: int
    options: SenderOptions | None
    timeout_s: float
    group: TrainerGroup | None


class EngineFleet(Closing):
    """Sends a trainer's weights to any number of servers that come, go, restart and lag.

    The weights are compared once and sent once, whatever the number of servers. Workers receive and
    stage while they generate. When a version is decided, each server is asked for an update, in
    which its workers only write, and it either takes the whole version or keeps its own. When all
    its workers have written, the version becomes its weight version. A `OneCallServer` does this in
    one call. Full syncs, and deltas too large to stage, are received and written within the update;
    if that breaks off, the weights are a mixture of versions. Generation stays paused after that,
    and after each update that raises, until a later update repairs the weights.

    A server that fails, or is later than `timeout_s`, is dropped from the version. The others take
    it, and resume as soon as their own workers have written. A server that was dropped, or was
    restarted, reconnects in a later call, and joins by digest or by a full sync. After a call it is
    in `SyncStats.lost`, by its name, until it has caught up; `servers` has the state of each.

    Use it as a context manager, or `close` it. `add`, `remove`, `servers` and `close` may be called
    from any thread, also while a sync is under way; all else by one thread.

    Args:
        source: The trainer's parameters, by checkpoint name, or `StreamedWeights` of them.
        transport: A listening sender of `shared_memory`, `cuda_ipc`, `nixl` or `collective`. Owned.
        min_engines: Servers that a version needs; None for all that the fleet has. With fewer, it
            is aborted: none of them takes it, `send_weights` raises SyncAborted, and the next call
            covers it.
        pauses: "together": servers pause at the same time. "rolling": one after the other, so that
            the others generate meanwhile. Servers that take a full sync, or a delta too large to
            stage, pause while it arrives; in a rolling fleet full syncs come one by one, too, once
            `min_engines` hold the version.
        without_routes: What to do if a worker keeps weights in another layout than they were
            loaded in, or computes what it keeps. "refuse": the server does not connect, and the
            error names one. "reload" (vLLM only): workers keep a copy of the whole checkpoint on
            the host, which is updated and reloaded in each update.
        keep: Patterns (`visual.*`) of checkpoint tensors that engines may keep from their start.
            Without it, a server does not connect if the trainer does not send a tensor.
        unproved: What to do if a worker cannot prove that updates reach everything that it computes
            with. "refuse": the server does not connect, and the error says why.
            "accept_stale_weights": workers prove nothing, and may compute with old weights in some
            places.
        max_staged_bytes: Memory in each worker for a version before it is written.
        options: Options of the sender.
        timeout_s: For each wait, here and in the workers: how long a server may hold up a call.
        group: The other ranks of the trainer, if it has several. This end is then rank 0, and every
            other rank uses a `TrainerRank` with a transport that workers can reach. If
            `send_weights` fails here, including the engines' part, it raises SyncAborted there.
    """

    _waits_for_calls: ClassVar[bool] = False
    """Whether a call that asks a server to connect may take longer than `timeout_s`: as long as the
    server's own calls do.
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
        if pauses not in get_args(Pauses):
            raise ConfigError(f"pauses is {pauses!r}, neither 'together' nor 'rolling'")
        check_seconds("timeout_s", timeout_s, may_be_zero=False)
        self._terms = TrainerInfo(
            addresses=(_reachable(Address.of(transport), rank=0),),
            engine="",
            sender=uuid.uuid4().hex,
            tensors=(),
            without_routes=without_routes,
            keep=tuple(keep),
            unproved=unproved,
            max_staged_bytes=max_staged_bytes,
            timeout_s=timeout_s,
        )
        self._at_least, self._pauses, self._timeout_s = min_engines, pauses, timeout_s
        self._limit = CallTimeout(timeout_s)  # of the call in progress
        kind = type(self).__name__
        self._caller = OneCaller(f"a sync is under way; an {kind} is used by one thread")
        self._lock = threading.Lock()  # of what `add` and `remove` change
        self._engines: dict[str, Engine] = {}
        self._removed: deque[Engine] = deque(maxlen=_REMEMBERED)
        self._taking: list[Engine] = []  # those that were here as the sync under way began
        self._slow = set[Future[None]]()  # updates that were waited for in vain
        self._is_closed = False
        self._ranks = Counter[str]()  # here, by the names of their engines
        self._specs: tuple[ParameterSpec, ...] | None = None
        self.sender = EngineSender(
            source,
            transport,
            options=options,
            owner=_FleetOwner(self),
            group=group,
        )
        self._group = group
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        self._lock = threading.Lock()

    @property
    def world(self) -> int:
        """Ranks of the trainer."""
        return self.sender.world

    def refresh_source(self) -> None:
        """See `WeightSender.refresh_source`."""
        self.sender.refresh_source()

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
            name: Of the server, here and in `SyncStats.lost`; by default its URL, if it has one.
            take_over: Whether its first connect takes it from another trainer that it follows.
                Without it the server is lost, and the reason names that trainer.

        Returns its name. Raises ConfigError if it has none, or if the fleet has the server, or the
        name, already: each of two would take the workers from the other.
        """
        if workers < 1:
            raise ConfigError(f"workers is {workers}; a server has one or more")
        with self._lock:
            if self._is_closed:
                raise ConfigError("this EngineFleet was closed: make a new one")
            name = name or getattr(server, "url", None)
            if name is None:
                raise ConfigError("the server has no URL to be known by: give it a name")
            twin = next((e for e in self._engines.values() if e.server is server), None)
            if name in self._engines or twin is not None:
                label = name if twin is None else twin.label
                raise ConfigError(f"the fleet has {label} already: remove it first, or add another")
            self._engines[name] = Engine(
                name,
                server,
                workers,
                paused,
                self._terms,
                take_over=take_over,
                stays=[e for e in self._removed if e.server is server or e.label == name],
            )
        return name

    def remove(self, name: str) -> Future[None]:
        """Remove a server. It keeps the weights that it has, and its workers disconnect.

        Returns at once; an update in flight ends first, in its thread, and if the server is added
        again, before it is connected. If generation is paused it is resumed, unless the weights may
        mix two versions: then an error is logged. The result is there when that is done. It raises
        EngineTaken, which is logged too, if the server was added again meanwhile, or another
        trainer has taken it: that one keeps it as it is.

        Raises ConfigError if there is no such server.
        """
        with self._lock:
            engine = self._engines.pop(name, None)
            if engine is None:
                has = ", ".join(self._engines) or "none"
                raise ConfigError(f"the fleet has no server {name!r}; it has {has}")
            self._removed.append(engine)
        return engine.remove()

    def servers(self) -> dict[str, ServerState]:
        """The state of each server, by name, as of the last call."""
        newest = self.sender.version
        with self._lock:
            return {name: engine.state(newest) for name, engine in self._engines.items()}

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

    def disconnect(self) -> None:
        """Close the connections of all workers; they no longer touch the weights.

        Call it before anything else writes the weights of servers. The next `send_weights`
        reconnects and sends what differs. Waits at most `timeout_s`.

        Raises, after all servers were asked: EngineTaken, with their names and once, if other
        trainers have taken servers since, which keep them as they are; otherwise why the first of
        the others cannot be asked, an EngineFailed or a TransportError.
        """
        with self._lock:
            parting = {engine.label: engine.hang_up() for engine in self._engines.values()}
        wait(parting.values(), self._timeout_s)
        errors = {name: left.exception() for name, left in parting.items() if left.done()}
        taken = {name: e for name, e in errors.items() if isinstance(e, EngineTaken)}
        if taken:
            raise EngineTaken("; ".join(f"{name}: {error}" for name, error in taken.items()))
        for name, left in parting.items():
            if not left.done():
                raise TransportTimeout(
                    f"{name} has not let its workers disconnect in {self._timeout_s:.4g} s: check "
                    "what it waits for"
                )
            left.result()

    def send_weights(
        self,
        *,
        timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        on_source_read: Callable[[], None] | None = None,
    ) -> SyncStats:
        """`WeightSender.send_weights`, with the update of each server.

        Raises what that raises. `SyncStats.lost` names each server that does not hold the version,
        and why; raises SyncAborted if fewer than `min_engines` can take it.

        `total_timeout_s` does not interrupt calls to engines. Within `atexit` this raises
        ConfigError before anything is sent, because updates need threads and none can start any
        more.
        """
        _check_threads_can_start()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        limit = CallTimeout(timeout_s, total_timeout_s)
        with plain_mode(), self._caller.call(), one_call(self.sender, limit):
            self._limit = limit
            self._gather(may_ask_source=on_source_read is None)
            self._check_enough()
            return self._send_weights(timeout_s, on_source_read)

    def close(self) -> None:
        """Close every connection, and take no more servers. Engines keep their weights.

        If the generation of an engine may be paused, it is resumed if all its workers are known to
        hold one version, for which this waits at most `timeout_s`. If an engine may hold a mixture
        of two versions, it stays paused and an error is logged. An update in flight ends first, in
        its thread.
        """
        with self._lock:
            self._is_closed = True
        self.sender.close()
        left = [left for engine in self._present(with_leaving=True) for left in engine.close()]
        wait(left, self._timeout_s)

    # Who is here

    @property
    def _min_engines(self) -> int:
        return len(self._engines) if self._at_least is None else self._at_least

    def _gather(self, *, may_ask_source: bool) -> None:
        """Let engines connect that are not, and wait until all are here that may come soon."""
        self._hear(0)
        engines, deadline = self._present(), time.monotonic() + self._limit.wait_s
        for engine in engines:
            engine.begin_call()
        while True:
            for engine in engines:
                if engine.look(self._ranks):
                    self._let_connect(engine, may_ask_source=may_ask_source)
            if self._waits_for_calls and any(engine.is_asked for engine in engines):
                deadline = time.monotonic() + self._limit.wait_s
            if time.monotonic() >= deadline or not self._is_awaited(engines):
                break
            self._hear(_TURN_S)
        refusal = self.sender.last_refusal()
        for engine in engines:
            engine.end_wait(refusal)
        self.sender.let_go_of_strangers("its server reconnects, or was removed")

    def _is_awaited(self, engines: Sequence[Engine]) -> bool:
        """Whether an engine may come soon, or has to, because without it they are too few."""
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

    def _let_connect(self, engine: Engine, *, may_ask_source: bool) -> None:
        """Ask an engine to connect. Raises ConfigError if its workers cannot reach a rank."""
        if self._specs is None:
            if not may_ask_source:  # it may change now
                raise SyncAborted("the engines have to connect; the next sync connects them")
            self._specs = self.sender.declared(self._limit.wait_s)
        (first,), ranks = self._terms.addresses, self._group.addresses if self._group else {}
        me = f"process {os.getpid()} on {socket.gethostname()}, stream {self.sender.stream_id}"
        terms = {
            "addresses": (first, *(_reachable(ranks[rank], rank=rank) for rank in sorted(ranks))),
            "tensors": tuple((each.names, each.dtype.name, each.shape) for each in self._specs),
            "holder": f"{me}, from {first}",
        }
        engine.start_connecting(self._terms.model_copy(update=terms))

    def _present(self, *, with_leaving: bool = False) -> list[Engine]:
        with self._lock:
            leaving = [e for e in self._removed if not e.has_left] if with_leaving else []
            return [*self._engines.values(), *leaving]

    def _engine_of(self, worker: str) -> Engine | None:
        return next((engine for engine in self._present() if engine.has(worker)), None)

    def _check_number(self, able: Collection[Engine]) -> None:
        if len(able) < self._min_engines:
            absent = {e.label: e.why for e in self._present() if not e.is_here}
            why = f" ({reasons(absent)})" if absent else ""
            raise SyncAborted(
                f"{len(able)} of at least {self._min_engines} servers can take the version{why}; "
                "none has changed, and the next sync covers it"
            )

    def _check_enough(self) -> None:
        """Raise if engines are too few, before anything is read or sent."""
        present = self._present()
        if not present:
            raise NoReceivers("the fleet has no server: add one first")
        try:
            self._check_number([engine for engine in present if engine.is_here])
        except SyncAborted as error:
            causes = [engine.error for engine in present if not engine.is_here]
            waits = (SyncAborted, TransportTimeout)
            raise error from next((e for e in causes if not isinstance(e, waits)), None)

    # A sync

    def _send_weights(
        self, timeout_s: float, on_source_read: Callable[[], None] | None
    ) -> SyncStats:
        engines = self._taking = [engine for engine in self._present() if engine.is_here]
        left_s = self._limit.left_s
        self._slow.clear()
        for engine in engines:
            engine.begin_sync()
        try:
            stats = self.sender.send_weights(
                timeout_s=timeout_s,
                total_timeout_s=left_s if left_s < math.inf else None,
                join_timeout_s=timeout_s,
                on_source_read=on_source_read,
            )
        except BaseException as error:
            self._give_up(engines, error)
            raise
        return self._end_sync(engines, stats)

    def _await_resumed(self) -> None:
        """Wait, once, for the engines that hold the version under way to generate again.

        Once it was waited for some in vain, for no others: that would cost a timeout for each.
        """
        if not self._slow:
            here = [e for e in self._taking if e.outcome.done() and not e.is_removed]
            resuming = {update for engine in here for update in engine.updates}
            self._slow = wait(resuming, self._limit.wait_s).not_done

    def _give_up(self, engines: Sequence[Engine], error: BaseException) -> None:
        """No version was sent. Engines that were asked to write one learn it."""
        lost, holders = self.sender.lost, self.sender.holders()
        for engine in engines:
            engine.give_up(error, lost, holders, were_asleep=self.sender.were_asleep)
        if self.sender.were_asleep:  # no worker has written, or left
            wait([update for engine in engines for update in engine.updates], self._limit.wait_s)

    def _end_sync(self, engines: Sequence[Engine], stats: SyncStats) -> SyncStats:
        """Let engines name the version that they hold, and name those that do not."""
        ranks, version = self.sender.holders(), stats.version
        for engine in engines:
            is_held = engine.count(ranks, ranks) == engine.workers
            engine.end_sync(version if is_held else None, stats.lost)
        ending = {each for e in engines if e.version == version for each in e.updates}
        wait(ending - self._slow, self._limit.wait_s)
        for engine in engines:
            engine.check_ended(version)
        present = self._present()
        behind = [engine for engine in present if engine.error]
        for engine in behind:
            logger.warning("%s is behind v%d: %s", engine, version, engine.why)
        with self._lock:
            stems = tuple(engine.stem for engine in (*self._removed, *present))
        others = {who: why for who, why in stats.lost.items() if not who.startswith(stems)}
        lost = {**others, **{engine.label: engine.why for engine in behind}}
        hold = tuple(e.label for e in present if e.state(version).state == "current")
        return self.sender.ended_as(replace(stats, lost=lost, engines=hold))


class _FleetOwner(Owner):
    """A fleet as its sender knows it, whose engines are the replicas of our engines."""

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet
        self._is_full = self._is_in_place = False  # the sync under way

    def admits(self, worker: str) -> bool:
        return self._fleet._engine_of(worker) is not None

    def joins(self, worker: str) -> bool:
        engine = self._fleet._engine_of(worker)
        return engine is not None and engine.is_here

    def turns(
        self, workers: Collection[str], besides: Collection[str]
    ) -> Sequence[Collection[str]]:
        """An engine takes a version if all of its workers can."""
        fleet, can = self._fleet, {*workers, *besides}
        engines = [engine for engine in fleet._present() if engine.is_here]
        able = [e for e in engines if e.count(can, fleet._ranks) == e.workers]
        fleet._check_number(able)
        here = [{worker for worker in workers if engine.has(worker)} for engine in able]
        turns = [turn for turn in here if turn]
        return turns if fleet._pauses == "rolling" else [set().union(*turns)]

    def begun(self, version: int, workers: Collection[str], plan: Plan) -> None:
        """Where workers write what is sent as it arrives, their pause begins before."""
        self._is_full = plan.base_version is None
        self._is_in_place = writes_as_it_arrives(plan, self._fleet._terms.max_staged_bytes)
        if self._is_in_place:
            for engine in self._those_of(workers):
                engine.follow(version, "write", is_in_place=True)

    def decided(self, version: int, workers: Collection[str], *, is_unchanged: bool) -> None:
        if self._fleet._pauses == "rolling" and not self._is_in_place:
            self._fleet._await_resumed()
        for engine in self._those_of(workers):
            engine.follow(version, "pass" if is_unchanged else "write", is_in_place=False)

    def held(self, version: int, worker: str) -> None:
        """After a full sync it holds what members hold already."""
        holders = self._fleet.sender.holders() if self._is_full else ()
        for engine in self._those_of([worker]):
            engine.held(version, [worker, *holders])

    def _those_of(self, workers: Collection[str]) -> list[Engine]:
        engines = self._fleet._present(with_leaving=True)
        return [engine for engine in engines if any(map(engine.has, workers))]


def _check_threads_can_start() -> None:
    """Raise ConfigError within `atexit`."""
    if not threading.main_thread().is_alive():
        raise ConfigError(
            "an engine's update needs a thread, and the interpreter is shutting down: send weights "
            "before the program ends, not within atexit"
        )


def _reachable(address: Address | None, *, rank: int) -> Address:
    """The address. Raises ConfigError if workers cannot connect to it."""
    if address is None:
        raise ConfigError(
            f"an engine's workers cannot connect to the transport of rank {rank}: use "
            "shared_memory, cuda_ipc, nixl or collective"
        )
    return address
