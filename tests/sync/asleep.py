"""A process whose weights cannot be read while its engine sleeps: a look at them kills it.

What GPU memory does that was released, `mprotect` does on a CPU. The trainer syncs all the time.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from deltasync import (
    DeltaSyncError,
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    StagingThread,
    WeightReceiver,
    WeightSender,
)
from deltasync.delta.bits import as_bits
from deltasync.transports import inprocess
from tests.worlds.links import Model, bits_equal, random_model

NUMEL = 1 << 16
_NONE = 0  # PROT_NONE
_LIBC = ctypes.CDLL(None, use_errno=True)


class Memory:
    """Pages that hold weights, and can be taken away."""

    def __init__(self, num_bytes: int) -> None:
        self._pages = mmap.mmap(-1, num_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self.weights = torch.frombuffer(self._pages, dtype=torch.float32)
        self.weights.zero_()

    def allow(self, access: int) -> None:
        assert not _LIBC.mprotect(ctypes.c_void_p(self._address), len(self._pages), access)


class Trainer:
    """Sends one version after another until it is stopped; who sleeps misses some."""

    def __init__(self) -> None:
        self.source, self.link = random_model({"w": (NUMEL,)}, 0), inprocess.Sender()
        self.sender = WeightSender(ModuleSource(self.source), self.link)
        self.is_stopping = threading.Event()

    def send(self, patience_s: float) -> None:
        as_bits(self.source.get_parameter("w").data)[::97] ^= 1
        with suppress(DeltaSyncError):
            self.sender.wait_for_receivers(1, timeout_s=patience_s / 10)
            self.sender.send_weights(timeout_s=patience_s)

    def run(self) -> None:
        while not self.is_stopping.is_set():
            self.send(0.5)


def commit(staging: StagingThread, seconds: float) -> None:
    """Let the engine serve, and write what is staged."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if staging.wait_staged(timeout_s=0.002):
            with suppress(DeltaSyncError):
                staging.commit()


def main(max_staged_bytes: int | None) -> None:
    """Sleep and wake for a second."""
    memory, trainer, moments = Memory(4 * NUMEL), Trainer(), random.Random(0)
    replica = Model({"w": memory.weights})
    options = ReceiverOptions(max_staged_bytes=max_staged_bytes, scrub_every=1)
    receiver = WeightReceiver(ModuleTarget(replica), trainer.link.receiver(), options=options)
    deadline, sending = time.monotonic() + 1.0, ThreadPoolExecutor(1)
    running = sending.submit(trainer.run)
    with sending, StagingThread(receiver) as staging:
        while time.monotonic() < deadline:
            commit(staging, moments.uniform(0, 0.05))
            receiver.detach()
            memory.allow(_NONE)
            time.sleep(moments.uniform(0, 0.05))
            memory.allow(mmap.PROT_READ | mmap.PROT_WRITE)
            if moments.random() < 0.3:  # the second level: what was there is lost
                memory.weights.zero_()
            receiver.attach()
        trainer.is_stopping.set()
        running.result()
        for _ in range(3):
            last = sending.submit(trainer.send, 20.0)  # also on a busy machine
            while not last.done():
                commit(staging, 0.01)
        assert bits_equal(trainer.source, replica)
        receiver.check_serving()
    receiver.close()
    trainer.sender.close()


if __name__ == "__main__":
    main(None)
    main(0)
