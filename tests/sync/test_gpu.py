"""Whole syncs between models on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    RoutedTarget,
    SenderOptions,
    StagingThread,
    StoreReceiver,
    StoreSender,
    WeightReceiver,
)
from deltasync.delta.bits import as_bits
from deltasync.delta.choice import Kernels
from deltasync.delta.coding import Coding
from deltasync.delta.kernels import host, reference
from deltasync.transports import inprocess
from tests.worlds.links import Model, bits_equal, fleet
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
    source_dtype: torch.dtype, snapshot_device: str | None, share: float, strided: bool
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
    new = torch.randint(-(2**15), 2**15, (100_000,), dtype=torch.int16)
    old = torch.where(torch.rand(100_000) < 0.01, new ^ 1, new)
    assert torch.equal(host.changed(new.cuda(), old.cuda()).cpu(), host.changed(new, old))
    assert reference.digest_run(as_bits(new.cuda()), 7, 5) == host.digest_run(new, 7, 5)


def nudged(source: Model) -> None:
    bits = as_bits(source.get_parameter("matrix").data)
    bits += (torch.rand(bits.shape, device=bits.device) < 0.003).to(bits.dtype)


@pytest.mark.parametrize(
    ("device", "linked", "snapshot_device", "compression"),
    [
        ("cuda", "cuda", None, "zstd"),
        ("cuda", "cpu", "cpu", "zstd"),
        ("cpu", "cpu", None, "gap"),
    ],
)
def test_payloads_for_a_gpu_are_compressed(
    device: str, linked: str, snapshot_device: str | None, compression: Coding
) -> None:
    source, replica = model(torch.bfloat16, 0).to(device), model(torch.bfloat16, 0)
    options = SenderOptions(compression=compression, snapshot_device=snapshot_device)
    with fleet(source, options=options, link=lambda: inprocess.Sender(device=linked)) as here:
        assert here.join(replica).full_synced == 0
        for _ in range(3):
            nudged(source)
            stats = here.sender.send_weights()
            assert stats.bytes_by_codec[compression] > 0.9 * stats.payload_bytes
        torch.cuda.synchronize()
        assert bits_equal(source, replica.to(device))


def test_a_store_has_deltas_of_a_gpu(tmp_path: Path) -> None:
    source, replica = (model(torch.bfloat16, seed) for seed in range(2))
    trainer = StoreSender(ModuleSource(source), tmp_path)
    engine = StoreReceiver(ModuleTarget(replica), tmp_path)
    for version in (1, 2, 3):
        nudged(source)
        assert trainer.publish().version == version
        assert engine.fetch() == version
        assert bits_equal(source, replica)
