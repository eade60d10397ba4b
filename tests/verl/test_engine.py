"""The checkpoint engine `deltasync`, driven as verl drives it, with rollouts that load by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync.delta.bits import as_bits
from deltasync.errors import ConfigError, SourceChanged, SyncAborted, TransportTimeout
from deltasync.integrations.verl import DeltaSyncEngine
from deltasync.transports import shared_memory
from deltasync.transports.base import Frame
from tests.verl.fleet import Fleet, Weights

Make = Callable[..., Fleet]


@pytest.fixture
def fleet() -> Iterator[Make]:
    made: list[Fleet] = []

    def make(weights: Weights, **kwargs: Any) -> Fleet:
        made.append(Fleet(weights, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def model() -> Weights:
    """A few tensors of several sizes."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    return {
        "embed.weight": draw(200, 64),
        "layers.0.proj.weight": draw(300, 500),
        "layers.0.norm.weight": draw(64),
        "head.weight": draw(64, 200),
    }


def test_rollouts_follow_bit_for_bit(fleet: Make) -> None:
    here = fleet(model())
    first = here.update()
    assert here.is_in_sync
    assert first["checkpoint_engine/changed_ratio"] == 1.0
    proj = here.weights["layers.0.proj.weight"]
    for step in range(3):
        proj.view(-1)[step::1000] *= -2
        metrics = here.update()
        assert here.is_in_sync
        assert metrics["checkpoint_engine/changed_elems"] == 150
        assert metrics["checkpoint_engine/version"] == step + 2
        ratio = (
            metrics["checkpoint_engine/payload_mbytes"] / first["checkpoint_engine/payload_mbytes"]
        )
        assert ratio < 0.01
    assert [replica.adapter.steps for replica in here.replicas] == [4, 4]


def test_an_engine_is_given_whole_tensors_that_changed_and_no_others(fleet: Make) -> None:
    here = fleet(model())
    here.update()
    assert all(set(replica.adapter.handed) == set(here.weights) for replica in here.replicas)
    here.weights["head.weight"][3, 4] = 7
    here.update()
    assert [replica.adapter.handed for replica in here.replicas] == [["head.weight"]] * 2
    assert here.is_in_sync


def test_nothing_changed(fleet: Make) -> None:
    here = fleet(model())
    here.update()
    metrics = here.update()
    assert metrics["checkpoint_engine/changed_elems"] == 0
    assert metrics["checkpoint_engine/payload_mbytes"] == 0
    assert [replica.adapter.handed for replica in here.replicas] == [[], []]


def test_all_tensors_are_handed_over_where_that_is_asked_for(fleet: Make) -> None:
    here = fleet(model(), hand_over="all", replicas=1)
    here.update()
    here.weights["head.weight"][0] = 0
    here.update()
    assert set(here.replicas[0].adapter.handed) == set(here.weights)


def test_empty_tensors_arrive(fleet: Make) -> None:
    weights = {"none": torch.empty(0, 8), "some": torch.ones(3), "scalar": torch.tensor(2.0)}
    here = fleet(weights, replicas=1)
    here.update()
    assert set(here.replicas[0].adapter.handed) == set(weights)
    assert here.is_in_sync


def test_dtypes_of_any_size_lie_beside_each_other(fleet: Make) -> None:
    weights = {
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "fp32": torch.ones(2),
        "byte": torch.ones(5, dtype=torch.uint8),
        "fp64": torch.ones(1, dtype=torch.float64),
        "fp8": torch.ones(7).to(torch.float8_e4m3fn),
    }
    here = fleet(weights, replicas=1)
    here.update()
    assert here.is_in_sync
    weights["fp32"][1], weights["bf16"][2] = 3, 4
    here.update()
    assert here.is_in_sync
    assert set(here.replicas[0].adapter.handed) == {"bf16", "fp32"}


def test_tensors_need_not_be_contiguous(fleet: Make) -> None:
    weights = {"t": torch.arange(600.0).view(20, 30).t(), "s": torch.arange(100.0)[::3]}
    here = fleet(weights, replicas=1)
    here.update()
    assert here.is_in_sync
    weights["t"][7, 5] = -1
    here.update()
    assert here.is_in_sync


