"""How kernels read codes: numbers that hosts and kernels agree on.

A *read* is a form times `FORM`, plus `WIDE` if that holds: see `delta.kernels.reads`.
"""

from __future__ import annotations

from deltasync.delta.kernels.reads import COMPUTED

WIDE = 1
"""Weights are float32, and rounded to bfloat16 first."""

FORM = COMPUTED

# Kernels keep the scales of these as float32.
BLOCK_FP8 = 1
BLOCK_FP8_UE8M0 = 2
FP8 = 3
"""Of compressed-tensors, per channel or per tensor."""
FP8_CHANNEL_VLLM = 4
FP8_TENSOR_VLLM = 5
INT8 = 6
INT4 = 7
INT4_SLIME = 8
# And those of these as they are served, in a byte.
MXFP8 = 9
MXFP8_VLLM = 10
MXFP4 = 11
NVFP4 = 12
NVFP4_MODELOPT = 13


def codes_of(form: int) -> int:
    """Codes in an element that is served."""
    if form in (INT4, INT4_SLIME):
        return 8
    return 2 if form >= MXFP4 else 1
