"""Where a sender listens, in a form that can be sent to its receivers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field

from deltasync.errors import ConfigError
from deltasync.transports.base import ReceiveTransport, SendTransport

LinkName = Literal["nccl", "gloo", "nixl", "cuda_ipc", "shared_memory"]


class Address(BaseModel):
    """Of a sender on a link that has addresses.

    The links are imported when they are used: not every system, or build of torch, has each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    link: LinkName
    host: str = Field(default="", description="of `nccl`, `gloo` and `nixl`")
    port: int = Field(default=0, ge=0, lt=1 << 16, description="of `nccl`, `gloo` and `nixl`")
    path: str = Field(default="", description="of the socket of the others")

    @classmethod
    def of(cls, transport: SendTransport) -> Self | None:
        """That of `transport`, if it has one."""
        from deltasync.transports import collective, cuda_ipc, nixl, shared_memory

        match transport:
            case collective.Sender() | nixl.Sender():
                host, port = transport.address
                link = transport.backend if isinstance(transport, collective.Sender) else "nixl"
                return cls(link=link, host=host, port=port)  # type: ignore[arg-type]
            case cuda_ipc.Sender():
                return cls(link="cuda_ipc", path=str(transport.path))
            case shared_memory.Sender():
                return cls(link="shared_memory", path=str(transport.path))
        return None

    def receiver(self, device: torch.device, *, secret: bytes | None = None) -> ReceiveTransport:
        """The other end, of weights on `device`. Links on a network share `secret`."""
        from deltasync.transports import collective, cuda_ipc, nixl, shared_memory

        match self.link:
            case "nccl" | "gloo":
                where = device if self.link == "nccl" else None
                return collective.Receiver(
                    self.host, self.port, backend=self.link, device=where, secret=secret
                )
            case "nixl":
                return nixl.Receiver(self.host, self.port, device=device, secret=secret)
            case "cuda_ipc":
                return cuda_ipc.Receiver(self.path, device=device)
            case "shared_memory":
                return shared_memory.Receiver(self.path)


def listen(
    link: LinkName,
    *,
    host: str = "127.0.0.1",
    path: Path | None = None,
    device: torch.device | str | None = None,
    secret: bytes | None = None,
) -> tuple[SendTransport, Address]:
    """Return a sender on a link, which the caller owns, and its address.

    Args:
        link: What moves weights.
        host: Of `nccl`, `gloo` and `nixl`: the interface to listen on.
        path: Of the others: the socket; None for one of this user's that nothing else has.
        device: Where payloads live; None for the link's default.
        secret: See `Address.receiver`.

    Raises ConfigError for another link.
    """
    from deltasync.transports import collective, cuda_ipc, nixl, shared_memory

    sender: SendTransport
    match link:
        case "nccl" | "gloo":
            sender = collective.Sender(host, backend=link, device=device, secret=secret)
        case "nixl":
            sender = nixl.Sender(host, device=device, secret=secret)
        case "cuda_ipc":
            sender = cuda_ipc.Sender(path, device=device)
        case "shared_memory":
            sender = shared_memory.Sender(path)
        case _:
            raise ConfigError(f"{link!r} is no link: give one of {', '.join(get_args(LinkName))}")
    address = Address.of(sender)
    assert address is not None  # each of these links has one
    return sender, address
