"""What cannot be served is refused at connect, by name, and nothing is served out of date."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource, NamedTensor, SenderOptions, WeightSource
from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.integrations.streamed import StreamedWeights
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.served import ServedSource, served_weights
from tests.quant.served import assert_holds, cold, engine, forms, plain, served, step, trainer
from tests.worlds.links import fleet

FORM = BlockFp8()


def weight(source: nn.Module, layer: str) -> nn.Parameter:
    return source.get_parameter(f"{layer}.weight")


def refusal(source: WeightSource, held: Mapping[str, Tensor], **options: Any) -> str:
    """What a first sync to an engine of these tensors is refused with."""
    replica = engine(held)
    with fleet(source, options=SenderOptions(**options)) as here:
        here.add(replica)

        def first_sync() -> None:
            here.wait(1)
            here.sender.send_weights(timeout_s=60)

        with pytest.raises(DeltaSyncError) as caught:
            first_sync()
    assert not any(tensor.float().any() for tensor in replica.state_dict().values())
    return str(caught.value)


@pytest.mark.promise("Checks", "NaN and infinity are not quantized when engines connect.")
@pytest.mark.parametrize("bad", [torch.nan, 3.4e38])
def test_weights_without_a_form_are_refused_at_connect(bad: float) -> None:
    source = trainer(0, torch.float32)  # 3.4e38 is infinite as bfloat16
    held = cold(source, FORM)
    weight(source, "down").data[129, 383] = bad
    assert "down.weight: NaN or infinity" in refusal(served(source, FORM), held)


@pytest.mark.promise("Checks", "NaN and infinity are not quantized when engines connect.")
def test_weights_without_a_form_that_come_by_a_stream_are_refused() -> None:
    source = trainer(0, torch.bfloat16)
    weight(source, "down").data[129, 383] = torch.nan
    went_by = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in source.state_dict().items():
            went_by.append(name)
            yield name, tensor

    with pytest.raises(ConfigError, match=r"down\.weight: NaN or infinity"):
        StreamedWeights().take(served_weights(weights(), forms(FORM)))
    assert went_by == list(source.state_dict())  # other ranks are not left waiting


UNMET: dict[str, tuple[bool, Callable[[dict[str, Tensor]], dict[str, Tensor]], list[str]]] = {
    "a trainer that is not quantized": (False, dict, ["up.weight", "deltasync.quant"]),
    "an engine that is not quantized": (
        True,
        lambda _: plain(trainer(0, torch.bfloat16)),
        ["up.weight", "float8_e4m3fn"],
    ),
    "scales of another shape": (
        True,
        lambda held: held | {"down.weight_scale_inv": torch.zeros(2, 4)},
        ["down.weight_scale_inv"],
    ),
    "scales of another dtype": (
        True,
        lambda held: held | {"down.weight_scale_inv": torch.zeros(2, 3).bfloat16()},
        ["down.weight_scale_inv: computed as float32, the engine holds bfloat16"],
    ),
}


@pytest.mark.promise(
    "Checks",
    "Quantized weights meet their scales, or are refused by name before anything is written.",
)
@pytest.mark.parametrize("how", UNMET)
def test_ends_that_do_not_meet_are_named(how: str) -> None:
    source, (is_quantized, change, says) = trainer(0, torch.bfloat16), UNMET[how]
    weights = served(source, FORM) if is_quantized else ModuleSource(source)
    told = refusal(weights, change(cold(source, FORM)))
    assert all(one in told for one in says), told


@pytest.mark.promise(
    "Checks",
    "Quantized weights meet their scales, or are refused by name before anything is written.",
)
def test_options_do_not_part_codes_and_scales() -> None:
    source = trainer(0, torch.float32)
    for pattern in ("*", "up.weight", "*_scale_inv"):
        told = refusal(served(source, FORM), cold(source, FORM), wire_dtypes={pattern: "bfloat16"})
        assert "up.weight: " in told or "up.weight_scale_inv: " in told
    told = refusal(served(source, FORM), cold(source, FORM), leave_out=["*_scale_inv"])
    assert "weight_scale_inv" in told  # codes without scales


def test_what_no_form_is_made_of_is_refused() -> None:
    source = trainer(0, torch.bfloat16)
    held = cold(source, FORM)
    other = nn.Parameter(weight(source, "down").to(torch.int8), requires_grad=False)
    source.get_submodule("down").weight = other
    told = refusal(served(source, FORM), held)
    assert "down.weight: block FP8 with float32 scales is made of bfloat16 or float32" in told


def test_what_is_served_under_names_that_do_not_fit_is_refused() -> None:
    """Tied weights, and a scale of the trainer's own."""
    source = nn.Module()
    source.embed, source.head = nn.Embedding(256, 128), nn.Linear(128, 256, bias=False)
    source.embed.weight = nn.Parameter(torch.randn(256, 128).bfloat16())
    source.head.weight = source.embed.weight
    one = ServedSource(ModuleSource(source), lambda name, _: FORM if "head" in name else None)
    with pytest.raises(ConfigError, match=r"embed\.weight is served as it is, and head\.weight"):
        one.tensors()
    both = ServedSource(
        ModuleSource(source), lambda name, _: FORM if name.endswith(".weight") else None
    )
    assert [entry.names for entry in both.tensors()] == [
        ("embed.weight", "head.weight"),
        ("embed.weight_scale_inv", "head.weight_scale_inv"),
    ]
    source.head.register_buffer("weight_scale_inv", torch.ones(2, 3))
    with pytest.raises(ConfigError, match=r"head\.weight_scale_inv: served, and a tensor of the"):
        both.tensors()


