"""What a trainer sends to an engine's workers through the engine, and the calls that carry it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, FailFast, Field

from deltasync import dtypes
from deltasync.delta.bits import torch_dtype
from deltasync.engines.routes.recorder import CheckpointTensor
from deltasync.errors import UnknownDtype
from deltasync.transports.address import Address
from deltasync.transports.control.connection import LONGEST_S

Work = Literal["write", "pass", "name"]
"""What an update does: write a version; take one that changes nothing; only name one."""

Caches = Literal["clear", "keep"]
"""What becomes of keys and values that older weights computed. "clear": they are dropped in each
update, and those of running requests computed again. "keep": new requests find them.
"""

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
    holder: str = Field(default="", description="who this is, the same in each of its connects")
    continues: str = Field(default="", description="the holder that this one was before")
    sender: str = Field(default="", description="the same for all its engines, until it restarts")
    take_over: bool = Field(default=False, description="also from another trainer that is alive")
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
    timeout_s: float = Field(gt=0, le=LONGEST_S, description="for each wait")

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
    """A request to a worker through its engine: connect, disconnect, or `Worker.commit`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trainer: TrainerInfo | None = None
    version: int | None = None
    holder: str = ""
    work: Work = "write"


class Server(Protocol):
    """Calls that reach every worker of an engine. Each returns when all workers are done.

    All but `connect` have the `TrainerInfo.holder` of who asks. If another trainer was let connect
    since, they raise EngineTaken, and do nothing: `Worker.commit` and `Worker.disconnect` do so.
    An error of another type, with that type's name and message in its text, counts as well.
    """

    def connect(self, trainer: dict[str, Any], /) -> object:
        """Let workers connect to a trainer, whose earlier connection ends. The argument is JSON."""
        ...

    def update(self, version: int, holder: str, /) -> object:
        """Let workers write a version."""
        ...

    def name(self, version: int, holder: str, /) -> object:
        """Name the weights that the engine holds with a version."""
        ...

    def disconnect(self, holder: str, /) -> object:
        """Let workers close their connection, if they have one."""
        ...


@runtime_checkable
class OneCallServer(Server, Protocol):
    """A server that can pause, write, name and resume in one call."""

    def reach(self, paused: Callable[[], object], /) -> int:
        """Return how many workers `switch` updates; 0 if it must not replace this way to pause."""
        ...

    def switch(self, version: int, work: Work, stays_paused: bool, holder: str, /) -> object:
        """Pause if weights change, let workers take a version, name it, and resume.

        Resumes only if all workers hold the version. If `stays_paused`, a failure leaves generation
        paused, until a later call succeeds; but an EngineTaken leaves it as it was.
        """
        ...
