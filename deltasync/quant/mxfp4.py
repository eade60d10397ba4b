"""MXFP4: E2M1 codes, and a power of two as the scale of 32 of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.quant import reads
from deltasync.quant.computation import KernelForm
from deltasync.quant.form import OfRows, Part, Shape, check_columns
from deltasync.quant.four_bits import e2m1, packed
from deltasync.quant.rounding import mx_exponent, power_of_two

_BLOCK = 32


@dataclass(frozen=True, slots=True)
class MxFp4(OfRows):
    """MXFP4 of compressed-tensors, format mxfp4-pack-quantized: MXFP4 and MXFP4A16.

    `weight_packed` uint8 [rows, cols / 2], and `weight_scale` uint8 [rows, cols / 32]: e for the
    scale 2^(e - 127). It is the exponent of amax, one more if its mantissa is 1.75 or above, less
    2, and at least 0. A block with an amax of 1.75 * 2^127 or more has no scale.

    Source of the formulas: `generate_mx_scales` of compressed-tensors (quantization/utils/
    mxfp_utils.py), `calculate_qparams` (quantization/utils/helpers.py), `_quantize` (lifecycle/
    forward_helpers.py), `compress_mx_scale` (compressors/mx_utils.py), 0.17.
    """

    cols: ClassVar[int] = _BLOCK

    @property
    def name(self) -> str:
        return "MXFP4 of compressed-tensors"

    @property
    def kernel(self) -> KernelForm:
        return KernelForm(reads.MXFP4, (1, _BLOCK), codes="weight_packed")

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        check_columns(shape, _BLOCK, self.name)
        rows, cols = shape
        return {
            "weight_packed": Part((rows, cols // 2), dtypes.BY_NAME["uint8"], 1, 2),
            "weight_scale": Part((rows, cols // _BLOCK), dtypes.BY_NAME["uint8"], 1, _BLOCK),
        }

    def quantize(self, band: Tensor, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        blocks = band.view(len(band), -1, _BLOCK)
        exponent = mx_exponent(blocks.abs().amax(-1), largest_power=2)
        codes = e2m1((blocks / power_of_two(exponent).bfloat16().unsqueeze(-1)).float())
        return {
            "weight_packed": packed(codes.flatten(1)),
            "weight_scale": exponent.to(torch.uint8),
        }
