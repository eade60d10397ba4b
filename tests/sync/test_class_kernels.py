"""Whole syncs of `class` whose payloads kernels code and decode, interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltasync import ReceiverOptions
from deltasync.delta.backend import Kernels
from deltasync.delta.codecs import coding
from deltasync.errors import SyncAborted, WrongBase
from tests.sync.decodings import decodings
from tests.sync.harness import Model, bits_equal, fleet, until
from tests.sync.interpreted import one_kernel_at_a_time
from tests.sync.test_coded_kernels import BLOCKS, change
from tests.sync.test_coded_kernels import model as sized_model

__all__ = ["one_kernel_at_a_time"]  # pytest uses it
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here: see test_gpu.py", allow_module_level=True)

CLASSES = BLOCKS.model_copy(update={"compression": "class"})


@pytest.fixture
def only_there(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """What devices have decoded. The host may neither code nor decode any."""

    def refused(*_: object) -> None:
        pytest.fail("coded on the host")

    monkeypatch.setattr(coding, "_on_host", refused)
    return decodings(monkeypatch)


def model(seed: int) -> Model:
    return sized_model(seed, rows=10, masters=900)


def test_nothing_goes_over_the_host(only_there: list[Tensor | None]) -> None:
    source, *targets = (model(1) for _ in range(3))
    with fleet(source, options=CLASSES) as here:
        for nth, (target, staged) in enumerate(zip(targets, (None, 0), strict=True)):
            options = ReceiverOptions(kernels="triton", max_staged_bytes=staged)
            here.add(target, engine=f"{nth}", options=options)
        here.wait(2)
        assert here.sender.send_weights().full_synced == 0
        for seed, share in enumerate((0.02, 0.3)):
            change(source, seed, share)
            stats = here.sender.send_weights()
            assert (stats.receivers, stats.lost) == (2, {})
            assert all(bits_equal(source, target) for target in targets)
            assert stats.bytes_by_codec["class"] > 0.3 * stats.payload_bytes
            assert stats.payload_bytes < 4 * stats.nnz
    assert len(only_there) == 4
    assert all(payload is not None for payload in only_there)


@pytest.mark.parametrize(("sender", "receiver"), [("triton", "torch"), ("torch", "triton")])
def test_ends_agree_wherever_payloads_are_coded(sender: Kernels, receiver: Kernels) -> None:
    source, target = model(1), model(1)
    options = CLASSES.model_copy(update={"kernels": sender})
    with fleet(source, options=options) as here:
        here.add(target, options=ReceiverOptions(kernels=receiver))
        here.wait(1)
        here.sender.send_weights()
        change(source, 1, 0.1)
        stats = here.sender.send_weights()
        assert stats.bytes_by_codec["class"] > 0
        assert bits_equal(source, target)


def test_a_wrong_base_is_found_before_anything_is_written() -> None:
    source, target = model(1), model(1)
    with fleet(source, options=CLASSES) as here:
        options = ReceiverOptions(kernels="triton", scrub_every=0)
        serving = here.add(target, options=options)
        here.wait(1)
        here.sender.send_weights()
        change(source, 1, 0.1)
        target.get_parameter("a").data.view(torch.int16)[:, ::3] ^= 0x1040  # something else wrote
        before = {n: p.data.clone() for n, p in target.named_parameters()}
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=60)
        until(lambda: bool(serving.errors))
        assert isinstance(serving.errors[-1], WrongBase)
        assert all(torch.equal(before[n], p.data) for n, p in target.named_parameters())
        assert not serving.receiver.is_dirty
        here.wait(1)
        assert here.sender.send_weights(timeout_s=60).full_synced == 1
        assert bits_equal(source, target)
