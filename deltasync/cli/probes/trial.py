"""The trials of `doctor`, each in processes of its own, so that a crash or a hang harms nothing.

The error of a trial is the last line that its processes write to stderr.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread
from typing import Self

import torch
from torch import Tensor, nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    SenderOptions,
    WeightReceiver,
    WeightSender,
)
from deltasync.errors import PeerLost, SyncError, TransportTimeout
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.served import Forms, ServedSource, served_weights
from deltasync.transports import inprocess
from deltasync.transports.address import Address, LinkName, listen

_START_TIMEOUT_S, _JOIN_TIMEOUT_S, _EXIT_TIMEOUT_S = 100.0, 180.0, 10.0
_POLL_S = 0.5
_NEW = multiprocessing.get_context("spawn")  # CUDA does not survive a fork


class Trial:
    """One trial, which begins at once. Use it in a `with` block, which ends its processes.

    Block Ctrl-C until the block has begun: it is for the caller, whose mask processes inherit.
    """

    def __init__(self, name: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="deltasync-")
        self._said = Path(self._folder.name, "stderr")
        self._said.touch()
        self._process = _NEW.Process(target=_run, args=(name, self._folder.name))
        self._not_started = ""
        try:
            self._process.start()
        except OSError as error:  # no descriptor or no process is left
            self._not_started = str(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if (pid := self._process.pid) is not None:
            with contextlib.suppress(ProcessLookupError):  # it had no session yet
                os.killpg(pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        self._folder.cleanup()

    def problem(self, deadline: float) -> str | None:
        """Wait until `deadline`, of time.monotonic. Returns what went wrong, or None."""
        if self._not_started:
            return self._not_started
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.exitcode == 0:
            return None
        if self._process.exitcode is None:
            return "it did not end in time"
        lines = self._said.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last.removeprefix("deltasync.errors.") or f"it ended with {self._process.exitcode}"


def _run(name: str, folder: str) -> None:
    """Run a trial. What it writes is in `folder`, so that a killed process leaves nothing."""
    os.setsid()
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.dup2(os.open(f"{folder}/stderr", os.O_WRONLY | os.O_APPEND), 2)
    match name:
        case "triton":
            _try_triton()
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
            sender.send_weights(timeout_s=_JOIN_TIMEOUT_S)  # both hold the same already
            with torch.no_grad():
                next(module.parameters())[7] += 1
            stats = sender.send_weights()
            if stats.kind != "delta" or stats.nnz != 1:
                raise SyncError(f"not the delta that it should be: {stats}")
            sender.close()
            process.join(_EXIT_TIMEOUT_S)
        finally:
            process.kill()
            process.join()


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


def _try_triton() -> None:
    """Compile Triton's kernels, and run them on the GPU."""
    for form in (None, BlockFp8(), BlockFp8("ue8m0"), Fp8()):
        for room in (None, 0):
            sync_tiny_models(torch.device("cuda", 0), form, room)


def sync_tiny_models(device: torch.device, form: Form | None, room: int | None) -> None:
    """Send all, one element and all elements of a model to another by kernels. Compares the bits.

    Args:
        device: Where both are.
        form: What the receiver holds of matrices; None for bfloat16.
        room: Bytes of what is kept and staged; None for what is usual. With 0 the snapshot is
            overwritten early, and deltas are written in place.
    """
    dtypes = {"same": torch.bfloat16, "wide": torch.float32}
    trainer = nn.ModuleDict(
        {n: nn.Linear(128, 64, device=device, dtype=d) for n, d in dtypes.items()}
    )
    forms: Forms = lambda _, shape: form if len(shape) == 2 else None  # noqa: E731

    def served() -> dict[str, Tensor]:
        weights = {name: weight.bfloat16() for name, weight in trainer.state_dict().items()}
        return dict(served_weights(weights.items(), forms))

    engine = nn.Module()
    for name, tensor in served().items():
        engine.register_buffer(name.replace(".", "_"), torch.zeros_like(tensor))
    link = inprocess.Sender(device=device)
    options = SenderOptions(kernels="triton", max_inflight_bytes=room)
    receiving = ReceiverOptions(kernels="triton", max_staged_bytes=room)
    target = ModuleTarget(engine, rename=lambda name: name.replace("_", ".", 1))
    source = ServedSource(ModuleSource(trainer), forms)
    with WeightSender(source, link, options=options) as sender:
        receiver = WeightReceiver(target, link.receiver(), options=receiving)
        thread = Thread(target=_receive, args=(receiver,))
        thread.start()
        sender.wait_for_receivers(1)
        for changed in (slice(0), slice(1), slice(None)):
            for weight in trainer.parameters():
                weight.data.view(-1)[changed] += 1
            sender.send_weights(timeout_s=_JOIN_TIMEOUT_S)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            for tensor, held in zip(served().values(), engine.buffers(), strict=True):
                if not torch.equal(tensor.view(torch.uint8), held.view(torch.uint8)):
                    raise SyncError("the receiver has other bits than were sent")
    thread.join(_EXIT_TIMEOUT_S)
