"""What a `quantization_config` says is quantized, and what of it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from deltasync.errors import ConfigError
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.config import forms_of_config
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from deltasync.quant.int8 import Int8
from deltasync.quant.mxfp8 import MxFp8
from deltasync.quant.nvfp4 import CompressedNvfp4, ModelOptNvfp4

FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": GROUP},
}
SQUARE = (256, 256)


def group(**weights: Any) -> dict[str, Any]:
    told = {**GROUP, "weights": {**GROUP["weights"], **weights}}
    return {**COMPRESSED, "config_groups": {"group_0": told}}


@pytest.mark.parametrize(
    "layer",
    [
        *("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"),
        *("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "mlp.experts.7.up_proj"),
        *("block_sparse_moe.experts.0.w2", "mlp.shared_expert.gate_proj"),
    ],
)
def test_linear_layers_are_quantized(layer: str) -> None:
    form = forms_of_config(FP8)(f"model.layers.3.{layer}.weight", SQUARE)
    assert form == BlockFp8("float32")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("model.embed_tokens.weight", SQUARE), ("lm_head.weight", SQUARE)),
        *(("model.layers.3.mlp.gate.weight", SQUARE), ("model.layers.3.mlp.router.weight", SQUARE)),
        *(("model.norm.weight", (256,)), ("model.layers.3.self_attn.q_proj.bias", (256,))),
        *(("model.layers.3.conv1d.weight", (256, 1, 4)), ("model.layers.3.A_log", SQUARE)),
        ("model.layers.3.mlp.shared_expert_gate.weight", (1, 256)),
    ],
)
def test_what_engines_quantize_nowhere_is_served_as_it_is(
    name: str, shape: tuple[int, ...]
) -> None:
    assert forms_of_config(FP8)(name, shape) is None


def test_scales_are_of_the_format_that_is_said() -> None:
    forms = forms_of_config({**FP8, "scale_fmt": "ue8m0"})
    assert forms("model.layers.0.mlp.up_proj.weight", SQUARE) == BlockFp8("ue8m0")


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MXFP8 = {
    "num_bits": 8,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": "torch.uint8",
}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
BLOCKED = BlockFp8(arithmetic="compressed-tensors")
SAID = [
    ("pack-quantized", INT4, Int4(32)),
    ("pack-quantized", {**INT4, "group_size": 128, "scale_dtype": "torch.bfloat16"}, Int4(128)),
    ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}, Int4(None)),
    ("nvfp4-pack-quantized", NVFP4, CompressedNvfp4()),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, Fp8("channel")),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, Fp8("tensor")),
    ("float-quantized", BLOCKS, BLOCKED),
    ("float-quantized", {**BLOCKS, "block_structure": "128x128"}, BLOCKED),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, Int8()),
    ("mxfp8-quantized", MXFP8, MxFp8("compressed-tensors")),
]


@pytest.mark.parametrize(("kind", "weights", "form"), SAID)
def test_groups_of_compressed_tensors(kind: str, weights: dict[str, Any], form: Form) -> None:
    other = {"targets": ["re:.*down_proj"], "format": kind, "weights": weights}
    told = {**COMPRESSED, "config_groups": {"a": other}}
    forms = forms_of_config(told)
    assert forms("model.layers.0.mlp.down_proj.weight", SQUARE) == form
    assert forms("model.layers.0.mlp.up_proj.weight", SQUARE) is None
    with pytest.raises(ConfigError, match="has no served form"):
        forms_of_config({**told, "config_groups": {"a": {**other, "format": "dense"}}})
    odd = {**weights, "scale_dtype": "float64"}
    with pytest.raises(ConfigError, match="has no served form"):
        forms_of_config({**told, "config_groups": {"a": {**other, "weights": odd}}})


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*.o_proj"]},
        {"quantization": {"quant_algo": "nvfp4", "group_size": 16, "exclude_modules": ["o_proj"]}},
    ],
)
def test_both_configs_of_modelopt(config: dict[str, Any]) -> None:
    forms = forms_of_config(config)
    for layer in ("model.layers.0.self_attn.q_proj", "lm_head"):
        assert forms(f"{layer}.weight", SQUARE) == ModelOptNvfp4()
    for layer in ("model.layers.0.self_attn.o_proj", "vision_tower.q_proj", "model.embed_tokens"):
        assert forms(f"{layer}.weight", SQUARE) is None


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_listed_layers_are_left_alone(key: str) -> None:
    listed = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.qkv_proj"]
    listed += ["model.layers.2.mlp.experts.0.up_proj", "model.layers.0.mlp.gate"]
    forms = forms_of_config({**FP8, key: listed})
    alone = [
        *("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"),
        *("model.layers.2.mlp.experts.5.down_proj",),  # one that is fused with what is listed
    ]
    assert [forms(f"{name}.weight", SQUARE) for name in alone] == [None] * 3
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.0.mlp.gate_proj"):
        assert forms(f"{name}.weight", SQUARE) is not None


def test_layers_that_engines_disagree_on_are_refused_by_name() -> None:
    forms = forms_of_config({**FP8, "modules_to_not_convert": ["model.layers.0.self_attn"]})
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn\.q_proj: .* SGLang"):
        forms("model.layers.0.self_attn.q_proj.weight", SQUARE)
    assert forms("model.layers.1.self_attn.q_proj.weight", SQUARE) is not None


@pytest.mark.parametrize("target", ["re:.*q_proj", "re:.*qkv_proj", "re:.*experts.3.*"])
def test_targets_of_a_part_of_what_vllm_has_as_one_are_refused_by_name(target: str) -> None:
    narrow = {**GROUP, "targets": [target], "weights": {**GROUP["weights"], "strategy": "tensor"}}
    config = {**COMPRESSED, "config_groups": {"group_0": GROUP, "group_1": narrow}}
    forms = forms_of_config(config)
    assert forms("model.layers.0.self_attn.o_proj.weight", SQUARE) == Fp8("channel")
    layer = "mlp.experts.3.up_proj" if "experts" in target else "self_attn.q_proj"
    with pytest.raises(ConfigError, match=rf"model\.layers\.0\.{layer}: its target"):
        forms(f"model.layers.0.{layer}.weight", SQUARE)


def test_an_expert_that_is_ignored_alone_is_refused_by_name() -> None:
    forms = forms_of_config({**COMPRESSED, "ignore": [r"re:.*experts\.3\..*"]})
    assert forms("model.layers.0.mlp.experts.0.up_proj.weight", SQUARE) == Fp8("channel")
    with pytest.raises(ConfigError, match=r"experts\.3\.up_proj and .* expert 0 are not both"):
        forms("model.layers.0.mlp.experts.3.up_proj.weight", SQUARE)


def test_a_wildcard_that_vllm_reads_in_two_ways_is_refused_by_name() -> None:
    forms = forms_of_config(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*dow*"]}
    )
    assert forms("model.layers.0.self_attn.o_proj.weight", SQUARE) == ModelOptNvfp4()
    with pytest.raises(ConfigError, match=r"mlp\.down_proj is excluded by a pattern"):
        forms("model.layers.0.mlp.down_proj.weight", SQUARE)


@pytest.mark.parametrize("target", ["linear", "re:.*Linear$", "Parallel", "LinearBase"])
def test_targets_that_are_parts_of_classes_are_refused(target: str) -> None:
    told = {**COMPRESSED, "config_groups": {"group_0": {**GROUP, "targets": [target]}}}
    with pytest.raises(ConfigError, match="layers of class"):
        forms_of_config(told)


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.0.linear_attn.in_proj_qkvz.weight", "model.visual.blocks.0.q_proj.weight"),
        *("model.layers.0.self_attn.indexer.weights_proj.weight", "score.weight"),
    ],
)
def test_names_that_are_not_known_are_refused_until_one_says(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be told from its name"):
        forms_of_config(FP8)(name, SQUARE)
    assert forms_of_config(FP8, alone=[name])(name, SQUARE) is None
    assert forms_of_config(FP8, linear=[f"*{name[-12:]}"])(name, SQUARE) == BlockFp8()


def test_stacked_experts_are_not_served_as_they_are() -> None:
    forms = forms_of_config(FP8)
    assert forms("model.layers.0.mlp.experts.gate_up_proj", (4, 256, 256)) == BlockFp8()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq' has no served form"),
        ({}, "None has no served form"),
        ({"quant_method": ["fp8"]}, "has no served form"),
        ({**FP8, "weight_block_size": None}, "engines round the codes of fused layers again"),
        ({**FP8, "weight_block_size": [64, 128]}, r"\(64, 128\) has no served form"),
        ({**FP8, "weight_block_size": 128}, "weight_block_size"),
        ({**FP8, "fmt": "e5m2"}, "fmt"),
        ({**FP8, "scale_fmt": "e5m3"}, "scale_fmt"),
        ({**FP8, "store_dtype": "mxfp4"}, "store_dtype"),
        ({**FP8, "kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo"),
        ({**FP8, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        (group(symmetric=False), "group_0: .*zero points"),
        (group(actorder="group"), "group_0: actorder 'group'"),
        (group(dynamic=True), "group_0: dynamic"),
        (group(num_bits=6), "group_0: format 'float-quantized' with weights"),
        (group(sparsity="2:4"), "sparsity"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "kv_cache_scheme"),
        ({**COMPRESSED, "transform_config": {"config_groups": {}}}, "transform_config"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        ({**COMPRESSED, "config_groups": {}}, "config_groups"),
        ({**COMPRESSED, "config_groups": {"a": {**GROUP, "targets": ["Conv2d"]}}}, "'Conv2d'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
        ({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, "kv_cache"),
        ({"quantization": {"quant_algo": "NVFP4", "has_zero_point": True}}, "has_zero_point"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_not_known_is_refused_by_name(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        forms_of_config(config)


@pytest.mark.parametrize("config", [None, "fp8", [FP8]])
def test_what_is_no_config_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="quantization_config is a"):
        forms_of_config(config)


def test_a_string_is_no_list_of_patterns() -> None:
    with pytest.raises(ConfigError, match="lists of patterns"):
        forms_of_config(FP8, alone="*.gate")
