"""deltasync's link between the ends of a run, and what the engine's end is told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.syncs.plan import Link
from deltasync.transports import collective, shared_memory
from deltasync.transports.address import Address
from deltasync.transports.base import ReceiveTransport, SendTransport


def listen(link: Link, device: torch.device, path: Path) -> tuple[SendTransport, dict[str, Any]]:
    """The trainer's end, and its address as JSON. `path`: of a socket, where the link has one."""
    transport: SendTransport
    if link == "collective":
        backend: str = "gloo" if device.type == "cpu" else "nccl"
        transport = collective.Sender(backend=backend, device=device)
    elif device.type == "cpu":
        transport = shared_memory.Sender(path)
    else:
        from deltasync.transports import cuda_ipc

        transport = cuda_ipc.Sender(path, device=device)
    address = Address.of(transport)
    assert address is not None
    return transport, address.model_dump(mode="json")


def connect(address: dict[str, Any], device: torch.device) -> ReceiveTransport:
    """The engine's end, of weights on `device`."""
    return Address(**address).receiver(device)