def test_a_value_that_becomes_nan_arrives_with_its_bits(fleet: Make) -> None:
    weights = model()
    here = fleet(weights, replicas=1)
    here.update()
    bits = as_bits(weights["head.weight"]).view(-1)
    bits[5], bits[9] = 0x7FC1, 0x7F81  # a quiet and a signalling NaN with payloads
    metrics = here.update()
    assert metrics["checkpoint_engine/changed_elems"] == 2
    assert here.is_in_sync
    bits[5] = 0x7FC2  # another NaN
    assert here.update()["checkpoint_engine/changed_elems"] == 1
    assert here.is_in_sync


class Swapping(shared_memory.Sender):
    """Swaps two words of 8 bytes in the next payload, once it is told to."""

    is_armed = False

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        if frame.payload is not None and Swapping.is_armed:
            Swapping.is_armed = False
            words = frame.payload[len(frame.payload) % 8 :][-16:].clone()
            frame.payload[-16:] = torch.cat([words[8:], words[:8]])
        super().send(frame, timeout_s=timeout_s)


def test_words_that_were_swapped_on_their_way_are_noticed(
    fleet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "Sender", Swapping)
    here = fleet({"w": torch.arange(64, dtype=torch.int64)}, replicas=1)
    here.update()
    here.weights["w"].mul_(3)
    Swapping.is_armed = True
    with pytest.raises(SyncAborted, match="DigestMismatch"):
        here.update()
    assert not Swapping.is_armed
    here.update()
    assert here.is_in_sync


@pytest.mark.parametrize("bucket", [1, 4096, 1 << 30])
def test_a_row_may_be_larger_than_the_bucket(fleet: Make, bucket: int) -> None:
    numel = 2_000 if bucket == 1 else 90_001
    weights = {"wide": torch.randn(3, numel), "narrow": torch.randn(5)}
    here = fleet(weights, replicas=1, bucket=bucket)
    here.update()
    assert here.is_in_sync
    weights["wide"][1] += 1
    weights["wide"][2, ::500] = 0
    here.update()
    assert here.is_in_sync


def test_after_a_load_that_failed_all_is_given_again(fleet: Make) -> None:
    here = fleet(model())
    here.update()
    here.weights["embed.weight"].add_(1)
    here.weights["head.weight"].add_(1)
    broken, healthy = here.replicas
    broken.adapter.fails_after = 1
    with pytest.raises(RuntimeError, match="planted"):
        here.update()
    assert healthy.model.holds(here.weights)
    here.weights["layers.0.norm.weight"].add_(1)
    here.update()
    assert all(set(replica.adapter.handed) == set(here.weights) for replica in here.replicas)
    assert here.is_in_sync
    assert here.update()["checkpoint_engine/payload_mbytes"] == 0
    assert [replica.adapter.handed for replica in here.replicas] == [[], []]


def test_weights_that_go_back_after_a_failed_load_are_given_again(fleet: Make) -> None:
    here = fleet(model(), replicas=1)
    here.update()
    before = here.weights["head.weight"].clone()
    here.weights["head.weight"].add_(1)
    here.weights["embed.weight"].add_(1)
    adapter = here.replicas[0].adapter
    adapter.fails_after = 1
    with pytest.raises(RuntimeError, match="planted"):
        here.update()
    here.weights["head.weight"].copy_(before)
    here.update()
    assert here.is_in_sync


def test_a_replica_that_is_added_later_gets_everything(fleet: Make) -> None:
    here = fleet(model(), replicas=1)
    here.update()
    here.weights["head.weight"][0] = 1
    added = here.add()
    metrics = here.update()
    assert here.is_in_sync
    assert set(added.adapter.handed) == set(here.weights)
    assert here.replicas[0].adapter.handed == ["head.weight"]
    assert metrics["checkpoint_engine/full_synced"] == 1
    here.weights["head.weight"][0] = 2
    assert here.update()["checkpoint_engine/full_synced"] == 0
    assert here.is_in_sync


def test_a_replica_that_was_removed_is_not_waited_for(fleet: Make) -> None:
    here = fleet(model(), replicas=2)
    here.update()
    removed = here.replicas.pop()
    here.weights["head.weight"][0] = 1
    metrics = here.update()
    assert here.is_in_sync
    assert metrics["checkpoint_engine/transfer_s"] < 5
    here.replicas.append(removed)
    here.update()
    assert here.is_in_sync


