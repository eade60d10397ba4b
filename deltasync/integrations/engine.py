"""One server as its trainer sees it: the calls to it, its pause, and the name of its workers."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    DirtyReceiver,
    EngineFailed,
    EngineTaken,
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
from deltasync.sync.engine_sender import EngineSender
from deltasync.sync.protocol.round import SyncPhase
from deltasync.transports import forks
from deltasync.transports.address import Address
from deltasync.wire.messages import ParameterSpec, as_text

logger = logging.getLogger(__name__)

_RESUMED = 0  # no version
_TAKEN = re.compile(r"EngineTaken: (.*?take_over=True)", re.DOTALL)  # ends so, in any text


@dataclass(frozen=True, slots=True)
class Terms:
    """What workers are told when they connect; attributes as the arguments of `EngineSync`.

    Attributes:
        address: Where rank 0 of the trainer sends from.
        take_over: Whether to take the engine from another trainer, the first time.
        label: What the trainer calls the engine.
        sender: Whose terms these are.
    """

    address: Address
    without_routes: WithoutRoutes
    keep: tuple[str, ...]
    unproved: Unproved
    max_staged_bytes: int
    timeout_s: float
    take_over: bool = False
    label: str = "its engine"
    sender: str = field(default_factory=lambda: uuid.uuid4().hex)

    def writes_at_once(self, phase: SyncPhase) -> bool:
        """Whether workers write what is sent as it arrives, in a pause that begins before."""
        return phase.is_full or phase.staged_bytes > self.max_staged_bytes


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
        is_whole: Whether no update has left the weights half written, as far as is known.
        is_spoiled: Whether the engine does not hold its own weights, and must not generate.
        is_taken: Whether it follows another trainer.
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
        self.is_whole = self._was_whole = True
        self.is_spoiled = self.is_taken = self._is_given_up = False
        self._holder = ""  # before it was asked to connect
        self._updates: dict[int, Future[None]] = {}
        self._one_call: OneCallServer | None = None  # if that reaches all workers
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="deltasync-engine")
        self._is_parents = False
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        """In a forked child, send nothing to the engine, and do not resume it."""
        self._is_parents, self._updates = True, {}
        self.pause.forget()
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

    def info(self, name: str, specs: Sequence[ParameterSpec], sender: EngineSender) -> TrainerInfo:
        """All that its workers need to connect, by this name.

        Raises ConfigError if they cannot reach a rank.
        """
        terms, others = self.terms, sender.addresses_of_ranks()
        me = f"process {os.getpid()} on {socket.gethostname()}, stream {sender.stream_id}"
        self._holder = f"{me}, from {terms.address} to {terms.label} ({terms.sender[:8]})"
        return TrainerInfo(
            addresses=(terms.address, *(reachable(there, rank=rank) for rank, there in others)),
            engine=name,
            holder=self._holder,
            sender=terms.sender,
            take_over=terms.take_over,
            tensors=tuple((spec.names, spec.dtype.name, spec.shape) for spec in specs),
            without_routes=terms.without_routes,
            keep=terms.keep,
            unproved=terms.unproved,
            max_staged_bytes=terms.max_staged_bytes,
            timeout_s=terms.timeout_s,
        )

    def connect(self, trainer: TrainerInfo) -> None:
        """Let workers connect. Raises as the engine does."""
        self.is_taken = False
        asked(self.server.connect, trainer.model_dump(mode="json"))

    def connected(self) -> None:
        """Find out how updates are made, now that workers have connected. Raises as the engine."""
        if isinstance(server := self.server, OneCallServer):
            reached = asked(server.reach, self.pause.paused)
            self._one_call = server if reached == self.workers else None
        self.terms = replace(self.terms, take_over=False)
        if self.is_spoiled:  # it was restarted, or it would not connect
            self.is_spoiled, self.is_whole = False, True
        if self.is_whole:
            self.pause.end()
        else:
            self.pause.renew()

    def disconnect(self) -> None:
        """Let workers close their connection. Raises as the engine does, EngineTaken once."""
        if self._holder and not (self._is_parents or self.is_taken):
            self._ask(self.server.disconnect)

    def _ask(self, call: Callable[..., object], *arguments: object) -> None:
        """Call the engine by this trainer's name. Raises as the engine does."""
        try:
            asked(call, *arguments, self._holder)
        except EngineTaken as error:
            logger.warning("%s is left as it is: %s", self, error)
            self.refused(error)
            raise

    def refused(self, error: BaseException) -> None:
        """It did not connect: leave it to another trainer, or pause it until it is restarted."""
        if isinstance(error, EngineTaken):
            self.is_taken = True
            self.pause.forget()
        if isinstance(error, DirtyReceiver):  # it does not hold its own weights
            self.is_spoiled, self.is_whole = True, False
            self.outcome = Future()  # what workers hold is not known
            try:
                self.pause.begin()
            except DeltaSyncError:
                logger.exception("an engine whose weights are wrong could not be paused")

    def typed(self, told: EngineFailed) -> DeltaSyncError:
        """Why workers cannot take part, as the type that they raised if that is known."""
        text = str(told).replace(f": {self.name}: ", ": ")
        for kind in (ConfigError, DirtyReceiver, EngineTaken):
            if told.error == kind.__name__:
                return kind(text.removeprefix(f"{told.error}: "))
        return EngineFailed(text, error=told.error)

    def has(self, worker: str) -> bool:
        """Whether workers of this name are of this engine."""
        return bool(self.name) and worker.startswith(self.name)

    def begin_sync(self) -> None:
        """Forget the last version and its update, which must have ended."""
        self._updates.clear()
        self.outcome, self._was_whole = Future(), self.is_whole

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

    def interrupted(self) -> None:
        """Let an update end of which the call was interrupted: nobody else would tell it."""
        if not self.outcome.done():
            self.outcome.set_exception(SyncAborted("the call was interrupted"))

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
        self.is_whole = True
        self.pause.begin()  # so that it is resumed, whoever has paused it
        try:
            if self._one_call is not None:
                self._ask(self._one_call.switch, version, "name", self.pause.pauses)
            else:
                self._ask(self.server.name, version)
        finally:
            self.pause.end()

    def sleep_on(self) -> Future[None]:
        """Its weights sleep: no worker has written, and what its update raised says so. Resume it.

        Returns the end of that, which comes after the update.
        """
        hanging = {at: update for at, update in self._updates.items() if not update.done()}
        resumed = self.submit(self._resume_asleep)
        self._updates, self.outcome = {**hanging, _RESUMED: resumed}, Future()
        return resumed

    def _resume_asleep(self) -> None:
        self.is_whole = self._was_whole
        if self.is_whole:
            self.pause.end()

    @property
    def _is_busy(self) -> bool:
        """Whether an update is in flight."""
        return any(not update.done() for update in self.updates)

    def close(self) -> Sequence[Future[None]]:
        """Make no more calls, and `leave`, in its thread after an update in flight.

        Returns what may be waited for: not for that update, which may hang.
        """
        for update in self._updates.values():
            update.cancel()
        if not threading.main_thread().is_alive():  # no thread can start, or is left
            self.leave()
        is_busy = self._is_busy
        left = [self.submit(self.leave)] if is_busy or self.pause.is_on else []
        self._calls.shutdown(wait=False)
        return [] if is_busy else left

    def leave(self) -> None:
        """Resume generation if it is paused, this trainer's, and whole; else log why not."""
        if self._is_parents or self._is_given_up or not self.pause.is_on:
            return
        why = "was closed after an update that failed: its weights may mix two versions"
        if self.is_whole or (self.outcome.done() and self.outcome.exception() is None):
            try:
                with suppress(DeltaSyncError):  # it may be gone
                    self.disconnect()  # and forget the pause if it is another trainer's by now
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
        self._is_given_up = True  # which is said once

    def _switch(
        self, server: OneCallServer, version: int, work: Work, outcome: Future[object]
    ) -> None:
        """Let the engine do the whole update. After a failure it has paused by itself."""
        if outcome.done() and outcome.exception() is not None:
            return  # the sync has failed meanwhile
        self.is_whole = False
        try:
            self._ask(server.switch, version, work, self.pause.pauses)
        except BaseException:
            if not self.is_taken:
                self.pause.begin()
            raise
        self.is_whole = True
        self.pause.end()

    def _update(self, version: int, outcome: Future[object], *, is_in_place: bool) -> None:
        """Pause, let workers write, and name the version when the sender knows that they have."""
        self.pause.begin()
        try:
            if outcome.done() and outcome.exception() is not None:
                return  # the engine was late to pause: the sync has failed meanwhile
            self.is_whole = False  # a failed worker may hold mixed weights without a report of it
            self._ask(self.server.update, version)
            self.is_whole = not is_in_place
            if self._failure(outcome) is None:
                self.is_whole = True
                self._ask(self.server.name, version)
        finally:
            if self.is_whole:
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
        is_on: Whether it may be paused: what was asked for counts as done until that is known not
            to be so.
        pauses: Whether `paused` pauses at all.
    """

    def __init__(self, paused: Callable[[], AbstractContextManager[object]]) -> None:
        self.paused, self.pauses = paused, paused is not nullcontext
        self._open = ExitStack()
        forks.keep(self._open)  # its end, or the process's, must not resume mixed weights
        self.is_on = self._is_entered = False

    def forget(self) -> None:
        """Whether the engine is paused is another's affair: a parent's, or another trainer's."""
        forks.keep(self._open.pop_all())
        self.is_on = self._is_entered = False

    def begin(self) -> None:
        """Pause, unless that is known to be so. Raises as the engine does, or EngineFailed."""
        if not self._is_entered:
            if self.is_on:
                forks.keep(self._open.pop_all())  # what was entered before is left once, not twice
            self.is_on = True
            asked(lambda: self._open.enter_context(self.paused()))
            self._is_entered = True

    def renew(self) -> None:
        """Pause again, if paused: the engine may have been restarted. Raises as `begin`."""
        self._is_entered = False
        if self.is_on:
            self.begin()

    def end(self) -> None:
        """Resume, if paused. If that fails, the engine stays paused and the next call retries."""
        if self.is_on:
            self.begin()  # after a pause or a resume that failed: enter again, to exit again
            self._is_entered = False
            asked(self._open.close)
            self.is_on = False


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
    """Call the engine. Raises EngineFailed for an error that is no DeltaSyncError, and EngineTaken
    for one whose text says so: engines pass on no types.
    """
    try:
        return call(*arguments)
    except EngineTaken:
        raise
    except Exception as error:
        if said := _TAKEN.search(str(error)):
            raise EngineTaken(said[1]) from error
        if isinstance(error, DeltaSyncError):
            raise
        raise EngineFailed(f"{type(error).__name__}: {as_text(error)}") from error


def reachable(address: Address | None, *, rank: int) -> Address:
    """The address. Raises ConfigError if workers cannot connect to it."""
    if address is None:
        raise ConfigError(
            f"an engine's workers cannot connect to the transport of rank {rank}: use "
            "shared_memory, cuda_ipc, nixl or collective"
        )
    return address
