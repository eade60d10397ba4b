"""Changes into an engine's model, at tiny size, beside the ways of a vLLM that is not there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.engines import EnginesPlan, run
from benchmarks.fused import Fused
from benchmarks.gpu.geometry import GEOMETRIES

PATCHES = """
from typing import NamedTuple
class CheckpointWeightPatch(NamedTuple):
    name: str
    shape: tuple
    dtype: object
    values: object
    indices: object
def load_checkpoint_weight_patches(model, patches):
    for patch in patches:
        whole = model.read(patch.name).flatten()
        whole[patch.indices.long()] = patch.values
        model.load_weights([(patch.name, whole.view(patch.shape))])
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnginesPlan:
    (tmp_path / "patches.py").write_text(PATCHES)
    monkeypatch.setattr("benchmarks.engines._MANY_TENSORS", "tiny-moe")
    return EnginesPlan.choose("tiny", "cpu", tmp_path / "patches.py")


def test_every_way_is_measured_and_the_engine_is_right_at_the_end(plan: EnginesPlan) -> None:
    results = list(run(plan))
    engines = {f"engine_{p}_over_{w}" for p in ("work", "pause") for w in ("sparse", "dense")}
    assert Counter(result.case for result in results) == {
        **dict.fromkeys(engines, 2),
        "engine_recording": 3,
    }
    for result in results:
        assert result.seconds > 0
        assert result.ratio > 0


@pytest.mark.parametrize("key", ["tiny", "tiny-moe"])
def test_the_stand_in_keeps_every_tensor_where_it_can_be_read_back(key: str) -> None:
    geometry = GEOMETRIES[key]
    weights = {n: p.detach() for n, p in geometry.build(torch.device("cpu")).named_parameters()}
    model = Fused(geometry, torch.device("cpu"))
    assert model.load_weights(weights.items()) == weights.keys()
    assert sum(p.numel() for p in model.parameters()) == geometry.numel
    for name, tensor in weights.items():
        assert torch.equal(model.read(name), tensor)
