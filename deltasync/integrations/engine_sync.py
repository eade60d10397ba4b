"""The trainer's end for any engine whose workers connect to the trainer."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress

from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    DirtyReceiver,
    EngineFailed,
    SyncAborted,
    TransportTimeout,
)
from deltasync.integrations.trainer_info import (
    OneCallServer,
    Server,
    TrainerInfo,
    Unproved,
    WithoutRoutes,
    Work,
)
from deltasync.sync.engine_calls import addresses_of_ranks, check_newcomers, declared
from deltasync.sync.group.group import TrainerGroup
from deltasync.sync.options import SenderOptions
from deltasync.sync.protocol.links import CallTimeout, OneCaller
from deltasync.sync.protocol.round import SyncPhase
from deltasync.sync.sender import WeightSender, one_call
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.stats import OnLost, SyncStats, judged, reasons
from deltasync.transports import forks
from deltasync.transports.address import Address
from deltasync.transports.base import Closing, SendTransport
from deltasync.wire.messages import ParameterSpec

logger = logging.getLogger(__name__)

_RETURN_S = 2.0


class EngineSync(Closing):
    """Sends a trainer's weights to a running engine.

    Workers receive and stage while they generate. When a version is decided, the trainer asks for
    an update, in which the workers only write. When all have written, the version becomes the
    engine's weight version. A `OneCallServer` does this in one call. Full syncs, and deltas too
    large to stage, are received and written within the update; if that breaks off, the weights are
    a mixture of versions. Generation stays paused after that, and after each update that raises,
    until a later update repairs the weights.

    Use it as a context manager, or `close` it.

    Args:
        source: The trainer's parameters, by checkpoint name.
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
    """

    def __init__(
        self,
        source: WeightSource,
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
    ) -> None:
        self._address = _reachable(Address.of(transport), rank=0)
        self._server, self._workers = server, workers
        self._without_routes: WithoutRoutes = without_routes
        self._keep, self._unproved = tuple(keep), unproved
        self._max_staged_bytes, self._timeout_s = max_staged_bytes, timeout_s
        self._limit = CallTimeout(timeout_s)  # of the call in progress
        self._name = ""  # of the engine, new at each connect
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="deltasync-engine")
        self._is_parents = False
        self._pause, self._is_spoiled = _Pause(paused), False
        self._caller = OneCaller("a sync is under way; an EngineSync is used by one thread")
        self._updates: dict[int, Future[None]] = {}
        self._sent: Future[SyncStats] = Future()  # the outcome of the version
        self._is_behind = True  # workers have to reconnect
        self._one_call: OneCallServer | None = None  # if that reaches all workers
        self.sender = WeightSender(
            source,
            transport,
            options=options,
            on_phase=self._follow,
            admits=self._has_let_connect,
            group=group,
        )
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        """In a forked child, send nothing to the engine, and do not resume it."""
        self._is_parents, self._updates = True, {}
        self._pause.forked()
        self._caller.forked()
        self._calls = ThreadPoolExecutor(1)

    def connect(self) -> None:
        """Connect the engine's workers, or reconnect them.

        `send_weights` does this itself if workers are missing, and after a failed update. The first
        time, the trainer's other ranks must be in their `send_weights`.

        Raises:
            ConfigError: A worker cannot take part; the message is the worker's own.
            DirtyReceiver: A worker's proof could not restore the engine's own weights. Generation
                stays paused: restart the engine, and the next call connects it.
            EngineFailed: The engine or a worker raised another error; the message names its type.
            TransportTimeout: Workers did not connect, or the engine's last update has not ended.
            SyncAborted: Another rank of the trainer did not call `send_weights`.
        """
        with self._caller.call():
            self._limit = CallTimeout(self._timeout_s)
            self._wait_for_last()
            self._connect()

    def _connect(self) -> None:
        """Raises as `connect`."""
        with suppress(EngineFailed):  # reports of workers from an earlier connect
            self.sender.wait_for_receivers(0, timeout_s=0)
        before, self._name = self._name, f"engine-{uuid.uuid4().hex[:8]}"
        try:
            self._let_connect()
        except BaseException as error:
            self._name = before  # workers that did not get the new name still use this one
            if isinstance(error, DirtyReceiver):
                self._stop()
            raise
        if isinstance(server := self._server, OneCallServer):
            reached = _asked(server.reach, self._pause.paused)
            self._one_call = server if reached == self._workers else None
        self._is_behind = False
        if self._is_spoiled:  # it was restarted, or it would not connect
            self._is_spoiled = False
            self._pause.end()

    def _stop(self) -> None:
        """Pause generation until a restart: the engine does not hold its own weights."""
        self._is_behind = self._is_spoiled = True
        self._sent = Future()  # what workers hold is not known
        try:
            self._pause.begin()
        except DeltaSyncError:
            logger.exception("an engine whose weights are wrong could not be paused")

    def _let_connect(self) -> None:
        """Raises as `connect`."""
        specs = declared(self.sender, self._limit.wait_s)
        try:
            _asked(self._server.connect, self._trainer_info(specs).model_dump(mode="json"))
        except DeltaSyncError as error:
            self._hear_why(error)
            raise
        try:
            self.sender.wait_for_receivers(self._workers, timeout_s=self._limit.wait_s)
        except EngineFailed as error:
            raise self._typed(error) from None
        check_newcomers(self.sender, specs)

    def _hear_why(self, error: DeltaSyncError) -> None:
        """Raise a worker's own report: engines pass on no types, and not always a text."""
        with suppress(TransportTimeout):
            try:
                self.sender.wait_for_receivers(self._workers, timeout_s=_RETURN_S)
            except EngineFailed as told:
                raise self._typed(told) from error

    def _typed(self, told: EngineFailed) -> DeltaSyncError:
        """Why workers cannot take part, as the type that they raised if that is known."""
        text = str(told).replace(f": {self._name}: ", ": ")
        for kind in (ConfigError, DirtyReceiver):
            if told.error == kind.__name__:
                return kind(text.removeprefix(f"{told.error}: "))
        return EngineFailed(text, error=told.error)

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
        _check_threads_can_start()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        limit = CallTimeout(timeout_s, total_timeout_s)
        with self._caller.call(), one_call(self.sender, limit):
            self._limit = limit
            self._wait_for_last()
            if self._is_behind or not self._are_here():
                if on_source_read is not None:
                    raise SyncAborted("the engine has to reconnect; the next sync connects it")
                if self._name:
                    logger.warning("the workers of %s have to reconnect", self._name)
                self._connect()
            stats = self._send_weights(timeout_s, on_source_read)
        return judged(stats, on_lost)

    def disconnect(self) -> None:
        """Close the workers' connection; they no longer touch the weights.

        Call it before anything else writes the engine's weights. The next `send_weights` reconnects
        and sends what differs.
        """
        self._is_behind = True
        if not self._is_parents:
            _asked(self._server.disconnect)

    def close(self) -> None:
        """Close every connection. The engine keeps its weights.

        If a failed update has left generation paused, it is resumed if all workers are known to
        hold the version. If the engine may hold a mixture of two versions, it stays paused and an
        error is logged. An update in flight ends first, in its thread.
        """
        self.sender.close()
        under_way = [each for each in self._updates.values() if not each.cancel()]
        self._calls.shutdown(wait=False, cancel_futures=True)
        if under_way:
            under_way[-1].add_done_callback(lambda _: self._leave_engine())
        else:
            self._leave_engine()

    def _leave_engine(self) -> None:
        """Resume generation if it is paused and the weights are whole; else say why not."""
        if self._is_parents or not self._pause.is_on:
            return
        why = "was closed after an update that failed: its weights may mix two versions"
        if self._sent.done() and self._sent.exception() is None:
            try:
                self._pause.end()
                return
            except DeltaSyncError as error:
                why = f"cannot be resumed ({error})"
        logger.error(
            "%s %s, so that generation stays paused; send it weights by a new EngineSync, or "
            "reload them and resume it",
            self._name or "an engine",
            why,
        )
        self._pause.is_on = False  # log this once

    def _wait_for_last(self) -> None:
        """Raise TransportTimeout while the last update runs: the next one would collide with it."""
        timeout_s = self._limit.wait_s
        if wait(self._updates.values(), timeout_s).not_done:
            raise TransportTimeout(
                f"the engine's last update has not ended in {timeout_s:.4g} s more: nothing was "
                "sent; check what the engine waits for, and send again"
            )

    def _send_weights(
        self, timeout_s: float, on_source_read: Callable[[], None] | None
    ) -> SyncStats:
        self._updates.clear()
        self._sent = Future()
        try:
            stats = self.sender.send_weights(
                timeout_s=timeout_s,
                total_timeout_s=self._limit.left_s,
                on_source_read=on_source_read,
            )
            self._check_complete(stats)
        except BaseException as error:
            self._sent.set_exception(error)
            for problem in self._ended():
                error.add_note(f"the engine's update: {type(problem).__name__}: {problem}")
            if self.sender.were_asleep:  # no worker has written, or left
                self._is_behind = False
                self._pause.end()
            raise
        self._sent.set_result(stats)
        for problem in self._ended():
            raise problem
        if not self._updates:  # the engine joined by digest
            try:
                self._let_name(stats.version)
            finally:
                self._pause.end()
        return stats

    def _let_name(self, version: int) -> None:
        """Raises as the engine does."""
        if self._one_call is not None:
            _asked(self._one_call.switch, version, "name", self._pause.pauses)
        else:
            _asked(self._server.name, version)

    def _has_let_connect(self, engine: str) -> bool:
        """Refuse engines of an earlier trainer at this address: none of them would commit."""
        return bool(self._name) and engine.startswith(self._name)

    def _are_here(self) -> bool:
        """Whether all workers are connected, or reconnect by themselves soon after a failure."""
        try:
            self.sender.wait_for_receivers(
                self._workers, timeout_s=min(_RETURN_S, self._limit.wait_s)
            )
        except (TransportTimeout, EngineFailed):
            return False
        return True

    def _check_complete(self, stats: SyncStats) -> None:
        if stats.receivers < self._workers:
            why = reasons(stats.lost) or "refused"
            raise SyncAborted(
                f"{stats.receivers} of {self._workers} workers hold v{stats.version} ({why}); the "
                "next sync covers the others"
            )

    def _ended(self) -> list[BaseException]:
        """Wait for updates to end. Returns what they raised."""
        limit = CallTimeout(self._timeout_s, self._limit.left_s)
        done, unfinished = wait(self._updates.values(), limit.wait_s)
        problems = [error for update in done if (error := update.exception()) is not None]
        if unfinished:
            problems.append(TransportTimeout("the engine's update did not end in time"))
        for update in unfinished:
            update.cancel()
        self._is_behind = bool(problems)
        return problems

    def _trainer_info(self, specs: Sequence[ParameterSpec]) -> TrainerInfo:
        others = addresses_of_ranks(self.sender)
        return TrainerInfo(
            addresses=(self._address, *(_reachable(there, rank=rank) for rank, there in others)),
            engine=self._name,
            tensors=tuple((spec.names, spec.dtype.name, spec.shape) for spec in specs),
            without_routes=self._without_routes,
            keep=self._keep,
            unproved=self._unproved,
            max_staged_bytes=self._max_staged_bytes,
            timeout_s=self._timeout_s,
        )

    def _follow(self, phase: SyncPhase) -> None:
        """Ask for the update as soon as workers would wait for it."""
        version, at_once = phase.version, phase.staged_bytes > self._max_staged_bytes
        if version in self._updates or not (phase.is_decided or phase.is_full or at_once):
            return
        if self._one_call is not None:
            work: Work = "pass" if phase.is_unchanged else "write"
            update = self._calls.submit(self._switch, self._one_call, version, work, self._sent)
        else:
            is_in_place = not phase.is_decided
            update = self._calls.submit(self._update, version, self._sent, is_in_place=is_in_place)
        self._updates[version] = update

    def _switch(
        self, server: OneCallServer, version: int, work: Work, sent: Future[SyncStats]
    ) -> None:
        """Let the engine do the whole update. After a failure it has paused by itself."""
        if sent.done() and sent.exception() is not None:
            return  # the sync has failed meanwhile
        try:
            _asked(server.switch, version, work, self._pause.pauses)
        except BaseException:
            self._pause.begin()
            raise
        self._pause.end()

    def _update(self, version: int, sent: Future[SyncStats], *, is_in_place: bool) -> None:
        """Pause, let workers write, and name the version when the sender knows that they have."""
        was_paused = self._pause.is_on
        self._pause.begin()
        is_whole = not was_paused
        try:
            if sent.done() and sent.exception() is not None:
                return  # the engine was late to pause: the sync has failed meanwhile
            is_whole = False  # a failed worker may hold mixed weights without a report of it
            _asked(self._server.update, version)
            is_whole = not is_in_place
            if sent.exception(self._timeout_s) is None:
                is_whole = True
                _asked(self._server.name, version)
        finally:
            if is_whole:
                self._pause.end()


