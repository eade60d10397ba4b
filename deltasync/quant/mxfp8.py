"""MXFP8: FP8 with a power of two as the scale of each 32 elements of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.quant import reads
from deltasync.quant.computation import KernelForm
from deltasync.quant.form import OfRows, Part, Shape, check_choice, check_columns
from deltasync.quant.rounding import (
    LARGEST_FP8,
    NO_EXPONENT,
    as_fp8,
    divided,
    largest,
    mx_exponent,
    power_of_two,
    power_of_two_above,
)

_BLOCK = 32

Arithmetic = Literal["vllm", "compressed-tensors"]


@dataclass(frozen=True, slots=True)
class MxFp8(OfRows):
    """`weight` as float8_e4m3fn and `weight_scale`, uint8 of [rows, cols / 32]: biased exponents.

    The scale of e is 2^(e - 127). Columns must be a multiple of 32.

    `arithmetic="vllm"`: in float32, the least power of two that is not below amax / 448, from
    2^-127 to 2^127; an element is divided by it and rounded. So vLLM quantizes what it loads,
    unless FlashInfer does it (on GPUs of compute capability 10.0), which is another arithmetic.
    Source: `_mxfp8_e4m3_quantize_torch`
    (vllm/model_executor/layers/quantization/utils/mxfp8_utils.py). Its logarithm is exact enough
    for the maximum of any bfloat16 block.

    `arithmetic="compressed-tensors"`: the exponent of amax, and one more if its mantissa is 1.75 or
    above, less 8; at least 0. In bfloat16 an element is divided by that power of two, added to 0,
    clamped to what float8_e4m3fn has and rounded. So are "mxfp8-quantized" checkpoints. A block
    with a maximum of 1.75 * 2^127 or more has no scale; its codes are NaN. Source:
    `generate_mx_scales` (compressed_tensors/quantization/utils/mxfp_utils.py), `calculate_qparams`
    (utils/helpers.py), `quantize` (lifecycle/forward.py) and `compress_mx_scale`
    (compressors/mx_utils.py).
    """

    arithmetic: Arithmetic = "vllm"
    cols: ClassVar[int] = _BLOCK

    def __post_init__(self) -> None:
        """Raises ConfigError for what is unknown."""
        check_choice("MXFP8", self.arithmetic, get_args(Arithmetic))

    @property
    def name(self) -> str:
        return f"MXFP8 of {self.arithmetic}"

    @property
    def kernel(self) -> KernelForm:
        return KernelForm(
            reads.MXFP8_VLLM if self.arithmetic == "vllm" else reads.MXFP8, (1, _BLOCK)
        )

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        rows, cols = shape
        check_columns(shape, _BLOCK, self.name)
        return {
            "weight": Part(shape, dtypes.BY_NAME["float8_e4m3fn"], 1),
            "weight_scale": Part((rows, cols // _BLOCK), dtypes.BY_NAME["uint8"], 1, _BLOCK),
        }

    def quantize(self, band: Tensor, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        blocks = band.reshape(len(band), -1, _BLOCK)
        amax = largest(blocks, 2)
        if self.arithmetic == "vllm":
            exponent = power_of_two_above(divided(amax.float(), LARGEST_FP8)).clamp_(0, 254)
            scale = torch.where(amax.isnan(), torch.nan, power_of_two(exponent))
            scaled = blocks / scale
        else:
            exponent = mx_exponent(amax, largest_power=8)
            lacking = exponent == NO_EXPONENT
            scale = torch.where(lacking, torch.nan, power_of_two(exponent.clamp(max=254)))
            scaled = (blocks / scale.bfloat16()).add_(0).clamp_(-LARGEST_FP8, LARGEST_FP8)
        codes = as_fp8(scaled).view_as(band)
        return {"weight": codes, "weight_scale": exponent.squeeze(2).to(torch.uint8)}
