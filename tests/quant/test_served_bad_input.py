"""What cannot be served is refused at connect, by name, and nothing is served out of date."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    NamedTensor,
    SenderOptions,
    WeightReceiver,
    WeightSender,
    WeightSource,
)
from deltasync.delta.bits import as_bits
from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form, Part, Shape
from deltasync.quant.nvfp4 import CompressedNvfp4
from deltasync.quant.served import ServedSource, served_weights
from deltasync.sync.source.streamed import StreamedWeights
from deltasync.transports import inprocess
from tests.quant.test_served import cold, engine, forms, step, trainer
from tests.worlds.links import Serving

FORM = BlockFp8()


@dataclass(frozen=True)
class OfTheWhole:
    """A form that has a part of the whole matrix: what is cached between two reads of it."""

    name: str = "a form with one scale"
    rows: int = 1
    shares: bool = False

    def parts(self, shape: Shape) -> dict[str, Part]:
        parts = BlockFp8().parts(shape)
        scale = Part((), parts["weight_scale_inv"].dtype, None)
        return {"weight": Part(shape, parts["weight"].dtype, 1), "weight_scale": scale}

    def whole(self, weights: Iterable[Tensor]) -> dict[str, Tensor]:
        (weight,) = weights
        return {"weight_scale": weight.float().abs().amax() / 448}

    def quantize(self, band: Tensor, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"weight": (band.float() / whole["weight_scale"]).to(torch.float8_e4m3fn)}


@contextmanager
def connected(
    source: WeightSource | StreamedWeights, replica: nn.Module, **options: object
) -> Iterator[tuple[WeightSender, Serving]]:
    transport = inprocess.Sender()
    chosen = None if isinstance(source, StreamedWeights) else SenderOptions(**options)  # type: ignore[arg-type]
    with WeightSender(source, transport, options=chosen) as sender:
        serving = Serving(WeightReceiver(ModuleTarget(replica), transport.receiver())).start()
        try:
            sender.wait_for_receivers(1, timeout_s=10)
            yield sender, serving
        finally:
            serving.stop()


def refusal(source: WeightSource, replica: nn.Module, **options: object) -> str:
    """What a first sync is refused with."""
    before = {name: tensor.clone() for name, tensor in replica.state_dict().items()}
    with (
        pytest.raises(DeltaSyncError) as caught,
        connected(source, replica, **options) as (sender, _),
    ):
        sender.send_weights(timeout_s=5)
    for name, tensor in replica.state_dict().items():
        assert torch.equal(as_bits(tensor), as_bits(before[name])), name
    return str(caught.value)


def served(source: nn.Module, form: Form = FORM) -> ServedSource:
    return ServedSource(ModuleSource(source), forms(form))


def weight(source: nn.Module, layer: str) -> nn.Parameter:
    return source.get_parameter(f"{layer}.weight")


def holds(replica: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, tensor in replica.state_dict().items():
        assert torch.equal(as_bits(tensor), as_bits(expected[name])), name


@pytest.mark.promise("Checks", "NaN and infinity are not quantized when engines connect.")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3.4e38])
def test_weights_without_a_form_are_refused_at_connect(bad: float) -> None:
    source = trainer(0, torch.float32)  # 3.4e38 is infinite as bfloat16
    replica = engine(cold(source, FORM))
    weight(source, "down").data[129, 383] = bad
    assert "down.weight: NaN or infinity" in refusal(served(source), replica)


@pytest.mark.promise("Checks", "NaN and infinity are not quantized when engines connect.")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_without_a_form_that_come_by_a_stream_are_refused(bad: float) -> None:
    source = trainer(0, torch.bfloat16)
    weight(source, "down").data[129, 383] = bad
    went_by = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in source.state_dict().items():
            went_by.append(name)
            yield name, tensor

    with pytest.raises(ConfigError, match=r"down\.weight: NaN or infinity"):
        StreamedWeights().take(served_weights(weights(), forms(FORM)))
    assert went_by == list(source.state_dict())  # other ranks are not left waiting


@pytest.mark.promise(
    "Checks",
    "Quantized weights meet their scales, or are refused by name before anything is written.",
)
def test_an_engine_that_is_quantized_takes_nothing_from_a_trainer_that_is_not() -> None:
    source = trainer(0, torch.bfloat16)
    told = refusal(ModuleSource(source), engine(cold(source, FORM)))
    assert "up.weight" in told
    assert "deltasync.quant" in told


@pytest.mark.promise(
    "Checks",
    "Quantized weights meet their scales, or are refused by name before anything is written.",
)
def test_an_engine_that_is_not_quantized_takes_nothing_that_is() -> None:
    source = trainer(0, torch.bfloat16)
    told = refusal(served(source), engine(dict(source.state_dict())))
    assert "up.weight" in told
    assert "float8_e4m3fn" in told


@pytest.mark.promise(
    "Checks",
    "Quantized weights meet their scales, or are refused by name before anything is written.",
)
@pytest.mark.parametrize(("name", "says"), [("up", "bfloat16"), ("down", "down.weight")])
def test_one_layer_that_either_end_does_not_quantize_is_named(name: str, says: str) -> None:
    source = trainer(0, torch.bfloat16)

    def without(layer: str, shape: tuple[int, ...]) -> Form | None:
        return None if layer.startswith(name) else forms(FORM)(layer, shape)

    weights = dict(source.state_dict())
    some = dict(served_weights(weights.items(), without))
    everything = dict(served_weights(weights.items(), forms(FORM)))
    for trained, held in ((forms(FORM), some), (without, everything)):
        told = refusal(ServedSource(ModuleSource(source), trained), engine(held))
        assert f"{name}.weight" in told


@pytest.mark.promise(
    "Checks",
    "Quantized weights meet their scales, or are refused by name before anything is written.",
)
def test_an_engine_of_another_scale_is_refused() -> None:
    source = trainer(0, torch.bfloat16)
    weights = cold(source, FORM)
    shape = dict(weights, **{"down.weight_scale_inv": torch.zeros(2, 4)})
    assert "down.weight_scale_inv" in refusal(served(source), engine(shape))
    dtype = dict(weights, **{"down.weight_scale_inv": torch.zeros(2, 3).bfloat16()})
    told = refusal(served(source), engine(dtype))
    assert "down.weight_scale_inv: computed as float32, the engine holds bfloat16" in told
    renamed = {name.replace("_inv", ""): tensor for name, tensor in weights.items()}
    assert "weight_scale" in refusal(served(source), engine(renamed))


@pytest.mark.promise(
    "Checks",
    "Quantized weights meet their scales, or are refused by name before anything is written.",
)
@pytest.mark.parametrize("pattern", ["*", "up.weight", "*_scale_inv"])
def test_wire_dtypes_change_nothing_that_is_served(pattern: str) -> None:
    source = trainer(0, torch.float32)
    told = refusal(served(source), engine(cold(source, FORM)), wire_dtypes={pattern: "bfloat16"})
    assert re.search(r"up\.weight(_scale_inv)?: ", told)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8])
def test_what_no_form_is_made_of_is_refused(dtype: torch.dtype) -> None:
    source = trainer(0, torch.bfloat16)
    replica = engine(cold(source, FORM))
    source.get_submodule("down").weight = nn.Parameter(
        weight(source, "down").to(dtype), requires_grad=False
    )
    told = refusal(served(source), replica)
    assert "down.weight: block FP8 with float32 scales is made of bfloat16 or float32" in told


def test_stacked_experts_are_refused_until_they_are_split() -> None:
    experts = torch.randn(3, 256, 128, dtype=torch.bfloat16)
    source = nn.Module()
    source.experts = nn.Parameter(experts)
    every: Callable[[str, tuple[int, ...]], Form | None] = lambda *_: FORM  # noqa: E731
    with pytest.raises(ConfigError, match=r"experts: .*\(3, 256, 128\); split.*name_map"):
        ServedSource(ModuleSource(source), every).tensors()

    def name_map(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int | slice, ...]]:
        halves = {"gate": slice(0, 128), "up": slice(128, None)}
        return {
            f"{name}.{expert}.{half}.weight": (expert, rows)
            for expert in range(3)
            for half, rows in halves.items()
        }

    split = ServedSource(ModuleSource(source, name_map=name_map), every)
    weights = {
        f"experts.{expert}.{half}.weight": experts[expert, rows]
        for expert in range(3)
        for half, rows in {"gate": slice(0, 128), "up": slice(128, None)}.items()
    }
    replica = engine(dict(served_weights(weights.items(), every)))
    with connected(split, replica) as (sender, _):
        for number, share in enumerate([0, 0.1, 1]):
            step(source, share, number)
            sender.send_weights(timeout_s=5)
            holds(replica, dict(served_weights(weights.items(), every)))


def tied() -> nn.Module:
    source = nn.Module()
    source.embed, source.head = nn.Embedding(256, 128), nn.Linear(128, 256, bias=False)
    source.embed.weight = nn.Parameter(torch.randn(256, 128).bfloat16())
    embed = source.get_submodule("embed")
    source.get_submodule("head").weight = embed.weight
    return source


def test_tied_weights_are_served_alike_or_refused() -> None:
    source = tied()
    one = ServedSource(ModuleSource(source), lambda name, _: FORM if "head" in name else None)
    with pytest.raises(ConfigError, match=r"embed\.weight is served as it is, and head\.weight"):
        one.tensors()
    both = ServedSource(ModuleSource(source), lambda *_: FORM)
    assert [entry.names for entry in both.tensors()] == [
        ("embed.weight", "head.weight"),
        ("embed.weight_scale_inv", "head.weight_scale_inv"),
    ]
    neither = ServedSource(ModuleSource(source), lambda *_: None)
    assert neither.tensors() == ModuleSource(source).tensors()


def test_a_trainer_that_has_the_name_of_a_scale_is_refused() -> None:
    source = trainer(0, torch.bfloat16)
    source.get_submodule("down").register_buffer("weight_scale_inv", torch.ones(2, 3))
    one = ServedSource(
        ModuleSource(source), lambda name, _: FORM if name == "down.weight" else None
    )
    with pytest.raises(ConfigError, match=r"down\.weight_scale_inv: served, and a tensor of the"):
        one.tensors()


def test_what_is_left_out_is_left_out_with_its_scale() -> None:
    source = trainer(0, torch.bfloat16)
    weights = cold(source, FORM)
    rest = {name: tensor for name, tensor in weights.items() if not name.startswith("down")}
    replica = engine(rest)
    with connected(served(source), replica, leave_out=["down.*"]) as (sender, _):
        sender.send_weights(timeout_s=5)
    holds(replica, weights)
    told = refusal(served(source), engine(weights), leave_out=["*_scale_inv"])
    assert "weight_scale_inv" in told  # codes without scales


@pytest.mark.parametrize("form", [FORM, OfTheWhole()], ids=lambda form: form.name)
def test_a_list_that_stays_the_same_serves_weights_that_change(form: Form) -> None:
    source = trainer(0, torch.bfloat16)
    fixed = ModuleSource(source).tensors()

    class Fixed:
        def tensors(self) -> list[NamedTensor]:
            return fixed

    replica = engine(cold(source, form))
    with connected(ServedSource(Fixed(), forms(form)), replica) as (sender, _):
        for number in range(4):
            step(source, 0.5, number)
            if number == 2:
                weight(source, "up").data[0, 0] *= 8  # the one scale of the whole
            sender.send_weights(timeout_s=5)
            holds(replica, cold(source, form))


@pytest.mark.parametrize("form", [FORM, OfTheWhole()], ids=lambda form: form.name)
def test_storage_that_moves_and_changes_its_dtype_is_served(form: Form) -> None:
    source = trainer(0, torch.bfloat16)
    replica = engine(cold(source, form))
    with connected(served(source, form), replica) as (sender, _):
        for number, dtype in enumerate([torch.bfloat16, torch.float32, torch.bfloat16]):
            step(source, 0.5, number)
            weight(source, "up").data = weight(source, "up").data.to(dtype, copy=True)
            source.get_submodule("down").weight = nn.Parameter(
                weight(source, "down").data.to(dtype, copy=True) * 4
            )
            sender.send_weights(timeout_s=5)
            holds(replica, cold(source, form))


@pytest.mark.parametrize("form", [FORM, OfTheWhole()], ids=lambda form: form.name)
def test_syncs_in_the_background_serve_what_was_there_when_they_began(form: Form) -> None:
    source = trainer(0, torch.bfloat16)
    replica = engine(cold(source, form))
    with connected(served(source, form), replica) as (sender, _):
        sender.send_weights(timeout_s=5)
        for number in range(6):
            step(source, 0.5, number)
            weight(source, "up").data[0, 0] = 2.0**number
            expected = {name: tensor.clone() for name, tensor in cold(source, form).items()}
            if number % 3:  # without it the sync looks the source up itself
                sender.refresh_source()
            read = threading.Event()
            thread = threading.Thread(
                target=lambda at=read: sender.send_weights(timeout_s=5, on_source_read=at.set)
            )
            thread.start()
            assert read.wait(10)
            for parameter in source.parameters():
                parameter.data *= 3
            thread.join(10)
            holds(replica, expected)


@pytest.mark.parametrize("form", [FORM, OfTheWhole()], ids=lambda form: form.name)
def test_a_sync_that_came_to_nothing_is_covered_by_the_next(form: Form) -> None:
    source = trainer(0, torch.bfloat16)
    replica = engine(cold(source, form))
    transport = inprocess.Sender()
    with WeightSender(served(source, form), transport) as sender:
        serving = Serving(WeightReceiver(ModuleTarget(replica), transport.receiver())).start()
        sender.wait_for_receivers(1, timeout_s=10)
        sender.send_weights(timeout_s=5)
        serving.stop()
        weight(source, "up").data[0, 0] = 100.0
        with suppress(DeltaSyncError):
            sender.send_weights(timeout_s=0.5)
        step(source, 1, 1)
        weight(source, "up").data[0, 0] = 0.0
        again = Serving(WeightReceiver(ModuleTarget(replica), transport.receiver())).start()
        late = engine({n: t.clone() for n, t in replica.state_dict().items()})
        receiver = WeightReceiver(ModuleTarget(late), transport.receiver(), engine="late")
        other = Serving(receiver).start()
        try:
            sender.wait_for_receivers(2, timeout_s=10)
            sender.send_weights(timeout_s=5)
        finally:
            again.stop()
            other.stop()
        holds(replica, cold(source, form))
        holds(late, cold(source, form))


def test_matrices_without_whole_blocks_are_refused_by_name() -> None:
    source = trainer(0, torch.bfloat16)
    replica = engine(cold(source, FORM))
    told = refusal(served(source, CompressedNvfp4()), replica)  # rows of 200 elements
    assert "up.weight: NVFP4 of compressed-tensors is for blocks of 16 in a row" in told


def test_an_engine_that_sleeps_and_one_that_rejoins_are_served() -> None:
    source = trainer(0, torch.bfloat16)
    replica = engine(cold(source, FORM))
    with connected(served(source), replica) as (sender, serving):
        sender.send_weights(timeout_s=5)
        serving.receiver.detach()
        step(source, 0.5, 1)
        with suppress(DeltaSyncError):
            sender.send_weights(timeout_s=5)
        serving.receiver.attach()
        step(source, 0.5, 2)
        sender.wait_for_receivers(1, timeout_s=10)
        sender.send_weights(timeout_s=5)
        holds(replica, cold(source, FORM))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (129, 1), (1, 129), (128, 128)])
def test_odd_shapes_are_served(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).bfloat16()
    parts = dict(served_weights([("one.weight", weight)], lambda *_: FORM))
    assert parts["one.weight"].shape == shape
    assert parts["one.weight_scale_inv"].shape == tuple(-(-size // 128) for size in shape)
