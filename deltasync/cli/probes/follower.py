"""A second process that follows this one's weights: what `doctor` tries and `bench` times."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Literal

import torch
from torch import nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    SenderOptions,
    WeightReceiver,
    WeightSender,
)
from deltasync.cli.probes.companion import start_companion
from deltasync.errors import PeerLost, TransportTimeout
from deltasync.transports import collective, cuda_ipc, shared_memory
from deltasync.transports.base import ReceiveTransport, SendTransport
from deltasync.transports.process_group import Backend

LinkName = Literal["shared_memory", "gloo", "cuda_ipc", "nccl"]

PARAMETER_NUMEL = 1 << 22
START_TIMEOUT_S = 100.0
JOIN_TIMEOUT_S = 180.0  # joining compiles kernels, at both ends
_POLL_S = 0.5
_EXIT_TIMEOUT_S = 10.0


def make_model(numel: int, device: str) -> nn.Module:
    """`numel` bf16 elements in parameters of 2^22, with values of a model: always the same bits."""
    generator = torch.Generator(device).manual_seed(0)
    module = nn.Module()
    for number, start in enumerate(range(0, numel, PARAMETER_NUMEL)):
        size = min(PARAMETER_NUMEL, numel - start)
        values = torch.empty(size, dtype=torch.bfloat16, device=device)
        values.normal_(0, 0.02, generator=generator)
        module.register_parameter(f"p{number}", nn.Parameter(values))
    return module


@contextmanager
def followed(
    module: nn.Module,
    link: LinkName,
    *,
    devices: tuple[str, str],
    options: SenderOptions | None = None,
) -> Iterator[WeightSender]:
    """The sender of `module`, from `make_model`, to a process that has joined, and follows it.

    Args:
        module: Lives on the first device.
        link: The transport between the two.
        devices: Of the sender and of the follower.
        options: Of the sender; the follower has the same kernels.

    Raises:
        PeerLost: The other process ended; the text has its last line.
        TransportTimeout: It does not come.
    """
    numel = sum(parameter.numel() for parameter in module.parameters())
    options = options or SenderOptions()
    with TemporaryDirectory(prefix="deltasync-") as folder, TemporaryFile() as said:
        transport, address = _sender(link, folder, devices[0])
        with WeightSender(ModuleSource(module), transport, options=options) as sender:
            words = [link, address, str(numel), devices[1], options.kernels]
            with start_companion("deltasync.cli.probes.follower", *words, stderr=said) as process:
                try:
                    _wait(sender, process, said)
                    sender.send_weights(timeout_s=JOIN_TIMEOUT_S)  # both hold the same already
                    yield sender
                    sender.close()
                    process.wait(_EXIT_TIMEOUT_S)
                finally:
                    process.kill()


def last_line(said: IO[bytes]) -> str:
    """What a process wrote last, which of a traceback is the error; empty if it was silent."""
    said.seek(0)
    lines = said.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _wait(sender: WeightSender, process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return sender.wait_for_receivers(1, timeout_s=_POLL_S)
        except TransportTimeout:
            if process.poll() is not None:
                raise PeerLost(f"the second process ended: {last_line(said)}") from None
            if time.monotonic() > deadline:
                raise


def _sender(link: LinkName, folder: str, device: str) -> tuple[SendTransport, str]:
    """The sender's end, and the address for `_receiver`."""
    path = Path(folder) / "weights.sock"
    match link:
        case "shared_memory":
            return shared_memory.Sender(path), str(path)
        case "cuda_ipc":
            return cuda_ipc.Sender(path, device=device), str(path)
        case "gloo" | "nccl":
            group = collective.Sender("127.0.0.1", backend=link, device=device)
            return group, "{}:{}".format(*group.address)


def _receiver(link: str, address: str, device: str) -> ReceiveTransport:
    match link:
        case "shared_memory":
            return shared_memory.Receiver(address)
        case "cuda_ipc":
            return cuda_ipc.Receiver(address, device=device)
    host, port = address.rsplit(":", 1)
    backend: Backend = "nccl" if link == "nccl" else "gloo"
    return collective.Receiver(host, int(port), backend=backend, device=device)


def main() -> None:
    """Follow the sender that `sys.argv` names until it has left."""
    link, address, numel, device, kernels = sys.argv[1:]
    target = ModuleTarget(make_model(int(numel), device))
    options = ReceiverOptions.model_validate({"kernels": kernels})
    receiver = WeightReceiver(target, _receiver(link, address, device), options=options)
    with receiver, contextlib.suppress(PeerLost):
        while True:
            receiver.receive_weights(timeout_s=JOIN_TIMEOUT_S)
