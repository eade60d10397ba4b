"""Plain modules as source and target: names, ties, buffers, moved storage, what must fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    SenderOptions,
    StoreSender,
)
from deltasync.delta.choice import Kernels
from deltasync.errors import (
    ConfigError,
    LayoutMismatch,
    SourceChanged,
    SyncAborted,
)
from deltasync.integrations.streamed import StreamedWeights
from tests.sync.interpreted import one_kernel_at_a_time
from tests.worlds.links import Model
from tests.worlds.toy_engines import joined
from tests.worlds.trainers import by_expert

__all__ = ["one_kernel_at_a_time"]  # pytest uses it


class Net(nn.Module):
    """Two layers, a head that may be tied, a buffer that is saved and one that is not."""

    saved: Tensor
    cache: Tensor

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("saved", torch.arange(3.0))
        self.register_buffer("cache", torch.arange(5.0), persistent=False)
        self.register_buffer("unset", None)


def module(**tensors: Tensor) -> nn.Module:
    """A bag of buffers."""
    made = nn.Module()
    for name, tensor in tensors.items():
        made.register_buffer(name, tensor)
    return made


def used_twice() -> nn.Module:
    layer = nn.Linear(2, 2, bias=False)
    both, shared = nn.Sequential(layer, layer), torch.ones(2)
    both.register_buffer("left", shared)
    both.register_buffer("right", shared)
    return both


def in_model(name: str) -> str | None:
    return None if name.startswith("norm") else f"model.{name}"


FOUR = torch.zeros(4)
EMBED, NORM = ("embed.weight", "head.weight"), [("norm.weight",), ("norm.bias",)]
Rename = Callable[[str], str | None]


@pytest.mark.parametrize(
    ("model", "rename", "names"),
    [
        (Net(), None, [EMBED, *NORM, ("saved",)]),
        (used_twice(), None, [("0.weight", "1.weight"), ("left", "right")]),
        (module(a=FOUR[:2], b=FOUR[:2], c=FOUR[2:]), None, [("a", "b"), ("c",)]),
        (Net(), in_model, [("model.embed.weight", "model.head.weight"), ("model.saved",)]),
    ],
)
def test_source_names_every_saved_tensor_once_and_its_aliases(
    model: nn.Module, rename: Rename | None, names: list[tuple[str, ...]]
) -> None:
    """A target names them alike."""
    source, target = ModuleSource(model, rename=rename), ModuleTarget(model, rename=rename)
    assert sorted(one.names for one in source.tensors()) == sorted(names)
    assert source.tensors() is source.tensors()
    assert sorted(one.names for one in target.parameters()) == sorted(names)
    if rename is None:
        assert {n for one in source.tensors() for n in one.names} == set(model.state_dict())


def test_a_stacked_parameter_goes_by_the_names_of_its_parts() -> None:
    model = Model({"experts": torch.randn(3, 4, 5), "norm": torch.ones(2)})
    parts = model.get_parameter("experts").requires_grad_().view(6, 2, 5)
    names = [f"experts.{expert}.{part}" for expert in range(3) for part in ("gate", "up")]
    engine = module(norm=torch.zeros(2), **{n.replace(".", "_"): torch.zeros(2, 5) for n in names})
    target = ModuleTarget(engine, rename=lambda own: own.replace("_", "."))
    with joined(ModuleSource(model, name_map=by_expert), target) as here:
        stats = here.sender.send_weights()
        assert stats.changed == 0
        for name, part in zip(names, parts, strict=True):
            assert torch.equal(engine.get_buffer(name.replace(".", "_")), part)


def test_odd_names_and_parts_are_refused_by_name() -> None:
    same = ModuleSource(Net(), rename=lambda _: "same")
    no_part = ModuleSource(module(a=FOUR), name_map=lambda name, shape: {"odd": (4,)})
    for source, words in ((same, "two tensors are named 'same'"), (no_part, "^odd: .*no part")):
        with pytest.raises(ConfigError, match=words):
            source.tensors()


def wired(model: nn.Module, engine: nn.Module, **dtypes: str) -> None:
    with joined(model, engine, options=SenderOptions(wire_dtypes=dtypes)):
        pass


def test_wire_dtypes_come_from_the_receiver_and_overrides_win() -> None:
    model, engine = Net(), Net().bfloat16()
    engine.norm.float()
    with pytest.raises(SyncAborted, match="saved: bfloat16 here, float16 on the wire"):
        wired(model, engine, **{"sav*": "float16"})
    engine.saved = engine.saved.half()
    wired(model, engine, **{"head.weight": "bfloat16"})
    assert torch.equal(engine.embed.weight, model.embed.weight.bfloat16())
    assert torch.equal(engine.norm.weight, model.norm.weight)
    with pytest.raises(SyncAborted, match="float32 cannot be sent"):
        wired(model, Net(), saved="int8")


class Wider(Net):
    """With a parameter that can be transposed, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.line = nn.Parameter(torch.randn(8), requires_grad=False)


