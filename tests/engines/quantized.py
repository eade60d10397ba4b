"""Small quantized checkpoints of the forms that engines serve, and kernels that move them.

How elements are rounded does not matter here: routes know no arithmetic.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltasync.quant.config import forms_of_targets
from deltasync.quant.served import Forms
from tests.engines.repacked import use_repacking

_FP8 = torch.float8_e4m3fn
_BLOCK = 128
Parts = dict[str, Tensor]


def _compressed(format_: str, weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors for all matrices but the head and routers."""
    fixed = {"symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": fixed | weights}
    if inputs:
        group["input_activations"] = fixed | {"dynamic": True} | inputs
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


_F8 = {"num_bits": 8, "type": "float"}
_MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": None}
_NV = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "block FP8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
        "modules_to_not_convert": ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(2))],
    },
    "block FP8, compressed": _compressed(
        "float-quantized",
        _F8 | {"strategy": "block", "block_structure": [_BLOCK, _BLOCK]},
        _F8 | {"strategy": "group", "group_size": _BLOCK},
    ),
    "channel FP8": _compressed(
        "float-quantized", _F8 | {"strategy": "channel"}, _F8 | {"strategy": "token"}
    ),
    "channel INT8": _compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {"num_bits": 8, "type": "int", "strategy": "token"},
    ),
    "MXFP8": _compressed("mxfp8-quantized", _F8 | _MX, _F8 | _MX),
    "NVFP4, ModelOpt": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": ["lm_head", "*mlp.gate"],
    },
    "NVFP4": _compressed("nvfp4-pack-quantized", _NV, _NV | {"dynamic": "local"}),
    "INT4": _compressed(
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, {}
    ),
}


_LINEAR = re.compile(r".*\.(\w+_proj(_with_mqa)?|w[123])\.weight")


def forms_of(form: str) -> Forms:
    """What a trainer serves to such an engine: all linear layers but the head and routers."""
    linear = forms_of_targets(CONFIGS[form])["Linear"]
    return lambda name, shape: linear if len(shape) == 2 and _LINEAR.fullmatch(name) else None


def served(form: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint in this form: its projections are quantized, everything else is as it was."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if tensor.dim() != 2 or not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        above = name.removesuffix("weight")
        parts = _PARTS[form](tensor.float())
        found |= {above + part: one.contiguous() for part, one in parts.items()}
    return found


def _of_blocks(weight: Tensor, scale_name: str) -> Parts:
    rows, cols = weight.shape
    wide = pad(weight, (0, -cols % _BLOCK, 0, -rows % _BLOCK))
    blocks = wide.view(wide.shape[0] // _BLOCK, _BLOCK, -1, _BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(1e-4) / 448
    codes = (blocks / scale[:, None, :, None]).to(_FP8).view_as(wide)
    return {"weight": codes[:rows, :cols], scale_name: scale}


def _of_rows(weight: Tensor, largest: float, dtype: torch.dtype) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / largest
    codes = weight / scale
    return {"weight": (codes if dtype == _FP8 else codes.round()).to(dtype), "weight_scale": scale}


def _exponents(groups: Tensor) -> Tensor:
    return groups.abs().amax(2).clamp(1e-30).log2().floor()


def _mxfp8(weight: Tensor) -> Parts:
    groups = weight.view(len(weight), -1, 32)
    exponents = _exponents(groups) - 8
    codes = (groups / exponents[..., None].exp2()).view_as(weight).to(_FP8)
    return {"weight": codes, "weight_scale": (exponents + 127).to(torch.uint8)}


def _pairs(groups: Tensor, rows: int) -> Tensor:
    """Some two codes of 4 bits in each byte."""
    return (groups * 37).to(torch.int32).view(rows, -1)[:, ::2].to(torch.uint8)


def _nvfp4(weight: Tensor) -> Parts:
    groups = weight.view(len(weight), -1, 16)
    whole = 448 * 6 / weight.abs().amax()
    return {
        "weight_packed": _pairs(groups, len(weight)),
        "weight_scale": (groups.abs().amax(2) / 6 * whole).to(_FP8),
        "weight_global_scale": whole.view(1),
        "input_global_scale": 1 / weight.abs().mean().view(1),
    }


def _nvfp4_of_modelopt(weight: Tensor) -> Parts:
    parts = _nvfp4(weight)
    return {
        "weight": parts["weight_packed"],
        "weight_scale": parts["weight_scale"],
        "weight_scale_2": 1 / parts["weight_global_scale"].view(()),
        "input_scale": weight.abs().mean(),
    }


def _int4(weight: Tensor) -> Parts:
    groups = weight.view(len(weight), -1, 128)
    scale = groups.abs().amax(2, keepdim=True) / 7
    codes = ((groups / scale).round() + 8).to(torch.int32).view(len(weight), -1, 8)
    packed = (codes << torch.arange(0, 32, 4)).sum(-1, dtype=torch.int64).to(torch.int32)
    return {
        "weight_packed": packed,
        "weight_scale": scale.squeeze(2).bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }


_PARTS: dict[str, Callable[[Tensor], Parts]] = {
    "block FP8": lambda weight: _of_blocks(weight, "weight_scale_inv"),
    "block FP8, compressed": lambda weight: _of_blocks(weight, "weight_scale"),
    "channel FP8": lambda weight: _of_rows(weight, 448, _FP8),
    "channel INT8": lambda weight: _of_rows(weight, 127, torch.int8),
    "MXFP8": _mxfp8,
    "NVFP4": _nvfp4,
    "NVFP4, ModelOpt": _nvfp4_of_modelopt,
    "INT4": _int4,
}


def use_kernels(kernels: Collection[str], experts: str = "") -> None:
    """Let vLLM choose these kernels of GPUs on a CPU, where they load weights and do not run.

    Args:
        kernels: Classes of kernels of matrices.
        experts: A backend of FP8, INT4 or NVFP4 experts; "" for those of CPUs.
    """
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.oracle import fp8, int_wna16, nvfp4
    from vllm.platforms import PlatformEnum

    use_repacking()
    Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    for name in (one for one in dir(linear) if one.startswith("_POSSIBLE_")):
        table = getattr(linear, name)
        chosen = [one for one in table[PlatformEnum.CUDA] if one.__name__ in kernels]
        for kernel in chosen:
            kernel.is_supported = kernel.can_implement = classmethod(lambda *_, **__: (True, None))
        table[PlatformEnum.CPU] = chosen or table.get(PlatformEnum.CPU, [])
    for oracle, backends, choose in (
        (fp8, fp8.Fp8MoeBackend, "select_fp8_moe_backend"),
        (int_wna16, int_wna16.WNA16MoEBackend, "select_wna16_moe_backend"),
        (nvfp4, nvfp4.NvFp4MoeBackend, "select_nvfp4_moe_backend"),
    ):
        if experts not in backends.__members__:
            continue
        with suppress(ValueError):  # it has the name alone
            found = backends[experts], oracle.backend_to_kernel_cls(backends[experts])[0]
            _replace(choose, lambda *_, found=found, **__: found)


def _replace(function: str, by: Callable[..., Any]) -> None:
    """In all modules of vLLM that have it by this name."""
    for module in [one for name, one in sys.modules.items() if name.startswith("vllm.")]:
        if function in vars(module):
            vars(module)[function] = by
