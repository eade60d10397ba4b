"""FP8 with a scale for each block of 128 x 128 elements, as DeepSeek-V3's checkpoints have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.quant.form import Part, Shape

_BLOCK = 128
_LARGEST = 448.0  # of float8_e4m3fn


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """`weight` as float8_e4m3fn and `weight_scale_inv`, float32 for each block.

    A block's scale is max(amax, 1e-4) / 448, and an element's code the nearest of its product with
    1 / scale, all in float32. With `scale="ue8m0"` the scale is rounded up to a power of two first.
    Blocks at the ends of rows and columns may be smaller.

    Source of the formula: `per_block_cast_to_fp8` of DeepGEMM (deep_gemm/utils/math.py), which
    vLLM has in vllm/utils/deep_gemm.py and SGLang, for ue8m0, in quantization/fp8_utils.py.
    """

    scale: Literal["float32", "ue8m0"] = "float32"
    rows: int = _BLOCK
    shares: bool = False

    @property
    def name(self) -> str:
        return f"block FP8 with {self.scale} scales"

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        rows, cols = shape
        blocks = -(-rows // _BLOCK), -(-cols // _BLOCK)
        return {
            "weight": Part(shape, dtypes.BY_NAME["float8_e4m3fn"], 1),
            "weight_scale_inv": Part(blocks, dtypes.BY_NAME["float32"], _BLOCK),
        }

    def whole(self, weights: Iterable[Tensor]) -> Mapping[str, Tensor]:
        """Nothing: blocks are on their own."""
        return {}

    def quantize(self, band: Tensor, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        rows, cols = band.shape
        padded = band.new_zeros((-(-rows // _BLOCK) * _BLOCK, -(-cols // _BLOCK) * _BLOCK))
        padded[:rows, :cols] = band
        blocks = padded.view(-1, _BLOCK, padded.shape[1] // _BLOCK, _BLOCK)
        scale = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / _LARGEST
        if self.scale == "ue8m0":
            scale = _power_of_two_above(scale)
        codes = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn).view_as(padded)
        return {"weight": codes[:rows, :cols], "weight_scale_inv": scale[:, 0, :, 0]}


def _power_of_two_above(scale: Tensor) -> Tensor:
    """The least power of two that is not below, of positive normal float32."""
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0).int()
    return (exponent.clamp(1, 254) << 23).view(torch.float32)
