"""A trainer is gone; what an engine proved to hold is what it goes on with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from deltasync import (
    ModuleSource,
    ModuleTarget,
    StagingThread,
    WeightReceiver,
    WeightSender,
    export_weights,
)
from deltasync.files.checkpoint import Checkpoint
from deltasync.transports import shared_memory
from tests.worlds.links import Model, bits_equal, random_model, step

SHAPES = {"a": (64, 40), "b": (7,), "empty": (0, 3)}


def follow(sender: WeightSender, staging: StagingThread, source: Model, turns: int) -> None:
    generator = torch.Generator().manual_seed(sender.version)
    with ThreadPoolExecutor(1) as trainer:
        for _ in range(turns):
            step(source, generator, 0.1)
            sender.wait_for_receivers(1, timeout_s=60)
            sent = trainer.submit(sender.send_weights, timeout_s=60)
            assert staging.wait_staged(timeout_s=60)
            version = staging.commit()
            assert version == sent.result(60).version


def test_a_trainer_is_restored_from_an_engine_and_goes_on(tmp_path: Path) -> None:
    source, replica, restored = (random_model(SHAPES, seed) for seed in range(3))
    socket, rescued = tmp_path / "socket", tmp_path / "rescued"
    link = shared_memory.Sender(socket)
    with (
        WeightReceiver(ModuleTarget(replica), shared_memory.Receiver(socket)) as receiver,
        StagingThread(receiver) as staging,
    ):
        with WeightSender(ModuleSource(source), link) as sender:
            follow(sender, staging, source, 3)
        assert export_weights(receiver, rescued).version == 3
        saved = Checkpoint(rescued)
        restored.load_state_dict({name: saved.tensor(name) for name in saved.specs})
        assert bits_equal(source, restored)
        with WeightSender(ModuleSource(restored), shared_memory.Sender(socket)) as sender:
            sender.wait_for_receivers(1, timeout_s=60)
            # The engine joins by its digest alone: not a weight is sent.
            assert sender.send_weights(timeout_s=60).full_synced == 0
            follow(sender, staging, restored, 2)
        assert bits_equal(restored, replica)
