"""FP8 with a scale for each row, or one for the matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.quant import reads
from deltasync.quant.computation import KernelForm
from deltasync.quant.form import Part, Shape, check_choice, check_columns
from deltasync.quant.rounding import (
    LARGEST_FP8,
    as_fp8,
    divided,
    largest,
    scale_of_compressed_tensors,
    with_one_nan,
)

Per = Literal["channel", "tensor"]
Arithmetic = Literal["compressed-tensors", "vllm"]

_LEAST_SCALE = 1 / (LARGEST_FP8 * 512)


@dataclass(frozen=True, slots=True)
class Fp8:
    """`weight` as float8_e4m3fn and `weight_scale`: [rows, 1] per channel, [1] per tensor.

    Layers that an engine fuses share the scale of a tensor: it computes with one.

    `arithmetic="compressed-tensors"`: all is in bfloat16, the scale too. It is amax / 448, or
    2^-7 if that is 0. An element is divided by it, rounded to bfloat16, added to 0, clamped to what
    float8_e4m3fn has and rounded. So are "float-quantized" checkpoints. Source:
    `calculate_qparams` (compressed_tensors/quantization/utils/helpers.py) and `quantize`
    (quantization/lifecycle/forward.py), on the minimum and the maximum.

    `arithmetic="vllm"`: all is in float32, as when vLLM quantizes what it loads. The scale is
    amax / 448. Per channel it is at least 1 / (448 * 512), and an element is divided by it; per
    tensor an element is multiplied by 1 / scale. What results is clamped and rounded. A matrix of
    zeros has no scale per tensor, and vLLM gives it the code of 448. Source:
    `Fp8PtpcOnlineLinearMethod` and `Fp8PerTensorOnlineLinearMethod`
    (vllm/model_executor/layers/quantization/online/fp8.py), and for the elements per tensor
    `scaled_fp8_conversion` (csrc/quantization/w8a8/fp8/common.cuh), which runs on GPUs only.
    """

    per: Per = "channel"
    arithmetic: Arithmetic = "compressed-tensors"
    rows: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Raises ConfigError for what is unknown."""
        check_choice("scales of FP8", self.per, get_args(Per))
        check_choice("FP8", self.arithmetic, get_args(Arithmetic))

    @property
    def name(self) -> str:
        return f"FP8 per {self.per} of {self.arithmetic}"

    @property
    def cols(self) -> int | None:
        return None if self.per == "channel" else 1

    @property
    def shares(self) -> bool:
        return self.per == "tensor"

    @property
    def kernel(self) -> KernelForm:
        if self.per == "channel":
            is_vllm = self.arithmetic == "vllm"
            return KernelForm(reads.FP8_CHANNEL_VLLM if is_vllm else reads.FP8, (1, None))
        number, total_of = _TOTALS[self.arithmetic]
        block = None, None
        return KernelForm(number, block, scales=None, total="weight_scale", total_of=total_of)

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        check_columns(shape, 1, self.name)
        dtype = dtypes.BY_NAME["float32" if self.arithmetic == "vllm" else "bfloat16"]
        per_channel = Part((shape[0], 1), dtype, 1, shape[1])
        scale = per_channel if self.per == "channel" else Part((1,), dtype, None)
        return {"weight": Part(shape, dtypes.BY_NAME["float8_e4m3fn"], 1), "weight_scale": scale}

    def whole(self, weights: Iterable[Tensor]) -> Mapping[str, Tensor]:
        if self.per == "channel":
            return {}
        peaks = [largest(weight, (0, 1)) for weight in weights]
        peak = largest(torch.cat(peaks), (0, 1)).view(1)
        return {"weight_scale": _TOTALS[self.arithmetic][1](peak)}

    def quantize(self, band: Tensor, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if whole:
            return {"weight": as_fp8(self._scaled(band, whole["weight_scale"]))}
        scale = _SCALES[self.arithmetic](largest(band, 1))
        return {"weight": as_fp8(self._scaled(band, scale)), "weight_scale": scale}

    def _scaled(self, band: Tensor, scale: Tensor) -> Tensor:
        if self.arithmetic == "compressed-tensors":
            return (band / scale).add_(0).clamp_(-LARGEST_FP8, LARGEST_FP8)
        if self.per == "channel":
            return (band / scale).clamp_(-LARGEST_FP8, LARGEST_FP8)
        scaled = band * scale.reciprocal()
        return scaled.nan_to_num_(nan=LARGEST_FP8).clamp_(-LARGEST_FP8, LARGEST_FP8)


def _bfloat16_scale(amax: Tensor) -> Tensor:
    return with_one_nan(scale_of_compressed_tensors(amax))


def _float32_scale(amax: Tensor) -> Tensor:
    """float32 [...], of largest magnitudes of tensors: that of vLLM."""
    return with_one_nan(divided(amax.float(), LARGEST_FP8))


def _channel_scale(amax: Tensor) -> Tensor:
    """float32 [...], of largest magnitudes of channels: that of vLLM."""
    return with_one_nan(divided(amax.float(), LARGEST_FP8).clamp_(_LEAST_SCALE))


_SCALES = {"compressed-tensors": _bfloat16_scale, "vllm": _channel_scale}
_TOTALS = {
    "compressed-tensors": (reads.FP8, _bfloat16_scale),
    "vllm": (reads.FP8_TENSOR_VLLM, _float32_scale),
}
