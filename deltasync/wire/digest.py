"""The numbers of the state digest, which two ends compare to know that weights agree.

docs/wire-format.md, section 5. The digest of a set of elements is the sum over its elements of a
64-bit mix of (parameter, position, bits), so that it can be kept up to date from a patch, added up
over disjoint pieces, and still sees order. It detects faults, not forgers. `delta.kernels` computes
it.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

GOLDEN_RATIO = 0x9E3779B97F4A7C15  # 2^64 / phi: keys of neighbouring positions lie far apart
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = (1 << 64) - 1


@lru_cache(maxsize=1 << 18)
def seed(name: str) -> int:
    """The seed of the parameter with this canonical name, 0 to 2^64 - 1."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
