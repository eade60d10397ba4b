"""The share of changed elements above which a chunk goes dense, by predicted cost."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Self

from pydantic import ConfigDict, Field

from deltasync.delta.options import OptionsModel
from deltasync.delta.patch import chunk_numel_on
from deltasync.errors import ConfigError


class Costs(OptionsModel):
    """What an element costs in a whole sync, both ends together, on one kind of machine.

    A sparse element costs an index, a gather and a scatter on both ends; a dense one a copy
    and a share of a full digest. `python -m benchmarks calibrate` measures them and writes a
    file that `load` reads.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    machine: str = Field(description="where they were measured, and with what")
    sparse_ns: float = Field(gt=0, description="cost of one changed element, all phases")
    dense_ns: float = Field(gt=0, description="cost of one element of a dense chunk")

    @property
    def crossover(self) -> float:
        """The density at which both ways cost the same. Above 1: sparse always pays."""
        return self.dense_ns / self.sparse_ns

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a JSON file of these fields. Raises ConfigError."""
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except (OSError, ConfigError) as error:
            raise ConfigError(f"no costs in {path}: {error}") from error


DEFAULT_COSTS = MappingProxyType(
    {
        "cpu": Costs(machine="AMD EPYC, 2 cores, torch 2.13.0", sparse_ns=38.0, dense_ns=5.7),
        "cuda": Costs(
            machine="2 x NVIDIA H200, NCCL, torch 2.11.0+cu130", sparse_ns=0.0567, dense_ns=0.0081
        ),
    }
)
"""By type of the device that compares. Accelerators that are not listed count as "cuda"."""


class Policy(OptionsModel):
    """When a chunk stops being sparse.

    The crossover is where `density * sparse_ns = dense_ns`, not where the bytes are equal. A
    parameter is sent sparse when no chunk is dense, dense when all are, chunked otherwise.
    """

    costs: Costs | None = Field(default=None, description="None for DEFAULT_COSTS of the device")
    dense_above: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="density above which a chunk is dense; overrides the costs",
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
        shipped = DEFAULT_COSTS.get(device_type, DEFAULT_COSTS["cuda"])
        return (self.costs or shipped).crossover

    def chunk_numel_on(self, *device_types: str) -> int:
        """Elements in a chunk where weights live on devices of these types."""
        return self.chunk_numel or chunk_numel_on(*device_types)
