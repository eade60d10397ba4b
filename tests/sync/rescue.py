"""A trainer that a test kills and restores, and an engine that exports what it holds."""

from __future__ import annotations

import hashlib
import json
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
from deltasync.delta.bits import as_bits
from deltasync.files.checkpoint import Checkpoint
from deltasync.transports.address import Address
from tests.worlds.links import Model

NUMEL = 1 << 14
MATRICES = 4


def model(seed: int, numel: int) -> Model:
    """Parameters of `numel` bfloat16 elements together, and an empty one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"p{n}": torch.randn(numel // MATRICES, generator=generator).to(torch.bfloat16)
        for n in range(MATRICES)
    }
    return Model({**tensors, "empty": torch.empty(0, 3, dtype=torch.bfloat16)})


def step(source: Model, seed: int) -> None:
    """About 2 % of the weights change, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in source.parameters():
        bits = as_bits(parameter.data).view(-1)
        bits[torch.rand(len(bits), generator=generator) < 0.02] ^= 1


def fingerprint(module: Model) -> str:
    """A plain hash of a model's bytes: nothing of ours is in it."""
    hasher = hashlib.sha256()
    for name, parameter in module.named_parameters():
        hasher.update(name.encode() + as_bits(parameter.data).numpy().tobytes())
    return hasher.hexdigest()


def say(told: dict[str, object]) -> None:
    """Write a JSON line at once."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


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
