"""MXFP4: E2M1 codes, and a power of two as the scale of 32 of a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.quant.form import Part, Shape
from deltasync.quant.four_bits import check_columns, e2m1, packed

_BLOCK = 32
_LACKING = 255  # of e8m0: NaN


@dataclass(frozen=True, slots=True)
class MxFp4:
    """MXFP4 of compressed-tensors, format mxfp4-pack-quantized: MXFP4 and MXFP4A16.

    `weight_packed` uint8 [rows, cols / 2], and `weight_scale` uint8 [rows, cols / 32]: e for the
    scale 2^(e - 127). It is the exponent of amax, one more if its mantissa is 1.75 or above, less
    2, and at least 0. A block with an amax of 1.75 * 2^127 or more has no scale.

    Source of the formulas: `generate_mx_scales` of compressed-tensors (quantization/utils/
    mxfp_utils.py), `calculate_qparams` (quantization/utils/helpers.py), `_quantize` (lifecycle/
    forward_helpers.py), `compress_mx_scale` (compressors/mx_utils.py), 0.17.
    """

    rows: int = 1
    shares: bool = False

    @property
    def name(self) -> str:
        return "MXFP4 of compressed-tensors"

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        check_columns(shape, _BLOCK, self.name)
        rows, cols = shape
        return {
            "weight_packed": Part((rows, cols // 2), dtypes.BY_NAME["uint8"], 1),
            "weight_scale": Part((rows, cols // _BLOCK), dtypes.BY_NAME["uint8"], 1),
        }

    def whole(self, weights: Iterable[Tensor]) -> Mapping[str, Tensor]:
        """Nothing: blocks are on their own."""
        return {}

    def quantize(self, band: Tensor, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        blocks = band.view(len(band), -1, _BLOCK)
        amax = blocks.abs().amax(-1).view(torch.int16).int()
        exponent = (amax + 0x20) >> 7  # mantissas of 1.75 carry
        exponent = torch.where(exponent >= _LACKING, _LACKING, (exponent - 2).clamp(0))
        scale = torch.where(exponent == 0, 2.0**-127, (exponent << 23).view(torch.float32))
        codes = e2m1((blocks / scale.bfloat16().unsqueeze(-1)).float())
        return {
            "weight_packed": packed(codes.flatten(1)),
            "weight_scale": exponent.to(torch.uint8),
        }
