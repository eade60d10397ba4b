"""Whole syncs of what is large: parameters beyond 2^31 elements, long rows, many parameters."""

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
    Policy,
    ReceiverOptions,
    RoutedTarget,
    SenderOptions,
    WeightReceiver,
    WeightSender,
    WeightTarget,
)
from deltasync.delta.shard import ShardSpec, placed
from deltasync.transports import shared_memory
from deltasync.transports.control.connection import DEFAULT_MAX_MESSAGE_BYTES
from deltasync.wire.frame import encode
from tests.worlds.links import Model, bits_equal, random_model, step
from tests.worlds.trainers import rows_of, trainer_of

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
def synced(source: Model, targets: Iterable[WeightTarget], path: Path) -> Iterator[WeightSender]:
    """A sender, and receivers in threads that take two syncs each."""
    link = shared_memory.Sender(path)
    policy = Policy(chunk_numel=CHUNK)
    sender = WeightSender(ModuleSource(source), link, options=SenderOptions(policy=policy))
    options = ReceiverOptions(chunk_numel=CHUNK + 1, stall_timeout_s=PATIENCE_S)
    receivers = [
        WeightReceiver(target, shared_memory.Receiver(path), engine=f"{number}", options=options)
        for number, target in enumerate(targets)
    ]

    def receive(receiver: WeightReceiver) -> None:
        for _ in range(2):
            receiver.receive_weights(timeout_s=PATIENCE_S)

    with ThreadPoolExecutor(len(receivers)) as threads:
        done = [threads.submit(receive, receiver) for receiver in receivers]
        try:
            sender.wait_for_receivers(len(receivers), timeout_s=PATIENCE_S)
            yield sender
            for one in done:
                one.result()
        finally:
            sender.close()
            for receiver in receivers:
                receiver.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_parameter_beyond_2_to_the_31_arrives(tmp_path: Path) -> None:
    """One receiver starts by a full sync; the other keeps a tensor where it lies far behind."""
    needs(6)
    source, engine = Model({"huge": zeros(HUGE), "tail": zeros(TAIL)}), Fused()
    huge, tail = source.parameters()
    plain = Model({"huge": zeros(HUGE), "tail": zeros(TAIL)})
    for holder in (huge, engine.fused):
        holder[[0, INT32 - 1, INT32, HUGE - 1]] = 1
    checkpoint = [
        CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in source.named_parameters()
    ]

    with synced(
        source, [ModuleTarget(plain), RoutedTarget(engine, checkpoint)], tmp_path / "link"
    ) as sender:
        stats = sender.send_weights(timeout_s=PATIENCE_S)
        assert (stats.joined, stats.full_synced, stats.lost) == (2, 1, {})
        sparse = [0, 5, INT32 - 2, INT32 - 1, INT32, INT32 + 1, HUGE - 2, HUGE - 1]
        huge[sparse] = 7
        huge[AFTER : AFTER + CHUNK] = 9
        tail[[0, TAIL - 1]] = 3
        stats = sender.send_weights(timeout_s=PATIENCE_S)
    assert (stats.kind, stats.nnz, stats.receivers) == ("delta", len(sparse) + CHUNK + 2, 2)
    assert stats.payload_bytes < CHUNK + 1000
    assert bits_equal(plain, source)
    assert torch.equal(engine.fused[:HUGE], huge)
    assert torch.equal(engine.fused[HUGE:], tail)


LONG = {"rows": (7, 3000), "norm": (3000,)}
SMALL = SenderOptions(bucket_bytes=600, policy=Policy(chunk_numel=1000, dense_above=0.15))


@pytest.mark.parametrize("share", [0.02, 0.15, 1.0])  # sparse, sparse and dense chunks, dense
@pytest.mark.parametrize("cut", ["whole", "rows", "columns"])
def test_rows_larger_than_a_bucket_arrive(cut: str, share: float) -> None:
    source, replica = random_model(LONG, 1), random_model(LONG, 2)
    boxes = columns_of(source) if cut == "columns" else rows_of(source, 2 if cut == "rows" else 1)
    with trainer_of(source, boxes, options=SMALL) as here:
        here.add(replica)
        here.wait(1)
        assert here.send().full_synced == 1
        assert bits_equal(source, replica)
        step(source, torch.Generator().manual_seed(3), share)
        here.step()
        stats = here.send()
    assert stats.num_buckets > 1
    assert bits_equal(source, replica)


def columns_of(module: nn.Module) -> list[dict[str, ShardSpec]]:
    """Each row is cut in two, which are bands with gaps."""
    shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    return [
        {n: placed(s, (2,), (rank,), [(len(s) - 1, 1)]) for n, s in shapes.items()}
        for rank in range(2)
    ]


MANY = 100_000


def test_a_hello_of_many_megabytes_is_let_in_and_answered(tmp_path: Path) -> None:
    """As many parameters have it."""
    shapes = dict.fromkeys((f"{number:04000}" for number in range(4000)), (1,))
    source, replica = random_model(shapes, 1), random_model(shapes, 2)
    with synced(source, [ModuleTarget(replica)], tmp_path / "link") as sender:
        for _ in range(2):
            sender.send_weights(timeout_s=PATIENCE_S)
            assert bits_equal(source, replica)


def test_ranks_tell_each_other_little_of_each_parameter() -> None:
    """So that there is room for many."""
    count = 500
    shapes = dict.fromkeys((f"{number:0100}" for number in range(count)), (4, 4))
    source, replica = random_model(shapes, 1), random_model(shapes, 2)
    replicas = [{name: ShardSpec.whole((4, 4)) for name in shapes} for _ in range(32)]
    said: list[int] = []
    with trainer_of(source, replicas) as here:
        here.hub.before = lambda order: said.append(len(encode(order)))
        here.add(replica)
        here.wait(1)
        assert here.send().full_synced == 1
        step(source, torch.Generator().manual_seed(3), 0.1)
        here.step()
        here.send()
        assert bits_equal(source, replica)
    assert max(said) / count * MANY < DEFAULT_MAX_MESSAGE_BYTES // 2
