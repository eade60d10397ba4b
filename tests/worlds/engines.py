"""An engine that serves in the thread of a test, and its trainer in another thread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from torch import nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    StagingThread,
    SyncStats,
    WeightReceiver,
    WeightSender,
)
from deltasync.delta.bits import as_bits
from deltasync.transports import inprocess
from tests.worlds.links import Model, Wrap, bits_equal, random_model

LIMIT_S = 60.0


def model(seed: int) -> Model:
    return random_model({"a": (300,), "b": (300,)}, seed).bfloat16()


def replace_storage(module: nn.Module) -> None:
    parameter = module.get_parameter("a")
    parameter.data = parameter.data.clone()


class Engine:
    """A model that a trainer changes, and an engine's replica of it."""

    def __init__(self, options: ReceiverOptions, wrap: Wrap) -> None:
        self.source, self.replica = model(0), model(1)
        self.link = inprocess.Sender()
        self.sender = WeightSender(ModuleSource(self.source), self.link)
        self.receiver = WeightReceiver(
            ModuleTarget(self.replica), wrap(self.link.receiver()), options=options
        )
        self.trainer = ThreadPoolExecutor(1)

    def nudge(self) -> None:
        as_bits(self.source.get_parameter("a").data)[7] += 1

    def send(self, *, timeout_s: float = LIMIT_S) -> Future[SyncStats]:
        """A sync under way."""

        def sync() -> SyncStats:
            self.sender.wait_for_receivers(1, timeout_s=LIMIT_S)
            return self.sender.send_weights(timeout_s=timeout_s)

        return self.trainer.submit(sync)

    def send_step(self, *, timeout_s: float = LIMIT_S) -> Future[SyncStats]:
        """A sync of a change, under way."""
        self.nudge()
        return self.send(timeout_s=timeout_s)

    def stage_step(
        self, staging: StagingThread, *, timeout_s: float = LIMIT_S
    ) -> Future[SyncStats]:
        """A sync of a change, which waits for the engine's commit."""
        sent = self.send_step(timeout_s=timeout_s)
        assert staging.wait_staged(timeout_s=LIMIT_S)
        return sent

    def join(self, staging: StagingThread) -> SyncStats:
        """A sync of a change, committed."""
        sent = self.stage_step(staging)
        staging.commit()
        stats = sent.result(LIMIT_S)
        assert bits_equal(self.source, self.replica)
        return stats

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
        self.trainer.shutdown()


@contextmanager
def engine(
    options: ReceiverOptions | None = None, wrap: Wrap = lambda transport: transport
) -> Iterator[Engine]:
    made = Engine(options or ReceiverOptions(stall_timeout_s=LIMIT_S), wrap)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def staging_engine(
    options: ReceiverOptions | None = None, wrap: Wrap = lambda transport: transport
) -> Iterator[tuple[Engine, StagingThread]]:
    """An engine whose receiver stages in a thread."""
    with engine(options, wrap) as here, StagingThread(here.receiver) as staging:
        yield here, staging
