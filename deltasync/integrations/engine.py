"""One engine as its trainer sees it: whether it is here, what it holds, and the calls to it."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    DirtyReceiver,
    EngineFailed,
    EngineTaken,
    SyncAborted,
    TransportTimeout,
)
from deltasync.integrations.calls import Pause, asked
from deltasync.integrations.trainer_info import OneCallServer, Server, TrainerInfo, Work
from deltasync.sync.stats import reasons
from deltasync.transports import forks
from deltasync.wire.messages import Failed

logger = logging.getLogger(__name__)

_NO_VERSION = 0
_RETURN_S = 0.3  # workers that failed in a sync connect again by themselves
_NOT_JOINED = "it has not joined yet"
_GRACE_S = 1.0  # for an engine that has failed before: a restarted one connects in this time


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server of an `EngineFleet`.

    Attributes:
        state: "current": connected, and holds the last version. "behind": connected, and does not.
            "lost": not connected; it is asked to connect in each call.
        version: The last version that all its workers are known to have held; None if there is
            none. A server that was restarted since holds the weights of its checkpoint.
        is_paused: Whether its generation may be paused: the fleet has asked for that, and not heard
            that it was resumed since.
        why: Why it is not current, or what it raised last; empty if all is well.
    """

    state: Literal["current", "behind", "lost"]
    version: int | None
    is_paused: bool
    why: str


