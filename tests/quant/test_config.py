"""What a `quantization_config` says of how a checkpoint is quantized, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deltasync.errors import ConfigError
from deltasync.files.served import forms_of_checkpoint
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from deltasync.quant.int8 import Int8
from deltasync.quant.mxfp8 import MxFp8
from deltasync.quant.nvfp4 import CompressedNvfp4, ModelOptNvfp4
from deltasync.quant.served import Forms, served_weights

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


def forms_of(folder: Path, form: Form, config: dict[str, Any], *layers: str) -> Forms:
    """Of a checkpoint of some layers in a form, with a config that may say something else."""
    weights = [(f"{layer}.weight", torch.randn(SQUARE).bfloat16()) for layer in layers]
    parts = {name: part.contiguous() for name, part in served_weights(weights, lambda *_: form)}
    save_file(parts, folder / "model.safetensors")
    return forms_of_checkpoint(folder, config=config)


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
BLOCKED = BlockFp8("bfloat16")
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
    ("mxfp8-quantized", MXFP8, MxFp8()),
]


@pytest.mark.parametrize(("kind", "weights", "form"), SAID)
def test_groups_of_compressed_tensors(
    kind: str, weights: dict[str, Any], form: Form, tmp_path: Path
) -> None:
    layer = "model.layers.0.mlp.down_proj"
    other = {"targets": ["re:.*down_proj"], "format": kind, "weights": weights}
    told = {**COMPRESSED, "config_groups": {"a": other}}
    assert forms_of(tmp_path, form, told, layer)(f"{layer}.weight", SQUARE) == form
    with pytest.raises(ConfigError, match="has no served form"):
        forms_of_checkpoint(
            tmp_path, config={**told, "config_groups": {"a": {**other, "format": "dense"}}}
        )
    odd = {**weights, "scale_dtype": "float64"}
    with pytest.raises(ConfigError, match="has no served form"):
        forms_of_checkpoint(
            tmp_path, config={**told, "config_groups": {"a": {**other, "weights": odd}}}
        )


@pytest.mark.parametrize("target", ["re:.*q_proj", "model.layers.0.self_attn.q_proj"])
def test_a_target_comes_before_all_linear_layers(target: str, tmp_path: Path) -> None:
    narrow = {**GROUP, "targets": [target], "weights": {**GROUP["weights"], "strategy": "tensor"}}
    config = {**COMPRESSED, "config_groups": {"group_0": GROUP, "group_1": narrow}}
    layers = [f"model.layers.0.self_attn.{one}_proj" for one in "qo"]
    forms = forms_of(tmp_path, Fp8("tensor"), config, *layers)
    assert forms(f"{layers[0]}.weight", SQUARE) == Fp8("tensor")
    with pytest.raises(ConfigError, match=r"o_proj\.weight_scale: the engine's checkpoint has"):
        forms(f"{layers[1]}.weight", SQUARE)


MODELOPT = {"quant_algo": "nvfp4", "group_size": 16, "exclude_modules": ["o_proj"]}


@pytest.mark.parametrize(
    ("config", "form"),
    [
        ({**FP8, "scale_fmt": "ue8m0"}, BlockFp8("ue8m0")),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*.o_proj"]},
            ModelOptNvfp4(),
        ),
        ({"quantization": MODELOPT}, ModelOptNvfp4()),
    ],
    ids=["fp8", "modelopt", "modelopt's own file"],
)
def test_other_configs(config: dict[str, Any], form: Form, tmp_path: Path) -> None:
    layers = ("model.layers.0.self_attn.q_proj", "lm_head")
    forms = forms_of(tmp_path, form, config, *layers)
    assert [forms(f"{layer}.weight", SQUARE) for layer in layers] == [form] * 2


@pytest.mark.promise(
    "Checks",
    "A `quantization_config` that is not known bit for bit is refused by name.",
)
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq' has no served form"),
        ("fp8", "quantization_config is a"),
        ({**FP8, "weight_block_size": None}, "engines round the codes of fused layers again"),
        ({**FP8, "weight_block_size": [64, 128]}, r"\(64, 128\) has no served form"),
        ({**FP8, "fmt": "e5m2"}, "fmt"),
        ({**FP8, "kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo"),
        (group(symmetric=False), "group_0: .*'symmetric': False.* no served form"),
        (group(actorder="group"), "group_0: .*'actorder': 'group'.* no served form"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "kv_cache_scheme"),
        ({**COMPRESSED, "transform_config": {"config_groups": {}}}, "transform_config"),
        ({**COMPRESSED, "config_groups": {"a": {**GROUP, "targets": ["Conv2d"]}}}, "'Conv2d'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ'"),
        ({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, "kv_cache"),
        ({"quantization": {"quant_algo": "NVFP4", "has_zero_point": True}}, "has_zero_point"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_not_known_is_refused_by_name(config: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        forms_of_checkpoint(tmp_path, config=config)
