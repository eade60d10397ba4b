"""Small quantized checkpoints of the forms that engines serve, and kernels that move them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from torch import Tensor

from deltasync.quant.config import forms_of_targets
from deltasync.quant.served import Forms, served_weights
from tests.engines.repacked import use_repacking

_BLOCK = 128


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
    "channel FP8": _compressed(
        "float-quantized", _F8 | {"strategy": "channel"}, _F8 | {"strategy": "token"}
    ),
    "channel INT8": _compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {"num_bits": 8, "type": "int", "strategy": "token"},
    ),
    "MXFP8": _compressed("mxfp8-quantized", _F8 | _MX, _F8 | _MX),
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
    return dict(served_weights(weights.items(), forms_of(form))) | constants(form, weights)


def constants(form: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What such a checkpoint holds beside them: scales of activations."""
    forms = forms_of(form)
    return {
        f"{name.removesuffix('weight')}input_global_scale": 1 / one.float().abs().mean().view(1)
        for name, one in weights.items()
        if form == "NVFP4" and forms(name, tuple(one.shape)) is not None
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
