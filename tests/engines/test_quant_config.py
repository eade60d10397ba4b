"""The configs that compressed-tensors and transformers write, as the installed vLLM reads them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from vllm.model_executor.layers.quantization.compressed_tensors.utils import find_matched_target

from deltasync.quant.config import form_of_layer

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
