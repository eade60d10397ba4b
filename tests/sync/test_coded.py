"""Coded payloads on live links: what is saved, and what a wrong base does."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import Tensor

from deltasync import ModuleSource, SenderOptions, TrainerRank, WeightSender
from deltasync.delta.codecs.coding import Coding
from deltasync.delta.policy import Policy
from deltasync.errors import ConfigError, SyncAborted, WrongBase
from deltasync.sync.protocol.round import SyncPhase
from deltasync.transports import inprocess
from deltasync.transports.base import Capabilities
from tests.worlds.links import Model, Receivers, ThroughSender, bits_equal, fleet, until

ONLY_SPARSE, ALL_DENSE = Policy(dense_above=1.0), Policy(dense_above=0.0)


def nudged(weights: Tensor, share: float, generator: torch.Generator) -> None:
    """Move a share of bfloat16 weights by one ULP."""
    bits = weights.view(torch.int16)
    where = torch.rand(bits.shape, generator=generator) < share
    sign = torch.randint(0, 2, bits.shape, generator=generator, dtype=torch.int16) * 2 - 1
    bits[where] += sign[where]


def model(seed: int, numel: int = 400_000) -> Model:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (numel // 1000, 1000), "b": (17,), "c": ()}
    return Model(
        {n: (torch.randn(s, generator=generator) * 0.02).bfloat16() for n, s in shapes.items()}
    )


@pytest.mark.parametrize(("coding", "most"), [("block", 1.9), ("class", 1.3)])
def test_a_codec_that_is_asked_for_takes_the_bytes(coding: Coding, most: float) -> None:
    source, target = model(1), model(1)
    options = SenderOptions(compression=coding, policy=ONLY_SPARSE)
    with fleet(source, options=options) as here:
        here.add(target)
        here.wait(1)
        for seed in (2, 3):
            nudged(source.get_parameter("a").data, 0.008, torch.Generator().manual_seed(seed))
            stats = here.sender.send_weights()
            assert bits_equal(source, target)
        assert stats.payload_bytes / stats.nnz < most
        assert stats.bytes_by_codec[coding] > 0.9 * stats.payload_bytes


@pytest.mark.parametrize(
    ("share", "most", "policy"),
    [
        (0.008, 1.4, ONLY_SPARSE),
        (0.1, 0.9, ONLY_SPARSE),
        (0.5, 0.6, ONLY_SPARSE),
        (0.1, 1.5, ALL_DENSE),
        (0.5, 0.6, ALL_DENSE),
    ],
)
def test_a_change_of_one_step_takes_about_its_entropy(
    share: float, most: float, policy: Policy
) -> None:
    source, target = model(1), model(1)
    options = SenderOptions(compression="gap", policy=policy)
    with fleet(source, options=options) as here:
        here.add(target)
        here.wait(1)
        here.sender.send_weights()
        nudged(source.get_parameter("a").data, share, torch.Generator().manual_seed(2))
        stats = here.sender.send_weights()
        assert bits_equal(source, target)
        assert stats.payload_bytes / stats.nnz < most
        assert sum(stats.bytes_by_codec.values()) == stats.payload_bytes
        name = "gap+ulp" if policy is ONLY_SPARSE else "dense+ulp"
        assert stats.bytes_by_codec[name] > 0.9 * stats.payload_bytes


@pytest.mark.parametrize("coding", ["gap", "block", "class"])
def test_a_wrong_base_is_found_before_anything_is_written(coding: Coding) -> None:
    source, target = model(1), model(1)
    with fleet(source, options=SenderOptions(compression=coding, policy=ONLY_SPARSE)) as here:
        serving = here.add(target)
        here.wait(1)
        here.sender.send_weights()
        source.get_parameter("a").data.view(torch.int16)[0] ^= 1
        found = target.get_parameter("a").data
        found.view(torch.int16)[0, 7] ^= 4  # something else has written to it
        before = found.clone()
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=5)
        until(lambda: bool(serving.errors))
        assert isinstance(serving.errors[-1], WrongBase)
        assert torch.equal(found.view(torch.int16), before.view(torch.int16))
        assert not serving.receiver.is_dirty
        here.wait(1)  # it measures its weights, which are no member's
        assert here.sender.send_weights(timeout_s=5).full_synced == 1
        assert bits_equal(source, target)


def test_a_change_that_gaps_do_not_pay_for_stays_raw_in_a_coded_payload() -> None:
    weights = {"a": torch.zeros(300_000), "b": torch.zeros(1000)}
    source, target = (Model({n: w.bfloat16() for n, w in weights.items()}) for _ in range(2))
    with fleet(source, options=SenderOptions(compression="gap", policy=ONLY_SPARSE)) as here:
        here.add(target)
        here.wait(1)
        here.sender.send_weights()
        source.get_parameter("a").data[299_999] = 1
        source.get_parameter("b").data[::2] = 1
        stats = here.sender.send_weights()
        assert bits_equal(source, target)
        assert any("raw" in name for name in stats.bytes_by_codec), stats.bytes_by_codec


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
        generator = torch.Generator().manual_seed(2)
        nudged(source.get_parameter("a").data, 0.1, generator)
        here.sender.send_weights()
        nudged(source.get_parameter("a").data, 0.1, generator)
        with pytest.raises(RuntimeError, match="not yet"):
            here.sender.send_weights()
        assert here.sender.send_weights().full_synced == 0
        assert bits_equal(source, target)


def test_a_codec_that_this_build_has_not_is_refused() -> None:
    with pytest.raises(ConfigError):
        SenderOptions(compression="lzma")  # type: ignore[arg-type]


class BetweenGpus(ThroughSender):
    """A link whose payloads would be in the memory of GPUs."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(("cuda",), None)


def test_class_is_refused_on_links_of_gpus() -> None:
    source, options = ModuleSource(model(1)), SenderOptions(compression="class")
    inner = inprocess.Sender()
    link = BetweenGpus(inner)
    with pytest.raises(ConfigError, match="cuda memory: use 'block'"):
        WeightSender(source, link, options=options)
    with pytest.raises(ConfigError, match="cuda memory: use 'block'"):
        TrainerRank(source, link, inner.receiver(), rank=1, world=2, options=options)
    with WeightSender(source, link, options=SenderOptions(compression="block")) as sender:
        with pytest.raises(ConfigError, match="for stores, patch files"):
            sender.options = options
        assert sender.options.compression == "block"


def test_options_that_are_replaced_take_effect_though_they_were_used() -> None:
    source, target = model(4), model(4)
    options = SenderOptions(compression="gap", policy=ALL_DENSE)
    with fleet(source, options=options) as here:
        here.add(target)
        here.wait(1)
        shares = []
        for seed, policy in enumerate((ALL_DENSE, ONLY_SPARSE)):
            here.sender.options = options.model_copy(update={"policy": policy})
            nudged(source.get_parameter("a").data, 0.008, torch.Generator().manual_seed(seed))
            shares.append(here.sender.send_weights().payload_bytes / 800_000)
            assert bits_equal(source, target)
    assert shares[0] > 0.1 > shares[1]
