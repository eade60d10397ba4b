"""The trainer's end for any engine whose workers connect to the trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext, suppress

from deltasync.delta.modes import plain_mode
from deltasync.errors import (
    DeltaSyncError,
    EngineFailed,
    SyncAborted,
    TransportTimeout,
)
from deltasync.integrations.engine import (
    Engine,
    Terms,
    check_threads_can_start,
    new_name,
    reachable,
)
from deltasync.integrations.trainer_info import Server, Unproved, WithoutRoutes
from deltasync.sync.engine_sender import EngineSender
from deltasync.sync.group.group import TrainerGroup
from deltasync.sync.options import SenderOptions
from deltasync.sync.protocol.links import CallTimeout, OneCaller, check_seconds
from deltasync.sync.sender import one_call
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.source.weights import LocalWeights
from deltasync.sync.stats import OnLost, SyncStats, judged, reasons
from deltasync.transports import forks
from deltasync.transports.address import Address
from deltasync.transports.base import Closing, SendTransport

logger = logging.getLogger(__name__)

_RETURN_S = 2.0


class EngineSync(Closing):
    """Sends a trainer's weights to a running engine.

    Workers receive and stage while they generate. When a version is decided, the trainer asks for
    an update, in which the workers only write. When all have written, the version becomes the
    engine's weight version. A `OneCallServer` does this in one call. Full syncs, and deltas too
    large to stage, are received and written within the update; if that breaks off, the weights are
    a mixture of versions. Generation stays paused after that, and after each update that raises,
    until a later update repairs the weights. Use it as a context manager, or `close` it.

    Args:
        source: The trainer's parameters, by checkpoint name, or `StreamedWeights` of them.
        server: Reaches the engine. While `send_weights` runs, a thread of this object calls it.
        transport: A listening sender of `shared_memory`, `cuda_ipc` or `collective`. Owned.
        workers: Number of engine processes that hold weights: tensor times pipeline times data
            parallel.
        paused: Returns the context manager that pauses generation during an update and resumes it.
        without_routes: What to do if a worker keeps weights in another layout than they were
            loaded in, or computes what it keeps. "refuse": `connect` raises and names one.
            "reload" (vLLM only): workers keep a copy of the whole checkpoint on the host, which is
            updated and reloaded in each update.
        keep: Patterns (`visual.*`) of checkpoint tensors that the engine may keep from its start.
            Without it, `connect` raises if the trainer does not send a tensor.
        unproved: What to do if a worker cannot prove that updates reach everything that it computes
            with. "refuse": `connect` raises and says why. "accept_stale_weights": workers prove
            nothing, and may compute with old weights in some places.
        max_staged_bytes: Memory in each worker for a version before it is written.
        options: Options of the sender.
        timeout_s: For each wait, here and in the workers.
        group: The other ranks of the trainer, if it has several. This end is then rank 0, and every
            other rank uses a `TrainerRank` with a transport that workers can reach. If
            `send_weights` fails here, including the engine's part, it raises SyncAborted there.
        take_over: Whether the first connect takes the engine from another trainer that it follows.
            That one's next call then raises EngineTaken.
    """

    def __init__(
        self,
        source: WeightSource | LocalWeights,
        server: Server,
        transport: SendTransport,
        *,
        workers: int = 1,
        paused: Callable[[], AbstractContextManager[object]] = nullcontext,
        without_routes: WithoutRoutes = "refuse",
        keep: Collection[str] = (),
        unproved: Unproved = "refuse",
        max_staged_bytes: int = 1 << 30,
        options: SenderOptions | None = None,
        timeout_s: float = 60.0,
        group: TrainerGroup | None = None,
        take_over: bool = False,
    ) -> None:
        check_seconds("timeout_s", timeout_s, may_be_zero=False)
        terms = Terms(
            address=reachable(Address.of(transport), rank=0),
            without_routes=without_routes,
            keep=tuple(keep),
            unproved=unproved,
            max_staged_bytes=max_staged_bytes,
            timeout_s=timeout_s,
            take_over=take_over,
        )
        self._engine = engine = Engine(server, workers, paused, terms)
        self._pause, self._timeout_s = engine.pause, timeout_s
        self._limit = CallTimeout(timeout_s)  # of the call in progress
        self._caller = OneCaller("a sync is under way; an EngineSync is used by one thread")
        self._is_behind = True  # workers have to reconnect
        self.sender = EngineSender(
            source,
            transport,
            options=options,
            on_phase=engine.follow,
            admits=engine.has,  # not those of an earlier trainer here: none of them would commit
            group=group,
        )
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        self._caller.forked()

    def connect(self) -> None:
        """Connect the engine's workers, or reconnect them.

        `send_weights` does this itself if workers are missing, and after a failed update. The first
        time, the trainer's other ranks must be in their `send_weights`.

        Raises:
            ConfigError: A worker cannot take part; the message is the worker's own.
            DirtyReceiver: A worker's proof could not restore the engine's own weights. Generation
                stays paused: restart the engine, and the next call connects it.
            EngineTaken: The engine follows another trainer; the message says which.
            EngineFailed: The engine or a worker raised another error; the message names its type.
            TransportTimeout: Workers did not connect, or the engine's last update has not ended.
            SyncAborted: Another rank of the trainer did not call `send_weights`.
        """
        with plain_mode(), self._caller.call():
            self._limit = CallTimeout(self._timeout_s)
            self._wait_for_last()
            self._connect()

    def _connect(self) -> None:
        """Raises as `connect`."""
        with suppress(EngineFailed):  # reports of workers from an earlier connect
            self.sender.wait_for_receivers(0, timeout_s=0)
        engine = self._engine
        before, engine.name = engine.name, new_name()
        try:
            self._let_connect()
        except BaseException as error:
            engine.name = before  # workers that did not get the new name still use this one
            engine.refused(error)
            self._is_behind |= engine.is_spoiled or engine.is_taken
            raise
        engine.connected()
        self._is_behind = False

    def _let_connect(self) -> None:
        """Raises as `connect`."""
        engine = self._engine
        specs = self.sender.declared(self._limit.wait_s)
        trainer = engine.info(engine.name, specs, self.sender)
        try:
            engine.connect(trainer)
        except DeltaSyncError as error:
            self._hear_why(error)
            raise
        try:
            self.sender.wait_for_receivers(engine.workers, timeout_s=self._limit.wait_s)
        except EngineFailed as error:
            raise engine.typed(error) from None
        self.sender.check_newcomers(specs)

    def _hear_why(self, error: DeltaSyncError) -> None:
        """Raise a worker's own report: engines pass on no types, and not always a text."""
        with suppress(TransportTimeout):
            try:
                self.sender.wait_for_receivers(self._engine.workers, timeout_s=_RETURN_S)
            except EngineFailed as told:
                raise self._engine.typed(told) from error

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
        on_lost: OnLost = "continue",
    ) -> SyncStats:
        """`WeightSender.send_weights`, with the engine's update.

        Raises what that raises, what the engine raises, and SyncAborted if some workers do not hold
        the version. `total_timeout_s` does not interrupt the engine's own calls. Within `atexit` it
        raises ConfigError before anything is sent, because the engine's update needs a thread and
        none can start any more.
        """
        check_threads_can_start()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        limit = CallTimeout(timeout_s, total_timeout_s)
        with plain_mode(), self._caller.call(), one_call(self.sender, limit):
            self._limit = limit
            self._wait_for_last()
            if self._is_behind or not self._are_here():
                if on_source_read is not None:
                    raise SyncAborted("the engine has to reconnect; the next sync connects it")
                if self._engine.name:
                    logger.warning("the workers of %s have to reconnect", self._engine)
                self._connect()
            stats = self._send_weights(timeout_s, on_source_read)
        return judged(stats, on_lost)

    def disconnect(self) -> None:
        """Close the workers' connection; they no longer touch the weights.

        Call it before anything else writes the engine's weights. The next `send_weights` reconnects
        and sends what differs.

        Raises EngineTaken, once, if another trainer has taken the engine since: it keeps it as it
        is. Raises EngineFailed or a TransportError if the engine cannot be asked.
        """
        self._is_behind = True
        self._engine.disconnect()

    def close(self) -> None:
        """Close every connection. The engine keeps its weights.

        If generation may be paused, it is resumed if all workers are known to hold one version, for
        which this waits at most `timeout_s`. If the engine may hold a mixture of two versions, it
        stays paused and an error is logged. An update in flight ends first, in its thread.
        """
        self.sender.close()
        wait(self._engine.close(), self._timeout_s)

    def _wait_for_last(self) -> None:
        """Raise TransportTimeout while the last update runs: the next one would collide with it."""
        timeout_s = self._limit.wait_s
        self._engine.interrupted()
        if wait(self._engine.updates, timeout_s).not_done:
            raise TransportTimeout(
                f"the engine's last update has not ended in {timeout_s:.4g} s more: nothing was "
                "sent; check what the engine waits for, and send again"
            )

    def _send_weights(
        self, timeout_s: float, on_source_read: Callable[[], None] | None
    ) -> SyncStats:
        engine = self._engine
        engine.begin_sync()
        try:
            stats = self.sender.send_weights(
                timeout_s=timeout_s,
                total_timeout_s=self._limit.left_s,
                on_source_read=on_source_read,
            )
            self._check_complete(stats)
        except BaseException as error:
            engine.outcome.set_exception(error)
            for problem in self._ended():
                error.add_note(f"the engine's update: {type(problem).__name__}: {problem}")
            if self.sender.were_asleep:  # no worker has written, or left
                self._is_behind = False
                wait([engine.sleep_on()], self._limit.wait_s)
            raise
        engine.outcome.set_result(stats)
        for problem in self._ended():
            raise problem
        if not engine.updates:  # the engine joined by digest
            engine.let_name(stats.version)
        return stats

    def _are_here(self) -> bool:
        """Whether all workers are connected, or reconnect by themselves soon after a failure."""
        try:
            self.sender.wait_for_receivers(
                self._engine.workers, timeout_s=min(_RETURN_S, self._limit.wait_s)
            )
        except (TransportTimeout, EngineFailed):
            return False
        return True

    def _check_complete(self, stats: SyncStats) -> None:
        workers = self._engine.workers
        if stats.receivers < workers:
            why = reasons(stats.lost) or "refused"
            raise SyncAborted(
                f"{stats.receivers} of {workers} workers hold v{stats.version} ({why}); the "
                "next sync covers the others"
            )

    def _ended(self) -> list[BaseException]:
        """Wait for updates to end. Returns what they raised."""
        problems = self._engine.ended(CallTimeout(self._timeout_s, self._limit.left_s).wait_s)
        self._is_behind = bool(problems)
        return problems
