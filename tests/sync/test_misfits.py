"""A trainer of another model: who waits for it is told, and an engine that serves goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from deltasync import ModuleSource, ModuleTarget, StagingThread, WeightReceiver, WeightSender
from deltasync.errors import DeltaSyncError, LayoutMismatch, Refused, is_permanent
from deltasync.integrations.follower import Follower
from deltasync.transports import shared_memory
from tests.worlds.stores import wait_until


@contextmanager
def trainer(path: Path, model: nn.Module) -> Iterator[WeightSender]:
    with WeightSender(ModuleSource(model), shared_memory.Sender(path)) as sender:
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(0.05):
                try:
                    sender.wait_for_receivers(sender.num_receivers + 1, timeout_s=0)
                    sender.send_weights(timeout_s=30)
                except DeltaSyncError:
                    continue

        looking = threading.Thread(target=look)
        looking.start()
        try:
            yield sender
        finally:
            stop.set()
            looking.join()


def test_an_engine_that_holds_a_version_waits_for_a_trainer_that_fits(tmp_path: Path) -> None:
    engine, path = nn.Linear(8, 8), tmp_path / "link"
    first, third = nn.Linear(8, 8), nn.Linear(8, 8)
    with Follower(WeightReceiver(ModuleTarget(engine), shared_memory.Receiver(path))) as follower:
        with trainer(path, first):
            follower.wait_joined(timeout_s=60)
        assert torch.equal(engine.weight, first.weight)
        with trainer(path, nn.Linear(8, 9)):
            wait_until(lambda: is_permanent(follower.last_error), timeout_s=60)
        with follower.serving():
            assert torch.equal(engine.weight, first.weight)
        with trainer(path, third):
            wait_until(lambda: torch.equal(engine.weight, third.weight), timeout_s=60)


def test_who_waits_for_a_first_version_is_told_that_none_will_fit(tmp_path: Path) -> None:
    """An engine serves its own weights on beside such a trainer."""

    def receiver() -> WeightReceiver:
        link = shared_memory.Receiver(tmp_path / "link")
        return WeightReceiver(ModuleTarget(nn.Linear(8, 9)), link)

    refused = pytest.raises((LayoutMismatch, Refused), match="shape")
    with trainer(tmp_path / "link", nn.Linear(8, 8)):
        with receiver() as own, StagingThread(own) as staging:
            with refused:
                staging.wait_staged(timeout_s=60)
            with refused:
                staging.commit()
        with Follower(receiver()) as follower:
            with refused:
                follower.wait_joined(timeout_s=60)
            assert is_permanent(follower.last_error)
            with follower.serving():
                pass
