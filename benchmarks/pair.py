"""A trainer in this process and engines in others, joined through shared memory."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from benchmarks import processes
from benchmarks.workload import bits_of, decoder, many_small
from deltasync import (
    ModuleSource,
    ModuleTarget,
    SenderOptions,
    SyncStats,
    WeightReceiver,
    WeightSender,
)
from deltasync.transports import shared_memory

_EXIT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Model:
    """What both processes build: a decoder, or `num_small` parameters if that is not 0."""

    hidden: int = 0
    layers: int = 0
    num_small: int = 0

    def build(self) -> nn.Module:
        if self.num_small:
            return many_small(self.num_small)
        return decoder(self.hidden, self.layers)


@dataclass(frozen=True, slots=True)
class Synced:
    """One sync seen from both ends. CPU times tell the ends apart even where they overlap.

    Attributes:
        receivers_cpu_s: Of each engine.
    """

    stats: SyncStats
    seconds: float
    sender_cpu_s: float
    receivers_cpu_s: tuple[float, ...]

    @property
    def receiver_cpu_s(self) -> float:
        """Of the engine that took most."""
        return max(self.receivers_cpu_s)


class Pair:
    """Both ends of one link, joined and at the same weights; the far end may be several engines."""

    def __init__(
        self, module: nn.Module, sender: WeightSender, engines: Sequence[subprocess.Popen[str]]
    ) -> None:
        self.module, self.sender, self._engines = module, sender, engines
        self._say("receive")
        sender.wait_for_receivers(len(engines), timeout_s=120.0)
        sender.send_weights()
        self._answers()

    @property
    def engine_pid(self) -> int:
        return self._engines[0].pid

    def sync(self, options: SenderOptions | None = None) -> Synced:
        """One call of `send_weights`, from the call to its return.

        Engines start to receive at the same moment, so that their scrub is in the time.
        """
        if options is not None:
            self.sender.options = options
        self._say("receive")
        began, cpu = time.perf_counter(), time.process_time()
        stats = self.sender.send_weights()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        if stats.lost:
            raise RuntimeError(f"an engine left: {stats.lost}")
        return Synced(stats, seconds, cpu, tuple(self._answers()))

    def trim(self) -> None:
        """Give freed memory back to the system, at both ends."""
        self._say("trim")
        trim_heap()
        self._answers()

    def check(self) -> None:
        """Raises unless both ends hold the same bytes, compared outside the library."""
        self._say("checksum")
        if set(self._answers()) != {checksum(self.module)}:
            raise RuntimeError("an engine's weights are not the trainer's")

    def _say(self, word: str) -> None:
        for engine in self._engines:
            assert engine.stdin is not None
            print(word, file=engine.stdin, flush=True)

    def _answers(self) -> list[float]:
        return [_answer(engine) for engine in self._engines]


def _answer(engine: subprocess.Popen[str]) -> float:
    assert engine.stdout is not None
    line = engine.stdout.readline()
    if not line:
        raise RuntimeError("an engine process ended; its error is above")
    return float(json.loads(line))


@contextmanager
def open_pair(
    model: Model, options: SenderOptions | None = None, *, num_engines: int = 1
) -> Iterator[Pair]:
    """Start the engines' processes and join them; they end with the block."""
    with TemporaryDirectory(prefix="deltasync-") as folder:
        path = Path(folder) / "weights.sock"
        module = model.build()
        sender = WeightSender(ModuleSource(module), shared_memory.Sender(path), options=options)
        numbers = [str(n) for n in (model.hidden, model.layers, model.num_small)]
        words = ("benchmarks.pair", str(path), *numbers)
        engines = [processes.start(*words, is_told=True) for _ in range(num_engines)]
        try:
            with sender:
                yield Pair(module, sender, engines)
        finally:
            for engine in engines:
                _end(engine)


def _end(engine: subprocess.Popen[str]) -> None:
    try:
        engine.communicate(timeout=_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        engine.kill()
        engine.wait()


def checksum(module: nn.Module) -> int:
    """CRC-32 of all weights."""
    total = 0
    for bits in bits_of(module):
        total = zlib.crc32(bits.numpy().data, total)
    return total


def trim_heap() -> None:
    """Without this, memory that was freed but kept by the allocator hides what a sync takes."""
    ctypes.CDLL(None).malloc_trim(0)


def run_engine(path: str, model: Model) -> None:
    """The engine's process: one answer on stdout for each word on stdin."""
    torch.set_num_threads(1)
    module = model.build()
    receiver = WeightReceiver(
        ModuleTarget(module), shared_memory.Receiver(path), engine=f"engine-{os.getpid()}"
    )
    with receiver:
        for word in sys.stdin:
            answer: float = 0
            match word.strip():
                case "receive":
                    began = time.process_time()
                    receiver.receive_weights(timeout_s=120.0)
                    answer = time.process_time() - began
                case "trim":
                    trim_heap()
                case "checksum":
                    answer = checksum(module)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    run_engine(sys.argv[1], Model(*map(int, sys.argv[2:])))
