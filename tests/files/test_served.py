"""What an engine quantizes, as its own checkpoint shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deltasync.errors import ConfigError
from deltasync.files.served import constants_of_checkpoint, forms_of_checkpoint
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.int4 import Int4
from deltasync.quant.nvfp4 import ModelOptNvfp4
from deltasync.quant.served import served_weights
from tests.quant.test_config import COMPRESSED, FP8, INT4

LAYER = "model.layers.0"
Q = f"{LAYER}.self_attn.q_proj"
WEIGHTS = {
    "model.embed_tokens.weight": (256, 64),
    f"{Q}.weight": (192, 64),
    f"{Q}.bias": (192,),
    f"{LAYER}.mlp.gate.weight": (8, 64),
    f"{LAYER}.mlp.experts.0.up_proj.weight": (160, 64),
    f"{LAYER}.mlp.experts.1.up_proj.weight": (160, 64),
    f"{LAYER}.input_layernorm.weight": (64,),
}
ALONE = ("embed", "mlp.gate.", "norm", "bias")
PACKED = {
    **COMPRESSED,
    "config_groups": {"a": {"targets": ["Linear"], "format": "pack-quantized", "weights": INT4}},
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
CASES = [(BlockFp8(), FP8), (Int4(32), PACKED), (ModelOptNvfp4(), NVFP4)]


def chosen(form: Form, name: str) -> Form | None:
    return None if any(part in name for part in ALONE) else form


def checkpoint(
    path: Path, form: Form, config: Any, change: Mapping[str, Tensor | None] | None = None
) -> Path:
    weights = {name: torch.randn(shape).bfloat16() for name, shape in WEIGHTS.items()}
    held = dict(served_weights(weights.items(), lambda name, _: chosen(form, name)))
    held |= {f"{Q}.input_scale": torch.tensor(0.5)}
    for name, tensor in (change or {}).items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file({name: t.contiguous() for name, t in held.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


@pytest.mark.promise(
    "Bits",
    "What is quantized is what the engine's checkpoint has quantized; everything else is "
    "served as it is.",
)
@pytest.mark.parametrize(("form", "config"), CASES, ids=lambda case: str(type(case).__name__))
def test_a_checkpoint_says_what_is_quantized(tmp_path: Path, form: Form, config: Any) -> None:
    forms = forms_of_checkpoint(checkpoint(tmp_path, form, config))
    found = {name: forms(name, shape) for name, shape in WEIGHTS.items()}
    assert found == {name: chosen(form, name) for name in WEIGHTS}
    for name in ("lm_head.weight", "model.lm_head.weight", "v_head.weight"):
        assert forms(name, (256, 64)) is None, "the checkpoint lacks it"
    constants = constants_of_checkpoint(tmp_path)
    assert constants == {f"{Q}.input_scale": torch.tensor(0.5)}


def test_the_config_may_lie_beside(tmp_path: Path) -> None:
    checkpoint(tmp_path, ModelOptNvfp4(), None)
    told = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}, "producer": {}}
    with pytest.raises(ConfigError, match="no quantization_config in config"):
        forms_of_checkpoint(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(told))
    name = f"{Q}.weight"
    assert forms_of_checkpoint(tmp_path)(name, (192, 64)) == ModelOptNvfp4()
    assert forms_of_checkpoint(tmp_path, config=NVFP4)(name, (192, 64)) == ModelOptNvfp4()


UP = f"{LAYER}.mlp.experts.up_proj"


@pytest.mark.promise(
    "Bits",
    "What is quantized is what the engine's checkpoint has quantized; everything else is "
    "served as it is.",
)
@pytest.mark.promise(
    "Checks",
    "A `quantization_config` that is not known bit for bit is refused by name.",
)
@pytest.mark.parametrize(
    ("change", "name", "shape", "says"),
    [
        ({"weight_scale_inv": torch.ones(2, 1).bfloat16()}, Q, (192, 64), r"has bfloat16 \[2, 1\]"),
        ({"weight_scale_inv": torch.ones(1, 2)}, Q, (192, 64), r"_inv: .* has float32 \[1, 2\]"),
        ({"weight_scale_inv": None}, Q, (192, 64), "_inv: the engine's checkpoint has nothing"),
        ({"weight": torch.zeros(192, 64)}, Q, (192, 64), r"q_proj\.weight: .* has float32"),
        ({}, Q, (64, 192), r"q_proj\.weight: .* float8_e4m3fn \[192, 64\]"),
        ({"qzeros": torch.ones(3)}, Q, (192, 64), r"q_proj\.qzeros: .* has no such part"),
        ({}, UP, (320, 64), f"{UP}.weight: the engine's checkpoint has no such tensor"),
    ],
)
def test_what_the_form_does_not_make_of_a_layer_is_refused_by_name(
    tmp_path: Path, change: dict[str, Tensor | None], name: str, shape: tuple[int, int], says: str
) -> None:
    """The last one fuses layers."""
    changed = {f"{Q}.{part}": tensor for part, tensor in change.items()}
    with pytest.raises(ConfigError, match=says):
        forms_of_checkpoint(checkpoint(tmp_path, BlockFp8(), FP8, changed))(f"{name}.weight", shape)


def test_what_is_no_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="no tensor is quantized"):
        forms_of_checkpoint(tmp_path, config=FP8)
    (tmp_path / "config.json").write_text("[" * 3)
    with pytest.raises(ConfigError, match=r"config\.json"):
        forms_of_checkpoint(tmp_path)
    with pytest.raises(ConfigError):
        forms_of_checkpoint(tmp_path / "absent", config=FP8)
    groups = {"a": {**PACKED["config_groups"]["a"], "targets": ["re:.*o_proj"]}}
    checkpoint(tmp_path, Int4(32), {**PACKED, "config_groups": groups})
    with pytest.raises(ConfigError, match="is no target of the quantization_config"):
        forms_of_checkpoint(tmp_path)
