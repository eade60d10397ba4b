"""Whole syncs between models on a GPU."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from deltasync import (
    ModuleTarget,
    ReceiverOptions,
    RoutedTarget,
    SenderOptions,
    StagingThread,
    WeightReceiver,
    sync_after_step,
)
from deltasync.delta.bits import as_bits
from deltasync.delta.choice import Kernels
from deltasync.delta.coding import Coding
from deltasync.delta.kernels import KERNELS, host, reference
from deltasync.sync.source.streamed import StreamedWeights
from deltasync.transports import inprocess
from deltasync.transports.base import Frame
from tests.worlds.links import Model, ThroughReceiver, bits_equal, fleet
from tests.worlds.ranks import free_port, run_ranks
from tests.worlds.toy_engines import CHECKPOINT, Rank, rank_of, trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def model(dtype: torch.dtype, seed: int, *, strided: bool = False) -> Model:
    generator = torch.Generator().manual_seed(seed)
    other = torch.randn(300, 20, generator=generator)
    tensors = {
        "matrix": torch.randn(1500, 1900, generator=generator),
        "other": other.t() if strided else other.t().contiguous(),
        "scalar": torch.randn((), generator=generator),
        "empty": torch.randn(0, 4, generator=generator),
    }
    return Model({name: tensor.to("cuda", dtype) for name, tensor in tensors.items()})


def link() -> inprocess.Sender:
    return inprocess.Sender(device="cuda")


@pytest.mark.parametrize("source_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("snapshot_device", [None, "cpu"])
@pytest.mark.parametrize("share", [0.001, 0.05, 0.7])
@pytest.mark.parametrize("strided", [False, True])  # then the receiver holds it in a box
def test_a_model_on_a_gpu_ends_bit_equal(
    source_dtype: torch.dtype, snapshot_device: str | None, share: float, *, strided: bool
) -> None:
    source = model(source_dtype, 0, strided=strided)
    replica = model(torch.bfloat16, 1, strided=strided)
    options = SenderOptions(snapshot_device=snapshot_device, bucket_bytes=1 << 18)
    with fleet(source, options=options, link=link) as here:
        assert here.join(replica).full_synced == 1
        for _ in range(3):
            for parameter in source.parameters():
                chosen = torch.rand(parameter.shape, device="cuda") < share
                parameter.data[chosen] *= 1.5
            assert here.sender.send_weights().kind == "delta"
        torch.cuda.synchronize()
        assert bits_equal(source.to(torch.bfloat16), replica)


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("staged_bytes", [0, None])
def test_ranks_of_an_engine_hold_their_parts(
    compression: Coding, kernels: Kernels, staged_bytes: int | None
) -> None:
    source, ranks = trainer(0).cuda(), [Rank(number).cuda() for number in range(2)]
    options = ReceiverOptions(kernels=kernels, max_staged_bytes=staged_bytes)
    sending = SenderOptions(compression=compression, max_inflight_bytes=1 << 20)
    with fleet(source, options=sending) as here:
        for number, rank in enumerate(ranks):
            here.add(RoutedTarget(rank, CHECKPOINT), rank=number, world=2, options=options)
        here.wait(2)
        for share in (0.0, 0.05, 0.5, 1.0):
            for weights in source.parameters():
                weights.data[torch.rand(weights.shape, device="cuda") < share] *= 1.01
            assert here.sender.send_weights().receivers == 2
            torch.cuda.synchronize()
            assert all(bits_equal(rank, rank_of(source, rank.rank).cuda()) for rank in ranks)


class Late(ThroughReceiver):
    """A receiver's link that takes its time before each frame."""

    def receive(self, *, timeout_s: float) -> Frame:
        time.sleep(0.5)
        return super().receive(timeout_s=timeout_s)