class Engine:
    """An engine that comes and goes. Calls to its server run in a thread of this object, one at a
    time. Methods are called by the thread of syncs, except `remove`, `hang_up` and `close`.

    Args:
        label: Its name for people.
        server: Reaches the engine.
        workers: Number of its processes that hold weights.
        paused: Makes the context in which generation is paused.
        terms: What its workers are told, whatever they are asked to send.
        take_over: Whether to take it from another trainer, the first time.
        stays: The same server's earlier ones, in order. Workers may be connected to the last one,
            which this one continues, once none can resume what this one pauses.

    Attributes:
        holder: Its name for workers, which tell its calls from those of others by it.
        stem: How the names of its workers begin, also those before they reconnected.
        version: See `ServerState`.
        error: Why it is not current, or what it raised last; None if all is well.
        pause: Of generation.
        outcome: Of the version under way, for its update: no result means that all workers hold it.
        is_here: Whether all workers are connected, and updates can be asked for.
        is_settled: Whether that is known for this call.
        is_ours: Whether the server may have workers that are connected to this trainer.
        is_whole: Whether no update has left the weights half written, as far as is known.
        is_removed: Whether `remove` was called. has_left: whether nothing has to be done for that
            any more.
    """

    def __init__(
        self,
        label: str,
        server: Server,
        workers: int,
        paused: Callable[[], AbstractContextManager[object]],
        terms: TrainerInfo,
        *,
        take_over: bool = False,
        stays: Sequence[Engine] = (),
    ) -> None:
        self.label, self.server, self.workers, self._terms = label, server, workers, terms
        self._takes_over = take_over
        self._continues: str = stays[-1].holder if stays else ""
        self.stem, self._name = new_name("engine-"), ""
        self.holder: str = self._continues
        self._stays = [stay for stay in stays if stay._may_resume]
        self.version: int | None = None
        self.error: BaseException | None = SyncAborted("it has not connected yet")
        self.pause, self.outcome = Pause(paused), Future[object]()
        self.is_here = self.is_settled = self.is_ours = self.is_removed = self.has_left = False
        self.is_whole = True
        self._is_spoiled = False  # it does not hold its own weights, and must not generate
        self._is_abandoned = False  # it was left paused
        self._is_asleep = False  # the sync failed for that: no worker has written
        self._connecting: Future[None] | None = None
        self._answered_s = 0.0  # when the server has answered that
        self._declined: DeltaSyncError | None = None
        self._patience_s = terms.timeout_s  # with it, when it is asked to connect
        self._missing_until_s = self._awaited_until_s = 0.0
        self._num_here = 0
        self._replicas: dict[str, int] = {}  # number of ranks, by the name that workers use
        self._holding: set[str] = set()  # replicas that hold the version under way
        self._updates: dict[int, Future[None]] = {}
        self._takes_one_call: bool | None = None  # for all workers; None until it was asked
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="deltasync-engine")
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        """In a forked child, send nothing to the engine, and do not resume it."""
        self.is_ours, self._updates = False, {}
        self.pause.forget()
        self._calls = ThreadPoolExecutor(1)

    def __str__(self) -> str:
        return self.label

    @property
    def why(self) -> str:
        """The text of `error`; empty if there is none."""
        if self.error is None or isinstance(self.error, SyncAborted):
            return str(self.error or "")
        return f"{type(self.error).__name__}: {self.error}"

    @property
    def updates(self) -> Sequence[Future[None]]:
        """Those of the sync under way, or of the last one."""
        return list(self._updates.values())

    @property
    def is_asked(self) -> bool:
        """Whether the server has not answered yet that it is asked to connect."""
        return self._connecting is not None and not self._connecting.done()

    @property
    def _is_busy(self) -> bool:
        """Whether an update is in flight."""
        return any(not update.done() for update in self.updates)

    @property
    def _may_resume(self) -> bool:
        """Whether what it is asked, or will be by itself, may resume it."""
        is_leaving = self.is_removed and not self.has_left
        return self._is_busy or (is_leaving and self.pause.is_on)

    @property
    def _is_held_up(self) -> bool:
        """Whether it cannot be asked to connect yet."""
        self._stays = [stay for stay in self._stays if stay._may_resume]
        return self._is_busy or bool(self._stays)

    def state(self, newest: int) -> ServerState:
        """What is known of it. `newest` is the last version decided."""
        state: Literal["current", "behind", "lost"] = "lost"
        if self.is_here:
            state = "current" if self.version == newest and not self.error else "behind"
        return ServerState(state, self.version, self.pause.is_on, self.why)

    def has(self, worker: str) -> bool:
        """Whether workers of this name are of this engine."""
        return bool(self._name) and worker.startswith(self._name)

    def count(self, workers: Collection[str], ranks: Mapping[str, int]) -> int:
        """Number of ranks of this engine in those of these names."""
        return sum(ranks.get(worker, 0) for worker in workers if self.has(worker))

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Do something in the thread of calls, after them. What it raises is in the result."""
        done = Future[None]()
        try:
            if threading.main_thread().is_alive():
                return self._calls.submit(call)
            call()  # within atexit, where no thread can start, or is left
            done.set_result(None)
        except RuntimeError as error:  # it was closed or removed meanwhile, or no thread is left
            done.set_exception(EngineFailed(f"{self} cannot be asked: {error}"))
        except DeltaSyncError as error:
            done.set_exception(error)
        return done

    def _ask(self, call: Callable[..., object], *arguments: object) -> None:
        """Call the engine by this trainer's name. Raises as the engine does."""
        try:
            asked(call, *arguments, self.holder)
        except EngineTaken as error:
            logger.warning("%s is left as it is: %s", self, error)
            self._refused(error)
            raise

    # Connecting

    def begin_call(self) -> None:
        """Find out whether it is here, and let an update end of which the call was interrupted."""
        if not self.outcome.done():
            self.outcome.set_exception(SyncAborted("the call was interrupted"))
        now = time.monotonic()
        if self._connecting is None:
            grace_s = min(_GRACE_S, self._terms.timeout_s)
            self._awaited_until_s = now + (grace_s if self._stays else self._patience_s)
        self._missing_until_s = now + _RETURN_S
        self.is_here = self.is_settled = False

    def reconnect(self) -> None:
        """Let workers connect again in the next call."""
        self._name, self._connecting = "", None

    def is_awaited(self) -> bool:
        """Whether it may be here soon, and the others wait for that."""
        return not self.is_settled and time.monotonic() < self._awaited_until_s

    def look(self, ranks: Mapping[str, int]) -> bool:
        """Find out whether it is here. Returns whether it has to be asked to connect."""
        if self.is_settled or self.is_removed or self._is_held_up:
            return False
        self._check_updates()
        self._num_here = self.count(ranks, ranks)
        if self._connecting is not None:
            self._look_at_attempt(self._connecting, ranks)
            return False
        if self._name and self._num_here >= self.workers:
            self._arrive(ranks)
            return False
        return not self._name or time.monotonic() > self._missing_until_s

    def start_connecting(self, trainer: TrainerInfo) -> None:
        """Ask it to connect to this trainer, in its thread."""
        self._name = new_name(self.stem)
        self.holder = f"{trainer.holder} to {self.label} ({self.stem})"
        terms = {
            "engine": self._name,
            "holder": self.holder,
            "continues": self._continues,
            "take_over": self._takes_over,
        }
        self.error, self._declined = SyncAborted(_NOT_JOINED), None
        self.is_ours, self._takes_one_call = True, None
        self._patience_s = min(_GRACE_S, self._terms.timeout_s)
        info = trainer.model_copy(update=terms).model_dump(mode="json")
        self._connecting = self.submit(lambda: self._connect(info))

    def _connect(self, trainer: dict[str, object]) -> None:
        """Let workers connect. Raises as the engine does."""
        try:
            asked(self.server.connect, trainer)
            self._takes_over = False
        finally:
            self._answered_s = time.monotonic()

    def declined(self, failed: Failed) -> None:
        """A worker has said why it cannot take part: an error of the type that it raised, if that
        is known.
        """
        why = failed.reason.removeprefix(f"{self._name}: ")
        self._declined = EngineFailed(f"{failed.error}: {why}")
        for kind in (ConfigError, DirtyReceiver, EngineTaken):
            if failed.error == kind.__name__:
                self._declined = kind(why)

    def _look_at_attempt(self, attempt: Future[None], ranks: Mapping[str, int]) -> None:
        if not attempt.done():
            return
        since_s = time.monotonic() - self._answered_s
        if self._declined is not None:
            self._fail(self._declined)
        elif (error := attempt.exception()) is not None:
            if not isinstance(error, EngineFailed) or since_s > _RETURN_S:  # a worker may say more
                self._fail(error)
        elif self._num_here < self.workers:
            if since_s > self._terms.timeout_s:
                self._fail(self._too_few())
        else:
            self._settle()
            self._connecting = None
            self._arrive(ranks)

    def _arrive(self, ranks: Mapping[str, int]) -> None:
        if self._num_here > self.workers:
            came = f"{self._num_here} workers have connected"
            self._fail(ConfigError(f"{came}, and workers={self.workers}"))
            return
        self._replicas = {worker: ranks[worker] for worker in ranks if self.has(worker)}
        self.is_here = self.is_settled = True

    def _settle(self) -> None:
        """It has connected again: it may have been restarted, and may be paused in vain."""
        if self._is_spoiled:  # it was restarted, or it would not connect
            self._is_spoiled, self.is_whole = False, True
        self.pause.renew()
        if self.is_whole:
            self.submit(self.pause.end)

    def _too_few(self, refusal: str = "") -> TransportTimeout:
        why = f"; the last one refused: {refusal}" if refusal else ""
        came = f"{self._num_here} of {self.workers} workers have connected in time"
        return TransportTimeout(f"{came}{why}")

    def _fail(self, error: BaseException) -> None:
        """It could not connect."""
        self._connecting, self._name, self.is_settled, self.error = None, "", True, error
        if isinstance(error, EngineTaken | DirtyReceiver):
            self._updates[_NO_VERSION] = self.submit(lambda: self._refused(error))

    def _refused(self, error: BaseException) -> None:
        """It did not connect: leave it to another trainer, or pause it until it is restarted."""
        if isinstance(error, EngineTaken):
            self.is_ours = False
            self.pause.forget()
        if isinstance(error, DirtyReceiver):  # it does not hold its own weights
            self._is_spoiled, self.is_whole = True, False
            self.outcome = Future()  # what workers hold is not known
            try:
                self.pause.begin()
            except DeltaSyncError:
                logger.exception("an engine whose weights are wrong could not be paused")

    def end_wait(self, refusal: str) -> None:
        """The call goes on without it, unless it is here. `refusal`: why a worker was refused."""
        if self.is_here or self.is_settled:
            return
        if self._is_held_up:
            self._name = ""  # its workers leave, for they could not be asked to write
            why = "the engine's last update has not ended; check what it waits for"
            self.error = TransportTimeout(why)
        elif self.is_asked:
            self.error = TransportTimeout("it has not connected yet")
        else:
            self.error = self._too_few(refusal)

    # A sync

    def begin_sync(self) -> None:
        """Forget the last version and its update, which must have ended."""
        self._updates.clear()
        self.outcome, self._holding, self._is_asleep = Future(), set(), False

    def follow(self, version: int, work: Work, *, is_in_place: bool) -> None:
        """Ask for the update, once workers would wait for it, unless it was asked for."""
        if self.is_removed or version in self._updates:
            return
        if self._updates:  # it joined with the version before, and holds only that for sure
            if not self.outcome.done():
                self.outcome.set_exception(SyncAborted(f"v{version} came before it had this one"))
            self.outcome, self._holding = Future(), set()
        self._ask_for(version, work, is_in_place)

    def held(self, version: int, replicas: Collection[str]) -> None:
        """These hold the version; when all its workers do, let the update end."""
        self._holding.update(filter(self.has, replicas))
        is_held = self.count(self._holding, self._replicas) == self.workers
        if is_held and not self.outcome.done():
            self.version = version
            self.outcome.set_result(None)

    def _ask_for(self, version: int, work: Work, is_in_place: bool = False) -> None:
        """Bring the engine to a version, in its thread."""
        update = partial(self._update, version, work, self.outcome, is_in_place=is_in_place)
        self._updates[version] = self.submit(update)

    def _update(
        self, version: int, work: Work, outcome: Future[object], *, is_in_place: bool
    ) -> None:
        """Bring the engine to a version. Raises as it does."""
        was_whole = self.is_whole
        try:
            if (server := self._one_call()) is not None:
                self._switch(server, version, work, outcome)
            else:
                self._write(version, work, outcome, is_in_place=is_in_place)
        except DeltaSyncError:
            with suppress(TransportTimeout):
                self._failure(outcome)
            if not self._is_asleep:
                raise
            self.is_whole = was_whole
            if was_whole:
                self.pause.end()

    def _one_call(self) -> OneCallServer | None:
        """The server, if one call of it reaches all workers. Raises as the engine does."""
        if not isinstance(self.server, OneCallServer):
            return None
        if self._takes_one_call is None:
            reached = asked(self.server.reach, self.pause.paused)
            self._takes_one_call = reached == self.workers
        return self.server if self._takes_one_call else None

    def _switch(
        self, server: OneCallServer, version: int, work: Work, outcome: Future[object]
    ) -> None:
        """Let the engine do the whole update. After a failure it has paused by itself."""
        if outcome.done() and outcome.exception() is not None:
            return  # the sync has failed meanwhile
        if work == "name":
            self.pause.begin()  # so that it is resumed, whoever has paused it
        self.is_whole = work == "name"
        try:
            self._ask(server.switch, version, work, self.pause.pauses)
            self.is_whole = True
        finally:
            if self.is_whole:
                self.pause.end()
            elif self.is_ours:
                self.pause.begin()

    def _write(
        self, version: int, work: Work, outcome: Future[object], *, is_in_place: bool
    ) -> None:
        """Pause, let workers write, and name the version when the sender knows that they have."""
        self.pause.begin()
        try:
            if outcome.done() and outcome.exception() is not None:
                return  # the engine was late to pause: the sync has failed meanwhile
            self.is_whole = False  # a failed worker may hold mixed weights without a report of it
            if work != "name":
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
            return outcome.exception(self._terms.timeout_s)
        except TimeoutError:
            raise TransportTimeout(
                f"the sync had not ended {self._terms.timeout_s:.4g} s after the engine's update: "
                "the version was not named"
            ) from None

    def give_up(
        self,
        error: BaseException,
        lost: Mapping[str, str],
        holders: Mapping[str, int],
        *,
        were_asleep: bool,
    ) -> None:
        """The sync has failed. `lost`: why members left. `holders`: the ranks of the others.
        `were_asleep`: as of the sender.
        """
        self._is_asleep = were_asleep
        if not self.outcome.done():
            self.outcome.set_exception(error)
        why = self._reason(lost)
        self.is_here = not why
        if not why and self.count(holders, holders) < self.workers:
            why = _NOT_JOINED
        self.error = SyncAborted(why) if why else None

    def end_sync(self, version: int | None, lost: Mapping[str, str]) -> None:
        """All its workers hold the version, which it is to name; or None, for the reason lost."""
        if version is None:
            why = self._reason(lost) or "some of its workers do not hold the version"
            self.error, self.is_here = SyncAborted(why), False
            if not self.outcome.done():
                self.outcome.set_exception(self.error)
            return
        self.version, self.error = version, None
        if not self.outcome.done():
            self.outcome.set_result(None)
        if not self._updates:  # it joined by digest
            self._ask_for(version, "name")

    def check_ended(self, version: int) -> None:
        """Note how its update has ended, or that it has not."""
        if self.version == version and self.error is None:
            if self._is_busy:
                self.error = TransportTimeout("its update has not ended")
            else:
                self._check_updates()

    def problems(self) -> list[BaseException]:
        """What updates have raised that have ended."""
        ended = [update for update in self.updates if update.done() and not update.cancelled()]
        return [error for update in ended if (error := update.exception()) is not None]

    def _check_updates(self) -> None:
        """Let it connect again if an update has failed. They have ended."""
        problems = self.problems()
        self._updates.clear()
        if problems:
            self._name, self.error = "", self.error or problems[0]

    def _reason(self, lost: Mapping[str, str]) -> str:
        return reasons({who: why for who, why in lost.items() if self.has(who)})

    # Leaving

    def hang_up(self) -> Future[None]:
        """Let its workers disconnect, in its thread."""
        self.reconnect()
        return self.submit(self._disconnect)

    def _disconnect(self) -> None:
        """Let workers close their connection. Raises as the engine does, EngineTaken once."""
        if self.is_ours:
            self._ask(self.server.disconnect)
            self.is_ours = False

    def remove(self) -> Future[None]:
        """Let its workers disconnect and resume it, after an update in flight. Returns at once."""
        self.is_removed = True
        parted = self.submit(self._part)
        self._calls.shutdown(wait=False)
        return parted

    def _part(self) -> None:
        try:
            self._disconnect()
        except DeltaSyncError as error:  # it may be gone
            if isinstance(error, EngineTaken):
                raise
        finally:
            self._leave()
            self.has_left = True

    def close(self) -> Sequence[Future[None]]:
        """Make no more calls, and resume it, in its thread after an update in flight.

        Returns what may be waited for: not for that update, which may hang.
        """
        for update in self._updates.values():
            update.cancel()
        is_busy = self._is_busy
        left = [self.submit(self._leave)] if is_busy or self.pause.is_on else []
        self._calls.shutdown(wait=False)
        return [] if is_busy else left

    def _leave(self) -> None:
        """Resume generation if it is paused, this trainer's, and whole; else log why not."""
        if self._is_abandoned or not self.pause.is_on:
            return
        why = "was closed after an update that failed: its weights may mix two versions"
        if self.is_whole or (self.outcome.done() and self.outcome.exception() is None):
            try:
                with suppress(DeltaSyncError):  # it may be gone
                    self._disconnect()  # and forget the pause if it is another trainer's by now
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
        self._is_abandoned = True  # which is logged once


def new_name(stem: str) -> str:
    """A name that begins so, and that no other engine has had."""
    return f"{stem}{uuid.uuid4().hex[:8]}"
