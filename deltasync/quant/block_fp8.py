"""FP8 with a scale for each block of 128 x 128 elements, as DeepSeek-V3's checkpoints have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.quant import reads
from deltasync.quant.computation import KernelForm
from deltasync.quant.form import Form, Part, Shape, check_choice
from deltasync.quant.rounding import (
    LARGEST_FP8,
    as_fp8,
    divided,
    largest,
    power_of_two,
    power_of_two_above,
    scale_of_compressed_tensors,
    with_one_nan,
)

_BLOCK = 128

Scale = Literal["float32", "ue8m0", "bfloat16"]


@dataclass(frozen=True, slots=True)
class BlockFp8(Form):
    """`weight` as float8_e4m3fn and `weight_scale_inv`, float32 for each block.

    Blocks at the ends of rows and columns may be smaller.

    `scale="float32"`: all is in float32. A block's scale is max(amax, 1e-4) / 448, and an element's
    code the nearest of its product with 1 / scale. With `scale="ue8m0"` the scale is rounded up to
    a power of two first. Source: `per_block_cast_to_fp8` of DeepGEMM (deep_gemm/utils/math.py),
    which vLLM has in vllm/utils/deep_gemm.py and SGLang, for ue8m0, in quantization/fp8_utils.py.
    They round up in two ways, by logarithms and by bits, which agree on the maximum of any bfloat16
    block. Each division is rounded once, as on CPUs. On GPUs torch multiplies by 1 / 448 instead,
    which gives other scales in the last bit of float32, and the same ue8m0.

    `scale="bfloat16"`: as `Fp8`, for each block: all is in bfloat16, and so is the scale, which is
    called `weight_scale`. So are "float-quantized" checkpoints of compressed-tensors, of strategy
    "block". Source: `calculate_qparams` (compressed_tensors/quantization/utils/helpers.py) on the
    minimum and the maximum of each block, and `compress` (compressors/naive_quantized/base.py).
    """

    scale: Scale = "float32"
    rows: ClassVar[int] = _BLOCK
    cols: ClassVar[int] = _BLOCK

    def __post_init__(self) -> None:
        """Raises ConfigError for what is unknown."""
        check_choice("scales of block FP8", self.scale, get_args(Scale))

    @property
    def name(self) -> str:
        return f"block FP8 with {self.scale} scales"

    @property
    def kernel(self) -> KernelForm | None:
        if self.scale == "bfloat16":
            return None
        number = reads.BLOCK_FP8 if self.scale == "float32" else reads.BLOCK_FP8_UE8M0
        return KernelForm(number, (_BLOCK, _BLOCK), scales="weight_scale_inv")

    @property
    def _scale_name(self) -> str:
        return "weight_scale" if self.scale == "bfloat16" else "weight_scale_inv"

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        rows, cols = shape
        blocks = -(-rows // _BLOCK), -(-cols // _BLOCK)
        dtype = dtypes.BY_NAME["bfloat16" if self.scale == "bfloat16" else "float32"]
        return {
            "weight": Part(shape, dtypes.BY_NAME["float8_e4m3fn"], 1),
            self._scale_name: Part(blocks, dtype, _BLOCK, _BLOCK),
        }

    def quantize(self, band: Tensor, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        rows, cols = band.shape
        padded = band.new_zeros((-(-rows // _BLOCK) * _BLOCK, -(-cols // _BLOCK) * _BLOCK))
        padded[:rows, :cols] = band
        blocks = padded.view(-1, _BLOCK, padded.shape[1] // _BLOCK, _BLOCK)
        amax = largest(blocks, (1, 3))
        if self.scale == "bfloat16":
            scale = scale_of_compressed_tensors(amax)
            scaled = (blocks / scale).add_(0).clamp_(-LARGEST_FP8, LARGEST_FP8)
        else:
            scale = divided(amax.float().clamp(1e-4), LARGEST_FP8)
            if self.scale == "ue8m0":
                exponent = power_of_two_above(scale).clamp_(1, 254)
                scale = torch.where(scale.isfinite(), power_of_two(exponent), scale)
            scaled = blocks * (1.0 / scale)
        codes = as_fp8(scaled).view_as(padded)
        return {"weight": codes[:rows, :cols], self._scale_name: with_one_nan(scale[:, 0, :, 0])}
