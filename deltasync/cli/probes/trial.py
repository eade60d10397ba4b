"""The trials of `doctor`, each in processes of its own, so that a crash or a hang harms nothing.

The error of a trial is the last line on stderr of its process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Self

import torch

from deltasync import SenderOptions
from deltasync.cli.probes.companion import start_companion
from deltasync.cli.probes.follower import followed, last_line, make_model
from deltasync.errors import SyncError
from deltasync.transports.address import LinkName


class Trial:
    """One trial, which begins at once. Use it in a `with` block, which ends its processes."""

    def __init__(self, name: str) -> None:
        self._folder = TemporaryDirectory(prefix="deltasync-")  # for what a killed process leaves
        self._said = TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        self._process: subprocess.Popen[bytes] | None = None
        self._not_started = ""
        try:
            self._process = start_companion(
                "deltasync.cli.probes.trial",
                name,
                stderr=self._said,
                start_new_session=True,
                env=os.environ | {"TMPDIR": self._folder.name},
            )
        except OSError as error:  # no descriptor or no process is left
            self._not_started = str(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with self._process:
                if self._process.poll() is None:
                    os.killpg(self._process.pid, signal.SIGKILL)
        self._said.close()
        self._folder.cleanup()

    def problem(self, deadline: float) -> str | None:
        """Wait until `deadline`, of time.monotonic. Returns what went wrong, or None."""
        if self._process is None:
            return self._not_started
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "it did not end in time"
        if code == 0:
            return None
        return last_line(self._said).removeprefix("deltasync.errors.") or f"it ended with {code}"


def try_link(link: LinkName, devices: tuple[str, str]) -> None:
    """Send a delta of one element to another process, checked by digest."""
    module = make_model(devices[0])
    options = SenderOptions(kernels="torch")  # Triton's have a trial of their own
    with followed(module, link, devices=devices, options=options) as sender:
        with torch.no_grad():
            next(module.parameters())[7] += 1
        stats = sender.send_weights()
        if stats.kind != "delta" or stats.nnz != 1:
            raise SyncError(f"not the delta that it should be: {stats}")


def try_triton() -> None:
    """Compile every Triton kernel, and run it on the GPU."""
    from deltasync.delta.batched.warm_up import sync_tiny_models
    from deltasync.dtypes import BY_NAME
    from deltasync.quant.block_fp8 import BlockFp8
    from deltasync.quant.computation import Kind
    from deltasync.quant.fp8 import Fp8

    kernels = [form.kernel for form in (BlockFp8(), BlockFp8("ue8m0"), Fp8())]
    wire = BY_NAME["bfloat16"]
    formats = frozenset({(wire, wire), (BY_NAME["float32"], wire)})
    computed = frozenset(Kind(own, one) for own, _ in formats for one in kernels if one)
    sync_tiny_models(formats, 1 << 20, torch.device("cuda", 0), computed=computed)
    torch.cuda.synchronize()


def main() -> None:
    """Run the trial that `sys.argv` names. `doctor` shows the last line of what this raises."""
    match sys.argv[1]:
        case "triton":
            try_triton()
        case "shared_memory" | "gloo" | "nixl" as link:
            try_link(link, ("cpu", "cpu"))
        case "cuda_ipc":
            try_link("cuda_ipc", ("cuda:0", "cuda:0"))
        case "nccl":
            try_link("nccl", ("cuda:0", "cuda:1"))
