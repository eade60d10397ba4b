"""The engine's process: one JSON answer on stdout for each JSON word on stdin."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import baselines
from benchmarks.gpu.exchange import ENGINE, Broadcasts, Exchange, SharedBuffer, attach
from benchmarks.gpu.geometry import GEOMETRIES, Geometry
from benchmarks.gpu.links import connect
from benchmarks.gpu.serving import served_module
from benchmarks.gpu.setup import Setup
from benchmarks.processes import begin
from deltasync import DeltaSyncError, ModuleTarget, WeightReceiver

FAILURES = (DeltaSyncError, RuntimeError, OSError, ValueError, TypeError, LookupError)
"""What a case may fail of without ending the run. Out of memory is a RuntimeError."""
_TIMEOUT_S = 120.0


class Engine:
    """A model that deltasync writes and, once asked for, one that the baselines write."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self._setup = setup
        self._device = setup.device("engine")
        self._exchange: Exchange | None = None
        if setup.link == "collective" and setup.engine == 1:
            self._exchange = Broadcasts.join(setup, folder, ENGINE)
        self._geometry: Geometry
        self._module: nn.Module
        self._receiver: WeightReceiver | None = None
        self._baseline: baselines.FusedModel | None = None

    def obey(self, word: dict[str, Any]) -> object:
        """Do one thing, wait for the device, and return what the trainer wants to know."""
        answer: object = getattr(self, f"on_{word.pop('do')}")(**word)
        synchronize(self._device)
        return answer

    def on_open(
        self, geometry: str, address: dict[str, Any], buffer: str | None, form: str = ""
    ) -> None:
        """Build a model, quantized if a form is named, and begin to receive from a trainer."""
        self.on_close()
        self._geometry = GEOMETRIES[geometry]
        self._module, self._form = self._geometry.build(self._device), form
        if form:
            self._module = served_module(self._module)
        if buffer is not None:
            self._exchange = SharedBuffer(attach(buffer, self._device))
        link = connect(address, self._device)
        name = f"engine{self._setup.engine}"
        self._receiver = WeightReceiver(ModuleTarget(self._module), link, engine=name)

    def on_close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            del self._module
        self._receiver = self._baseline = None
        if self._setup.link == "local":
            self._exchange = None
        free_memory(self._device)

    def end(self) -> None:
        """The trainer has nothing more to say."""
        if isinstance(self._exchange, Broadcasts):
            self._exchange.close()

    def on_receive(self) -> None:
        assert self._receiver is not None
        self._receiver.receive_weights(timeout_s=_TIMEOUT_S)

    def on_dense(self) -> None:
        """The dense baseline's end: into the parameters of a model of its own."""
        baselines.take_dense(list(self._fused().parts.values()), self._link())

    def on_sparse(self, counts: list[int]) -> dict[str, float]:
        """The usual sparse baseline's end, with the seconds that it took to apply."""
        changes = baselines.take_sparse(counts, self._link())
        synchronize(self._device)
        began = time.perf_counter()
        baselines.apply_through_nan(self._fused(), self._geometry.shapes(), changes)
        synchronize(self._device)
        return {"apply_s": time.perf_counter() - began}

    def on_differing(self, baseline: bool) -> int:
        """How many parameters are not the trainer's."""
        weights: list[Tensor] = [p.detach() for p in self._module.parameters()]
        if self._form:  # of several dtypes
            weights = [w.view(-1).view(torch.uint8) for w in weights]
        if baseline:
            weights = list(self._fused().parts.values())
        return baselines.differing(weights, self._link())

    def on_watch(self) -> None:
        free_memory(self._device)
        self._watch = Watch(self._device)

    def on_taken(self) -> int:
        weights = sum(p.nbytes for p in self._module.parameters())
        return self._watch.taken(beside=weights)

    def _fused(self) -> baselines.FusedModel:
        if self._baseline is None:
            self._baseline = baselines.FusedModel(self._geometry.shapes(), self._device)
        return self._baseline

    def _link(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange


class Watch:
    """The most memory that this process takes: on a GPU torch's allocator, else resident."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:  # the kernel's high-water mark begins here
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._resident = _status_bytes("VmRSS")

    def taken(self, *, beside: int) -> int:
        """Bytes since the beginning: on a GPU beside so many that are meant to be there."""
        if self._device.type != "cuda":
            return _status_bytes("VmHWM") - self._resident
        return torch.cuda.max_memory_allocated(self._device) - beside


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cpu":  # what was freed and is kept would hide what a sync takes
        ctypes.CDLL(None).malloc_trim(0)
    else:
        torch._C._cuda_clearCublasWorkspaces()  # of products in what was measured before
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call] # what the other process has let go of
        torch.cuda.empty_cache()


def run_engine(setup: Setup, folder: Path) -> None:
    answers = begin(setup.device("engine"))
    engine = Engine(setup, folder)
    for line in sys.stdin:
        try:
            answer: object = engine.obey(json.loads(line))
        except FAILURES as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    engine.end()


if __name__ == "__main__":
    run_engine(Setup.from_json(sys.argv[1]), Path(sys.argv[2]))
