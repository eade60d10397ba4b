"""What a trainer sends to an engine's workers through the engine, as plain JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from deltasync import dtypes
from deltasync.delta.bits import torch_dtype
from deltasync.delta.routes.recorder import CheckpointTensor
from deltasync.errors import UnknownDtype
from deltasync.transports.address import Address

WithoutRoutes = Literal["refuse", "reload"]
Unproved = Literal["refuse", "accept_stale_weights"]
Shape = Annotated[tuple[Annotated[int, Field(ge=0)], ...], FailFast()]
Names = Annotated[tuple[str, ...], Field(min_length=1), FailFast()]
Tensors = Annotated[tuple[tuple[Names, str, Shape], ...], FailFast()]

SentTensors = tuple[Tensors, tuple[str, ...], Unproved]
"""The tensors that a trainer sends, and what it accepts for the others."""


class TrainerInfo(BaseModel):
    """What a worker needs to connect: the trainer's addresses, and the tensors that it sends."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    addresses: tuple[Address, ...] = Field(min_length=1, description="of the ranks, in order")
    engine: str = Field(max_length=64, description="the trainer's unique name for the engine")
    tensors: Tensors = Field(description="names, dtype and shape of each checkpoint tensor")
    without_routes: WithoutRoutes = Field(
        default="refuse", description="what to do if a tensor has no route; see `EngineSync`"
    )
    keep: tuple[Annotated[str, Field(max_length=1024)], ...] = Field(
        default=(), max_length=1024, description="patterns of tensors that are not sent"
    )
    unproved: Unproved = Field(
        default="refuse", description="what to do if updates cannot be proved"
    )
    max_staged_bytes: int = Field(ge=0, description="memory for a version before it is written")
    timeout_s: float = Field(gt=0, le=86_400, description="for each wait")

    def sent(self) -> SentTensors:
        """What a proof depends on."""
        return self.tensors, self.keep, self.unproved

    def checkpoint(self) -> list[CheckpointTensor]:
        """The tensors whose routes are recorded from the engine's loader. Raises UnknownDtype."""
        if unknown := {dtype for _, dtype, _ in self.tensors} - dtypes.BY_NAME.keys():
            name = next(names[0] for names, dtype, _ in self.tensors if dtype in unknown)
            raise UnknownDtype(
                f"{name!r} has the dtype {min(unknown)!r}, which is not known here: install the "
                "trainer's version of deltasync beside the engine"
            )
        return [
            CheckpointTensor(names[0], shape, torch_dtype(dtypes.BY_NAME[dtype]), names[1:])
            for names, dtype, shape in self.tensors
        ]


class WorkerRequest(BaseModel):
    """A request to a worker through its engine: connect, disconnect, or write a version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trainer: TrainerInfo | None = None
    version: int | None = None
