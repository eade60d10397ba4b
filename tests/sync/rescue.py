"""A trainer that a test kills and restores, and an engine that exports what it holds."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    StagingThread,
    WeightReceiver,
    WeightSender,
    export_weights,
)
from deltasync.files.checkpoint import Checkpoint
from deltasync.transports.address import Address
from tests.sync.regions import fingerprint, model, say, step

NUMEL = 1 << 14


def train(address: str, checkpoint: str) -> None:
    """Begin with a checkpoint, if one is named, and send a version for each line read."""
    torch.set_num_threads(1)
    source = model(0, NUMEL)
    if checkpoint:
        saved = Checkpoint(checkpoint)
        source.load_state_dict({name: saved.tensor(name) for name in saved.specs})
    with WeightSender(ModuleSource(source), Address.parse(address).sender()) as sender:
        say({"hash": fingerprint(source)})
        for line in sys.stdin:
            if line.strip() != "-":
                step(source, int(line))
            sender.wait_for_receivers(1, timeout_s=60)
            stats = sender.send_weights(timeout_s=30)
            told = {"full_synced": stats.full_synced, "receivers": stats.receivers}
            say({"version": stats.version, "hash": fingerprint(source), **told})


def serve(address: str, folder: str) -> None:
    """Serve; for each line read, commit what is staged or export what is held."""
    torch.set_num_threads(1)
    replica = model(1, NUMEL)
    link = Address.parse(address).receiver(torch.device("cpu"))
    options = ReceiverOptions(stall_timeout_s=30)
    receiver = WeightReceiver(ModuleTarget(replica), link, options=options)
    with receiver, StagingThread(receiver) as staging:
        say({"serves": True})
        for line in sys.stdin:
            if line.startswith("export"):
                done = export_weights(receiver, Path(folder, line.split()[1]))
                say({"version": done.version, "hash": fingerprint(replica)})
            else:
                while not staging.wait_staged(timeout_s=60):
                    pass
                say({"version": staging.commit(), "hash": fingerprint(replica)})


if __name__ == "__main__":
    {"train": train, "serve": serve}[sys.argv[1]](*sys.argv[2:])
