"""A second process that follows this one's weights, which `doctor` tries."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

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
from deltasync.transports.address import Address, LinkName, listen

_NUMEL = 1000
START_TIMEOUT_S = 100.0
JOIN_TIMEOUT_S = 180.0  # joining compiles kernels, at both ends
_POLL_S = 0.5
_EXIT_TIMEOUT_S = 10.0


def make_model(device: str) -> nn.Module:
    """Return a few bf16 elements, always the same bits."""
    return nn.ParameterList([torch.arange(_NUMEL, dtype=torch.bfloat16, device=device)])


@contextmanager
def followed(
    module: nn.Module,
    link: LinkName,
    *,
    devices: tuple[str, str],
    options: SenderOptions | None = None,
) -> Iterator[WeightSender]:
    """Yield a sender of `module`, made by `make_model`, whose receiver in a process has joined.

    Args:
        module: Lives on the first device.
        link: The transport between the two.
        devices: The devices of the sender and of the follower.
        options: Options of the sender; the follower uses the same kernels.

    Raises:
        PeerLost: The other process ended; the message has its last line.
        TransportTimeout: It does not connect.
    """
    options = options or SenderOptions()
    with TemporaryDirectory(prefix="deltasync-") as folder, TemporaryFile() as said:
        path = Path(folder) / "weights.sock"
        transport, address = listen(link, path=path, device=devices[0])
        with WeightSender(ModuleSource(module), transport, options=options) as sender:
            words = [address.model_dump_json(), devices[1], options.kernels]
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
    """The last line that a process wrote, which names the error of a traceback; empty if none."""
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


def main() -> None:
    """Follow the sender that `sys.argv` names until it has left."""
    address, device, kernels = sys.argv[1:]
    target = ModuleTarget(make_model(device))
    options = ReceiverOptions.model_validate({"kernels": kernels})
    link = Address.model_validate_json(address).receiver(torch.device(device))
    receiver = WeightReceiver(target, link, options=options)
    with receiver, contextlib.suppress(PeerLost):
        while True:
            receiver.receive_weights(timeout_s=JOIN_TIMEOUT_S)
