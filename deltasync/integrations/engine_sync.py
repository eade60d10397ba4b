"""The trainer's end for any engine whose workers connect to the trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from deltasync.delta.modes import plain_mode
from deltasync.errors import TransportTimeout
from deltasync.integrations.engine import Engine
from deltasync.integrations.servers import Servers
from deltasync.integrations.trainer_info import Server, Unproved, WithoutRoutes
from deltasync.sync.group.group import TrainerGroup
from deltasync.sync.options import SenderOptions
from deltasync.sync.protocol.links import CallTimeout
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.source.weights import LocalWeights
from deltasync.sync.stats import SyncStats
from deltasync.transports.base import SendTransport


class EngineSync(Servers):
    """Sends a trainer's weights to a running engine.

    Workers receive and stage while they generate. When a version is decided, the trainer asks for
    an update, in which the workers only write. When all have written, the version becomes the
    engine's weight version. A `OneCallServer` does this in one call. Full syncs, and deltas too
    large to stage, are received and written within the update; if that breaks off, the weights are
    a mixture of versions. Generation stays paused after that, and after each update that raises,
    until a later update repairs the weights. Use it as a context manager, or `close` it.

    Args:
        source: The trainer's parameters, by checkpoint name, or `StreamedWeights` of them.
        server: Reaches the engine. A thread of this object calls it.
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

    _waits_for_calls: ClassVar[bool] = True

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
        super().__init__(
            source,
            transport,
            at_least=1,
            pauses="together",
            options=options,
            timeout_s=timeout_s,
            group=group,
            without_routes=without_routes,
            keep=tuple(keep),
            unproved=unproved,
            max_staged_bytes=max_staged_bytes,
        )
        self._engine = Engine(
            getattr(server, "url", None) or "the engine",
            server,
            workers,
            paused,
            self._terms,
            take_over=take_over,
        )
        self._engines[self._engine.label] = self._engine

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
            self._engine.reconnect()
            self._gather(may_ask_source=True)
            self._check_enough()

    def disconnect(self) -> None:
        """Close the workers' connection; they no longer touch the weights.

        Call it before anything else writes the engine's weights. The next `send_weights` reconnects
        and sends what differs.

        Raises EngineTaken, once, if another trainer has taken the engine since: it keeps it as it
        is. Raises EngineFailed or a TransportError if the engine cannot be asked.
        """
        left = self._engine.hang_up()
        if not wait([left], self._timeout_s).done:
            raise TransportTimeout(
                f"the engine has not let its workers disconnect in {self._timeout_s:.4g} s: check "
                "what it waits for"
            )
        left.result()

    def _check_enough(self) -> None:
        """Raises as `connect`."""
        engine = self._engine
        if not engine.is_here and engine.error is not None:
            if engine.is_settled:
                wait(engine.updates, self._limit.wait_s)  # it may have to be paused
            elif not engine.is_asked:
                engine.reconnect()
            raise engine.error
        self.sender.check_newcomers(self._specs or ())

    def _give_up(self, engines: Sequence[Engine], error: BaseException) -> None:
        """Wait for the engine's update, and note what that has raised."""
        super()._give_up(engines, error)
        wait(self._engine.updates, CallTimeout(self._timeout_s, self._limit.left_s).wait_s)
        for problem in self._engine.problems():
            error.add_note(f"the engine's update: {type(problem).__name__}: {problem}")

    def _end_sync(self, engines: Sequence[Engine], stats: SyncStats) -> SyncStats:
        """Raise why the engine does not hold the version, or what its update has raised."""
        stats = super()._end_sync(engines, stats)
        if self._engine.error is not None:
            raise self._engine.error
        return stats
