"""A user's program, checked by mypy --strict and run against the installed wheel alone."""

from __future__ import annotations

import threading

import torch
from torch import nn

import deltasync
from deltasync import (
    ModuleSource,
    ModuleTarget,
    SenderOptions,
    SyncStats,
    WeightReceiver,
    WeightSender,
    apply_patch,
    diff,
)
from deltasync.errors import DeltaSyncError
from deltasync.transports import inprocess


def synced(trainer: nn.Module, engine: nn.Module) -> SyncStats:
    link = inprocess.Sender()
    options = SenderOptions(compression="gap")
    with (
        WeightSender(ModuleSource(trainer), link, options=options) as sender,
        WeightReceiver(ModuleTarget(engine), link.receiver()) as receiver,
    ):
        thread = threading.Thread(target=receiver.receive_weights)
        thread.start()
        sender.wait_for_receivers(1)
        stats = sender.send_weights()
        thread.join(30)
        return stats


def main() -> None:
    trainer, engine = nn.Linear(64, 64), nn.Linear(64, 64)
    stats: SyncStats = synced(trainer, engine)
    density: float = stats.density
    assert torch.equal(trainer.weight, engine.weight), density
    patch = diff(torch.zeros(4), torch.ones(4), name="weight")
    assert patch is not None
    target = torch.zeros(4)
    apply_patch(target, patch)
    assert torch.equal(target, torch.ones(4))
    assert issubclass(DeltaSyncError, Exception)
    assert deltasync.__version__


if __name__ == "__main__":
    main()
