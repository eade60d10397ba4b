"""A trainer of bfloat16 or float32 that serves quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    Policy,
    SenderOptions,
    WeightReceiver,
    WeightSender,
)
from deltasync.delta.bits import as_bits
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int8 import Int8
from deltasync.quant.mxfp8 import MxFp8
from deltasync.quant.served import ServedSource, served_weights
from deltasync.transports import inprocess
from tests.sync.lines import Lines
from tests.worlds.links import Serving

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


def cold(source: nn.Module, form: Form) -> dict[str, Tensor]:
    """What the engine would load from a checkpoint that was written now."""
    weights = ((name, tensor.bfloat16()) for name, tensor in source.state_dict().items())
    return dict(served_weights(weights, forms(form)))


def engine(weights: dict[str, Tensor]) -> nn.Module:
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


@pytest.mark.promise(
    "Bits",
    "An engine that serves a quantized form holds what it would load from a checkpoint of the "
    "trainer's weights.",
)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_engine_holds_what_a_cold_load_gives(
    dtype: torch.dtype, scale: str, kernels: Literal["torch", "triton"]
) -> None:
    follows(BlockFp8(scale=scale), dtype, kernels)  # type: ignore[arg-type]


@pytest.mark.timeout(300)  # Triton's interpreter takes long, beside other tests
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize(
    "form",
    [BlockFp8("float32", "nemo-rl"), Fp8("channel"), Fp8("tensor"), Int8(), MxFp8()],
    ids=lambda form: form.name,
)
def test_so_it_does_with_other_forms_of_8_bits(
    form: Form, kernels: Literal["torch", "triton"]
) -> None:
    follows(form, torch.bfloat16, kernels)


@pytest.mark.parametrize(
    "form", [Fp8("channel"), Fp8("tensor"), Int8()], ids=lambda form: form.name
)
def test_engines_may_hold_scales_of_bfloat16_as_float32(form: Form) -> None:
    follows(form, torch.bfloat16, "torch", scales=torch.float32)


def follows(
    form: Form,
    dtype: torch.dtype,
    kernels: Literal["torch", "triton"],
    *,
    scales: torch.dtype | None = None,
) -> None:
    """An engine of this form, through steps that change nothing, little and all."""

    def loaded() -> dict[str, Tensor]:
        return {
            name: tensor.to(scales) if scales and name.endswith("_scale") else tensor
            for name, tensor in cold(source, form).items()
        }

    source = trainer(0, dtype)
    replica = engine(loaded())
    transport = inprocess.Sender()
    policy = Policy(chunk_numel=8192)
    sender = WeightSender(
        ServedSource(ModuleSource(source), forms(form)),
        transport,
        options=SenderOptions(kernels=kernels, policy=policy),
    )
    serving = Serving(WeightReceiver(ModuleTarget(replica), transport.receiver())).start()
    try:
        sender.wait_for_receivers(1, timeout_s=10)
        for number, share in enumerate([0, 0.01, 0.3, 1, 0]):
            step(source, share, number)
            stats = sender.send_weights(timeout_s=10)
            expected = loaded()
            for name, tensor in replica.state_dict().items():
                assert torch.equal(as_bits(tensor), as_bits(expected[name])), (number, name)
        assert stats.nnz == 0
    finally:
        serving.stop()
        sender.close()


def lines_to_look(source: ServedSource) -> int:
    """Lines of the package that one more look at an unchanged source runs through."""
    source.tensors()
    with Lines() as lines:
        source.tensors()
    return lines.count


def test_matrices_of_which_nothing_was_computed_take_no_lines() -> None:
    def source(count: int) -> ServedSource:
        layers = [nn.Linear(16, 16, bias=False) for _ in range(count)]
        named = nn.ModuleDict({f"l{number}": layer for number, layer in enumerate(layers)})
        return ServedSource(ModuleSource(named), lambda name, shape: Int8())

    assert lines_to_look(source(40)) == lines_to_look(source(10))
