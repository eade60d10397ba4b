"""The trainer's end for one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Unpack

from deltasync.delta.modes import plain_mode
from deltasync.integrations.engine import Engine, ServerState
from deltasync.integrations.fleet import EngineFleet, FleetSettings
from deltasync.integrations.trainer_info import Server
from deltasync.sync.protocol.links import CallTimeout
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.source.weights import LocalWeights
from deltasync.sync.stats import SyncStats
from deltasync.transports.base import SendTransport


class EngineSync(EngineFleet):
    """An `EngineFleet` of one engine: it raises why that does not hold the version.

    Use it as a context manager, or `close` it.

    Args:
        source: As of `EngineFleet`.
        server: As of `EngineFleet.add`.
        transport: As of `EngineFleet`.
        workers: Number of engine processes that hold weights: tensor times pipeline times data
            parallel.
        paused: As of `EngineFleet.add`.
        take_over: Likewise.
        settings: As of `EngineFleet`, except for `min_engines` and `pauses`.
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
        take_over: bool = False,
        **settings: Unpack[FleetSettings],
    ) -> None:
        super().__init__(source, transport, **settings)
        name = getattr(server, "url", None) or "the engine"
        self.add(server, workers=workers, paused=paused, name=name, take_over=take_over)
        self._engine = self._engines[name]

    def connect(self) -> dict[str, ServerState]:
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
        return self.servers()

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
        wait(self._engine.updates, min(self._timeout_s, self._limit.left_s))
        for problem in self._engine.problems():
            error.add_note(f"the engine's update: {type(problem).__name__}: {problem}")

    def _end_sync(self, engines: Sequence[Engine], stats: SyncStats) -> SyncStats:
        """Raise why the engine does not hold the version, or what its update has raised."""
        stats = super()._end_sync(engines, stats)
        if self._engine.error is not None:
            raise self._engine.error
        return stats
