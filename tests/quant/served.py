"""Trainers that serve quantized weights, and engines that hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from deltasync import ModuleSource
from deltasync.delta.bits import as_bits
from deltasync.quant.form import Form
from deltasync.quant.mxfp8 import MxFp8
from deltasync.quant.served import ServedSource, served_weights

SHAPES = {"up": (256, 200), "down": (130, 384), "row": (1, 128), "odd": (7, 3)}


def trainer(seed: int, dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Module()
    for name, (rows, cols) in SHAPES.items():
        layer = nn.Linear(cols, rows, bias=name == "up")
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
        model.add_module(name, layer)
    model.norm = nn.LayerNorm(8)
    return model


def forms(form: Form) -> Callable[[str, tuple[int, ...]], Form | None]:
    step = 32 if isinstance(form, MxFp8) else 1

    def choose(name: str, shape: tuple[int, ...]) -> Form | None:
        fits = name.split(".")[0] in SHAPES and len(shape) == 2 and shape[1] % step == 0
        return form if fits else None

    return choose


def served(source: nn.Module, form: Form) -> ServedSource:
    return ServedSource(ModuleSource(source), forms(form))


def plain(source: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() for name, tensor in source.state_dict().items()}


def cold(source: nn.Module, form: Form) -> dict[str, Tensor]:
    """What the engine would load from a checkpoint that was written now."""
    return dict(served_weights(plain(source).items(), forms(form)))


def engine(weights: Mapping[str, Tensor]) -> nn.Module:
    """A module that has these tensors, all of them zero."""
    model = nn.Module()
    for name, tensor in weights.items():
        *path, last = name.split(".")
        owner = model
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_buffer(last, torch.zeros_like(tensor))
    return model


def step(source: nn.Module, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in source.parameters():
        chosen = torch.rand(parameter.shape, generator=generator) < share
        change = torch.randn(parameter.shape, generator=generator) * parameter.data.abs() * 0.02
        parameter.data += torch.where(chosen, change, 0).to(parameter.dtype)


def assert_holds(replica: nn.Module, expected: Mapping[str, Tensor]) -> None:
    for name, tensor in replica.state_dict().items():
        assert torch.equal(as_bits(tensor), as_bits(expected[name])), name
