"""A proof takes the memory of a few layers, however many there are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deltasync.engines.proof.cold import Startup
from deltasync.engines.proof.proving import Proof
from deltasync.engines.routed import RoutedTarget
from deltasync.engines.routes.recorder import CheckpointTensor
from deltasync.testing.processes import Child

LAYERS, ROWS, COLUMNS = 24, 2048, 2048
LAYER_BYTES = 2 * ROWS * COLUMNS * 2  # a matrix, and another that is made of it
MOST_LAYERS = 6
M_MMAP_THRESHOLD = -3  # of malloc.h


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        empty = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
        self.weight = nn.Parameter(empty, requires_grad=False)

    def work(self) -> None:
        self.absorbed = self.weight.data.T.contiguous()


class Engine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def work_on(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, Layer):
            module.work()


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def prove() -> None:
    """In a process of its own, of which the kernel says how much it held at most."""
    torch.set_num_threads(1)
    allocator = ctypes.CDLL(None)
    allocator.mallopt(M_MMAP_THRESHOLD, 1 << 20)  # what is freed goes back at once
    engine = Engine()
    weights = {name: torch.rand_like(own) for name, own in engine.named_parameters()}
    engine.load_weights(weights.items())
    work_on(list(engine.modules()))
    target = RoutedTarget(
        engine, [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in weights.items()]
    )
    allocator.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = status_bytes("VmRSS")
    target.verify_routes(weights.items(), lambda: Proof(engine, Startup(Engine, work_on=work_on)))
    taken = status_bytes("VmHWM") - before
    assert taken <= MOST_LAYERS * LAYER_BYTES, f"{taken / LAYER_BYTES:.1f} of {LAYERS} layers"


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A proof takes the memory of a few layers.",
)
def test_a_proof_takes_the_memory_of_a_few_layers() -> None:
    with Child(prove) as child:
        child.wait(timeout_s=240)