def test_an_engine_that_has_lost_its_weights_gets_all_of_them(fleet: Make) -> None:
    here = fleet(model(), replicas=1)
    here.update()
    (replica,) = here.replicas
    for parameter in replica.model.parameters():
        parameter.zero_()
    replica.engine.forget()
    metrics = here.update()
    assert metrics["checkpoint_engine/payload_mbytes"] == 0  # the worker has them still
    assert here.is_in_sync


def test_weights_are_sent_in_the_dtype_that_is_asked_for(fleet: Make) -> None:
    weights = {"w": torch.randn(1000), "bias": torch.randn(10)}
    here = fleet(weights, replicas=1, sender={"wire_dtypes": {"w": "bfloat16"}})
    here.update()
    assert torch.equal(here.replicas[0].model["w"], weights["w"].bfloat16().float())
    assert torch.equal(here.replicas[0].model["bias"], weights["bias"])
    weights["w"] *= 1 + 2.0**-16  # which bfloat16 does not see, but for few
    assert here.update()["checkpoint_engine/changed_ratio"] < 0.1
    assert torch.equal(here.replicas[0].model["w"], weights["w"].bfloat16().float())


def test_every_rank_of_the_trainer_takes_part_in_gathering(fleet: Make) -> None:
    here = fleet(model(), ranks=3, replicas=1, timeout_s=3.0)
    here.update()
    assert here.drained == 3
    missing = here.weights.pop("head.weight")
    with pytest.raises(SourceChanged, match=r"head\.weight"):
        here.update()
    assert here.drained == 6
    here.weights["head.weight"] = missing
    here.update()
    assert here.is_in_sync


def test_an_export_that_fails_costs_one_update(fleet: Make) -> None:
    here = fleet(model(), timeout_s=2.0)
    here.update()
    here.weights["layers.0.proj.weight"].add_(1)

    def failing() -> Iterator[tuple[str, Tensor]]:
        exported = here.exported()
        yield next(exported)
        yield next(exported)
        raise RuntimeError("planted: a rank is gone")

    with pytest.raises(RuntimeError, match="planted"):
        here.update(failing())
    here.update()
    assert here.is_in_sync


def test_a_rollout_that_is_gone_costs_one_update(fleet: Make) -> None:
    here = fleet(model(), timeout_s=3.0)
    here.update()
    here.weights["head.weight"].add_(1)
    here.replicas[1].engine.close()
    with pytest.raises(TransportTimeout, match="1 of 2"):
        here.update()
    here.replicas.pop()
    here.add()
    here.weights["head.weight"].add_(1)
    here.update()
    assert here.is_in_sync


def test_an_update_that_was_given_up_does_not_disturb_the_next(fleet: Make) -> None:
    here = fleet(model(), replicas=1)
    here.update()
    (replica,) = here.replicas

    async def begin() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(replica.engine.receive_weights()), 0.2)

    asyncio.run(begin())  # nobody sends
    here.weights["head.weight"].add_(1)
    here.update()
    assert here.is_in_sync


def test_a_load_that_lags_behind_counts_for_nothing(fleet: Make) -> None:
    here = fleet(model(), replicas=1)
    (replica,) = here.replicas
    late: list[BaseException] = []

    async def lag(weights: AsyncIterator[tuple[str, Tensor]]) -> None:
        await anext(weights)
        replica.engine.prepare()  # of the next update: verl has given this one up
        with pytest.raises(SyncAborted, match="given up") as caught:
            await anext(weights)
        late.append(caught.value)

    load = replica.adapter.update_weights
    replica.adapter.update_weights = lambda weights, *_: lag(weights)  # type: ignore[method-assign]
    here.update()
    assert late
    replica.adapter.update_weights = load  # type: ignore[method-assign]
    here.update()
    assert here.is_in_sync


def test_what_cannot_be_configured_is_refused() -> None:
    with pytest.raises(ConfigError, match="density_treshold"):
        DeltaSyncEngine(1 << 20, density_treshold=0.1)
    with pytest.raises(ConfigError, match="link"):
        DeltaSyncEngine(1 << 20, link="carrier pigeon")
    with pytest.raises(ConfigError, match="sender"):
        DeltaSyncEngine(1 << 20, sender=None)
    with pytest.raises(ConfigError, match="receives nothing"):
        DeltaSyncEngine(1 << 20, is_master=True).forget()
