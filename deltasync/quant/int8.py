"""INT8 with a scale for each row."""

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
from deltasync.quant.rounding import largest, scale_of_compressed_tensors, with_one_nan


@dataclass(frozen=True, slots=True)
class Int8(Form):
    """`weight` as int8 and `weight_scale`, bfloat16 of [rows, 1]: "int-quantized" checkpoints.

    All is in bfloat16. The scale is amax / 127.5, or 2^-7 if that is 0. An element is divided by
    it, rounded to bfloat16, clamped to [-128, 127] and rounded, ties to even.

    Source of the formula: compressed-tensors' `calculate_qparams`
    (compressed_tensors/quantization/utils/helpers.py) and `quantize`
    (quantization/lifecycle/forward.py), symmetric, on the minimum and the maximum of a row.
    """

    name: ClassVar[str] = "INT8 per channel of compressed-tensors"
    cols: ClassVar[None] = None
    kernel: ClassVar[KernelForm] = KernelForm(reads.INT8, (1, None))

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        check_columns(shape, 1, self.name)
        return {
            "weight": Part(shape, dtypes.BY_NAME["int8"], 1),
            "weight_scale": Part((shape[0], 1), dtypes.BY_NAME["bfloat16"], 1, shape[1]),
        }

    def quantize(self, band: Tensor, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        scale = scale_of_compressed_tensors(largest(band, 1), 127.5)
        codes = (band / scale).nan_to_num_(nan=0).clamp_(-128, 127).round_().to(torch.int8)
        return {"weight": codes, "weight_scale": with_one_nan(scale)}
