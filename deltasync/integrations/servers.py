"""The trainer's end for any number of engines: one comparison and one stream of frames for all."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, ClassVar, Literal

from deltasync.delta.modes import plain_mode
from deltasync.errors import ConfigError, NoReceivers, SyncAborted, TransportTimeout
from deltasync.integrations.engine import Engine, writes_at_once
from deltasync.integrations.trainer_info import TrainerInfo
from deltasync.sync.engine_sender import EngineSender
from deltasync.sync.group.group import TrainerGroup
from deltasync.sync.options import SenderOptions
from deltasync.sync.protocol.links import CallTimeout, OneCaller, check_seconds
from deltasync.sync.protocol.round import SyncPhase
from deltasync.sync.sender import one_call
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.source.weights import LocalWeights
from deltasync.sync.stats import SyncStats, reasons
from deltasync.transports import forks
from deltasync.transports.address import Address
from deltasync.transports.base import Closing, SendTransport
from deltasync.transports.control.connection import Deadline
from deltasync.wire.messages import ParameterSpec

Pauses = Literal["together", "rolling"]
"""Which servers pause for a staged version at the same time: all, or one after the other."""

_TURN_S = 0.02
_REMEMBERED = 256  # servers that were removed


class Servers(Closing):
    """What an `EngineSync` and an `EngineFleet` share.

    Args:
        source, transport, options, timeout_s, group, pauses: As of `EngineFleet`.
        at_least: Its `min_engines`.
        terms: What workers are told: fields of `TrainerInfo`.
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
        at_least: int | None,
        pauses: Pauses,
        options: SenderOptions | None,
        timeout_s: float,
        group: TrainerGroup | None,
        **terms: Any,
    ) -> None:
        check_seconds("timeout_s", timeout_s, may_be_zero=False)
        address = _reachable(Address.of(transport), rank=0)
        self._terms = TrainerInfo(
            addresses=(address,),
            engine="",
            sender=uuid.uuid4().hex,
            tensors=(),
            timeout_s=timeout_s,
            **terms,
        )
        self._at_least, self._pauses, self._timeout_s = at_least, pauses, timeout_s
        self._limit = CallTimeout(timeout_s)  # of the call in progress
        kind = type(self).__name__
        self._caller = OneCaller(f"a sync is under way; an {kind} is used by one thread")
        self._lock = threading.Lock()  # of what `add` and `remove` change
        self._engines: dict[str, Engine] = {}
        self._removed: deque[Engine] = deque(maxlen=_REMEMBERED)
        self._taking: list[Engine] = []  # those that were here as the sync under way began
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

    @property
    def world(self) -> int:
        """Ranks of the trainer."""
        return self.sender.world

    def refresh_source(self) -> None:
        """See `WeightSender.refresh_source`."""
        self.sender.refresh_source()

    def send_weights(
        self,
        *,
        timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        on_source_read: Callable[[], None] | None = None,
    ) -> SyncStats:
        """`WeightSender.send_weights`, with the update of each engine.

        Raises what that raises. An `EngineSync` also raises what its engine raises, and SyncAborted
        if some workers do not hold the version. An `EngineFleet` names each server that does not
        hold it, and why, in `SyncStats.lost`, and raises SyncAborted if fewer than `min_engines`
        can take it.

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
        """Close every connection. Engines keep their weights.

        If the generation of an engine may be paused, it is resumed if all its workers are known to
        hold one version, for which this waits at most `timeout_s`. If an engine may hold a mixture
        of two versions, it stays paused and an error is logged. An update in flight ends first, in
        its thread.
        """
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
        engines, deadline = self._present(), Deadline(self._limit.wait_s)
        for engine in engines:
            engine.begin_call()
        while True:
            for engine in engines:
                if engine.look(self._ranks):
                    self._let_connect(engine, may_ask_source=may_ask_source)
            if self._waits_for_calls and any(engine.is_asked for engine in engines):
                deadline = Deadline(self._limit.wait_s)
            if deadline.passed or not self._is_awaited(engines):
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
        (first,), ranks = self._terms.addresses, self.sender.addresses_of_ranks()
        me = f"process {os.getpid()} on {socket.gethostname()}, stream {self.sender.stream_id}"
        now = {
            "addresses": (first, *(_reachable(there, rank=rank) for rank, there in ranks)),
            "tensors": tuple((each.names, each.dtype.name, each.shape) for each in self._specs),
            "holder": f"{me}, from {first}",
        }
        engine.start_connecting(self._terms.model_copy(update=now))

    def _present(self, *, with_leaving: bool = False) -> list[Engine]:
        with self._lock:
            leaving = [e for e in self._removed if not e.has_left] if with_leaving else []
            return [*self._engines.values(), *leaving]

    def _engine_of(self, worker: str) -> Engine | None:
        return next((engine for engine in self._present() if engine.has(worker)), None)

    def _joins(self, worker: str) -> bool:
        engine = self._engine_of(worker)
        return engine is not None and engine.is_here

    def _turns(
        self, workers: Collection[str], besides: Collection[str]
    ) -> Sequence[Collection[str]]:
        """The `Turns` of the sender. Its engines are the replicas of ours.

        An engine takes a version if all of its workers can.
        """
        can, engines = {*workers, *besides}, [e for e in self._present() if e.is_here]
        able = [e for e in engines if e.count(can, self._ranks) == e.workers]
        self._check_number(able)
        here = [{worker for worker in workers if engine.has(worker)} for engine in able]
        turns = [turn for turn in here if turn]
        return turns if self._pauses == "rolling" else [set().union(*turns)]

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
            whys = [engine.error for engine in present if not engine.is_here]
            ours = (SyncAborted, TransportTimeout)
            raise error from next((why for why in whys if not isinstance(why, ours)), None)

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
        engines = self._present(with_leaving=True)
        is_turn = phase.is_decided and not (phase.is_held or writes_at_once(phase, self._terms))
        if is_turn and self._pauses == "rolling":
            self._await_resumed()
        is_join = phase.is_held and phase.is_full  # with the version that members hold already
        held = self.sender.holders().keys() if is_join else ()
        for engine in engines:
            if any(map(engine.has, phase.engines)):
                mine = frozenset(filter(engine.has, {*phase.engines, *held}))
                engine.follow(replace(phase, engines=mine))

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
        were_asleep, said, held = self.sender.were_asleep, self.sender.lost(), self.sender.holders()
        for engine in engines:
            engine.give_up(error, said, held)
        if were_asleep:  # no worker has written, or left
            wait([update for engine in engines for update in engine.updates], self._limit.wait_s)
            wait([engine.sleep_on() for engine in engines], self._limit.wait_s)

    def _end_sync(self, engines: Sequence[Engine], stats: SyncStats) -> SyncStats:
        """Let engines name the version that they hold, and note which do not."""
        ranks, version = self.sender.holders(), stats.version
        for engine in engines:
            is_held = engine.count(ranks, ranks) == engine.workers
            engine.end_sync(version if is_held else None, stats.lost)
        ending = {each for e in engines if e.version == version for each in e.updates}
        wait(ending - self._slow, self._limit.wait_s)
        for engine in engines:
            engine.check_ended(version)
        return stats


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
