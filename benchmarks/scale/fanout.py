"""The trainer's host work for each further receiver: CPU time of its process.

Receivers are threads of one other process, so that a small machine can have many: what they do, and
waiting for them, does not count.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Self

import numpy as np
import torch
from torch import nn

from benchmarks import processes
from benchmarks.record import RESULTS, Environment
from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender
from deltasync.errors import DeltaSyncError
from deltasync.transports import shared_memory

RECORD = RESULTS / "fanout.jsonl"
NUMBERS = (1, 8, 32, 64)
_SYNCS = 30
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class FanOut:
    """CPU seconds of the trainer's process in one sync, by the number of receivers."""

    receivers: tuple[int, ...]
    seconds: tuple[float, ...]
    environment: Environment = field(default_factory=Environment.here)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        found = json.loads(text)
        return cls(
            tuple(found["receivers"]), tuple(found["seconds"]), Environment(**found["environment"])
        )

    @property
    def each_s(self) -> float:
        """Of each receiver: the slope."""
        return float(np.polyfit(self.receivers, self.seconds, 1)[0])


def measure(numbers: Sequence[int] = NUMBERS) -> FanOut:
    """Medians over a few syncs to each of these numbers of receivers."""
    return FanOut(tuple(numbers), tuple(_measure(number) for number in numbers))


def _measure(number: int) -> float:
    module = _model()
    with _receivers(module, number) as sender:
        samples = []
        for _ in range(_SYNCS):
            with torch.no_grad():
                module.weight[0] += 1
            began = time.process_time()
            stats = sender.send_weights()
            samples.append(time.process_time() - began)
            if stats.receivers != number:
                raise RuntimeError(f"{stats.receivers} of {number} receivers: {stats.lost}")
        return median(samples)


@contextmanager
def _receivers(module: nn.Module, number: int) -> Iterator[WeightSender]:
    """A sender with this many receivers at its weights."""
    with TemporaryDirectory(prefix="deltasync-") as folder:
        path = Path(folder) / "weights.sock"
        process = processes.start("benchmarks.scale.fanout", str(path), str(number))
        try:
            with WeightSender(ModuleSource(module), shared_memory.Sender(path)) as sender:
                sender.wait_for_receivers(number, timeout_s=_TIMEOUT_S)
                sender.send_weights()
                yield sender
        finally:
            process.kill()
            process.communicate()


def _model() -> nn.Linear:
    return nn.Linear(64, 64, dtype=torch.bfloat16)


def _receive(path: str, engine: str) -> None:
    link = shared_memory.Receiver(path)
    with WeightReceiver(ModuleTarget(_model()), link, engine=engine) as receiver:
        while True:
            try:
                receiver.receive_weights(timeout_s=_TIMEOUT_S)
            except DeltaSyncError:
                return


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number in range(int(sys.argv[2])):
        threading.Thread(target=_receive, args=(sys.argv[1], f"engine-{number}")).start()