def test_stacked_experts_are_refused_until_they_are_split() -> None:
    source = nn.Module()
    source.experts = nn.Parameter(torch.randn(3, 256, 128, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"experts: .*\(3, 256, 128\); split.*name_map"):
        ServedSource(ModuleSource(source), lambda *_: FORM).tensors()


# Nothing is served out of date


both_forms = pytest.mark.parametrize("form", [FORM, Fp8("tensor")], ids=lambda form: form.name)


@both_forms
@pytest.mark.parametrize("is_fixed", [False, True])
def test_weights_that_change_where_they_lie_or_move_are_served(form: Form, is_fixed: bool) -> None:
    """The list of a source may stay the same; storage may be another, of another dtype."""
    source = trainer(0, torch.bfloat16)
    fixed = ModuleSource(source).tensors()

    class Fixed:
        def tensors(self) -> list[NamedTensor]:
            return fixed

    replica = engine(cold(source, form))
    own = ServedSource(Fixed(), forms(form)) if is_fixed else served(source, form)
    with fleet(own) as here:
        here.add(replica)
        here.wait(1)
        for number, dtype in enumerate([torch.bfloat16, torch.float32, torch.bfloat16]):
            step(source, 0.5, number)
            weight(source, "up").data[0, 0] *= 8  # the one scale of the whole
            if not is_fixed:
                weight(source, "up").data = weight(source, "up").data.to(dtype, copy=True)
                source.get_submodule("down").weight = nn.Parameter(
                    weight(source, "down").data.to(dtype, copy=True) * 4
                )
            here.sender.send_weights(timeout_s=60)
            assert_holds(replica, cold(source, form))


@both_forms
def test_syncs_in_the_background_serve_what_was_there_when_they_began(form: Form) -> None:
    source = trainer(0, torch.bfloat16)
    replica = engine(cold(source, form))
    with fleet(served(source, form)) as here:
        here.add(replica)
        here.wait(1)
        here.sender.send_weights(timeout_s=60)
        for number in range(3):
            step(source, 0.5, number)
            weight(source, "up").data[0, 0] = 2.0**number
            expected = {name: tensor.clone() for name, tensor in cold(source, form).items()}
            if number % 3:  # without it the sync looks the source up itself
                here.sender.refresh_source()
            read = threading.Event()
            thread = threading.Thread(
                target=lambda at=read: here.sender.send_weights(timeout_s=60, on_source_read=at.set)
            )
            thread.start()
            assert read.wait(60)
            for parameter in source.parameters():
                parameter.data *= 3
            thread.join(60)
            assert_holds(replica, expected)
