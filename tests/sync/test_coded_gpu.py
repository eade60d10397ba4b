"""Whole syncs between models on a GPU, whose payloads are coded and decoded there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltasync import (
    Policy,
    ReceiverOptions,
    SenderOptions,
)
from deltasync.delta.bits import as_bits
from deltasync.errors import SyncAborted, WrongBase
from deltasync.transports import inprocess
from tests.sync.decodings import decodings
from tests.sync.test_gpu import model
from tests.worlds.links import bits_equal, fleet, until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Chunks of which a row fits into a bucket of 1 MiB, although many of their elements change.
BLOCKS = SenderOptions(compression="block", policy=Policy(dense_above=0.9, chunk_numel=1 << 18))


def nudged(weights: Tensor, share: float) -> None:
    bits = as_bits(weights)
    bits += (torch.rand(weights.shape, device="cuda") < share).to(bits.dtype)


@pytest.mark.parametrize("link", ["cuda", "cpu"])
@pytest.mark.parametrize("snapshot_device", [None, "cpu"])
@pytest.mark.parametrize("share", [0.003, 0.3])
@pytest.mark.parametrize("strided", [False, True])  # then the receiver holds it in a box
def test_payloads_are_coded_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
    link: str,
    snapshot_device: str | None,
    share: float,
    *,
    strided: bool,
) -> None:
    decoded = decodings(monkeypatch)
    source, replica = (model(torch.bfloat16, 0, strided=strided) for _ in range(2))
    changes = {"snapshot_device": snapshot_device, "bucket_bytes": 1 << 20}
    options = BLOCKS.model_copy(update=changes | {"max_inflight_bytes": 1 << 26})
    with fleet(source, options=options, link=lambda: inprocess.Sender(device=link)) as here:
        assert here.join(replica).full_synced == 0
        for _ in range(3):
            for parameter in source.parameters():
                nudged(parameter.data, share)
            stats = here.sender.send_weights()
            assert stats.bytes_by_codec["block"] > 0.9 * stats.payload_bytes
            assert stats.payload_bytes < 2.5 * stats.nnz
        torch.cuda.synchronize()
        assert bits_equal(source, replica)
    assert decoded
    assert all(payload is not None and payload.is_cuda for payload in decoded)


def test_a_wrong_base_is_found_on_the_gpu_before_anything_is_written() -> None:
    source, target = (model(torch.bfloat16, 0) for _ in range(2))
    with fleet(source, options=BLOCKS) as here:
        serving = here.add(target, options=ReceiverOptions(scrub_every=0))
        here.wait(1)
        here.sender.send_weights()
        nudged(source.get_parameter("matrix").data, 0.01)
        changed = as_bits(source.get_parameter("matrix").data) != as_bits(
            target.get_parameter("matrix").data
        )
        as_bits(target.get_parameter("matrix").data)[tuple(changed.nonzero()[5])] ^= 64
        before = {name: weights.data.clone() for name, weights in target.named_parameters()}
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=20)
        until(lambda: bool(serving.errors))
        assert isinstance(serving.errors[-1], WrongBase)
        assert all(torch.equal(before[n], p.data) for n, p in target.named_parameters())
        here.wait(1)
        assert here.sender.send_weights(timeout_s=20).full_synced == 1
        torch.cuda.synchronize()
        assert bits_equal(source, target)
