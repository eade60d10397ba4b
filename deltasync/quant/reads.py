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
"""Per channel or per tensor."""
INT8 = 4
INT4 = 5
# And those of these as they are served, in a byte.
MXFP8 = 6
NVFP4 = 7
NVFP4_MODELOPT = 8


def codes_of(form: int) -> int:
    """Codes in an element that is served."""
    if form == INT4:
        return 8
    return 2 if form >= NVFP4 else 1
