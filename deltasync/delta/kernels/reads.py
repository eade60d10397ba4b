"""How kernels read the elements of a source: numbers that hosts and kernels agree on."""

from __future__ import annotations

AS_IS = 0
ROUNDED = 1
"""From float32 to bfloat16."""

BLOCK_FP8 = 4
"""Quantized from bfloat16, by scales of blocks of 128 x 128. The next two are added to it."""

WIDE = 1
"""Weights are float32, and rounded to bfloat16 first."""

NATIVE = 2
"""The GPU converts to the type of the codes itself."""
