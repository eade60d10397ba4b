"""A whole sync of what is large: a parameter beyond 2^31 elements."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltasync import CheckpointTensor, ReceiverOptions, RoutedTarget
from deltasync.wire.changes import TILE
from tests.worlds.links import LINKS, Model, fleet

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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_parameter_beyond_2_to_the_31_arrives() -> None:
    """The receiver keeps a tensor where it lies far behind."""
    needs(6)
    source, engine = Model({"huge": zeros(HUGE), "tail": zeros(TAIL)}), Fused()
    huge, tail = source.parameters()
    for holder in (huge, engine.fused):
        holder[[0, INT32 - 1, INT32, HUGE - 1]] = 1
    checkpoint = [
        CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in source.named_parameters()
    ]
    with fleet(source, link=LINKS["shared memory"]) as here:
        target = RoutedTarget(engine, checkpoint)
        here.add(target, options=ReceiverOptions(stall_timeout_s=PATIENCE_S))
        here.wait(1)
        stats = here.sender.send_weights(timeout_s=PATIENCE_S)
        assert (stats.joined, stats.full_synced, stats.lost) == (1, 0, {})
        sparse = [0, 5, INT32 - 2, INT32 - 1, INT32, INT32 + 1, HUGE - 2, HUGE - 1]
        huge[sparse] = 7
        huge[AFTER : AFTER + CHUNK] = 9
        tail[[0, TAIL - 1]] = 3
        stats = here.sender.send_weights(timeout_s=PATIENCE_S)
    assert (stats.kind, stats.nnz, stats.receivers) == ("delta", len(sparse) + CHUNK + 2, 1)
    assert stats.payload_bytes < CHUNK + TILE
    assert torch.equal(engine.fused[:HUGE], huge)
    assert torch.equal(engine.fused[HUGE:], tail)
