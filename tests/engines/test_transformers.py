"""transformers' own models at both ends: experts stacked here, one by one in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from deltasync.errors import ConfigError
from deltasync.integrations.transformers import TransformersSource, transformers_target
from tests.engines.checkpoints import write_config
from tests.engines.environment import ROOT
from tests.engines.programs import Program
from tests.worlds.links import bits_equal, fleet, step

ARCHITECTURES = [
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",  # tied
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "MixtralForCausalLM",  # whose names are others in the checkpoint
    "DeepseekV2ForCausalLM",
    "GPT2LMHeadModel",
]


def model_of(architecture: str, folder: Path, seed: int) -> Any:
    config = transformers.AutoConfig.from_pretrained(write_config(architecture, folder))
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


def saved(model: Any, folder: Path) -> dict[str, Tensor]:
    """By transformers itself."""
    model.save_pretrained(folder)
    return dict(load_file(folder / "model.safetensors"))


def loaded(architecture: str, folder: Path, seed: int) -> Any:
    """As trainers make their models: `from_pretrained`, which names tied weights by the head."""
    model_of(architecture, folder, seed).save_pretrained(folder / str(seed))
    return transformers.AutoModelForCausalLM.from_pretrained(folder / str(seed))


@pytest.mark.parametrize(
    ("make", "architecture"),
    [
        *((model_of, architecture) for architecture in ARCHITECTURES),
        *((loaded, tied) for tied in ("Qwen3ForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel")),
    ],
)
def test_a_target_follows_what_transformers_saves(
    make: Callable[[str, Path, int], Any], architecture: str, tmp_path: Path
) -> None:
    trainer, engine = make(architecture, tmp_path, 0), make(architecture, tmp_path, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        source, target = TransformersSource(trainer), transformers_target(engine)
        source.tensors()
    with fleet(source) as here:
        here.add(target)
        here.wait(1)
        assert here.sender.send_weights().full_synced == 1
        assert bits_equal(trainer, engine)
        for share in (0.01, 0.0, 1.0):
            step(trainer, generator, share)
            assert here.sender.send_weights().kind == "delta"
            assert bits_equal(trainer, engine)
    found = {name: one.tensor for one in source.tensors() for name in one.names}
    wanted = saved(trainer, tmp_path / "saved")
    assert len(source.tensors()) == len(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_the_example_ends_with_equal_weights(tmp_path: Path) -> None:
    with Program(ROOT / "docs" / "examples" / "transformers_cpu.py", tmp_path / "model") as program:
        text = program.wait()
    deltas = re.findall(r"v\d+: (\S+)% changed, ", text)
    assert len(deltas) == 5
    assert all(0 < float(share) < 100 for share in deltas)
    here, there = re.findall(r"[0-9a-f]{64}", text)
    assert here == there


def test_parameters_that_zero_3_has_partitioned_are_refused_by_name(tmp_path: Path) -> None:
    model = model_of("Qwen3ForCausalLM", tmp_path, 0)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.ds_shape, weight.data = weight.shape, torch.empty(0, dtype=weight.dtype)
    with pytest.raises(ConfigError, match=r"layers.0.mlp.up_proj.weight: \(0,\) is held here"):
        TransformersSource(model).tensors()
