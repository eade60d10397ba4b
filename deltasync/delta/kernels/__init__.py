"""Functions that touch every element, chosen by device.

`host` and `reference` have the same functions, held together by a parity test. The kernels of
`triton` go over a whole model in one launch; `delta.batched` calls them.

- `changed(new, old, limit)`: how many of int[n] differ, and their int32 positions, new and old
  bits unless they are more than `limit`.
- `is_increasing(indices, span)`: whether int32[n] are strictly increasing within [0, span).
- `digest_run(bits, key, start)`: the digest of consecutive elements, a Python integer.
- `digest_chunks(positions, bits, key, chunk_numel)`: the digests of scattered elements by
  chunk, as (first chunk, uint64[chunks]).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.kernels import host, reference


class Kernels(Protocol):
    """The functions of a kernel module."""

    def changed(
        self, new: Tensor, old: Tensor, limit: float
    ) -> tuple[int, tuple[Tensor, Tensor, Tensor] | None]: ...

    def is_increasing(self, indices: Tensor, span: int) -> bool: ...

    def digest_run(self, bits: Tensor, key: int, start: int) -> int: ...

    def digest_chunks(
        self, positions: Tensor, bits: Tensor, key: int, chunk_numel: int
    ) -> tuple[int, NDArray[np.uint64]]: ...


KERNELS: Mapping[str, Kernels] = defaultdict(lambda: reference, cpu=host)
"""The kernels by type of the device that they run on."""
