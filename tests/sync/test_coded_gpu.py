"""Whole syncs between models on a GPU, whose payloads are compressed or coded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    SenderOptions,
    StoreReceiver,
    StoreSender,
    WeightSender,
)
from deltasync.delta.bits import as_bits
from deltasync.errors import ConfigError, SyncAborted
from deltasync.transports import inprocess
from tests.sync.test_gpu import model
from tests.worlds.links import bits_equal, fleet, until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def nudged(weights: Tensor, share: float) -> None:
    bits = as_bits(weights)
    bits += (torch.rand(weights.shape, device=weights.device) < share).to(bits.dtype)


@pytest.mark.parametrize("link", ["cuda", "cpu"])
@pytest.mark.parametrize("snapshot_device", [None, "cpu"])
def test_payloads_of_a_gpu_are_compressed(link: str, snapshot_device: str | None) -> None:
    source, replica = (model(torch.bfloat16, 0) for _ in range(2))
    options = SenderOptions(compression="zstd", snapshot_device=snapshot_device)
    with fleet(source, options=options, link=lambda: inprocess.Sender(device=link)) as here:
        assert here.join(replica).full_synced == 0
        for _ in range(3):
            for parameter in source.parameters():
                nudged(parameter.data, 0.003)
            stats = here.sender.send_weights()
            assert stats.bytes_by_codec["zstd"] > 0.9 * stats.payload_bytes
        torch.cuda.synchronize()
        assert bits_equal(source, replica)


def test_codecs_of_changes_are_refused_on_a_gpu(tmp_path: Path) -> None:
    source, gap = ModuleSource(model(torch.bfloat16, 0)), SenderOptions(compression="gap")
    with inprocess.Sender() as link, pytest.raises(ConfigError, match="made on hosts"):
        WeightSender(source, link, options=gap)
    with pytest.raises(ConfigError, match="made on hosts"):
        StoreSender(source, tmp_path, options=SenderOptions(compression="class"))


def test_a_store_has_deltas_of_a_gpu_compressed(tmp_path: Path) -> None:
    source, replica = (model(torch.bfloat16, seed) for seed in range(2))
    trainer, engine = (
        StoreSender(ModuleSource(source), tmp_path),
        StoreReceiver(ModuleTarget(replica), tmp_path),
    )
    for version in (1, 2, 3):
        nudged(source.get_parameter("matrix").data, 0.003)
        assert trainer.publish().version == version
        assert engine.fetch() == version
        assert bits_equal(source, replica)


def test_a_host_codes_for_a_gpu() -> None:
    source, replica = model(torch.bfloat16, 0).cpu(), model(torch.bfloat16, 0)
    with fleet(source, options=SenderOptions(compression="gap")) as here:
        assert here.join(replica).full_synced == 0
        for _ in range(3):
            nudged(source.get_parameter("matrix").data, 0.003)
            stats = here.sender.send_weights()
            assert stats.bytes_by_codec["gap"] > 0.9 * stats.payload_bytes
        torch.cuda.synchronize()
        assert bits_equal(source, replica.cpu())


def test_a_wrong_base_is_found_on_the_gpu_before_anything_is_written() -> None:
    source, target = (model(torch.bfloat16, 0) for _ in range(2))
    with fleet(source, options=SenderOptions()) as here:
        serving = here.add(target, options=ReceiverOptions(scrub_every=0))
        here.wait(1)
        here.sender.send_weights()
        nudged(source.get_parameter("matrix").data, 0.01)
        changed = as_bits(source.get_parameter("matrix").data) != as_bits(
            target.get_parameter("matrix").data
        )
        as_bits(target.get_parameter("matrix").data)[tuple(changed.nonzero()[5])] ^= 64
        before = {name: weights.data.clone() for name, weights in target.named_parameters()}
        with pytest.raises(SyncAborted, match="DigestMismatch: it would not arrive"):
            here.sender.send_weights(timeout_s=60)
        until(lambda: bool(serving.errors))
        assert all(torch.equal(before[n], p.data) for n, p in target.named_parameters())
        here.wait(1)
        assert here.sender.send_weights(timeout_s=60).full_synced == 1
        torch.cuda.synchronize()
        assert bits_equal(source, target)
