"""Whole syncs whose payloads are coded, or compared and written by kernels: what is saved, and what
wrong bases do. Kernels are interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from deltasync import (
    ModuleSource,
    ReceiverOptions,
    SenderOptions,
    TrainerRank,
    WeightSender,
)
from deltasync.delta.choice import Kernels
from deltasync.delta.coding import Coding
from deltasync.delta.kernels import triton_base
from deltasync.errors import ConfigError, SyncAborted
from deltasync.transports import inprocess
from tests.sync.interpreted import one_kernel_at_a_time
from tests.worlds.links import Model, bits_equal
from tests.worlds.toy_engines import fails, joined, recovers

__all__ = ["one_kernel_at_a_time"]  # pytest uses it
GAPS = SenderOptions(compression="gap", max_inflight_bytes=1 << 20)
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: see test_gpu.py"
)


def model(seed: int, rows: int = 20) -> Model:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (rows, 500), "b": (17,), "c": (), "d": (1500,), "e": (0, 4)}
    made = {n: torch.randn(s, generator=generator) * 0.02 for n, s in shapes.items()}
    return Model({n: t if n == "d" else t.bfloat16() for n, t in made.items()})


@pytest.mark.parametrize(
    ("share", "most"),
    [(0.008, 1.4), (0.4, 0.7), (0.6, 0.6)],  # in lanes, and in whole tiles
)
def test_a_change_of_one_step_takes_about_its_entropy(share: float, most: float) -> None:
    source, target = model(1, 800), model(1, 800)
    with joined(source, target, options=SenderOptions(compression="gap")) as here:
        for _ in range(2):
            bits = source.get_parameter("a").data.view(torch.int16)
            bits += torch.rand(bits.shape) < share
            stats = here.sender.send_weights()
            assert bits_equal(source, target)
            assert stats.payload_bytes / stats.nnz < most
            assert stats.bytes_by_codec == {"gap": stats.payload_bytes}


@pytest.mark.promise(
    "Errors",
    "A staged delta that was made from other weights is refused before anything is written.",
)
@pytest.mark.parametrize(
    ("device", "coding", "kernels"),
    [
        ("cpu", "none", "torch"),
        ("cpu", "gap", "torch"),
        pytest.param("cpu", "none", "triton", marks=interpreted),
        pytest.param("cuda", "none", "triton", marks=pytest.mark.gpu),
    ],
)
def test_a_wrong_base_is_found_before_anything_is_written(
    device: str, coding: Coding, kernels: Kernels
) -> None:
    source, target = model(1).to(device), model(1).to(device)
    options = GAPS.model_copy(update={"compression": coding, "kernels": kernels})
    receiving = ReceiverOptions(kernels=kernels, scrub_every=0)
    with joined(source, target, options=options, receiving=receiving) as here:
        source.get_parameter("a").data.view(torch.int16)[0] ^= 1
        # Something else has written to it.
        target.get_parameter("a").data.view(torch.int16)[0, 7] ^= 4
        before = {n: p.data.clone() for n, p in target.named_parameters()}
        fails(here, "DigestMismatch: it would not arrive at our weights")
        assert all(torch.equal(before[n], p.data) for n, p in target.named_parameters())
        assert not here.serving["engine/0"].receiver.is_dirty
        assert recovers(here).full_synced == 1  # it measures its weights, which are no member's
        assert bits_equal(source, target)


def test_a_codec_that_links_do_not_take_is_refused() -> None:
    source, options = ModuleSource(model(1)), SenderOptions(compression="class")
    with inprocess.Sender() as link:
        with pytest.raises(ConfigError, match="for stores and patch files"):
            WeightSender(source, link, options=options)
        with pytest.raises(ConfigError, match="for stores and patch files"):
            TrainerRank(source, link, link.receiver(), rank=1, world=2, options=options)


@interpreted
def test_payloads_are_zstd_where_weights_have_no_codec() -> None:
    source, target = model(1), model(1)
    options = GAPS.model_copy(update={"kernels": "triton"})
    with joined(source, target, options=options) as here:
        source.get_parameter("a").data.view(torch.int16)[:] += 1
        stats = here.sender.send_weights()
        assert bits_equal(source, target)
        assert stats.bytes_by_codec == {"zstd": stats.payload_bytes}


@interpreted
def test_kernels_are_refused_on_a_cpu_where_nothing_interprets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_base, "IS_INTERPRETED", False)
    options, receiving = SenderOptions(kernels="torch"), ReceiverOptions(kernels="triton")
    with (
        pytest.raises(SyncAborted, match="kernels='triton' is not possible here: the weights live"),
        joined(model(1), model(1), options=options, receiving=receiving),
    ):
        pass
