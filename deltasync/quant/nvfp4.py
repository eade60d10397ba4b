"""NVFP4: E2M1 codes, an e4m3 scale for 16 of a row, and a float32 scale of the whole.

All of it is the same on CPUs and GPUs but for `weight_scale_2` of ModelOpt: torch divides by 2688
on a CPU, and on CUDA multiplies by its inverse, which gives another last bit for a fifth of all
magnitudes. Each is what ModelOpt gives there.

A step that moves the largest magnitude of a group of matrices by one unit of bfloat16 moves their
float32 scale, and by that some 6 % of the e4m3 scales and 4 % of the bytes of codes, of weights
that are normally distributed. Other steps change far less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.quant import reads
from deltasync.quant.computation import KernelForm
from deltasync.quant.form import Form, Part, Shape, check_columns
from deltasync.quant.four_bits import e2m1, packed
from deltasync.quant.rounding import as_fp8, divided, with_one_nan

_BLOCK = 16
_LARGEST_CODE = 6.0
_LARGEST_SCALE = 448.0  # of float8_e4m3fn
_UINT8, _E4M3, _FLOAT32 = (dtypes.BY_NAME[name] for name in ("uint8", "float8_e4m3fn", "float32"))


def _global_scale(peak: Tensor) -> Tensor:
    """float32 [...], where float [...] are the largest magnitudes, as compressed-tensors has it."""
    scale = _LARGEST_SCALE * _LARGEST_CODE / peak.float().clamp(torch.finfo(torch.float32).tiny)
    return scale.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0)


def _second_scale(peak: Tensor) -> Tensor:
    """float32 [...], where float [...] are the largest magnitudes, as ModelOpt has it."""
    return with_one_nan(divided(peak.float(), _LARGEST_CODE * _LARGEST_SCALE))


class _Nvfp4(Form):
    """What both have in common: their parts, under names of their own.

    Attributes:
        total_shape: Of the scale of the whole.
    """

    name: ClassVar[str]
    cols: ClassVar[int] = _BLOCK
    shares: ClassVar[bool] = True
    kernel: ClassVar[KernelForm]
    total: ClassVar[str]
    total_shape: ClassVar[tuple[int, ...]]

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        check_columns(shape, _BLOCK, self.name)
        rows, cols = shape
        return {
            self.kernel.codes: Part((rows, cols // 2), _UINT8, 1, 2),
            "weight_scale": Part((rows, cols // _BLOCK), _E4M3, 1, _BLOCK),
            self.total: Part(self.total_shape, _FLOAT32, None),
        }


@dataclass(frozen=True, slots=True)
class CompressedNvfp4(_Nvfp4):
    """NVFP4 of compressed-tensors, format nvfp4-pack-quantized: NVFP4 and NVFP4A16.

    `weight_packed` uint8 [rows, cols / 2], `weight_scale` e4m3 [rows, cols / 16], and
    `weight_global_scale` float32 [1], which multiplies what is quantized. `input_global_scale` of
    NVFP4 is of activations: no weight determines it, see `ServedSource(constants=...)`.

    Sources of the formulas: `Observer.get_global_scale` of llm-compressor (observers/base.py,
    since observers are fused), `generate_gparam` and `calculate_qparams` of compressed-tensors
    (quantization/utils/helpers.py), `_quantize` (lifecycle/forward_helpers.py), `cast_to_fp4`
    (quant_args.py) and `pack_fp4_to_uint8` (compressors/nvfp4/helpers.py), with 0.17.
    """

    name: ClassVar[str] = "NVFP4 of compressed-tensors"
    total: ClassVar[str] = "weight_global_scale"
    total_shape: ClassVar[tuple[int, ...]] = (1,)
    kernel: ClassVar[KernelForm] = KernelForm(
        reads.NVFP4, (1, _BLOCK), codes="weight_packed", total=total, total_of=_global_scale
    )

    def whole(self, peak: Tensor) -> Mapping[str, Tensor]:
        """The global scale; 1 where it would be infinite, as for zeros."""
        return {"weight_global_scale": _global_scale(peak)}

    def quantize(self, band: Tensor, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        blocks, total = band.view(len(band), -1, _BLOCK), whole["weight_global_scale"]
        scale = total * (blocks.abs().amax(-1) / _LARGEST_CODE)  # the quotient is bfloat16
        stored = as_fp8(scale.clamp(max=_LARGEST_SCALE))
        divisor = stored.float()
        divisor = torch.where(divisor == 0, 0.125, divisor)
        codes = e2m1(blocks.float().div_((divisor / total).unsqueeze(-1)))
        return {
            "weight_packed": packed(codes.flatten(1)),
            "weight_scale": as_fp8(divisor),
        }


@dataclass(frozen=True, slots=True)
class ModelOptNvfp4(_Nvfp4):
    """NVFP4 of ModelOpt, with a dynamic weight quantizer: NVFP4 and W4A16_NVFP4.

    `weight` uint8 [rows, cols / 2], `weight_scale` e4m3 [rows, cols / 16], and `weight_scale_2`
    float32 [], which divides what is quantized. `input_scale` is of activations: no weight
    determines it, see `ServedSource(constants=...)`. A matrix of zeros has no such form, since its
    scales are NaN.

    Quantizers that search for scales (static, AWQ, SVDQuant) do not follow from the weights alone.

    Source of the formulas: `NVFP4QTensor` of ModelOpt (torch/quantization/qtensor/nvfp4_tensor.py:
    `get_weights_scaling_factor_2`, `get_weights_scaling_factor`, `quantize`, `_cast_fp4`), since
    it keeps scales at 2**-9 or above; `preprocess_linear_fusion` of export/quant_utils.py.
    """

    name: ClassVar[str] = "NVFP4 of ModelOpt"
    total: ClassVar[str] = "weight_scale_2"
    total_shape: ClassVar[tuple[int, ...]] = ()
    kernel: ClassVar[KernelForm] = KernelForm(
        reads.NVFP4_MODELOPT, (1, _BLOCK), total=total, total_of=_second_scale
    )

    def whole(self, peak: Tensor) -> Mapping[str, Tensor]:
        return {"weight_scale_2": _second_scale(peak).view(())}

    def quantize(self, band: Tensor, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        blocks, total = band.view(len(band), -1, _BLOCK), whole["weight_scale_2"]
        scale = blocks.abs().amax(-1).float() / (_LARGEST_CODE * total)
        stored = as_fp8(torch.where(scale == 0, 1.0, scale).clamp(2**-9, _LARGEST_SCALE))
        codes = e2m1(blocks.float().div_((stored.float() * total).unsqueeze(-1)))
        return {"weight": packed(codes.flatten(1)), "weight_scale": stored}
