"""Trainers and receivers in processes of their own that end or stop at a given phase."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn

from deltasync import ModuleSource, ModuleTarget, ReceiverOptions, WeightReceiver, WeightSender
from deltasync.delta.bits import as_bits
from deltasync.errors import DeltaSyncError
from deltasync.transports import collective, shared_memory
from deltasync.transports.base import Frame, ReceiveTransport, SendTransport
from deltasync.wire.frame import decode
from tests.worlds.links import Model, ThroughReceiver, ThroughSender

NUMELS = (5000, 3, 40_000, 0)


def model(seed: int) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return Model(
        {
            f"p{n}": torch.randn(numel, generator=generator).to(torch.bfloat16)
            for n, numel in enumerate(NUMELS)
        }
    )


def step(source: nn.Module, number: int) -> None:
    """What training does: some elements of every parameter change, the same in every process."""
    generator = torch.Generator().manual_seed(number)
    for parameter in source.parameters():
        bits = as_bits(parameter.data).view(-1)
        bits[torch.rand(len(bits), generator=generator) < 0.02] ^= 1


def fingerprint(module: nn.Module) -> str:
    """A plain hash of a model's bytes: nothing of ours is in it."""
    hasher = hashlib.sha256()
    for name, parameter in module.named_parameters():
        hasher.update(name.encode() + as_bits(parameter).numpy().tobytes())
    return hasher.hexdigest()


def listen(kind: str, folder: str) -> SendTransport:
    if kind == "shared_memory":
        return shared_memory.Sender(f"{folder}/socket")
    sender = collective.Sender("127.0.0.1", read_port(folder))
    Path(folder, "port").write_text(str(sender.address[1]))
    return sender


def connect(kind: str, folder: str) -> ReceiveTransport:
    if kind == "shared_memory":
        return shared_memory.Receiver(f"{folder}/socket")
    while not read_port(folder):
        time.sleep(0.01)
    return collective.Receiver("127.0.0.1", read_port(folder))


def read_port(folder: str) -> int:
    path = Path(folder, "port")
    return int(path.read_text() or 0) if path.exists() else 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class DyingReceiver(ThroughReceiver):
    """Signals its process when a message of one kind arrives, or just after it was answered."""

    def __init__(self, inner: ReceiveTransport, phase: str, number: signal.Signals) -> None:
        super().__init__(inner)
        self._phase, self._number = phase, number

    def receive(self, *, timeout_s: float) -> Frame:
        frame = self._inner.receive(timeout_s=timeout_s)
        if decode(frame.header)[0].kind == self._phase:
            os.kill(os.getpid(), self._number)
        return frame

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        self._inner.reply(data, timeout_s=timeout_s)
        if decode(data)[0].kind == self._phase:
            os.kill(os.getpid(), self._number)


class DyingSender(ThroughSender):
    """Kills its process when it is about to send a message of one kind in sync number `turn`."""

    def __init__(self, inner: SendTransport, phase: str, turn: int) -> None:
        super().__init__(inner)
        self._phase, self._turn = phase, turn

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        self._meet(frame.header)
        self._inner.send(frame, timeout_s=timeout_s)

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        self._meet(header)
        self._inner.tell(peers, header, timeout_s=timeout_s)

    def _meet(self, header: bytes) -> None:
        kind = decode(header)[0].kind
        if kind == "begin":
            self._turn -= 1
        if kind == self._phase and self._turn <= 0:
            die()


def serve(
    kind: str,
    folder: str,
    engine: str,
    seed: int,
    phase: str,
    start: str,
    number: signal.Signals = signal.SIGKILL,
    *,
    rank: int = 0,
    world: int = 1,
) -> None:
    """Receive until the test ends, writing down what is held after every sync and every error.

    Waits for the file `start`, if it has a name, so that processes can be started ahead. Sends
    itself the signal `number` at `phase`. Every rank of an engine holds the whole model.
    """
    while start and not Path(folder, start).exists():
        time.sleep(0.005)
    replica = model(seed)
    receiver = WeightReceiver(
        ModuleTarget(replica),
        DyingReceiver(connect(kind, folder), phase, number),
        engine=engine,
        rank=rank,
        world=world,
        options=ReceiverOptions(stall_timeout_s=10),
    )
    name = engine if world == 1 else receiver.name.replace("/", "-")
    with Path(folder, f"{name}.jsonl").open("a", buffering=1) as record:
        while True:
            try:
                version = receiver.receive_weights(timeout_s=0.5)
            except TimeoutError:
                continue
            except DeltaSyncError as error:
                kept = {"error": type(error).__name__, "keeps": fingerprint(replica)}
                record.write(json.dumps(kept) + "\n")
                time.sleep(0.02)
                continue
            record.write(json.dumps({"version": version, "hash": fingerprint(replica)}) + "\n")


def train(kind: str, folder: str, phase: str, turn: int, first: int, count: int) -> None:
    """Send `count` versions of a deterministic training run from step `first`, or die at it."""
    source = model(0)
    for number in range(first):
        step(source, number)
    transport = DyingSender(listen(kind, folder), phase, turn)
    sender = WeightSender(ModuleSource(source), transport)
    sender.wait_for_receivers(1, timeout_s=30)
    for number in range(first, first + count):
        step(source, number)
        sender.send_weights(timeout_s=10)
    sender.close()


def held(folder: str | Path, engine: str) -> list[dict[str, object]]:
    """What an engine wrote down so far."""
    path = Path(folder, f"{engine}.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]