class _Pause:
    """The pause of an engine's generation.

    Args:
        paused: Makes the context in which generation is paused.

    Attributes:
        is_on: Whether it is paused.
        pauses: Whether `paused` pauses at all.
    """

    def __init__(self, paused: Callable[[], AbstractContextManager[object]]) -> None:
        self.paused, self.pauses = paused, paused is not nullcontext
        self._open = ExitStack()
        forks.keep(self._open)  # its end, or the process's, must not resume mixed weights
        self.is_on = self._is_entered = False

    def forked(self) -> None:
        """A forked child does not resume its parent's engine."""
        self._open, self.is_on = ExitStack(), False

    def begin(self) -> None:
        """Pause, unless paused. Raises as the engine does, or EngineFailed."""
        if not self.is_on:
            self._enter()

    def end(self) -> None:
        """Resume, if paused. If that fails, the engine stays paused and the next call retries."""
        if not self.is_on:
            return
        if not self._is_entered:  # a failed exit: enter again to exit again
            self._enter()
        self._is_entered = False
        _asked(self._open.close)
        self.is_on = False

    def _enter(self) -> None:
        _asked(lambda: self._open.enter_context(self.paused()))
        self.is_on = self._is_entered = True


def _check_threads_can_start() -> None:
    """Raise ConfigError within `atexit`."""
    if not threading.main_thread().is_alive():
        raise ConfigError(
            "an engine's update needs a thread, and the interpreter is shutting down: send weights "
            "before the program ends, not within atexit"
        )


def _asked(call: Callable[..., object], *arguments: object) -> object:
    """Call the engine. Raises EngineFailed for an error that is no DeltaSyncError."""
    try:
        return call(*arguments)
    except DeltaSyncError:
        raise
    except Exception as error:
        raise EngineFailed(f"{type(error).__name__}: {error}") from error


def _reachable(address: Address | None, *, rank: int) -> Address:
    if address is None:
        raise ConfigError(
            f"an engine's workers cannot connect to the transport of rank {rank}: use "
            "shared_memory, cuda_ipc or collective"
        )
    return address