def swap_names(model: Wider) -> None:
    """The same tensors in the same order, under each other's names."""
    weight, bias = model.norm.weight, model.norm.bias
    del model.norm.weight, model.norm.bias
    model.norm.bias, model.norm.weight = weight, bias


def move_over(model: Wider) -> None:
    """The last parameter of one module becomes the first of the next one."""
    bias, weight = model.norm.bias, model.head.weight
    del model.norm.bias, model.head.weight
    model.head.bias, model.head.weight = bias, weight


swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors

MOVES: dict[str, Callable[[Wider], object]] = {
    "data": lambda m: setattr(m.norm.weight, "data", m.norm.weight.data + 1),
    "assign": lambda m: m.load_state_dict(
        {name: tensor + 1 for name, tensor in m.state_dict().items()}, assign=True
    ),
    "dtype": lambda m: m.to(torch.float64),
    "parameter": lambda m: setattr(m.norm, "weight", nn.Parameter(torch.full((4,), 3.0))),
    "module": lambda m: setattr(m, "norm", nn.LayerNorm(4)),
    "buffer": lambda m: setattr(m, "saved", torch.full((3,), 3.0)),
    "names swapped": swap_names,
    "strides": lambda m: setattr(m.embed.weight, "data", torch.full((4, 6), 7.0).T),
    "transposed in place": lambda m: m.square.t_(),
    "shape of the same memory": lambda m: setattr(m.line, "data", m.line.data.view(4, 2)),
    "tensors swapped": lambda m: swap(m.norm.weight, m.norm.bias),
}
OTHERS: dict[str, tuple[Callable[[Wider], object], str]] = {
    "untied": (lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight + 1)), "ties"),
    "removed": (lambda m: delattr(m.norm, "bias"), "appeared or vanished"),
    "moved over": (move_over, ""),
    "memory released": (lambda m: m.norm.weight.untyped_storage().resize_(0), r"norm\.weight"),
    "another shape": (
        lambda m: setattr(m.norm, "weight", nn.Parameter(torch.ones(5))),
        r"norm\.weight: shape \(4,\) became \(5,\)",
    ),
}


@pytest.mark.parametrize(
    ("kernels", "names"),
    [
        ("torch", [*MOVES]),
        ("triton", ["data", "parameter", "buffer", "names swapped", "transposed in place"]),
    ],
)
def test_whatever_moves_is_read_as_it_is_or_refused(kernels: Kernels, names: list[str]) -> None:
    """One source after another; kernels look at it twice."""
    for name in names:
        source, engine = Wider(), Wider()
        with joined(source, engine, options=SenderOptions(kernels=kernels)) as here:
            with torch.no_grad():
                MOVES[name](source)
            try:
                here.sender.send_weights()
            except (SourceChanged, ConfigError):
                continue
            held, now = engine.state_dict(), source.state_dict()
            for own, tensor in now.items():
                assert torch.equal(tensor.to(held[own].dtype), held[own]), name
            assert here.sender.send_weights().nnz == 0, name


