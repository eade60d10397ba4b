"""A trainer and receivers in processes of their own, for relays between them."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from pathlib import Path

import torch

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    Relay,
    WeightReceiver,
    WeightSender,
)
from deltasync.delta.bits import as_bits
from deltasync.errors import DeltaSyncError, TransportTimeout
from deltasync.transports.address import Address
from deltasync.transports.base import ReceiveTransport, SendTransport
from tests.sync.harness import Model
from tests.sync.processes import DyingReceiver, DyingSender

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


def train(address: str, numel: str, count: str) -> None:
    """Serve at an address; for each line read send a version, when `count` receivers are there.

    A line is a seed, of the step that comes first. Writes a JSON line for each version.
    """
    torch.set_num_threads(1)
    source = model(0, int(numel))
    with WeightSender(ModuleSource(source), Address.parse(address).sender()) as sender:
        say({"listens": True})
        for line in sys.stdin:
            step(source, int(line))
            try:
                sender.wait_for_receivers(int(count), timeout_s=60)
                stats = sender.send_weights(timeout_s=30)
            except DeltaSyncError as error:
                say({"error": f"{type(error).__name__}: {error}"})
                continue
            told: dict[str, object] = {
                "version": stats.version,
                "hash": fingerprint(source),
                "bytes": stats.payload_bytes + stats.joined_bytes,
                "receivers": stats.receivers,
                "lost": stats.lost,
            }
            say(told)


def say(told: dict[str, object]) -> None:
    """Write a JSON line at once."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def serve(address: str, folder: str, engine: str, seed: int, numel: int) -> None:
    """Receive until the test ends; write what is held after every sync and every error."""
    replica = model(seed, numel)
    receiver = WeightReceiver(
        ModuleTarget(replica),
        Address.parse(address).receiver(torch.device("cpu")),
        engine=engine,
        options=ReceiverOptions(stall_timeout_s=20),
    )
    with Path(folder, f"{engine}.jsonl").open("a", buffering=1) as record:
        while True:
            try:
                version = receiver.receive_weights(timeout_s=0.5)
            except TransportTimeout:
                continue
            except DeltaSyncError as error:
                kept = {"error": f"{type(error).__name__}: {error}", "hash": fingerprint(replica)}
                record.write(json.dumps(kept) + "\n")
                time.sleep(0.05)
                continue
            record.write(json.dumps({"version": version, "hash": fingerprint(replica)}) + "\n")


def relay(above: str, below: str, phase: str, memory: str, dies_above: bool) -> None:
    """Forward until the process kills itself at `phase`, of the link above or of that below."""
    receiver: ReceiveTransport = Address.parse(above).receiver(torch.device("cpu"))
    sender: SendTransport = Address.parse(below).sender()
    if phase and dies_above:
        receiver = DyingReceiver(receiver, phase, signal.SIGKILL)
    elif phase:
        sender = DyingSender(sender, phase, turn=2)
    with Relay(receiver, sender, name="relay", memory=memory, timeout_s=10) as made:
        while True:
            made.forward()


if __name__ == "__main__":
    train(*sys.argv[1:])