def test_the_trainers_stream_goes_on_while_a_receiver_is_late() -> None:
    source, replica = model(torch.bfloat16, 0), model(torch.bfloat16, 1)
    with fleet(source, link=link) as here, ThreadPoolExecutor(1) as trainer:
        here.join(replica, wrap=Late)
        source.get_parameter("matrix").data[::7] *= 1.5
        torch.cuda.synchronize()

        def train() -> float:
            time.sleep(0.2)  # the sync is under way
            began = time.monotonic()
            torch.ones(1000, device="cuda").sum().item()
            return time.monotonic() - began

        took = trainer.submit(train)
        began = time.monotonic()
        here.sender.send_weights()
        assert time.monotonic() - began > 1
        assert took.result(30) < 0.25
        torch.cuda.synchronize()
        assert bits_equal(source, replica)


def test_a_commit_is_ordered_by_the_callers_stream() -> None:
    source, replica = model(torch.bfloat16, 0), model(torch.bfloat16, 1)
    engine = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with (
        fleet(source, link=link) as here,
        WeightReceiver(ModuleTarget(replica), here.transport.receiver()) as receiver,
        StagingThread(receiver) as staging,
        ThreadPoolExecutor(1) as trainer,
    ):
        here.wait(1)
        for turn in range(3):
            if turn:
                source.get_parameter("matrix").data[turn::7] *= 1.5
                torch.cuda.synchronize()
            sent = trainer.submit(here.sender.send_weights)
            assert staging.wait_staged(timeout_s=30)
            with torch.cuda.stream(engine):
                before = replica.get_parameter("matrix").clone()  # what the engine still computes
                staging.commit()
                after = replica.get_parameter("matrix").clone()
            sent.result(30)
            engine.synchronize()
            assert torch.equal(after, source.get_parameter("matrix"))
            assert not torch.equal(before, after)


@pytest.mark.promise("Bits", "GPU kernels give the same bits as the host's. (GPU)")
def test_kernels_agree_with_the_host() -> None:
    assert KERNELS["cuda"] is reference
    new = torch.randint(-(2**15), 2**15, (100_000,), dtype=torch.int16)
    old = torch.where(torch.rand(100_000) < 0.01, new ^ 1, new)
    expected = host.changed(new, old, len(new))
    found = reference.changed(new.cuda(), old.cuda(), len(new))
    assert found is not None
    assert expected is not None
    assert torch.equal(found.cpu(), expected)
    assert reference.digest_run(as_bits(new.cuda()), 7, 5) == host.digest_run(new, 7, 5)


def test_weights_that_a_gpu_gives_one_by_one_arrive() -> None:
    source, replica = (model(torch.bfloat16, seed) for seed in (0, 1))
    with fleet(StreamedWeights(), link=link) as here:
        here.source.take(source.state_dict().items())
        assert here.join(replica).full_synced == 1
        for share in (0.01, 0.9):
            for parameter in source.parameters():
                chosen = torch.rand(parameter.shape, device="cuda") < share
                parameter.data[chosen] *= 1.5
            here.source.take(source.state_dict().items())
            assert here.sender.send_weights(timeout_s=60).kind == "delta"
            torch.cuda.synchronize()
            assert bits_equal(source, replica)


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_what_fsdp2_shards_or_keeps_on_the_host_arrives(*, is_offloaded: bool) -> None:
    run_ranks(follow_fsdp2, 1, is_offloaded, free_port(), timeout_s=100)


def follow_fsdp2(rank: int, is_offloaded: bool, port: int) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=1)
    torch.manual_seed(0)
    trainer = nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 64)).cuda()
    fully_shard(trainer, offload_policy=CPUOffloadPolicy() if is_offloaded else OffloadPolicy())
    assert all(p.device.type == ("cpu" if is_offloaded else "cuda") for p in trainer.parameters())
    replica = nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 64)).cuda().bfloat16()
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-4)
    with fleet(trainer, link=link) as here:
        here.add(replica)
        here.wait(1)
        hook = sync_after_step(optimizer, here.sender, on_busy="wait", on_error="raise")
        for number in range(6):
            torch.manual_seed(number)
            trainer(torch.randn(4, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        hook.wait()
        assert hook.last_stats is not None
        assert hook.last_stats.kind == "delta"
        for name, tensor in replica.state_dict().items():
            held: Any = trainer.get_parameter(name)
            assert torch.equal(tensor, held.to_local().detach().to(tensor)), name
        hook.remove()
    dist.destroy_process_group()
