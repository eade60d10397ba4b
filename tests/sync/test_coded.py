"""Whole syncs whose payloads are coded, or compared and written by kernels: what is saved, and what
wrong bases and damage do. Kernels are interpreted where there is no GPU."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import Tensor

from deltasync import ModuleSource, ReceiverOptions, SenderOptions, TrainerRank, WeightSender
from deltasync.delta.snapshot import Kernels
from deltasync.delta.coding import Coding
from deltasync.delta.kernels import triton_base
from deltasync.delta.policy import Policy
from deltasync.errors import ConfigError, SyncAborted, WrongBase
from deltasync.sync.protocol.round import SyncPhase
from deltasync.transports import inprocess
from tests.sync.decodings import decodings
from tests.sync.interpreted import one_kernel_at_a_time
from tests.worlds.links import (
    Model,
    Receivers,
    bits_equal,
    fleet,
)
from tests.worlds.toy_engines import fails, joined, recovers

__all__ = ["one_kernel_at_a_time"]  # pytest uses it
ONLY_SPARSE, ALL_DENSE = Policy(dense_above=1.0), Policy(dense_above=0.0)
BLOCKS = SenderOptions(
    compression="block",
    policy=Policy(dense_above=0.9, chunk_numel=1000),
    max_inflight_bytes=1 << 20,
)
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
    ("coding", "policy", "share", "most", "codec"),
    [
        ("block", ONLY_SPARSE, 0.008, 1.9, "block"),
        ("gap", ONLY_SPARSE, 0.008, 1.4, "gap+ulp"),
        ("gap", Policy(), 0.4, 0.7, "gap+ulp"),  # a codec has chunks go dense above a half
        ("gap", ALL_DENSE, 0.5, 0.6, "dense+ulp"),
    ],
)
def test_a_change_of_one_step_takes_about_its_entropy(
    coding: Coding, policy: Policy, share: float, most: float, codec: str
) -> None:
    source, target = model(1, 800), model(1, 800)
    options = SenderOptions(compression=coding, policy=policy)
    with joined(source, target, options=options) as here:
        for seed in (2, 3):
            nudged(source.get_parameter("a").data, share, seed)
            stats = here.sender.send_weights()
            assert bits_equal(source, target)
            assert stats.payload_bytes / stats.nnz < most
            assert sum(stats.bytes_by_codec.values()) == stats.payload_bytes
            assert stats.bytes_by_codec[codec] > 0.9 * stats.payload_bytes


@pytest.mark.parametrize(
    ("sender", "coding", "bucket_bytes"),
    [
        ("torch", "block", 3000),
        pytest.param("triton", "none", 3000, marks=interpreted),
        pytest.param("triton", "block", None, marks=interpreted),
    ],
)
def test_ends_agree_whatever_compares_codes_and_writes(
    sender: Kernels, coding: Coding, bucket_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = decodings(monkeypatch)
    source, first = model(1), 1 if coding == "block" else 2
    changes = {"compression": coding, "kernels": sender, "bucket_bytes": bucket_bytes}
    options = BLOCKS.model_copy(update=changes)
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
            if coding == "block":
                assert stats.bytes_by_codec["block"] > 0.6 * stats.payload_bytes
                assert stats.payload_bytes < 4 * stats.nnz
        stats = here.sender.send_weights()
        assert (stats.nnz, stats.num_buckets, stats.receivers) == (0, 0, 4)
    assert not (coding == "block" and sender == "triton") or any(d is not None for d in decoded)


@interpreted
def test_what_has_no_old_bits_stays_raw() -> None:
    """A full sync, and changes that are not held until the decision."""
    source, target = model(1), model(2)
    options = BLOCKS.model_copy(update={"kernels": "triton", "max_inflight_bytes": 0})
    receiving = ReceiverOptions(kernels="triton")
    with joined(source, target, options=options, receiving=receiving) as here:
        all_stats = [here.first]
        for seed in range(2):
            change(source, seed)
            all_stats.append(here.sender.send_weights())
            assert bits_equal(source, target)
    assert [stats.full_synced for stats in all_stats] == [1, 0, 0]
    assert all(stats.bytes_by_codec == {"none": stats.payload_bytes} for stats in all_stats)


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
    "A GPU decodes and refuses the payloads that the host decodes and refuses, before "
    "anything is written.",
)
@pytest.mark.parametrize(
    ("coding", "kernels", "staged_bytes"),
    [("gap", "torch", None), pytest.param("block", "triton", 0, marks=interpreted)],
)
def test_a_wrong_base_is_found_before_anything_is_written(
    coding: Coding, kernels: Kernels, staged_bytes: int | None
) -> None:
    source, target = model(1), model(1)
    changes = {"compression": coding, "policy": ONLY_SPARSE, "kernels": kernels}
    options = BLOCKS.model_copy(update=changes)
    receiving = ReceiverOptions(kernels=kernels, max_staged_bytes=staged_bytes, scrub_every=0)
    with joined(source, target, options=options, receiving=receiving) as here:
        source.get_parameter("a").data.view(torch.int16)[0] ^= 1
        # Something else has written to it.
        target.get_parameter("a").data.view(torch.int16)[0, 7] ^= 4
        before = {n: p.data.clone() for n, p in target.named_parameters()}
        assert isinstance(fails(here), WrongBase)
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
    options = SenderOptions(compression="gap", policy=ALL_DENSE, max_inflight_bytes=0)
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
    with WeightSender(source, link, options=SenderOptions(compression="block")) as sender:
        with pytest.raises(ConfigError, match="for stores and patch files"):
            sender.options = options
        assert sender.options.compression == "block"


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
