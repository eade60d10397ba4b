"""How kernels read the elements of a source: numbers that hosts and kernels agree on.

A *read* is `AS_IS`, `ROUNDED`, or a number from `COMPUTED` on, whose meaning is that of the
`Masks` that codes come from.
"""

from __future__ import annotations

AS_IS = 0
ROUNDED = 1
"""From float32 to bfloat16."""

COMPUTED = 2
