"""Engines of each form hold what a cold load gives; matrices that they fuse share scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource, SenderOptions
from deltasync.integrations.streamed import StreamedWeights
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from deltasync.quant.int8 import Int8
from deltasync.quant.mxfp8 import MxFp8
from deltasync.quant.nvfp4 import CompressedNvfp4, ModelOptNvfp4
from deltasync.quant.served import ServedSource, served_weights
from deltasync.quant.sharing import siblings
from tests.quant.kinds import peak_of
from tests.quant.matrices import matrix
from tests.quant.served import assert_holds, engine
from tests.worlds.links import fleet

SHAPES = {
    "attn.q_proj": (48, 64),
    "attn.k_proj": (16, 64),
    "attn.v_proj": (16, 64),
    "mlp.gate_proj": (40, 64),
    "mlp.down_proj": (130, 160),  # of several blocks, and parts of others
    "mlp.up_proj": (40, 64),
}


def trainer(dtype: torch.dtype) -> nn.Module:
    model = nn.Module()
    model.attn, model.mlp, model.norm = nn.Module(), nn.Module(), nn.LayerNorm(64)
    for seed, (name, (rows, cols)) in enumerate(SHAPES.items()):
        owner, _, layer = name.partition(".")
        linear = nn.Linear(cols, rows, bias=False)
        linear.weight.data = matrix("plain", rows, cols, seed=seed).to(dtype) * (1 + seed)
        model.get_submodule(owner).add_module(layer, linear)
    return model


def cold(model: nn.Module, form: Form) -> dict[str, Tensor]:
    """What a checkpoint written now has: every group quantized by hand, at once."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    weights = {name: state.pop(f"{name}.weight").bfloat16() for name in SHAPES}
    groups = [("attn.q_proj", "attn.k_proj", "attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")]
    for group in [*groups, ("mlp.down_proj",)]:
        whole = form.whole(peak_of(*(weights[name] for name in group)))
        for name in group:
            parts = {**whole, **form.quantize(weights[name], whole)}
            if isinstance(form, Int4):
                parts["weight_shape"] = torch.tensor(weights[name].shape)
            state |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
    return state


def form_of(form: Form, name: str) -> Form | None:
    return form if name.removesuffix(".weight") in SHAPES else None


def test_layers_that_engines_fuse_share() -> None:
    qkv = tuple(f"model.layers.3.self_attn.{one}_proj.weight" for one in "qkv")
    assert siblings(qkv[1]) == qkv
    assert siblings("gate_proj.weight") == ("gate_proj.weight", "up_proj.weight")
    assert siblings("experts.7.w3.weight") == ("experts.7.w1.weight", "experts.7.w3.weight")
    assert siblings("model.layers.3.mlp.down_proj.weight") == (
        "model.layers.3.mlp.down_proj.weight",
    )
    assert siblings("a.own.weight", [("own", "other")]) == ("a.own.weight", "a.other.weight")


def passing(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A stream of the model's weights that has one buffer for matrices."""
    passed = torch.empty(130 * 160, dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        if tensor.dim() < 2:
            yield name, tensor
            continue
        yield name, passed[: tensor.numel()].view(tensor.shape).copy_(tensor)


FORMS: list[tuple[Form, torch.dtype]] = [
    (CompressedNvfp4(), torch.bfloat16),
    (CompressedNvfp4(), torch.float32),
    (ModelOptNvfp4(), torch.bfloat16),
    (Fp8("tensor"), torch.bfloat16),
    (Fp8("channel"), torch.float32),
    (Int4(32), torch.float32),
    (Int8(), torch.bfloat16),
    (MxFp8(), torch.float32),
    (BlockFp8(), torch.bfloat16),
    (BlockFp8("ue8m0"), torch.float32),
]
WIDE = Fp8("channel"), Fp8("tensor"), Int8()
"""Of which engines may hold scales as float32."""


@pytest.mark.promise(
    "Bits",
    "An engine that serves a quantized form holds what it would load from a checkpoint of the "
    "trainer's weights.",
)
@pytest.mark.promise(
    "Bits",
    "Matrices of 4 bits that engines fuse share their scale, in streams too.",
)
@pytest.mark.timeout(300)  # Triton's interpreter takes long, beside other tests
@pytest.mark.parametrize(
    ("form", "dtype", "way"),
    [
        *((*each, way) for each in FORMS for way in ("module", "stream")),
        *((form, torch.bfloat16, "wide scales") for form in WIDE),
        (BlockFp8(), torch.bfloat16, "kernels"),
    ],
    ids=str,
)
def test_an_engine_holds_what_a_cold_load_gives(form: Form, dtype: torch.dtype, way: str) -> None:
    """Of a stream, too, which holds back what shares a scale; and what is constant stays."""

    def loaded() -> dict[str, Tensor]:
        return scale | {
            name: tensor.float() if way == "wide scales" and name.endswith("_scale") else tensor
            for name, tensor in cold(model, form).items()
        }

    model, is_stream = trainer(dtype), way == "stream"
    scale = {} if is_stream else {"attn.q_proj.input_scale": torch.tensor(0.25)}
    replica = engine(loaded())
    streamed = StreamedWeights()
    options = SenderOptions(kernels="triton") if way == "kernels" else None
    own = ServedSource(
        ModuleSource(model), lambda name, shape: form_of(form, name), constants=scale
    )
    generator = torch.Generator().manual_seed(0)
    with fleet(cast("Any", streamed if is_stream else own), options=options) as here:
        here.add(replica)
        for number in range(4):
            for parameter in model.parameters():
                change = torch.randn(parameter.shape, generator=generator) * 3e-4 * number
                parameter.data += change.to(parameter.dtype)
            if number == 2:  # the largest of all: the scale of the others moves too
                model.get_parameter("attn.k_proj.weight").data[3, 5] = 1.0
            if is_stream:
                streamed.take(served_weights(passing(model), lambda name, _: form_of(form, name)))
            here.wait(1)
            here.sender.send_weights(timeout_s=60)
            assert set(loaded()) == set(replica.state_dict())
            assert_holds(replica, loaded())


def test_a_layer_without_its_siblings_comes_at_the_end() -> None:
    weight = matrix("plain", 16, 64, seed=0)
    weights = [("a.q_proj.weight", weight), ("a.o_proj.weight", weight)]
    form = CompressedNvfp4()
    names = [name for name, _ in served_weights(weights, lambda name, shape: form)]
    assert names[0].startswith("a.o_proj.")
    assert names[-1] == "a.q_proj.weight_global_scale"
