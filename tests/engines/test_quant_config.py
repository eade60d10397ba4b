"""Layers are left alone where the installed vLLM and SGLang leave them alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import FineGrainedFP8Config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.utils import (
    find_matched_target,
    should_ignore_layer,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.models.utils import WeightsMapper

from deltasync.errors import ConfigError
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.config import forms_of_config, named_form
from deltasync.quant.int4 import Int4
from deltasync.quant.int8 import Int8
from deltasync.quant.methods import Arguments, CompressedTensors, Fp8, Group, ModelOpt

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
SHARDS = {shard: fused for fused, shards in FUSED.items() for shard in shards}
LAYERS = [
    f"model.layers.{number}.{layer}"
    for number in (0, 1, 10)
    for layer in [
        *(f"self_attn.{one}_proj" for one in "qkvo"),
        *(f"mlp.{one}_proj" for one in ("gate", "up", "down")),
        *(f"mlp.experts.{expert}.{one}_proj" for expert in (0, 3) for one in ("up", "down")),
        *("mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
        *("mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    ]
] + ["lm_head", "vision_tower.blocks.0.o_proj", "language_model.model.layers.0.mlp.down_proj"]
NAMES = st.sampled_from(
    [
        *LAYERS,
        *("self_attn", "model.layers.0.self_attn", "mlp.gate", "model.layers.1.mlp.gate", "o_proj"),
        *("model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.experts", "model.layers.1"),
        *("model.layers.0.mlp.shared_experts.down_proj.0", "model.layers.0.mlp.shared_experts"),
    ]
)
WILDCARDS = NAMES | st.sampled_from(
    [
        "*.mlp.gate*",
        "*o_pro*",
        "model.layers.0.mlp*",
        "*down*",
        "model.layers.1*",
        "*.mlp.*",
        "*self_attn*",
        "*q_proj",
        "lm_head*",
        "*.experts.*",
        "mlp*",
    ]
)
REGEXES = NAMES | st.sampled_from(
    ["re:.*self_attn", "re:.*mlp.experts", "re:.*q_proj$", "re:.*(gate|up)_proj", "re:lm_head"]
)


def called(layer: str) -> str:
    """What it is called in vLLM."""
    owner, found, _ = layer.rpartition(".experts.")
    if found:
        return f"{owner}.experts"
    owner, dot, last = layer.rpartition(".")
    return f"{owner}{dot}{SHARDS.get(last, last)}"


def agree(ignores: Callable[[str], bool], theirs: Callable[[], bool], layer: str) -> None:
    """They leave it alone alike, unless either refuses it."""
    with suppress(ConfigError, ValueError):
        assert ignores(layer) == theirs(), layer


@given(st.sampled_from(LAYERS), st.lists(NAMES, max_size=4))
def test_fp8(layer: str, names: list[str]) -> None:
    config = Fp8(quant_method="fp8", ignored_layers=names)
    agree(config.ignores(), lambda: is_layer_skipped(called(layer), names, FUSED), layer)


@given(st.sampled_from(LAYERS), st.lists(NAMES, max_size=4))
def test_fp8_of_sglang(layer: str, names: list[str]) -> None:
    theirs = pytest.importorskip("sglang.srt.layers.quantization.utils").is_layer_skipped
    config = Fp8(quant_method="fp8", ignored_layers=names)
    plain = [name.removeprefix("model.") for name in names]
    both = plain + [f"model.{name}" for name in plain]  # as its Fp8Config does
    agree(config.ignores(), lambda: theirs(called(layer), both, FUSED), layer)


@given(st.sampled_from(LAYERS), st.lists(WILDCARDS, max_size=4), st.booleans())
def test_modelopt(layer: str, patterns: list[str], renames: bool) -> None:
    config = ModelOpt(quant_algo="NVFP4", ignore=patterns)
    theirs = ModelOptNvFp4Config(exclude_modules=patterns)
    theirs.packed_modules_mapping = FUSED
    if renames:
        theirs.apply_vllm_mapper(WeightsMapper())
    is_vision = "vision_tower" in layer
    agree(config.ignores(), lambda: is_vision or theirs.is_layer_excluded(called(layer)), layer)


@given(
    st.sampled_from(LAYERS),
    st.lists(REGEXES, max_size=3),
    st.lists(REGEXES, min_size=1, max_size=3),
)
def test_compressed_tensors(layer: str, ignore: list[str], targets: list[str]) -> None:
    group = Group(targets=targets, weights=Arguments())
    config = CompressedTensors(
        quant_method="compressed-tensors", config_groups={"a": group}, ignore=ignore
    )
    own = layer if ".experts." in layer else called(layer)
    agree(config.ignores(), lambda: should_ignore_layer(own, ignore, FUSED), layer)
    forms: dict[str, Any] = {target: target for target in targets}
    found = find_matched_target(layer, nn.Linear(1, 1), [*targets, "Linear"])
    assert (named_form(forms, layer) or "Linear") == found


TARGETS = st.sampled_from(
    [
        *("Linear", "re:.*q_proj", "re:.*qkv_proj", "re:.*(q|k|v)_proj", "re:.*gate_up_proj"),
        *("re:.*up_proj", "re:.*experts.*", r"re:.*experts\.3.*", "re:.*experts.0.up_proj"),
        *("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.qkv_proj", "re:.*mlp.*"),
        *(r"re:.*layers\.0\..*", "re:.*Linear$", "linear", "Parallel", "re:.*"),
    ]
)
BITS: dict[int, tuple[str, dict[str, Any]]] = {
    8: ("int-quantized", {"strategy": "channel"}),
    4: ("pack-quantized", {"group_size": 32}),
}


@settings(max_examples=200)
@given(
    st.sampled_from([layer for layer in LAYERS if layer.startswith("model.")]),
    st.lists(TARGETS, min_size=1, max_size=5, unique=True),
    st.lists(REGEXES | TARGETS, max_size=2),
    st.sampled_from([1, 2]),
)
def test_layers_have_the_form_that_vllm_gives_them(
    layer: str, targets: list[str], ignore: list[str], groups: int
) -> None:
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "ignore": ignore}
    config["config_groups"] = {
        f"{bits}": {
            "targets": targets[number::groups],
            "weights": {"num_bits": bits, "type": "int", "strategy": "group", **weights},
            "input_activations": {"num_bits": 8, "dynamic": True, "strategy": "token"}
            if bits == 8
            else None,
            "format": kind,
        }
        for number, (bits, (kind, weights)) in zip(range(groups), BITS.items(), strict=False)
    }
    with suppress(ConfigError, ValueError):
        form = forms_of_config(config)(f"{layer}.weight", (256, 256))
        theirs = CompressedTensorsConfig.from_config({"format": "mixed-precision", **config})
        theirs.packed_modules_mapping = FUSED
        found = form and {Int8(): 8, Int4(32): 4}[form]
        assert found == bits_of(theirs, layer), layer


def bits_of(theirs: CompressedTensorsConfig, layer: str) -> int | None:
    """Of a weight; None if it is left alone. Raises ValueError if vLLM refuses the config."""
    own = called(layer)
    if not own.endswith(".experts"):
        module = type("QKVParallelLinear", (nn.Module,), {})()
        scheme = theirs.get_scheme_dict(module, own)
    else:
        theirs._add_fused_moe_to_target_scheme_map()
        module = type("RoutedExperts", (nn.Module,), {})()
        names = [f"{own}.0.{one}_proj" for one in ("gate", "up", "down")]
        scheme, *others = [theirs.get_scheme_dict(module, name) for name in names]
        if any(one != scheme for one in others):
            raise ValueError("experts of several schemes")
    return int(scheme["weights"].num_bits) if scheme else None


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
    forms = forms_of_config(config | {"quant_method": "fp8"})
    assert forms("model.layers.0.mlp.up_proj.weight", (256, 256)) == BlockFp8()
    assert forms("lm_head.weight", (256, 256)) is None
