"""MXFP8: FP8 with a power of two as the scale of each 32 elements of a row."""

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
from deltasync.quant.rounding import LARGEST_FP8, as_fp8, largest, power_of_two

_BLOCK = 32
_NO_EXPONENT = 255
"""e8m0's NaN: the exponent of no scale."""


@dataclass(frozen=True, slots=True)
class MxFp8(Form):
    """`weight` as float8_e4m3fn and `weight_scale`, uint8 of [rows, cols / 32]: biased exponents.

    The scale of e is 2^(e - 127). Columns must be a multiple of 32. The exponent is that of amax,
    and one more if its mantissa is 1.75 or above, less 8; at least 0. In bfloat16 an element is
    divided by that power of two, added to 0, clamped to what float8_e4m3fn has and rounded. So are
    "mxfp8-quantized" checkpoints. A block with a maximum of 1.75 * 2^127 or more has no scale; its
    codes are NaN.

    Source: `generate_mx_scales` (compressed_tensors/quantization/utils/mxfp_utils.py),
    `calculate_qparams` (utils/helpers.py), `quantize` (lifecycle/forward.py) and
    `compress_mx_scale` (compressors/mx_utils.py).
    """

    name: ClassVar[str] = "MXFP8 of compressed-tensors"
    cols: ClassVar[int] = _BLOCK
    kernel: ClassVar[KernelForm] = KernelForm(reads.MXFP8, (1, _BLOCK))

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        rows, cols = shape
        check_columns(shape, _BLOCK, self.name)
        return {
            "weight": Part(shape, dtypes.BY_NAME["float8_e4m3fn"], 1),
            "weight_scale": Part((rows, cols // _BLOCK), dtypes.BY_NAME["uint8"], 1, _BLOCK),
        }

    def quantize(self, band: Tensor, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        blocks = band.reshape(len(band), -1, _BLOCK)
        bits = largest(blocks, 2).view(torch.int16).int()
        exponent = (bits + 0x20) >> 7  # carries from mantissas of 1.75
        has_scale = exponent < _NO_EXPONENT
        exponent = torch.where(has_scale, (exponent - 8).clamp(0), _NO_EXPONENT)
        scale = power_of_two(exponent.clamp(max=254)).bfloat16()
        scale = torch.where(has_scale, scale, torch.nan)
        codes = as_fp8((blocks / scale).add_(0).clamp_(-LARGEST_FP8, LARGEST_FP8)).view_as(band)
        return {"weight": codes, "weight_scale": exponent.squeeze(2).to(torch.uint8)}
