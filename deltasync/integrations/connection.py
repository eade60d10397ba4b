"""What a trainer tells the workers of an engine so that they can connect: plain JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, FailFast, Field

from deltasync import dtypes
from deltasync.delta.bits import dtype_of, torch_dtype
from deltasync.delta.recorder import CheckpointTensor
from deltasync.errors import ConfigError, UnknownDtype
from deltasync.sync.source import NamedTensor
from deltasync.transports import collective, cuda_ipc, shared_memory
from deltasync.transports.base import ReceiveTransport, SendTransport

LinkName = Literal["nccl", "gloo", "cuda_ipc", "shared_memory"]
WithoutRoutes = Literal["refuse", "reload"]
Shape = Annotated[tuple[Annotated[int, Field(ge=0)], ...], FailFast()]
Tensors = Annotated[tuple[tuple[str, str, Shape], ...], FailFast()]


class Connection(BaseModel):
    """The trainer's address, and the checkpoint that it keeps workers at."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    link: LinkName
    engine: str = Field(
        max_length=64, description="what the trainer calls the engine, and no other"
    )
    host: str = Field("", description="of `nccl` and `gloo`")
    port: int = Field(0, ge=0, lt=1 << 16, description="of `nccl` and `gloo`")
    path: str = Field("", description="of the socket of the others")
    tensors: Tensors = Field(description="name, dtype and shape of each of the checkpoint's")
    without_routes: WithoutRoutes = Field(
        "refuse", description="what to do where no route leads; see `EngineSync`"
    )
    max_staged_bytes: int = Field(ge=0, description="memory for a version that is not written yet")
    timeout_s: float = Field(gt=0, le=86_400, description="for each wait")

    @classmethod
    def to(
        cls,
        transport: SendTransport,
        tensors: Sequence[NamedTensor],
        *,
        engine: str,
        without_routes: WithoutRoutes,
        max_staged_bytes: int,
        timeout_s: float,
    ) -> Self:
        """To a trainer that listens on `transport`. Raises ConfigError for one out of reach."""
        host, port, path = "", 0, ""
        link: LinkName
        match transport:
            case collective.Sender():
                link, (host, port) = transport.backend, transport.address
            case cuda_ipc.Sender():
                link, path = "cuda_ipc", str(transport.path)
            case shared_memory.Sender():
                link, path = "shared_memory", str(transport.path)
            case _:
                name = type(transport).__name__
                raise ConfigError(f"an engine's workers cannot connect to a {name}")
        return cls(
            link=link,
            engine=engine,
            host=host,
            port=port,
            path=path,
            tensors=tuple(
                (one.name, dtype_of(one.tensor).name, tuple(one.tensor.shape)) for one in tensors
            ),
            without_routes=without_routes,
            max_staged_bytes=max_staged_bytes,
            timeout_s=timeout_s,
        )

    def checkpoint(self) -> list[CheckpointTensor]:
        """The tensors that the engine's loader is asked about. Raises UnknownDtype."""
        if unknown := {dtype for _, dtype, _ in self.tensors} - dtypes.BY_NAME.keys():
            raise UnknownDtype(f"no dtype is called {min(unknown)!r}")
        return [
            CheckpointTensor(name, shape, torch_dtype(dtypes.BY_NAME[dtype]))
            for name, dtype, shape in self.tensors
        ]

    def receiver(self, device: torch.device) -> ReceiveTransport:
        """The worker's end, of weights on `device`."""
        match self.link:
            case "nccl":
                return collective.Receiver(self.host, self.port, backend="nccl", device=device)
            case "gloo":
                return collective.Receiver(self.host, self.port)
            case "cuda_ipc":
                return cuda_ipc.Receiver(self.path, device=device)
            case "shared_memory":
                return shared_memory.Receiver(self.path)
