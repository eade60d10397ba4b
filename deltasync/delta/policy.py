"""Sparse or dense: chosen by predicted cost, chunk by chunk."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from deltasync.delta.patch import CHUNK_NUMEL


class Policy(BaseModel):
    """When a chunk stops being sparse.

    A sparse element costs an index, a gather and a scatter on both ends; a dense one a copy
    and a share of a full digest. So the crossover is where `density * sparse_ns = dense_ns`,
    not where the bytes are equal. A parameter is sent sparse when no chunk is dense, dense
    when all are, chunked otherwise.

    The default costs are CPU time of both ends together, so that their crossover is where syncs
    with all chunks sparse and all chunks dense take the same time. `python -m benchmarks cpu
    --only crossover` measures that on a machine.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sparse_ns: float = Field(38.0, gt=0, description="cost of one changed element, all phases")
    dense_ns: float = Field(5.7, gt=0, description="cost of one element of a dense chunk")
    dense_above: float | None = Field(
        None, ge=0, le=1, description="density above which a chunk is dense; overrides the costs"
    )
    chunk_numel: int = Field(CHUNK_NUMEL, ge=1, lt=1 << 31, description="elements in a chunk")

    @property
    def crossover(self) -> float:
        """The density above which a chunk is sent dense."""
        return self.dense_ns / self.sparse_ns if self.dense_above is None else self.dense_above

    def max_sparse(self, numel: int) -> float:
        """The most changes with which a chunk of `numel` elements still goes sparse."""
        return self.crossover * numel
