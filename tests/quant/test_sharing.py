"""Matrices that engines fuse, and the scales that these share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender
from deltasync.delta.bits import as_bits
from deltasync.errors import ConfigError
from deltasync.quant.form import Form
from deltasync.quant.int4 import Int4
from deltasync.quant.nvfp4 import CompressedNvfp4, ModelOptNvfp4
from deltasync.quant.served import ServedSource, served_weights
from deltasync.quant.sharing import siblings
from deltasync.sync.source.streamed import StreamedWeights
from deltasync.transports import inprocess
from tests.quant.matrices import matrix
from tests.quant.test_served import engine
from tests.worlds.links import Serving

SHAPES = {
    "attn.q_proj": (48, 64),
    "attn.k_proj": (16, 64),
    "attn.v_proj": (16, 64),
    "mlp.gate_proj": (40, 64),
    "mlp.down_proj": (64, 32),
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
        whole = form.whole(weights[name] for name in group)
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


@pytest.mark.promise(
    "Bits",
    "Matrices of 4 bits that engines fuse share their scale, in streams too.",
)
@pytest.mark.parametrize("form", [CompressedNvfp4(), ModelOptNvfp4(), Int4(32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_engine_of_4_bits_holds_what_a_cold_load_gives(form: Form, dtype: torch.dtype) -> None:
    model, scale = trainer(dtype), {"attn.q_proj.input_scale": torch.tensor(0.25)}
    replica, transport = engine(cold(model, form) | scale), inprocess.Sender()
    source = ServedSource(
        ModuleSource(model), lambda name, shape: form_of(form, name), constants=scale
    )
    sender = WeightSender(source, transport)
    serving = Serving(WeightReceiver(ModuleTarget(replica), transport.receiver())).start()
    generator = torch.Generator().manual_seed(0)
    try:
        sender.wait_for_receivers(1, timeout_s=10)
        for number in range(4):
            for parameter in model.parameters():
                change = torch.randn(parameter.shape, generator=generator) * 3e-4 * number
                parameter.data += change.to(parameter.dtype)
            if number == 2:  # the largest of all: the scale of the others moves too
                model.get_parameter("attn.k_proj.weight").data[3, 5] = 1.0
            sender.send_weights(timeout_s=10)
            expected = cold(model, form) | scale
            assert set(expected) == set(replica.state_dict())
            for name, tensor in replica.state_dict().items():
                assert torch.equal(as_bits(tensor), as_bits(expected[name])), (number, name)
    finally:
        serving.stop()
        sender.close()


@pytest.mark.promise(
    "Bits",
    "Matrices of 4 bits that engines fuse share their scale, in streams too.",
)
@pytest.mark.parametrize("form", [CompressedNvfp4(), ModelOptNvfp4()])
def test_streams_hold_back_what_shares(form: Form) -> None:
    model = trainer(torch.bfloat16)
    passed = torch.empty(48, 64, dtype=torch.bfloat16)  # as a stream that has one buffer

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in model.state_dict().items():
            if tensor.dim() < 2:
                yield name, tensor
                continue
            view = passed.view(-1)[: tensor.numel()].view(tensor.shape)
            yield name, view.copy_(tensor)

    found = served_weights(weights(), lambda name, shape: form_of(form, name))
    taken = {name: tensor.clone() for name, tensor in found}
    expected = cold(model, form)
    assert set(taken) == set(expected)
    for name, tensor in taken.items():
        assert torch.equal(as_bits(tensor), as_bits(expected[name])), name


@pytest.mark.parametrize("form", [CompressedNvfp4(), ModelOptNvfp4()])
def test_what_was_held_back_arrives(form: Form) -> None:
    model, transport, weights = trainer(torch.bfloat16), inprocess.Sender(), StreamedWeights()
    replica = engine(cold(model, form))
    sender = WeightSender(weights, transport)
    serving = Serving(WeightReceiver(ModuleTarget(replica), transport.receiver())).start()
    try:
        for number in range(3):
            for parameter in model.parameters():
                parameter.data += torch.randn(parameter.shape).to(parameter.dtype) * 1e-3 * number
            state = model.state_dict().items()
            weights.take(served_weights(state, lambda name, shape: form_of(form, name)))
            if not number:
                sender.wait_for_receivers(1, timeout_s=10)
            sender.send_weights(timeout_s=10)
            expected = cold(model, form)
            for name, tensor in replica.state_dict().items():
                assert torch.equal(as_bits(tensor), as_bits(expected[name])), (number, name)
    finally:
        serving.stop()
        sender.close()


def test_a_layer_without_its_siblings_comes_at_the_end() -> None:
    weight = matrix("plain", 16, 64, seed=0)
    weights = [("a.q_proj.weight", weight), ("a.o_proj.weight", weight)]
    form = CompressedNvfp4()
    names = [name for name, _ in served_weights(weights, lambda name, shape: form)]
    assert names[0].startswith("a.o_proj.")
    assert names[-1] == "a.q_proj.weight_global_scale"


def test_a_stream_is_gone_through_where_a_weight_is_refused() -> None:
    passed = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, cols in [("a", 64), ("b", 24), ("c", 64)]:
            passed.append(name)
            yield f"{name}.weight", matrix("plain", 16, cols, seed=0)

    form = CompressedNvfp4()
    with pytest.raises(ConfigError, match=r"b\.weight: NVFP4 of compressed-tensors is for blocks"):
        list(served_weights(weights(), lambda name, shape: form))
    assert passed == ["a", "b", "c"]
