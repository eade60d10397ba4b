"""Functions that touch every element, chosen by device.

`host` and `reference` have the same functions, held together by a parity test. The kernels of
`tiles` go over a whole model in one launch; `delta.device` calls them.

- `changed(new, old, most)`: int32 positions where int[n] differ; None if they are more than `most`.
- `digest_run(bits, key, start)`: the digest of consecutive elements, a Python integer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from deltasync.delta.kernels import host, reference


class Kernels(Protocol):
    """The functions of a kernel module."""

    def changed(self, new: Tensor, old: Tensor, most: int) -> Tensor | None: ...

    def digest_run(self, bits: Tensor, key: int, start: int) -> int: ...


KERNELS: Mapping[str, Kernels] = defaultdict(lambda: reference, cpu=host)
"""The kernels by type of the device that they run on."""
