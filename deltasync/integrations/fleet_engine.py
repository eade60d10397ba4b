"""One server of a fleet: whether it is here, what it holds, and why not."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    EngineFailed,
    EngineTaken,
    SyncAborted,
    TransportTimeout,
)
from deltasync.integrations.engine import Engine, Terms, new_name
from deltasync.integrations.trainer_info import Server, TrainerInfo
from deltasync.sync.engine_sender import EngineSender
from deltasync.sync.protocol.round import SyncPhase
from deltasync.sync.stats import reasons
from deltasync.wire.messages import Failed, ParameterSpec

_RETURN_S = 0.3  # workers that failed in a sync connect again by themselves
_NOT_JOINED = "it has not joined yet"
_GRACE_S = 1.0  # for a server that has failed before: a restarted one connects in this time


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


class FleetEngine(Engine):
    """An engine that comes and goes. Methods are called by the thread of syncs, except `remove`.

    Args:
        label: Its name in the fleet.
        server, workers, paused, terms: As of `Engine`.
        after: The same server, removed a moment ago. What is still asked of it for that ends, or
            `timeout_s` passes, before it is asked to connect.

    Attributes:
        version: See `ServerState`.
        names: Of its workers, now and before it reconnected.
        is_here: Whether all workers are connected, and updates can be asked for.
        is_settled: Whether that is known for this call.
        why, error: Why it is not current.
        is_removed: Whether `remove` was called. has_left: whether nothing has to be done for that
            any more.
    """

    def __init__(
        self,
        label: str,
        server: Server,
        workers: int,
        paused: Callable[[], AbstractContextManager[object]],
        terms: Terms,
        *,
        after: Collection[FleetEngine] = (),
    ) -> None:
        super().__init__(server, workers, paused, terms)
        self.label, self._after = label, after
        self._after_until_s = time.monotonic() + terms.timeout_s
        self.version: int | None = None
        self.is_here = self.is_settled = self.has_left = self._was_here = False
        self.why = "it has not connected yet"
        self.error: BaseException | None = None
        self.names: tuple[str, ...] = ()
        self._is_new = True  # it has not been asked to connect
        self._is_behind = self.is_removed = False
        self._connecting: Future[None] | None = None
        self._returned_s = 0.0  # when that ended
        self._declined: DeltaSyncError | None = None
        self._missing_until_s = self._awaited_until_s = 0.0
        self._replicas: dict[str, int] = {}  # number of ranks, by the name that workers use
        self._held: set[str] = set()  # replicas that hold the version under way
        self._expected = 0  # the version that `outcome` is of, once it was asked for
        self._named: int | None = None

    def __str__(self) -> str:
        return self.label

    def state(self, newest: int) -> ServerState:
        """What is known of it. `newest` is the last version decided."""
        state: Literal["current", "behind", "lost"] = "lost"
        if self.is_here:
            state = "current" if self.version == newest and not self.why else "behind"
        return ServerState(state, self.version, self.pause.is_on, self.why)

    def count(self, workers: Collection[str], ranks: Mapping[str, int]) -> int:
        """Number of ranks of this server in engines of these names."""
        return sum(ranks.get(worker, 0) for worker in workers if self.has(worker))

    # Connecting

    def begin_call(self) -> None:
        """Find out anew whether it is here."""
        now = time.monotonic()
        self.interrupted()
        if self._is_leaving:
            self._awaited_until_s = now + min(_GRACE_S, self.terms.timeout_s)
        if self._was_here:
            self._missing_until_s = now + _RETURN_S
            self._awaited_until_s = now + _GRACE_S
        self.is_here = self.is_settled = self._was_here = False
        self._check_updates()

    def is_awaited(self) -> bool:
        """Whether it may be here soon, and the others wait for that."""
        return not self.is_settled and time.monotonic() < self._awaited_until_s

    def look(self, ranks: Mapping[str, int]) -> bool:
        """Find out whether it is here. Returns whether it has to be asked to connect."""
        if self.is_settled or self.is_removed or self._is_busy or self._is_leaving:
            return False
        here = self.count(ranks, ranks)
        if self._connecting is not None:
            self._look_at_attempt(self._connecting, here, ranks)
            return False
        if self.name and not self._is_behind:
            if here >= self.workers:
                self._arrive(here, ranks)
            return here < self.workers and time.monotonic() > self._missing_until_s
        return True

    def start_connecting(self, specs: Sequence[ParameterSpec], sender: EngineSender) -> None:
        """Ask it to connect, in its thread. Raises as `info`."""
        name = new_name()
        trainer, now = self.info(name, specs, sender), time.monotonic()
        self.name, self.why, self._declined = name, _NOT_JOINED, None
        self.names = (*self.names[-7:], name)
        self._named = None
        patience_s = self.terms.timeout_s if self._is_new else _GRACE_S
        self._is_new = self._is_behind = False
        self._awaited_until_s = now + min(patience_s, self.terms.timeout_s)
        self._connecting = self.submit(lambda: self._connect(trainer))

    def _connect(self, trainer: TrainerInfo) -> None:
        try:
            self.connect(trainer)
            self.connected()
        finally:
            self._returned_s = time.monotonic()

    def declined(self, failed: Failed) -> None:
        """A worker has said why it cannot take part."""
        reason = f"{failed.error}: {failed.reason}"
        self._declined = self.typed(EngineFailed(reason, error=failed.error))

    def end_wait(self) -> None:
        """The call goes on without it, unless it is here."""
        if self.is_here or self.is_settled:
            return
        if self._is_busy:
            self.name = ""  # its workers leave, for they could not be asked to write
            self.why = "its last update has not ended"
        elif self._connecting is not None:
            self.why = "it has not connected yet"
        else:
            self.why = "its workers are not connected"

    @property
    def _is_leaving(self) -> bool:
        """Whether calls of an earlier stay in the fleet may still reach the server."""
        if self._after and time.monotonic() < self._after_until_s:
            self._after = [engine for engine in self._after if not engine.has_left]
        else:
            self._after = ()
        return bool(self._after)

    def _arrive(self, here: int, ranks: Mapping[str, int]) -> None:
        if here > self.workers:
            self._fail(ConfigError(f"{here} workers have connected, and workers={self.workers}"))
            return
        self._replicas = {worker: ranks[worker] for worker in ranks if self.has(worker)}
        self.is_here = self.is_settled = self._was_here = True

    def _look_at_attempt(self, attempt: Future[None], here: int, ranks: Mapping[str, int]) -> None:
        if self._declined is not None and attempt.done():
            self._fail(self._declined)
        elif not attempt.done():
            return
        elif (error := attempt.exception()) is not None:
            since_s = time.monotonic() - self._returned_s
            if not isinstance(error, EngineFailed) or since_s > _RETURN_S:  # a worker may say more
                self._fail(error)
        elif here >= self.workers:
            self._connecting = None
            self._arrive(here, ranks)
        elif time.monotonic() - self._returned_s > self.terms.timeout_s:
            came = f"{here} of {self.workers} workers have connected"
            self._fail(TransportTimeout(f"{came} in {self.terms.timeout_s:.4g} s"))

    def _fail(self, error: BaseException) -> None:
        """It could not connect."""
        self._connecting, self.name, self.is_settled = None, "", True
        self.error, self.why = error, f"{type(error).__name__}: {error}"
        self.submit(lambda: self.refused(error))

    # A sync

    def begin_sync(self) -> None:
        super().begin_sync()
        self._held, self._expected = set(), 0

    def _expect(self, version: int) -> None:
        """An engine that joined with the version before, in this call, holds only that for sure."""
        if self._expected:
            if not self.outcome.done():
                self.outcome.set_exception(SyncAborted(f"v{version} came before it had this one"))
            self.outcome, self._held = Future(), set()
        self._expected = version

    def follow(self, phase: SyncPhase) -> None:
        """As `Engine.follow`; and when all workers hold the version, let the update end."""
        if not phase.is_held:
            if not self.is_removed:
                super().follow(phase)
            return
        self._held |= phase.engines
        if self.count(self._held, self._replicas) == self.workers and not self.outcome.done():
            self.version = phase.version
            self.outcome.set_result(None)

    def give_up(
        self, error: BaseException, lost: Mapping[str, str], held: Mapping[str, int]
    ) -> None:
        """The sync has failed. `lost` says why members left, `held` has the ranks of the others."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
        self.why = self._reason(lost)
        self.is_here = not self.why
        if self.is_here and self.count(held, held) < self.workers:
            self.why = _NOT_JOINED

    def end_sync(self, version: int | None, lost: Mapping[str, str]) -> None:
        """All its workers hold the version, which it is to name; or None, for the reason lost."""
        if version is None:
            why = self._reason(lost) or "some of its workers do not hold the version"
            if not self.outcome.done():
                self.outcome.set_exception(SyncAborted(why))
            self.why, self.is_here = why, False
            return
        self.version, self.why, self.error = version, "", None
        if not self.outcome.done():
            self.outcome.set_result(None)
        if not self._updates and self._named != version:  # it joined by digest
            self._updates[version] = self.submit(lambda: self.let_name(version))

    def check_ended(self, version: int) -> None:
        """Note how its update has ended, or that it has not."""
        if self.version != version or self.why:
            return
        if self._is_busy:
            self.why = "its update has not ended"
            return
        self._named = version
        self._check_updates()

    def _check_updates(self) -> None:
        """Reconnect it if an update has failed."""
        if self._is_busy:
            return
        problems = self.ended(0)
        self._updates.clear()
        if problems:
            self._is_behind, self.error = True, problems[0]
            self.why = self.why or f"{type(problems[0]).__name__}: {problems[0]}"

    def _reason(self, lost: Mapping[str, str]) -> str:
        return reasons({who: why for who, why in lost.items() if self.has(who)})

    # Leaving

    def remove(self) -> Future[None]:
        """Let its workers disconnect and resume it, after an update in flight. Returns at once."""
        self.is_removed = True
        parted = self.submit(self._part)
        self._calls.shutdown(wait=False)
        return parted

    def _part(self) -> None:
        try:
            self.disconnect()
        except DeltaSyncError as error:  # it may be gone
            if isinstance(error, EngineTaken):
                raise
        finally:
            self.leave()
            self.has_left = True

    def hang_up(self) -> Future[None]:
        """Let its workers disconnect, in its thread."""
        self._is_behind = True
        return self.submit(self.disconnect)
