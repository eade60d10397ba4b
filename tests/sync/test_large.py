"""Whole syncs of what is large: parameters beyond 2^31 elements, and many parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltasync import (
    CheckpointTensor,
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    RoutedTarget,
    WeightReceiver,
    WeightSender,
    WeightTarget,
)
from deltasync.transports import shared_memory
from deltasync.wire.changes import TILE
from tests.worlds.links import Model, bits_equal, random_model

INT32 = 1 << 31
HUGE = INT32 + (1 << 20) + 5
CHUNK = 300_000  # one of them lies across 2^31
AFTER = INT32 // CHUNK * CHUNK + CHUNK  # where the next one begins
TAIL = 1000
PATIENCE_S = 400.0


def needs(gib: float) -> None:
    """Skip where so much memory is not to be had."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    if kib < gib * (1 << 20):
        pytest.skip(f"takes {gib} GiB of memory, {kib / (1 << 20):.1f} are there")


def zeros(numel: int) -> Tensor:
    """Takes memory where it is written."""
    return torch.from_numpy(np.zeros(numel, np.uint8))


class Fused(nn.Module):
    """An engine that keeps two checkpoint tensors in one, the second of them beyond 2^31."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(zeros(HUGE + TAIL), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            begin, length = {"huge": (0, HUGE), "tail": (HUGE, TAIL)}[name]
            self.fused.data[begin : begin + length].copy_(tensor)


@contextmanager
def synced(source: Model, target: WeightTarget, path: Path) -> Iterator[WeightSender]:
    """A sender, and a receiver in a thread that takes two syncs."""
    options = ReceiverOptions(stall_timeout_s=PATIENCE_S)
    with (
        WeightSender(ModuleSource(source), shared_memory.Sender(path)) as sender,
        WeightReceiver(target, shared_memory.Receiver(path), options=options) as receiver,
        ThreadPoolExecutor(1) as thread,
    ):
        done = thread.submit(
            lambda: [receiver.receive_weights(timeout_s=PATIENCE_S) for _ in range(2)]
        )
        sender.wait_for_receivers(1, timeout_s=PATIENCE_S)
        yield sender
        done.result()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_parameter_beyond_2_to_the_31_arrives(tmp_path: Path) -> None:
    """The receiver keeps a tensor where it lies far behind."""
    needs(6)
    source, engine = Model({"huge": zeros(HUGE), "tail": zeros(TAIL)}), Fused()
    huge, tail = source.parameters()
    for holder in (huge, engine.fused):
        holder[[0, INT32 - 1, INT32, HUGE - 1]] = 1
    checkpoint = [
        CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in source.named_parameters()
    ]
    with synced(source, RoutedTarget(engine, checkpoint), tmp_path / "link") as sender:
        stats = sender.send_weights(timeout_s=PATIENCE_S)
        assert (stats.joined, stats.full_synced, stats.lost) == (1, 0, {})
        sparse = [0, 5, INT32 - 2, INT32 - 1, INT32, INT32 + 1, HUGE - 2, HUGE - 1]
        huge[sparse] = 7
        huge[AFTER : AFTER + CHUNK] = 9
        tail[[0, TAIL - 1]] = 3
        stats = sender.send_weights(timeout_s=PATIENCE_S)
    assert (stats.kind, stats.nnz, stats.receivers) == ("delta", len(sparse) + CHUNK + 2, 1)
    assert stats.payload_bytes < CHUNK + TILE
    assert torch.equal(engine.fused[:HUGE], huge)
    assert torch.equal(engine.fused[HUGE:], tail)


def test_a_hello_of_many_megabytes_is_let_in_and_answered(tmp_path: Path) -> None:
    """As many parameters have it."""
    shapes = dict.fromkeys((f"{number:04000}" for number in range(4000)), (1,))
    source, replica = random_model(shapes, 1), random_model(shapes, 2)
    with synced(source, ModuleTarget(replica), tmp_path / "link") as sender:
        for _ in range(2):
            sender.send_weights(timeout_s=PATIENCE_S)
            assert bits_equal(source, replica)
