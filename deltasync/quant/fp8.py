"""FP8 with a scale for each row, or one for the matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from deltasync import dtypes
from deltasync.quant import reads
from deltasync.quant.computation import KernelForm
from deltasync.quant.form import Form, Part, Shape, check_choice, check_columns
from deltasync.quant.rounding import (
    LARGEST_FP8,
    as_fp8,
    largest,
    scale_of_compressed_tensors,
    with_one_nan,
)

Per = Literal["channel", "tensor"]


@dataclass(frozen=True, slots=True)
class Fp8(Form):
    """`weight` as float8_e4m3fn and `weight_scale`: bfloat16 [rows, 1] per channel, [1] per tensor.

    Layers that an engine fuses share the scale of a tensor: it computes with one.

    All is in bfloat16. The scale is amax / 448, or 2^-7 if that is 0. An element is divided by it,
    rounded to bfloat16, added to 0, clamped to what float8_e4m3fn has and rounded. So are
    "float-quantized" checkpoints. Source: `calculate_qparams`
    (compressed_tensors/quantization/utils/helpers.py) and `quantize`
    (quantization/lifecycle/forward.py), on the minimum and the maximum.
    """

    per: Per = "channel"

    def __post_init__(self) -> None:
        """Raises ConfigError for what is unknown."""
        check_choice("scales of FP8", self.per, get_args(Per))

    @property
    def name(self) -> str:
        return f"FP8 per {self.per} of compressed-tensors"

    @property
    def cols(self) -> int | None:
        return None if self.per == "channel" else 1

    @property
    def shares(self) -> bool:
        return self.per == "tensor"

    @property
    def kernel(self) -> KernelForm:
        if self.per == "channel":
            return KernelForm(reads.FP8, (1, None))
        block = None, None
        return KernelForm(reads.FP8, block, scales=None, total="weight_scale", total_of=_scale)

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        check_columns(shape, 1, self.name)
        dtype = dtypes.BY_NAME["bfloat16"]
        per_channel = Part((shape[0], 1), dtype, 1, shape[1])
        scale = per_channel if self.per == "channel" else Part((1,), dtype, None)
        return {"weight": Part(shape, dtypes.BY_NAME["float8_e4m3fn"], 1), "weight_scale": scale}

    def whole(self, peak: Tensor) -> Mapping[str, Tensor]:
        return {"weight_scale": _scale(peak)} if self.shares else {}

    def quantize(self, band: Tensor, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        scale = whole["weight_scale"] if whole else _scale(largest(band, 1))
        codes = as_fp8((band / scale).add_(0).clamp_(-LARGEST_FP8, LARGEST_FP8))
        return {"weight": codes} if whole else {"weight": codes, "weight_scale": scale}


def _scale(amax: Tensor) -> Tensor:
    return with_one_nan(scale_of_compressed_tensors(amax))
