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


def test_all_tensors_are_handed_over_where_that_is_asked_for(fleet: Make) -> None:
    here = fleet(model(), hand_over="all", replicas=1)
    here.update()
    here.weights["head.weight"][0] = 0
    here.update()
    assert set(here.replicas[0].adapter.handed) == set(here.weights)


DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.float64, torch.float8_e4m3fn]
# Tensors of all kinds, how large a bucket is, and the elements that change, by their bits.
TENSORS: dict[str, tuple[Weights, int, dict[str, list[int]]]] = {
    "empty and scalar": (
        {"none": torch.empty(0, 8), "some": torch.ones(3), "scalar": torch.tensor(2.0)},
        1 << 20,
        {"some": [1]},
    ),
    "dtypes of any size beside each other": (
        {str(dtype): torch.ones(2 * n + 1).to(dtype) for n, dtype in enumerate(DTYPES)},
        1 << 20,
        {"torch.bfloat16": [0], "torch.float32": [1, 2]},
    ),
    "not contiguous": (
        {"t": torch.arange(600.0).view(20, 30).t(), "s": torch.arange(100.0)[::3]},
        1 << 20,
        {"t": [145]},
    ),
    "a bucket smaller than an element": ({"wide": torch.ones(3, 2_000)}, 1, {"wide": [5, 4_001]}),
    "a bucket smaller than a row": ({"wide": torch.ones(3, 90_001)}, 4096, {"wide": [7, 200_000]}),
}


@pytest.mark.parametrize(("weights", "bucket", "changed"), TENSORS.values(), ids=TENSORS)
def test_tensors_of_any_kind_arrive_with_their_bits(
    weights: Weights, bucket: int, changed: dict[str, list[int]], fleet: Make
) -> None:
    """A value that becomes NaN, and then another NaN, too."""
    here = fleet(weights, replicas=1, bucket=bucket)
    here.update()
    assert here.is_in_sync
    assert set(here.replicas[0].adapter.handed) == set(weights)
    for becomes_nan in (False, True, False):
        for name, places in changed.items():
            bits = as_bits(weights[name])
            for place in places:
                index = tuple(torch.unravel_index(torch.tensor(place), bits.shape))
                if becomes_nan:
                    weights[name][index] = torch.nan
                bits[index] ^= 1
        metrics = here.update()
        assert metrics["checkpoint_engine/changed_elems"] == sum(map(len, changed.values()))
        assert set(here.replicas[0].adapter.handed) == set(changed)
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
