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
from typing import Self

import numpy as np
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
from deltasync.delta.bits import Flat, torch_dtype
from deltasync.delta.changes import Changes
from deltasync.delta.readers import Reader, WireReader
from deltasync.delta.shard import whole
from deltasync.delta.snapshot import MIN_BUCKET_BYTES, Plan, snapshot_of
from deltasync.delta.staging import LiveWeights, Staging
from deltasync.delta.tiles import Space
from deltasync.dtypes import BY_NAME
from deltasync.errors import PeerLost, SyncError, TransportTimeout
from deltasync.transports.address import Address, LinkName, listen
from deltasync.wire.messages import ParameterSpec

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
    with WeightReceiver(target, link, options=options) as receiver, contextlib.suppress(PeerLost):
        while True:
            receiver.receive_weights(timeout_s=_JOIN_TIMEOUT_S)


def _try_triton(device: torch.device | None = None) -> None:
    """Compile every Triton kernel, and run it on the GPU."""
    from deltasync.quant.block_fp8 import BlockFp8
    from deltasync.quant.computation import Kind
    from deltasync.quant.fp8 import Fp8

    device, wire = device or torch.device("cuda", 0), BY_NAME["bfloat16"]
    ones = [torch.ones(64, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32)]
    readers: list[Reader] = [WireReader.of(one, wire, name="weight") for one in ones]
    for form in (BlockFp8(), BlockFp8("ue8m0"), Fp8()):
        if form.kernel is not None:
            kinds = (Kind(BY_NAME[name], form.kernel) for name in ("bfloat16", "float32"))
            readers += [kind.example(device) for kind in kinds]
    specs = [ParameterSpec((f"{n}",), (64,), one.dtype) for n, one in enumerate(readers)]
    snapshot = snapshot_of(whole(specs), readers, kernels="triton")
    live = LiveWeights(
        {
            number: Flat.of(torch.zeros(64, dtype=torch_dtype(spec.dtype), device=device))
            for number, spec in enumerate(specs)
        },
        Space(whole(specs)),
        kernels="triton",
    )
    live.ledger.sums[:] = live.measure(np.arange(live.space.num_chunks))
    _write(live, snapshot.full(bucket_bytes=MIN_BUCKET_BYTES))
    for one in ones:
        one[7] += 1  # codes differ from what was captured in any case
    _write(
        live,
        snapshot.compare(readers, bucket_bytes=MIN_BUCKET_BYTES, max_held_bytes=0, base_version=1),
    )


def _write(live: LiveWeights, plan: Plan) -> None:
    """Bring weights to a plan. Raises SyncError if they are not what they should be."""
    staging, lane = Staging(live, max_bytes=1 << 20), live.lane()
    for bucket in plan.buckets():
        payload = torch.empty(bucket.sizes.num_bytes, dtype=torch.uint8, device=bucket.device)
        bucket.pack(payload, lambda: None)
        changes = Changes.of(payload, bucket.sizes)
        lane.check(changes)
        staging.stage(lane, changes)
    if staging.commit() != plan.ledger.total:
        raise SyncError("kernels do not write what they should")
    live.ledger = staging.ledger
