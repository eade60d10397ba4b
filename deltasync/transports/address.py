"""Where a sender listens, in a form that can be sent to its receivers."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field

from deltasync.transports.base import ReceiveTransport, SendTransport

LinkName = Literal["nccl", "gloo", "cuda_ipc", "shared_memory"]


class Address(BaseModel):
    """Of a sender on a link that has addresses.

    The links are imported when they are used: not every system, or build of torch, has each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    link: LinkName
    host: str = Field(default="", description="of `nccl` and `gloo`")
    port: int = Field(default=0, ge=0, lt=1 << 16, description="of `nccl` and `gloo`")
    path: str = Field(default="", description="of the socket of the others")

    @classmethod
    def of(cls, transport: SendTransport) -> Self | None:
        """That of `transport`, if it has one."""
        from deltasync.transports import collective, cuda_ipc, shared_memory

        match transport:
            case collective.Sender():
                host, port = transport.address
                return cls(link=transport.backend, host=host, port=port)
            case cuda_ipc.Sender():
                return cls(link="cuda_ipc", path=str(transport.path))
            case shared_memory.Sender():
                return cls(link="shared_memory", path=str(transport.path))
        return None

    def receiver(self, device: torch.device, *, secret: bytes | None = None) -> ReceiveTransport:
        """The other end, of weights on `device`. Links on a network share `secret`."""
        from deltasync.transports import collective, cuda_ipc, shared_memory

        match self.link:
            case "nccl":
                return collective.Receiver(
                    self.host, self.port, backend="nccl", device=device, secret=secret
                )
            case "gloo":
                return collective.Receiver(self.host, self.port, secret=secret)
            case "cuda_ipc":
                return cuda_ipc.Receiver(self.path, device=device)
            case "shared_memory":
                return shared_memory.Receiver(self.path)
