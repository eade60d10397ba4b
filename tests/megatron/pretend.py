"""Runs a program on a CPU that believes that this CPU is its GPU, and has no Transformer Engine.

python -m tests.megatron.pretend PROGRAM ARGUMENTS

Megatron-core asks for CUDA by name where it makes buffers, and accepts parameters by the name of
their type alone. What it does with them is torch, and gloo gathers what NCCL would.
"""

from __future__ import annotations

import runpy
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Pretend(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU, and calls tensors there tensors of CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func in (Tensor.cuda,):
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class Stream:
    """Work on a CPU is done when a call returns."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def synchronize(self) -> None: ...


STAND_INS: dict[str, Any] = {
    "current_device": lambda: "cpu",
    "set_device": lambda device: None,
    "synchronize": lambda *_: None,
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
    "Stream": Stream,
    "current_stream": Stream,
    "default_stream": Stream,
    "stream": lambda stream: nullcontext(),
}


class Absent(ModuleType):
    """Has a class for every name: Megatron-Bridge derives some of its own without asking."""

    pytorch: ModuleType
    ops: ModuleType

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (nn.Module,), {})


def stand_in() -> None:
    import megatron.core.models.gpt.gpt_layer_specs  # finds no Transformer Engine
    import megatron.core.optimizer
    import megatron.core.parallel_state
    import megatron.core.tensor_parallel.random

    torch._dynamo.config.disable = True  # it looks functions up in the module of this one
    te, torch_te = Absent("transformer_engine"), Absent("transformer_engine.pytorch")
    te.pytorch, torch_te.ops = torch_te, Absent("transformer_engine.pytorch.ops")
    for module in (te, torch_te, torch_te.ops):
        sys.modules[module.__name__] = module
    for name, ours in STAND_INS.items():
        setattr(torch.cuda, name, ours)
    megatron.core.tensor_parallel.random._get_cuda_rng_state = STAND_INS["get_rng_state"]
    megatron.core.tensor_parallel.random._set_cuda_rng_state = STAND_INS["set_rng_state"]


if __name__ == "__main__":
    program, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = program
    stand_in()
    with Pretend():
        runpy.run_path(program, run_name="__main__")
