"""One server as its trainer sees it: the calls to it, its pause, and the name of its workers."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    DirtyReceiver,
    EngineFailed,
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
from deltasync.sync.engine_calls import addresses_of_ranks
from deltasync.sync.protocol.round import SyncPhase
from deltasync.sync.sender import WeightSender
from deltasync.transports import forks
from deltasync.transports.address import Address
from deltasync.wire.messages import ParameterSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Terms:
    """What workers are told when they connect; attributes as the arguments of `EngineSync`.

    Attributes:
        address: Where rank 0 of the trainer sends from.
    """

    address: Address
    without_routes: WithoutRoutes
    keep: tuple[str, ...]
    unproved: Unproved
    max_staged_bytes: int
    timeout_s: float

    def writes_at_once(self, phase: SyncPhase) -> bool:
        """Whether workers write what is sent as it arrives, in a pause that begins before."""
        return phase.is_full or phase.staged_bytes > self.max_staged_bytes

    def info(
        self, engine: str, specs: Sequence[ParameterSpec], sender: WeightSender
    ) -> TrainerInfo:
        """All that a worker needs. Raises ConfigError if workers cannot reach a rank."""
        others = addresses_of_ranks(sender)
        return TrainerInfo(
            addresses=(self.address, *(reachable(there, rank=rank) for rank, there in others)),
            engine=engine,
            tensors=tuple((spec.names, spec.dtype.name, spec.shape) for spec in specs),
            without_routes=self.without_routes,
            keep=self.keep,
            unproved=self.unproved,
            max_staged_bytes=self.max_staged_bytes,
            timeout_s=self.timeout_s,
        )


class Engine:
    """The calls to one server. Those of updates run in a thread of this object, one at a time.

    Args:
        server: Reaches the engine.
        workers: Number of its processes that hold weights.
        paused: Makes the context in which generation is paused.
        terms: What its workers are told.

    Attributes:
        name: The prefix of the names of its workers; new at each connect, empty before.
        pause: Of generation.
        outcome: Of the version under way, for its update: no result means that all workers hold it.
        is_spoiled: Whether the engine does not hold its own weights, and must not generate.
    """

    def __init__(
        self,
        server: Server,
        workers: int,
        paused: Callable[[], AbstractContextManager[object]],
        terms: Terms,
    ) -> None:
        self.server, self.workers, self.terms = server, workers, terms
        self.name, self.pause = "", Pause(paused)
        self.outcome: Future[object] = Future()
        self.is_spoiled = False
        self._updates: dict[int, Future[None]] = {}
        self._one_call: OneCallServer | None = None  # if that reaches all workers
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="deltasync-engine")
        self._is_parents = False
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        """In a forked child, send nothing to the engine, and do not resume it."""
        self._is_parents, self._updates = True, {}
        self.pause.forked()
        self._calls = ThreadPoolExecutor(1)

    def __str__(self) -> str:
        return self.name or "an engine"

    @property
    def updates(self) -> Sequence[Future[None]]:
        """Those of the sync under way, or of the last one."""
        return list(self._updates.values())

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Do something in the thread of updates, after them. What it raises is in the result."""
        try:
            return self._calls.submit(call)
        except RuntimeError as error:  # it was closed or removed meanwhile, or no thread is left
            failed = Future[None]()
            failed.set_exception(EngineFailed(f"{self} cannot be asked: {error}"))
            return failed

    def connect(self, trainer: TrainerInfo) -> None:
        """Let workers connect. Raises as the engine does."""
        asked(self.server.connect, trainer.model_dump(mode="json"))

    def connected(self) -> None:
        """Find out how updates are made, now that workers have connected. Raises as the engine."""
        if isinstance(server := self.server, OneCallServer):
            reached = asked(server.reach, self.pause.paused)
            self._one_call = server if reached == self.workers else None
        if self.is_spoiled:  # it was restarted, or it would not connect
            self.is_spoiled = False
            self.pause.end()
        else:
            self.pause.renew()

    def disconnect(self) -> None:
        """Let workers close their connection. Raises as the engine does."""
        if not self._is_parents:
            asked(self.server.disconnect)

    def stop(self) -> None:
        """Pause generation until a restart: the engine does not hold its own weights."""
        self.is_spoiled = True
        self.outcome = Future()  # what workers hold is not known
        try:
            self.pause.begin()
        except DeltaSyncError:
            logger.exception("an engine whose weights are wrong could not be paused")

    def typed(self, told: EngineFailed) -> DeltaSyncError:
        """Why workers cannot take part, as the type that they raised if that is known."""
        text = str(told).replace(f": {self.name}: ", ": ")
        for kind in (ConfigError, DirtyReceiver):
            if told.error == kind.__name__:
                return kind(text.removeprefix(f"{told.error}: "))
        return EngineFailed(text, error=told.error)

    def has(self, worker: str) -> bool:
        """Whether workers of this name are of this engine."""
        return bool(self.name) and worker.startswith(self.name)

    def begin_sync(self) -> None:
        """Forget the last version and its update, which must have ended."""
        self._updates.clear()
        self.outcome = Future()

    def follow(self, phase: SyncPhase) -> None:
        """Ask for the update as soon as workers would wait for it."""
        version = phase.version
        if version in self._updates or not (phase.is_decided or self.terms.writes_at_once(phase)):
            return
        self._expect(version)
        if self._one_call is not None:
            work: Work = "pass" if phase.is_unchanged else "write"
            update = partial(self._switch, self._one_call, version, work, self.outcome)
        else:
            in_place = not phase.is_decided
            update = partial(self._update, version, self.outcome, is_in_place=in_place)
        self._updates[version] = self.submit(update)

    def _expect(self, version: int) -> None:
        """Hear that an update is about to be asked for."""

    def ended(self, timeout_s: float) -> list[BaseException]:
        """Wait for updates to end. Returns what they raised."""
        done, unfinished = wait(self._updates.values(), timeout_s)
        problems = [error for update in done if (error := update.exception()) is not None]
        if unfinished:
            problems.append(TransportTimeout("the engine's update did not end in time"))
        for update in unfinished:
            update.cancel()
        return problems

    def let_name(self, version: int) -> None:
        """Name weights that all workers hold already. Raises as the engine does."""
        try:
            if self._one_call is not None:
                asked(self._one_call.switch, version, "name", self.pause.pauses)
            else:
                asked(self.server.name, version)
        finally:
            self.pause.end()

    def close(self) -> None:
        """Make no more calls. When an update in flight has ended, `leave`."""
        under_way = [each for each in self._updates.values() if not each.cancel()]
        self._calls.shutdown(wait=False, cancel_futures=True)
        if under_way:
            under_way[-1].add_done_callback(lambda _: self.leave())
        else:
            self.leave()

    def leave(self) -> None:
        """Resume generation if it is paused and the weights are whole; else log why not."""
        if self._is_parents or not self.pause.is_on:
            return
        why = "was closed after an update that failed: its weights may mix two versions"
        if self.outcome.done() and self.outcome.exception() is None:
            try:
                self.pause.end()
                return
            except DeltaSyncError as error:
                why = f"cannot be resumed ({error})"
        logger.error(
            "%s %s, so that generation stays paused; send it weights by a new EngineSync, or "
            "reload them and resume it",
            self,
            why,
        )
        self.pause.is_on = False  # log this once

    def _switch(
        self, server: OneCallServer, version: int, work: Work, outcome: Future[object]
    ) -> None:
        """Let the engine do the whole update. After a failure it has paused by itself."""
        if outcome.done() and outcome.exception() is not None:
            return  # the sync has failed meanwhile
        try:
            asked(server.switch, version, work, self.pause.pauses)
        except BaseException:
            self.pause.begin()
            raise
        self.pause.end()

    def _update(self, version: int, outcome: Future[object], *, is_in_place: bool) -> None:
        """Pause, let workers write, and name the version when the sender knows that they have."""
        was_paused = self.pause.is_on
        self.pause.begin()
        is_whole = not was_paused
        try:
            if outcome.done() and outcome.exception() is not None:
                return  # the engine was late to pause: the sync has failed meanwhile
            is_whole = False  # a failed worker may hold mixed weights without a report of it
            asked(self.server.update, version)
            is_whole = not is_in_place
            if self._failure(outcome) is None:
                is_whole = True
                asked(self.server.name, version)
        finally:
            if is_whole:
                self.pause.end()

    def _failure(self, outcome: Future[object]) -> BaseException | None:
        """What the sync raised, as soon as it has ended."""
        try:
            return outcome.exception(self.terms.timeout_s)
        except TimeoutError:
            raise TransportTimeout(
                f"the sync had not ended {self.terms.timeout_s:.4g} s after the engine's update: "
                "the version was not named"
            ) from None


