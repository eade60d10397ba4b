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

from deltasync import DeltaSyncError, ModuleTarget, ReceiverOptions, StagingThread, WeightReceiver
from deltasync.delta.bits import as_bits
from tests.worlds.links import Fleet, Model, bits_equal, fleet, random_model

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


def send(here: Fleet, timeout_s: float) -> None:
    """A change, to the engine if it is awake."""
    as_bits(here.source.get_parameter("w").data)[::97] ^= 1
    with suppress(DeltaSyncError):
        here.sender.wait_for_receivers(1, timeout_s=timeout_s / 10)
        here.sender.send_weights(timeout_s=timeout_s)


def train(here: Fleet, is_over: threading.Event) -> None:
    while not is_over.is_set():
        send(here, 0.5)


def commit(staging: StagingThread, seconds: float) -> None:
    """Let the engine serve, and write what is staged."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if staging.wait_staged(timeout_s=0.002):
            with suppress(DeltaSyncError):
                staging.commit()


def main(max_staged_bytes: int | None) -> None:
    """Sleep and wake for a second."""
    memory, moments, is_over = Memory(4 * NUMEL), random.Random(0), threading.Event()
    replica = Model({"w": memory.weights})
    options = ReceiverOptions(max_staged_bytes=max_staged_bytes, scrub_every=1)
    deadline = time.monotonic() + 1.0
    with fleet(random_model({"w": (NUMEL,)}, 0)) as here, ThreadPoolExecutor(1) as sending:
        end = here.transport.receiver()
        receiver = WeightReceiver(ModuleTarget(replica), end, options=options)
        running = sending.submit(train, here, is_over)
        with receiver, StagingThread(receiver) as staging:
            while time.monotonic() < deadline:
                commit(staging, moments.uniform(0, 0.05))
                receiver.detach()
                memory.allow(_NONE)
                commit(staging, moments.uniform(0, 0.05))  # nor is written what was staged
                memory.allow(mmap.PROT_READ | mmap.PROT_WRITE)
                if moments.random() < 0.3:  # the second level: what was there is lost
                    memory.weights.zero_()
                receiver.attach()
            is_over.set()
            running.result()
            for _ in range(3):
                last = sending.submit(send, here, 20.0)  # also on a busy machine
                while not last.done():
                    commit(staging, 0.01)
            assert bits_equal(here.source, replica)
            receiver.check_serving()


if __name__ == "__main__":
    main(None)
    main(0)
