"""INT4: codes of -8 to 7 with a scale for a group of columns, or for a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltasync import dtypes
from deltasync.quant.form import Part, Shape
from deltasync.quant.four_bits import check_columns, packed

_WORD = 8  # codes of an int32


@dataclass(frozen=True, slots=True)
class Int4:
    """INT4 of compressed-tensors, format pack-quantized, symmetric: W4A16 and the like.

    `weight_packed` int32 [rows, cols / 8], codes + 8 with the first one in the low bits;
    `weight_scale` bfloat16 [rows, groups], as the dtype of the weights is; `weight_shape` int64
    [2]. A scale is amax / 7.5, and an element's code the nearest of its quotient by the scale, all
    rounded to bfloat16.

    Words travel as the int32 that engines hold, so that their loaders and routes know the tensor. A
    changed code costs 8 bytes, index and word; as bytes it would cost 5. With `python -m
    benchmarks.served` a sync in words has 1/614 of the bytes of one in bfloat16, and in bytes would
    have 1/982: what is left is too little to be worth another view of the engine's memory.

    Source of the formulas: `calculate_qparams` of compressed-tensors (quantization/utils/
    helpers.py) on what a minmax observer sees, `_quantize` (lifecycle/forward_helpers.py) and
    `pack_to_int32` (compressors/pack_quantized/helpers.py), 0.17.

    Args:
        group: Columns that have a scale together; None for all of them.
    """

    group: int | None = 128
    rows: int = 1
    shares: bool = False

    @property
    def name(self) -> str:
        of = "rows" if self.group is None else f"groups of {self.group}"
        return f"INT4 of {of}"

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        check_columns(shape, self.group or 1, self.name)
        rows, cols = shape
        groups = 1 if self.group is None else cols // self.group
        return {
            "weight_packed": Part((rows, -(-cols // _WORD)), dtypes.BY_NAME["int32"], 1),
            "weight_scale": Part((rows, groups), dtypes.BY_NAME["bfloat16"], 1),
            "weight_shape": Part((2,), dtypes.BY_NAME["int64"], None, elements=shape),
        }

    def whole(self, weights: Iterable[Tensor]) -> Mapping[str, Tensor]:
        """Nothing: rows are on their own."""
        return {}

    def quantize(self, band: Tensor, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        groups = band.view(len(band), -1, self.group or band.shape[1])
        scale = groups.abs().amax(-1, keepdim=True) / 7.5
        scale = torch.where(scale == 0, torch.finfo(torch.bfloat16).eps, scale)
        codes = (groups / scale).clamp(-8, 7).round().add_(8).to(torch.uint8).flatten(1)
        codes = pad(codes, (0, -band.shape[1] % _WORD))
        return {"weight_packed": packed(codes).view(torch.int32), "weight_scale": scale.squeeze(-1)}
