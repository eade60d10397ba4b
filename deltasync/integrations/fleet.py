"""The trainer's end for many engines, some of which may be away or fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import get_args

from deltasync.delta.modes import plain_mode
from deltasync.errors import ConfigError, EngineTaken
from deltasync.integrations.engine import Engine, ServerState
from deltasync.integrations.servers import Pauses, Servers
from deltasync.integrations.trainer_info import Server, Unproved, WithoutRoutes
from deltasync.sync.group.group import TrainerGroup
from deltasync.sync.options import SenderOptions
from deltasync.sync.protocol.links import CallTimeout
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.source.weights import LocalWeights
from deltasync.sync.stats import SyncStats
from deltasync.transports.base import SendTransport

__all__ = ["EngineFleet", "Pauses", "ServerState"]

logger = logging.getLogger(__name__)


class EngineFleet(Servers):
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
        if pauses not in get_args(Pauses):
            raise ConfigError(f"pauses is {pauses!r}, neither 'together' nor 'rolling'")
        super().__init__(
            source,
            transport,
            at_least=min_engines,
            pauses=pauses,
            options=options,
            timeout_s=timeout_s,
            group=group,
            without_routes=without_routes,
            keep=tuple(keep),
            unproved=unproved,
            max_staged_bytes=max_staged_bytes,
        )
        self._num_added, self._is_closed = 0, False

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
            self._engines[name] = Engine(
                name,
                server,
                workers,
                paused,
                self._terms,
                take_over=take_over,
                after=[e for e in self._removed if e.server is server or e.label == name],
            )
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
        """Close every connection, as `EngineSync.close`, and take no more servers."""
        with self._lock:
            self._is_closed = True
        super().close()

    def _end_sync(self, engines: Sequence[Engine], stats: SyncStats) -> SyncStats:
        """Name servers, in place of their workers."""
        stats, present = super()._end_sync(engines, stats), self._present()
        behind = [engine for engine in present if engine.error]
        for engine in behind:
            logger.warning("%s is behind v%d: %s", engine, stats.version, engine.why)
        with self._lock:
            stems = tuple(engine.stem for engine in (*self._removed, *present))
        others = {who: why for who, why in stats.lost.items() if not who.startswith(stems)}
        lost = {**others, **{engine.label: engine.why for engine in behind}}
        hold = tuple(e.label for e in present if e.state(stats.version).state == "current")
        return self.sender.ended_as(replace(stats, lost=lost, engines=hold))
