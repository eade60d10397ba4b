"""A process whose weights cannot be read while its engine sleeps: a look at them kills it.

What GPU memory does that was released, `mprotect` does on a CPU. The trainer syncs all the time.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
import threading
import time
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
        self.source = random_model({"w": (NUMEL,)}, 0)
        self.link = inprocess.Sender()
        self.sender = WeightSender(ModuleSource(self.source), self.link)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def send(self, patience_s: float) -> None:
        as_bits(self.source.get_parameter("w").data)[::97] ^= 1
        with suppress(DeltaSyncError):
            self.sender.wait_for_receivers(1, timeout_s=patience_s / 10)
            self.sender.send_weights(timeout_s=patience_s)

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            self.send(0.5)


def commit(staging: StagingThread, seconds: float) -> None:
    """Let the engine serve, and write what is staged."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if staging.wait_staged(timeout_s=0.002):
            with suppress(DeltaSyncError):
                staging.commit()


def main(way: str, kind: str, seconds: float) -> None:
    """Sleep and wake for some time, by `detach` or by what does not do: `invalidate`."""
    memory, trainer, moments = Memory(4 * NUMEL), Trainer(), random.Random(0)
    replica = Model({"w": memory.weights})
    options = ReceiverOptions(max_staged_bytes=0 if kind == "in place" else None, scrub_every=1)
    receiver = WeightReceiver(ModuleTarget(replica), trainer.link.receiver(), options=options)
    deadline = time.monotonic() + seconds
    trainer.start()
    with StagingThread(receiver) as staging:
        while time.monotonic() < deadline:
            commit(staging, moments.uniform(0, 0.05))
            getattr(receiver, way)()
            memory.allow(_NONE)
            time.sleep(moments.uniform(0, 0.05))
            memory.allow(mmap.PROT_READ | mmap.PROT_WRITE)
            if moments.random() < 0.3:  # the second level: what was there is lost
                memory.weights.zero_()
            if way == "detach":
                receiver.attach()
        trainer.stop()
        for _ in range(5):
            sending = threading.Thread(target=trainer.send, args=(20.0,))  # also on a busy machine
            sending.start()
            while sending.is_alive():
                commit(staging, 0.05)
        assert bits_equal(trainer.source, replica)
        receiver.check_serving()
    receiver.close()
    trainer.sender.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
