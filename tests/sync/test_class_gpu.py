"""Whole syncs of `class` between models on a GPU, whose payloads are coded and decoded there."""

from __future__ import annotations

import pytest
import torch

from deltasync import (
    ModuleSource,
    ModuleTarget,
    Policy,
    SenderOptions,
    WeightReceiver,
    WeightSender,
)
from deltasync.transports import inprocess
from tests.sync.decodings import decodings
from tests.sync.harness import Serving, bits_equal
from tests.sync.test_coded_gpu import nudged
from tests.sync.test_gpu import model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("link", ["cuda", "cpu"])
@pytest.mark.parametrize("share", [0.003, 0.3])
@pytest.mark.parametrize("strided", [False, True])  # then the host decodes
def test_payloads_are_coded_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, link: str, share: float, *, strided: bool
) -> None:
    decoded = decodings(monkeypatch)
    source, replica = (model(torch.bfloat16, 0, strided=strided) for _ in range(2))
    transport = inprocess.Sender(device=link)
    options = SenderOptions(
        compression="class",
        policy=Policy(dense_above=0.9, chunk_numel=1 << 18),  # a row fits into a bucket
        bucket_bytes=1 << 20,
        max_inflight_bytes=1 << 26,
    )
    sender = WeightSender(ModuleSource(source), transport, options=options)
    serving = Serving(WeightReceiver(ModuleTarget(replica), transport.receiver())).start()
    try:
        sender.wait_for_receivers(1)
        assert sender.send_weights().full_synced == 0
        for _ in range(3):
            for parameter in source.parameters():
                nudged(parameter.data, share)
            assert sender.send_weights().bytes_by_codec["class"] > 0
        torch.cuda.synchronize()
        assert bits_equal(source, replica)
        assert decoded
        assert all(payload is not None and payload.is_cuda for payload in decoded) or strided
    finally:
        sender.close()
        serving.stop()
