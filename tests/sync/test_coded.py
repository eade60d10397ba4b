"""Whole syncs whose payloads are coded, or compared and written by kernels: what is saved, and what
wrong bases do. Kernels are interpreted where there is no GPU."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync import (
    ModuleSource,
    ReceiverOptions,
    SenderOptions,
    StoreSender,
    TrainerRank,
    WeightSender,
)
from deltasync.delta.choice import Kernels
from deltasync.delta.coding import Coding
from deltasync.delta.kernels import triton_base
from deltasync.errors import ConfigError, SyncAborted
from deltasync.sync.protocol.round import SyncPhase
from deltasync.transports import inprocess
from tests.sync.interpreted import one_kernel_at_a_time
from tests.worlds.links import (
    Model,
    Receivers,
    bits_equal,
    fleet,
)
from tests.worlds.toy_engines import fails, joined, recovers

__all__ = ["one_kernel_at_a_time"]  # pytest uses it
GAPS = SenderOptions(compression="gap", max_inflight_bytes=1 << 20)
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: see test_coded_gpu.py"
)


def nudged(weights: Tensor, share: float, seed: int) -> None:
    """Move a share of bfloat16 weights by one ULP."""
    generator, bits = torch.Generator().manual_seed(seed), weights.view(torch.int16)
    where = torch.rand(bits.shape, generator=generator) < share
    sign = torch.randint(0, 2, bits.shape, generator=generator, dtype=torch.int16) * 2 - 1
    bits[where] += sign[where]


def model(seed: int, rows: int = 20) -> Model:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (rows, 500), "b": (17,), "c": (), "d": (1500,), "e": (0, 4)}
    made = {n: torch.randn(s, generator=generator) * 0.02 for n, s in shapes.items()}
    return Model({n: t if n == "d" else t.bfloat16() for n, t in made.items()})


def change(source: Model, seed: int, share: float = 0.05) -> None:
    for name in "abc":
        nudged(source.get_parameter(name).data, share, seed)
    masters = source.get_parameter("d").data
    masters[torch.rand(len(masters), generator=torch.Generator().manual_seed(seed)) < share] *= (
        1.0001
    )


@pytest.mark.parametrize(
    ("share", "most"),
    [(0.008, 1.4), (0.4, 0.7), (0.6, 0.6)],  # in lanes, and in whole tiles
)
def test_a_change_of_one_step_takes_about_its_entropy(share: float, most: float) -> None:
    source, target = model(1, 800), model(1, 800)
    with joined(source, target, options=SenderOptions(compression="gap")) as here:
        for seed in (2, 3):
            nudged(source.get_parameter("a").data, share, seed)
            stats = here.sender.send_weights()
            assert bits_equal(source, target)
            assert stats.payload_bytes / stats.nnz < most
            assert stats.bytes_by_codec == {"gap": stats.payload_bytes}


@pytest.mark.parametrize(
    ("sender", "coding", "bucket_bytes"),
    [
        ("torch", "gap", 3000),
        ("torch", "zstd", None),
        pytest.param("triton", "none", 3000, marks=interpreted),
        pytest.param("triton", "gap", None, marks=interpreted),
    ],
)
def test_ends_agree_whatever_compares_codes_and_writes(
    sender: Kernels, coding: Coding, bucket_bytes: int | None
) -> None:
    source, first = model(1), 2 if coding == "none" else 1
    changes = {"compression": coding, "kernels": sender, "bucket_bytes": bucket_bytes}
    options = GAPS.model_copy(update=changes)
    with fleet(source, options=options) as here:
        targets = [model(first) for _ in range(4)]
        for nth, target in enumerate(targets):
            receiving = ReceiverOptions(
                kernels="torch" if nth < 2 or torch.cuda.is_available() else "triton",
                max_staged_bytes=0 if nth % 2 else None,
            )
            here.add(target, engine=f"{nth}", options=receiving)
        here.wait(4)
        stats = here.sender.send_weights()
        assert stats.full_synced == (0 if first == 1 else 4)
        for seed, share in enumerate((0.02, 0.3)):
            change(source, seed, share)
            stats = here.sender.send_weights()
            assert (stats.kind, stats.receivers, stats.lost) == ("delta", 4, {})
            assert all(bits_equal(source, target) for target in targets)
            # Where kernels compare, nobody on a host has the old bits.
            coded = coding if sender == "torch" or coding == "none" else "zstd"
            assert stats.bytes_by_codec[coded] > 0.9 * stats.payload_bytes
            if coding == "gap" and sender == "torch":
                assert stats.payload_bytes < 3 * stats.nnz
        stats = here.sender.send_weights()
        assert (stats.nnz, stats.num_buckets, stats.receivers) == (0, 0, 4)


def test_what_has_no_old_bits_is_compressed_by_zstd() -> None:
    source, target = model(1), model(2)
    with joined(source, target, options=GAPS) as here:
        assert here.first.full_synced == 1
        assert here.first.bytes_by_codec == {"zstd": here.first.payload_bytes}
        assert bits_equal(source, target)


@interpreted
def test_what_kernels_cannot_read_in_place_is_copied_at_each_sync() -> None:
    source, replica = model(1), model(2)
    matrix = source.get_parameter("a")
    matrix.data = matrix.data.T.contiguous().T
    options, receiving = SenderOptions(kernels="triton"), ReceiverOptions(kernels="triton")
    with joined(source, replica, options=options, receiving=receiving) as here:
        for number in range(3):
            matrix.data[number, 0] += 1
            assert here.sender.send_weights().nnz == 1
            assert bits_equal(source, replica)


@pytest.mark.promise(
    "Errors",
    "A staged delta that was made from other weights is refused before anything is written.",
)
@pytest.mark.parametrize(
    ("coding", "kernels"),
    [("none", "torch"), ("gap", "torch"), pytest.param("none", "triton", marks=interpreted)],
)
def test_a_wrong_base_is_found_before_anything_is_written(coding: Coding, kernels: Kernels) -> None:
    source, target = model(1), model(1)
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


def test_what_an_aborted_sync_overwrote_is_not_coded_against() -> None:
    """With nothing held, the snapshot has the new bits as soon as they are packed."""
    source, target = model(1), model(1)
    failures = [RuntimeError("not yet")]

    def on_phase(phase: SyncPhase) -> None:
        if phase.version == 3 and failures:
            raise failures.pop()

    link = inprocess.Sender()
    options = SenderOptions(compression="gap", max_inflight_bytes=0)
    with closing(Receivers([link])) as here:
        here.sender = WeightSender(ModuleSource(source), link, options=options, on_phase=on_phase)
        here.add(target)
        here.wait(1)
        here.sender.send_weights()
        nudged(source.get_parameter("a").data, 0.1, 2)
        here.sender.send_weights()
        nudged(source.get_parameter("a").data, 0.1, 3)
        with pytest.raises(RuntimeError, match="not yet"):
            here.sender.send_weights()
        assert here.sender.send_weights().full_synced == 0
        assert bits_equal(source, target)


def test_class_is_refused_on_links() -> None:
    source, options = ModuleSource(model(1)), SenderOptions(compression="class")
    link = inprocess.Sender()
    with pytest.raises(ConfigError, match="for stores and patch files"):
        WeightSender(source, link, options=options)
    with pytest.raises(ConfigError, match="for stores and patch files"):
        TrainerRank(source, link, link.receiver(), rank=1, world=2, options=options)
    with WeightSender(source, link, options=SenderOptions(compression="gap")) as sender:
        with pytest.raises(ConfigError, match="for stores and patch files"):
            sender.options = options
        assert sender.options.compression == "gap"


def test_codecs_of_changes_are_refused_where_kernels_compare_on_a_gpu(tmp_path: Path) -> None:
    there = SimpleNamespace(device=torch.device("cuda", 0), numel=lambda: 4)
    source: Any = SimpleNamespace(tensors=lambda: [SimpleNamespace(tensor=there)])
    gap, link = SenderOptions(compression="gap"), inprocess.Sender()
    with pytest.raises(ConfigError, match="made on hosts"):
        WeightSender(source, link, options=gap)
    with pytest.raises(ConfigError, match="made on hosts"):
        TrainerRank(source, link, link.receiver(), rank=1, world=2, options=gap)
    with pytest.raises(ConfigError, match="made on hosts"):
        StoreSender(source, tmp_path, options=SenderOptions(compression="class"))
    StoreSender(source, tmp_path)
    with WeightSender(source, link) as sender:
        with pytest.raises(ConfigError, match="made on hosts"):
            sender.options = gap
        sender.options = SenderOptions(compression="zstd")


@interpreted
@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_kernels_are_refused_on_a_cpu_where_nothing_interprets_them(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_base, "IS_INTERPRETED", False)
    options = SenderOptions(kernels="triton" if end == "sender" else "auto")
    receiving = ReceiverOptions(kernels="auto" if end == "sender" else "triton")
    reason = "kernels='triton' is not possible here: the weights live on a CPU, and TRITON_INTERP"
    with (
        pytest.raises(SyncAborted, match=reason),
        joined(model(1), model(1), options=options, receiving=receiving),
    ):
        pass
