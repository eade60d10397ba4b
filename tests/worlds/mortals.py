"""Trainers and receivers in processes of their own that end or stop at a given phase."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    SyncStats,
    WeightReceiver,
    WeightSender,
)
from deltasync.delta.bits import as_bits
from deltasync.errors import DeltaSyncError
from deltasync.testing.processes import Child
from deltasync.transports import collective, shared_memory
from deltasync.transports.base import Frame, ReceiveTransport, SendTransport
from deltasync.wire.frame import decode
from tests.worlds.fleets import at
from tests.worlds.links import AMPLE_S, Model, ThroughReceiver, Watched, random_model, until

SHAPES = {f"p{n}": (numel,) for n, numel in enumerate((5000, 3, 40_000, 0))}


def model(seed: int) -> Model:
    return random_model(SHAPES, seed).bfloat16()


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


class DyingReceiver(ThroughReceiver):
    """Signals its process at messages that are armed: as one arrives, or just after an answer.

    `armed` and the kind of a message name the file that arms it, once.
    """

    def __init__(self, inner: ReceiveTransport, armed: str, number: signal.Signals) -> None:
        super().__init__(inner)
        self._armed, self._number = armed, number

    def receive(self, *, timeout_s: float) -> Frame:
        frame = self._inner.receive(timeout_s=timeout_s)
        self._meet(frame.header)
        return frame

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        self._inner.reply(data, timeout_s=timeout_s)
        self._meet(data)

    def _meet(self, header: bytes) -> None:
        path = Path(self._armed + decode(header)[0].kind)
        if path.exists():
            path.unlink()
            os.kill(os.getpid(), self._number)


def serve(
    kind: str,
    folder: str,
    engine: str,
    seed: int,
    number: signal.Signals = signal.SIGKILL,
) -> None:
    """Receive until the test ends, writing down what is held after every sync and every error.

    Sends itself the signal `number` where it is armed.
    """
    replica = model(seed)
    receiver = WeightReceiver(
        ModuleTarget(replica),
        DyingReceiver(connect(kind, folder), f"{folder}/{engine}-", number),
        engine=engine,
        options=ReceiverOptions(stall_timeout_s=AMPLE_S),
    )
    with Path(folder, f"{engine}.jsonl").open("a", buffering=1) as record:
        while True:
            try:
                version = receiver.receive_weights(timeout_s=0.5)
            except TimeoutError:
                continue
            except DeltaSyncError as error:
                record.write(json.dumps({"error": type(error).__name__}) + "\n")
                time.sleep(0.02)
                continue
            record.write(json.dumps({"version": version, "hash": fingerprint(replica)}) + "\n")


def train(kind: str, folder: str, phase: str, turn: int, first: int, count: int) -> None:
    """Send `count` versions of a deterministic training run from step `first`.

    Or die before the message of a phase in sync number `turn`: each sync has one of each kind.
    """
    source = model(0)
    for number in range(first):
        step(source, number)
    transport = Watched(listen(kind, folder))
    transport.before = at(turn, phase, lambda: os.kill(os.getpid(), signal.SIGKILL))
    sender = WeightSender(ModuleSource(source), transport)
    sender.wait_for_receivers(1, timeout_s=AMPLE_S)
    for number in range(first, first + count):
        step(source, number)
        sender.send_weights(timeout_s=AMPLE_S)
    sender.close()


class Mortals:
    """A trainer in this process, and receivers in others, by name.

    Attributes:
        processes: All that were started.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder, self._steps = kind, folder, 0
        self.source, self.processes = model(1), dict[str, Child]()
        self.sender = WeightSender(ModuleSource(self.source), listen(kind, str(folder)))

    def start(self, name: str, seed: int = 1, number: signal.Signals = signal.SIGKILL) -> None:
        """Start a receiver, which joins by digest unless its `seed` is another one than 1."""
        child = Child(serve, self._kind, str(self._folder), name, seed, number)
        self.processes[name] = child

    def arm(self, name: str, phase: str) -> None:
        (self._folder / f"{name}-{phase}").touch()

    def wait(self, count: int) -> None:
        self.sender.wait_for_receivers(count, timeout_s=90)

    def send_step(self, *, timeout_s: float = AMPLE_S) -> SyncStats:
        self._steps += 1
        step(self.source, self._steps)
        return self.sender.send_weights(timeout_s=timeout_s)

    def lines(self, name: str) -> list[dict[str, object]]:
        """What a receiver wrote down so far."""
        path = self._folder / f"{name}.jsonl"
        return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []

    def errors(self, name: str) -> list[dict[str, object]]:
        return [line for line in self.lines(name) if "error" in line]

    def check(self, *names: str) -> None:
        """Wait until these receivers hold the weights."""
        expected = fingerprint(self.source)
        for name in names:
            until(lambda name=name: self._last(name) == expected)  # type: ignore[misc]

    def _last(self, name: str) -> object:
        lines = self.lines(name)
        return lines[-1].get("hash") if lines else None

    def close(self) -> None:
        self.sender.close()
        for process in self.processes.values():
            process.kill()
