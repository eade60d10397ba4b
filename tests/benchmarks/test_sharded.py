"""Sharded trainers and engines at tiny size, in a process for each rank."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from benchmarks.fused import Fused
from benchmarks.gpu.geometry import GEOMETRIES
from benchmarks.runner import GroupFailed
from benchmarks.sharded.plan import ShardedPlan
from benchmarks.sharded.runner import run_ranks


@pytest.mark.parametrize("link", ["local", "collective"])
def test_every_way_is_measured_and_leaves_engines_with_the_trainers_bits(link: str) -> None:
    results = list(run_ranks(ShardedPlan.choose("tiny", None, "cpu", link)))
    ways = ("over_dense", "over_gathered", "pause")
    assert Counter(result.case for result in results) == {
        f"{case}_{way}": 1 for case in ("sharded", "sharded_adamw") for way in ways
    }
    for result in results:
        assert result.seconds > 0
        assert result.ratio > 0
        assert 0 < result.changed < result.numel


@pytest.mark.parametrize("link", ["local", "collective"])
def test_tensor_parallel_trainers_and_spread_experts(link: str) -> None:
    plan = ShardedPlan.choose("tiny", "tiny-moe", "cpu", link, "tensor")
    results = list(run_ranks(plan))
    assert [result.case for result in results] == ["sharded_large", "sharded_large_pause"]
    assert all("tensor-parallel" in result.link for result in results)


def test_a_rank_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ShardedPlan.choose("tiny", None, "cpu", "local")
    monkeypatch.setattr(ShardedPlan, "to_json", lambda self: "{}")
    with pytest.raises(GroupFailed):
        list(run_ranks(plan))


@pytest.mark.parametrize("spreads_experts", [False, True])
@pytest.mark.parametrize("key", ["tiny", "tiny-moe"])
def test_the_stand_ins_of_two_ranks_make_up_the_model(key: str, spreads_experts: bool) -> None:
    geometry, cpu = GEOMETRIES[key], torch.device("cpu")
    weights = {n: p.detach() for n, p in geometry.build(cpu).named_parameters()}
    halves = [Fused(geometry, cpu, rank, 2, spreads_experts=spreads_experts) for rank in range(2)]
    for half in halves:
        half.load_weights(weights.items())
    for name, tensor in weights.items():
        parts = [half.read(name) for half in halves]
        dim, _, _ = halves[0].cut(name, tuple(tensor.shape))
        is_cut = sum(part.shape[dim] for part in parts) == tensor.shape[dim]
        whole = torch.cat(parts, dim) if is_cut else parts[1]
        assert torch.equal(whole, tensor), name