@pytest.mark.promise("Errors", "`SourceChanged`: members keep what they hold.")
@pytest.mark.parametrize(
    ("name", "kernels"),
    [*((name, "torch") for name in OTHERS), ("removed", "triton"), ("memory released", "triton")],
)
def test_a_source_that_is_not_the_same_model_any_more(name: str, kernels: Kernels) -> None:
    source, engine, (move, words) = Wider(), Wider(), OTHERS[name]
    with joined(source, engine, options=SenderOptions(kernels=kernels)) as here:
        held = [tensor.clone() for tensor in engine.state_dict().values()]
        with torch.no_grad():
            move(source)
        for _ in range(2):
            with pytest.raises((SourceChanged, ConfigError), match=words or None):
                here.sender.send_weights()
        assert here.sender.num_receivers == 1
        assert all(map(torch.equal, held, engine.state_dict().values()))


# What must fit.


def without_bias(model: Net) -> None:
    del model.norm.bias


def widen(model: Net) -> None:
    model.norm.weight.data = torch.ones(5)


@pytest.mark.promise("Errors", "`LayoutMismatch`: models that differ are refused by name.")
@pytest.mark.parametrize(
    ("tied", "engine_tied", "change", "words"),
    [
        (True, True, without_bias, r"takes nothing of 'norm\.bias'; if it has no use"),
        (True, True, lambda m: m.register_buffer("extra", FOUR), "the sender has no .* 'extra'"),
        (True, True, widen, r"norm\.weight: shape \(5,\) here, \(4,\) at the"),
        (False, True, id, r"'embed\.weight', 'head\.weight' are tied here"),
        (True, False, id, r"'embed\.weight' are tied at the sender, not here"),
        (True, False, lambda m: delattr(m, "head"), None),  # it may hold one of the tied names
    ],
)
def test_an_engine_that_does_not_fit_is_refused_by_name(
    tied: bool, engine_tied: bool, change: Callable[[Net], object], words: str | None
) -> None:
    model, engine = Net(tied=tied), Net(tied=engine_tied)
    change(engine)
    if words is not None:
        with pytest.raises(SyncAborted, match=words), joined(model, engine):
            pass
        return
    with joined(model, engine):
        assert torch.equal(engine.embed.weight, model.embed.weight)
    assert not engine_tied or engine.head.weight is engine.embed.weight


def test_tensors_that_share_bytes_without_being_tied_are_refused() -> None:
    memory = torch.zeros(12)
    target = ModuleTarget(Model({"whole": memory, "part": memory[4:8]}))
    with pytest.raises(LayoutMismatch, match="share memory"):
        target.bind(target.parameters())
    halves = ModuleTarget(Model({"low": memory[:6], "high": memory[6:]}))
    assert len(halves.bind(halves.parameters())) == 2


ODD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(4).to_sparse(), "layout sparse_coo"),
    "meta": (lambda: torch.ones(4, 4, device="meta"), "meta device"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8), "qint8"),
    "conjugated": (lambda: torch.ones(4, 4, dtype=torch.complex64).conj(), "conjugated"),
}


def module_with(odd: Tensor) -> nn.Module:
    return module(plain=torch.ones(2), odd=odd)


@pytest.mark.filterwarnings("ignore")  # of torch, about what is made here
@pytest.mark.parametrize(("make", "words"), ODD.values(), ids=ODD.keys())
def test_tensors_without_plain_storage_are_refused_by_name(
    make: Callable[[], Tensor], words: str, tmp_path: Path
) -> None:
    calls: list[Callable[[], object]] = [
        StoreSender(ModuleSource(module_with(make())), tmp_path).publish,
        lambda: StreamedWeights().take([("odd", make())]),
        ModuleTarget(module_with(make())).parameters,
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=f"^'?odd.*{words}"):
            call()
