"""The share of changed elements above which a chunk goes dense, by measured cost."""

from __future__ import annotations

from types import MappingProxyType

from pydantic import Field

from deltasync.delta.options import OptionsModel
from deltasync.delta.patch import chunk_numel_on

CROSSOVERS = MappingProxyType(
    {
        "cpu": 5.7 / 38.0,  # AMD EPYC, 2 cores, torch 2.13.0
        "cuda": 0.0081 / 0.0567,  # 2 x NVIDIA H200, NCCL, torch 2.11.0+cu130
    }
)
"""By type of the device that compares: nanoseconds of an element of a dense chunk, by those of a
changed element in a sparse one, in whole syncs, both ends together. A changed element costs an
index, a gather and a scatter at both ends, one of a dense chunk a copy and a share of a digest.
Accelerators that are not listed count as "cuda"."""


class Policy(OptionsModel):
    """When a chunk stops being sparse.

    The crossover is where both ways cost the same time, not where they take the same bytes. A
    parameter is sent sparse when no chunk is dense, dense when all are, chunked otherwise.
    """

    dense_above: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="density above which a chunk is dense; None for what was measured on devices "
        "of this type",
    )
    chunk_numel: int | None = Field(
        default=None,
        ge=1,
        lt=1 << 31,
        description="elements in a chunk; None for what fits the device",
    )

    def crossover(self, device_type: str) -> float:
        """The density above which a chunk on such a device ("cpu", "cuda") is sent dense."""
        if self.dense_above is not None:
            return self.dense_above
        return CROSSOVERS.get(device_type, CROSSOVERS["cuda"])

    def chunk_numel_on(self, *device_types: str) -> int:
        """Elements in a chunk where weights live on devices of these types."""
        return self.chunk_numel or chunk_numel_on(*device_types)
