"""The configs that compressed-tensors and transformers write, as the installed vLLM reads them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import FineGrainedFP8Config
from vllm.model_executor.layers.quantization.compressed_tensors.utils import find_matched_target

from deltasync.errors import ConfigError
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.config import CompressedTensors, form_of_layer, forms_of_targets

LAYERS = [
    *(
        f"model.layers.{n}.{layer}"
        for n in (0, 10)
        for layer in ("self_attn.q_proj", "mlp.up_proj")
    ),
    *("model.layers.0.mlp.experts.3.down_proj", "lm_head"),
]
TARGETS = st.sampled_from(
    [
        *LAYERS,
        *("re:.*self_attn", "re:.*q_proj$", "re:.*(gate|up)_proj", "re:lm_head", "re:.*experts.*"),
    ]
)


@given(st.sampled_from(LAYERS), st.lists(TARGETS, min_size=1, max_size=3))
def test_layers_meet_the_target_that_vllm_finds(layer: str, targets: list[str]) -> None:
    forms: dict[str, Any] = {target: target for target in targets}
    found = find_matched_target(layer, nn.Linear(1, 1), [*targets, "Linear"])
    assert (form_of_layer(forms, layer) or "Linear") == found


@pytest.mark.parametrize("preset", [name for name, scheme in PRESET_SCHEMES.items() if scheme])
def test_all_that_compressed_tensors_writes_is_known(preset: str) -> None:
    scheme = preset_name_to_scheme(preset, ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    told = config.model_dump(mode="json") | {"quantization_status": "compressed"}
    with suppress(ConfigError):
        CompressedTensors(**told).forms()  # which may have no served form
    assert CompressedTensors(**told).config_groups["group_0"].targets == ["Linear"]


def test_what_transformers_writes_is_known() -> None:
    config = FineGrainedFP8Config(modules_to_not_convert=["lm_head"]).to_dict()
    assert forms_of_targets(config | {"quant_method": "fp8"}) == {"Linear": BlockFp8()}
