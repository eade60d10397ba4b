"""The trials of `doctor`, each in processes of its own, so that a crash or a hang harms nothing.

The error of a trial is the last line that its processes write to stderr.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread
from typing import Self

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
from deltasync.errors import PeerLost, SyncError, TransportTimeout
from deltasync.transports import inprocess
from deltasync.transports.address import Address, LinkName, listen

_START_TIMEOUT_S, _JOIN_TIMEOUT_S, _EXIT_TIMEOUT_S = 100.0, 180.0, 10.0
_POLL_S = 0.5
_NEW = multiprocessing.get_context("spawn")  # CUDA does not survive a fork


class Trial:
    """One trial, which begins at once. Use it in a `with` block, which ends its processes.

    They have a session of their own, so that Ctrl-C is for the caller alone.
    """

    def __init__(self, name: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="deltasync-")
        self._said = Path(self._folder.name, "stderr")
        self._process: subprocess.Popen[bytes] | None = None
        self._not_started = ""
        try:
            with self._said.open("wb") as said:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "deltasync.cli.probes.trial", name],
                    env={**os.environ, "TMPDIR": self._folder.name},  # where nothing is left
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    start_new_session=True,
                )
        except OSError as error:  # no descriptor or no process is left
            self._not_started = str(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()

    def problem(self, deadline: float) -> str | None:
        """Wait until `deadline`, of time.monotonic. Returns what went wrong, or None."""
        if self._process is None:
            return self._not_started
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "it did not end in time"
        if not code:
            return None
        lines = self._said.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last.removeprefix("deltasync.errors.") or f"it ended with {code}"


def _run(name: str) -> None:
    match name:
        case "triton":
            _try_triton("cuda:0")
        case "shared_memory" | "gloo" | "nixl" as link:
            _try_link(link, ("cpu", "cpu"))
        case "cuda_ipc":
            _try_link("cuda_ipc", ("cuda:0", "cuda:0"))
        case "nccl":
            _try_link("nccl", ("cuda:0", "cuda:1"))


def _model(device: str) -> nn.Module:
    """A few bf16 elements, always the same bits."""
    return nn.ParameterList([torch.arange(1000, dtype=torch.bfloat16, device=device)])


def _try_link(link: LinkName, devices: tuple[str, str]) -> None:
    """Send a delta of one element to another process, checked by digest."""
    module = _model(devices[0])
    options = SenderOptions(kernels="torch")  # Triton's have a trial of their own
    path = Path(tempfile.gettempdir()) / "weights.sock"
    transport, address = listen(link, path=path, device=devices[0])
    with WeightSender(ModuleSource(module), transport, options=options) as sender:
        process = _NEW.Process(target=_follow, args=(address.model_dump_json(), devices[1]))
        process.start()
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while True:
                try:
                    sender.wait_for_receivers(1, timeout_s=_POLL_S)
                    break
                except TransportTimeout:
                    if process.exitcode is not None:  # and has said why
                        sys.exit(1)
                    if time.monotonic() > deadline:
                        raise
            _send(sender, module)
            sender.close()
            process.join(_EXIT_TIMEOUT_S)
        finally:
            process.kill()
            process.join()


def _send(sender: WeightSender, module: nn.Module) -> None:
    """Send weights that both ends hold already, and then a delta of one element."""
    sender.send_weights(timeout_s=_JOIN_TIMEOUT_S)
    with torch.no_grad():
        next(module.parameters())[7] += 1
    stats = sender.send_weights(timeout_s=_JOIN_TIMEOUT_S)
    if stats.kind != "delta" or stats.nnz != 1:
        raise SyncError(f"not the delta that it should be: {stats}")


def _follow(address: str, device: str) -> None:
    """In the second process: follow the sender until it has left."""
    link = Address.model_validate_json(address).receiver(torch.device(device))
    target, options = ModuleTarget(_model(device)), ReceiverOptions(kernels="torch")
    _receive(WeightReceiver(target, link, options=options))


def _receive(following: WeightReceiver) -> None:
    """Follow the sender until it has left, and close."""
    with following as receiver, contextlib.suppress(PeerLost):
        while True:
            receiver.receive_weights(timeout_s=_JOIN_TIMEOUT_S)


def _try_triton(device: str) -> None:
    """Compile Triton's kernels, and let them send and write a delta on the GPU."""
    trainer, engine = _model(device), _model(device)
    link = inprocess.Sender(device=torch.device(device))
    options, receiving = SenderOptions(kernels="triton"), ReceiverOptions(kernels="triton")
    with WeightSender(ModuleSource(trainer), link, options=options) as sender:
        receiver = WeightReceiver(ModuleTarget(engine), link.receiver(), options=receiving)
        thread = Thread(target=_receive, args=(receiver,))
        thread.start()
        sender.wait_for_receivers(1)
        _send(sender, trainer)
    thread.join(_EXIT_TIMEOUT_S)


if __name__ == "__main__":
    _run(sys.argv[1])
