"""INT4: codes of -8 to 7 with a scale for a group of columns, or for a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltasync import dtypes
from deltasync.errors import ConfigError
from deltasync.quant import reads
from deltasync.quant.computation import KernelForm
from deltasync.quant.form import Form, Part, Shape, check_columns
from deltasync.quant.four_bits import packed
from deltasync.quant.rounding import largest, scale_of_compressed_tensors, with_one_nan

_WORD = 8  # codes of an int32


@dataclass(frozen=True, slots=True)
class Int4(Form):
    """INT4 as compressed-tensors keeps it, format pack-quantized, symmetric: W4A16 and the like.

    `weight_packed` int32 [rows, cols / 8], codes + 8 with the first one in the low bits;
    `weight_scale` bfloat16 [rows, groups], as the dtype of the weights is; `weight_shape` int64
    [2].

    A scale is amax / 7.5, and an element's code the nearest of its quotient by the scale, from -8
    to 7, all rounded to bfloat16. Source: `calculate_qparams` (quantization/utils/helpers.py) on
    what a minmax observer sees, `_quantize` (lifecycle/forward_helpers.py) and `pack_to_int32`
    (compressors/pack_quantized/helpers.py), 0.17.

    Words travel as the int32 that engines hold, so that their loaders and routes know the tensor. A
    changed code costs 8 bytes, index and word; as bytes it would cost 5. After one
    step of AdamW at 1e-6, a sync in words has 1/614 of the bytes of one in bfloat16, and in bytes
    would have 1/982: what is left is too little to be worth another view of the engine's memory.

    Args:
        group: Columns that have a scale together; None for all of them.
    """

    group: int | None = 128

    def __post_init__(self) -> None:
        """Raises ConfigError for groups of nothing."""
        if self.group is not None and self.group < 1:
            raise ConfigError(f"INT4 of groups of {self.group} columns; give 1 or more, or None")

    @property
    def cols(self) -> int | None:
        return self.group

    @property
    def name(self) -> str:
        of = "rows" if self.group is None else f"groups of {self.group}"
        return f"INT4 of {of} (compressed-tensors)"

    @property
    def kernel(self) -> KernelForm:
        return KernelForm(reads.INT4, (1, self.group), codes="weight_packed")

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        check_columns(shape, self.group or 1, self.name)
        rows, cols = shape
        group = cols if self.group is None else self.group
        return {
            "weight_packed": Part((rows, -(-cols // _WORD)), dtypes.BY_NAME["int32"], 1, _WORD),
            "weight_scale": Part((rows, cols // group), dtypes.BY_NAME["bfloat16"], 1, group),
            "weight_shape": Part((2,), dtypes.BY_NAME["int64"], None, elements=shape),
        }

    def quantize(self, band: Tensor, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        groups = band.view(len(band), -1, self.group or band.shape[1])
        scale = scale_of_compressed_tensors(largest(groups, -1), 7.5)
        codes = (groups / scale).clamp(-8, 7).round()
        unsigned = codes.add_(8).nan_to_num_(nan=0).to(torch.uint8).flatten(1)
        words = packed(pad(unsigned, (0, -band.shape[1] % _WORD))).view(torch.int32)
        return {"weight_packed": words, "weight_scale": with_one_nan(scale.squeeze(-1))}