class Pause:
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

    def renew(self) -> None:
        """Pause again, if paused: the engine may have been restarted. Raises as `begin`."""
        if self.is_on:
            forks.keep(self._open.pop_all())  # what was entered before is left once, not twice
            self._enter()

    def end(self) -> None:
        """Resume, if paused. If that fails, the engine stays paused and the next call retries."""
        if not self.is_on:
            return
        if not self._is_entered:  # a failed exit: enter again to exit again
            self._enter()
        self._is_entered = False
        asked(self._open.close)
        self.is_on = False

    def _enter(self) -> None:
        asked(lambda: self._open.enter_context(self.paused()))
        self.is_on = self._is_entered = True


def new_name() -> str:
    """A name for an engine that no other engine has had."""
    return f"engine-{uuid.uuid4().hex[:8]}"


def check_threads_can_start() -> None:
    """Raise ConfigError within `atexit`."""
    if not threading.main_thread().is_alive():
        raise ConfigError(
            "an engine's update needs a thread, and the interpreter is shutting down: send weights "
            "before the program ends, not within atexit"
        )


def asked(call: Callable[..., object], *arguments: object) -> object:
    """Call the engine. Raises EngineFailed for an error that is no DeltaSyncError."""
    try:
        return call(*arguments)
    except DeltaSyncError:
        raise
    except Exception as error:
        raise EngineFailed(f"{type(error).__name__}: {error}") from error


def reachable(address: Address | None, *, rank: int) -> Address:
    """The address. Raises ConfigError if workers cannot connect to it."""
    if address is None:
        raise ConfigError(
            f"an engine's workers cannot connect to the transport of rank {rank}: use "
            "shared_memory, cuda_ipc, nixl or collective"
        )
    return address
