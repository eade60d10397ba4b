"""Plain modules as source and target: names, ties, buffers, moved storage, what must fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    NamedTensor,
    ReceiverOptions,
    SenderOptions,
    StoreSender,
    WeightSource,
    WeightTarget,
)
from deltasync.delta.choice import Kernels
from deltasync.errors import (
    ConfigError,
    LayoutMismatch,
    NoReceivers,
    SourceChanged,
    SyncAborted,
)
from deltasync.sync.source.streamed import StreamedWeights
from deltasync.sync.source.tensors import Index
from tests.sync.interpreted import one_kernel_at_a_time
from tests.worlds.links import Model, bits_equal, until
from tests.worlds.target_contract import TargetContract
from tests.worlds.toy_engines import joined, recovers

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


def untied_head(name: str) -> str:
    return name.replace("head", "embed")


FOUR = torch.zeros(4)
EMBED, NORM = ("embed.weight", "head.weight"), [("norm.weight",), ("norm.bias",)]
Rename = Callable[[str], str | None]


@pytest.mark.parametrize(
    ("model", "rename", "names"),
    [
        (Net(), None, [EMBED, *NORM, ("saved",)]),
        (Net(tied=False), None, [("embed.weight",), *NORM, ("head.weight",), ("saved",)]),
        (used_twice(), None, [("0.weight", "1.weight"), ("left", "right")]),
        (module(a=torch.empty(0), b=torch.empty(0)), None, [("a",), ("b",)]),
        (module(a=FOUR[:2], b=FOUR[:2], c=FOUR[2:]), None, [("a", "b"), ("c",)]),
        (Net(), in_model, [("model.embed.weight", "model.head.weight"), ("model.saved",)]),
        (Net(), untied_head, [("embed.weight",), *NORM, ("saved",)]),
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


def by_expert(name: str, shape: tuple[int, ...]) -> dict[str, Index] | None:
    """(experts, 2 * width, hidden): gate beside up."""
    if name != "experts":
        return None
    width, found = shape[1] // 2, dict[str, Index]()
    for expert in range(shape[0]):
        found[f"experts.{expert}.gate"] = (expert, slice(0, width))
        found[f"experts.{expert}.up"] = (expert, slice(width, None))
    return found


def test_a_stacked_parameter_goes_by_the_names_of_its_parts() -> None:
    model = Model({"experts": torch.randn(3, 4, 5), "norm": torch.ones(2)})
    experts = model.get_parameter("experts").requires_grad_()
    source = ModuleSource(model, name_map=by_expert)
    tensors = source.tensors()
    names = [f"experts.{expert}.{part}" for expert in range(3) for part in ("gate", "up")]
    assert [one.name for one in tensors] == [*names, "norm"]
    for entry, part in zip(tensors, experts.view(6, 2, 5), strict=False):
        assert (entry.shape, entry.tensor.data_ptr()) == ((2, 5), part.data_ptr())
    engine = module(norm=torch.zeros(2), **{n.replace(".", "_"): torch.zeros(2, 5) for n in names})
    target = ModuleTarget(engine, rename=lambda own: own.replace("_", "."))
    with joined(source, target) as here:
        stats = here.sender.send_weights()
        assert stats.parameters == {"changed": 0, "unchanged": 6, "frozen": 1}
        for name, part in zip(names, experts.view(6, 2, 5), strict=True):
            assert torch.equal(engine.get_buffer(name.replace(".", "_")), part)


class OneTensor:
    """A source of a user's own."""

    def __init__(self, tensor: Tensor, name: str = "odd") -> None:
        self._tensor, self._name = tensor, name

    def tensors(self) -> list[NamedTensor]:
        return [NamedTensor((self._name,), self._tensor)]


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
    for dtype, words in (("float99", "'float99' is not one"), ("int8", "float32 cannot be sent")):
        with pytest.raises(SyncAborted, match=words):
            wired(model, Net(), saved=dtype)


class Wider(Net):
    """With a parameter that can be transposed, a vector, a scalar, and a module of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.line = nn.Parameter(torch.randn(8), requires_grad=False)
        self.one = nn.Parameter(torch.ones(()), requires_grad=False)
        self.drop = nn.Dropout()
        self.memory = torch.arange(40.0)
        self.part = nn.Parameter(self.memory.as_strided((2, 3), (5, 1)), requires_grad=False)


def swap_names(model: Wider) -> None:
    """The same tensors in the same order, under each other's names."""
    weight, bias = model.norm.weight, model.norm.bias
    del model.norm.weight, model.norm.bias
    model.norm.bias, model.norm.weight = weight, bias


def rename(model: Wider) -> None:
    model.last = model.norm
    del model.norm


def move_over(model: Wider) -> None:
    """The last parameter of one module becomes the first of the next one."""
    bias, weight = model.norm.bias, model.head.weight
    del model.norm.bias, model.head.weight
    model.head.bias, model.head.weight = bias, weight


swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors

MOVES: dict[str, Callable[[Wider], object]] = {
    "data": lambda m: setattr(m.norm.weight, "data", m.norm.weight.data + 1),
    "data of the same values": lambda m: setattr(m.norm.bias, "data", m.norm.bias.data.clone()),
    "assign": lambda m: m.load_state_dict(
        {name: tensor + 1 for name, tensor in m.state_dict().items()}, assign=True
    ),
    "dtype": lambda m: m.to(torch.float64),
    "dtype of one": lambda m: setattr(m.norm.weight, "data", m.norm.weight.data.half()),
    "bits of another dtype": lambda m: setattr(m.line, "data", m.line.data.view(torch.int32)),
    "parameter": lambda m: setattr(m.norm, "weight", nn.Parameter(torch.full((4,), 3.0))),
    "module": lambda m: setattr(m, "norm", nn.LayerNorm(4)),
    "buffer": lambda m: setattr(m, "saved", torch.full((3,), 3.0)),
    "not persistent": lambda m: m._non_persistent_buffers_set.add("saved"),
    "added where nothing was": lambda m: m.drop.register_buffer("more", torch.ones(1)),
    "set to None": lambda m: setattr(m.norm, "bias", None),
    "names swapped": swap_names,
    "memory grown": lambda m: m.norm.weight.untyped_storage().resize_(64),
    "strides": lambda m: setattr(m.embed.weight, "data", torch.full((4, 6), 7.0).T),
    "transposed": lambda m: setattr(m.square, "data", m.square.data.t()),
    "transposed in place": lambda m: m.square.t_(),
    "shape of the same memory": lambda m: setattr(m.line, "data", m.line.data.view(4, 2)),
    "beginning of the same memory": lambda m: setattr(m.line, "data", m.line.data[:4]),
    "another part, with the same strides": lambda m: setattr(
        m.part, "data", m.memory.as_strided((3, 2), (5, 1))
    ),
    "tensors swapped": lambda m: swap(m.norm.weight, m.norm.bias),
}
OTHERS: dict[str, tuple[Callable[[Wider], object], str]] = {
    "untied": (lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight + 1)), "ties"),
    "tied": (lambda m: setattr(m.norm, "bias", m.norm.weight), ""),
    "added": (
        lambda m: m.norm.register_parameter("more", nn.Parameter(torch.ones(1))),
        "appeared or vanished",
    ),
    "removed": (lambda m: delattr(m.norm, "bias"), "appeared or vanished"),
    "renamed": (rename, "appeared or vanished"),
    "moved over": (move_over, ""),
    "memory released": (lambda m: m.norm.weight.untyped_storage().resize_(0), r"norm\.weight"),
    "another shape": (
        lambda m: setattr(m.norm, "weight", nn.Parameter(torch.ones(5))),
        r"norm\.weight: shape \(4,\) became \(5,\)",
    ),
    "without memory": (
        lambda m: setattr(m.norm, "weight", nn.Parameter(torch.empty(4, device="meta"))),
        r"norm\.weight",
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
        (True, True, id, None),
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


@pytest.mark.promise(
    "Checks",
    "The scrub checks all weights within 64 syncs and names what changed; a full sync repairs it.",
)
@pytest.mark.parametrize("every", [3, 64])
@pytest.mark.parametrize(("name", "position"), [("a", 9), ("c", 0), ("d", 24)])
def test_scrub_looks_at_everything_within_its_share_of_syncs(
    every: int, name: str, position: int
) -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (10,), "b": (0,), "c": (), "d": (5, 5)}
    source, engine = (Model({n: torch.zeros(s) for n, s in shapes.items()}) for _ in range(2))
    for model in (source, engine):
        model.register_parameter("step", nn.Parameter(torch.zeros(1), requires_grad=False))
    options = ReceiverOptions(scrub_every=every, stall_timeout_s=60)
    with joined(source, engine, receiving=options) as here:
        serving = here.serving["engine/0"]
        engine.get_parameter(name).data.view(-1)[position] = -0.0
        full_synced = 0
        for _ in range(every + 1):  # one may be over before the last one's scrub
            source.get_parameter("step").data += 1
            if not serving.errors:
                with suppress(SyncAborted, NoReceivers):
                    full_synced += here.sender.send_weights().full_synced
        until(lambda: bool(serving.errors))
        assert name in str(serving.errors[0])
        assert full_synced + recovers(here).full_synced == 1
        assert bits_equal(source, engine)


class TestModuleTarget(TargetContract):
    module: nn.Module

    def make_target(self, state: dict[str, Tensor]) -> WeightTarget:
        self.module = nn.Module()
        for name, tensor in state.items():
            *path, key = name.split(".")
            owner = self.module
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(key, nn.Parameter(tensor.clone()))
        return ModuleTarget(self.module)

    def replace_storage(self, name: str) -> None:
        parameter = self.module.get_parameter(name)
        parameter.data = parameter.data.clone()


class TestTransposedModuleTarget(TestModuleTarget):
    """Live weights that are not contiguous, as fused engines keep them."""

    def make_target(self, state: dict[str, Tensor]) -> WeightTarget:
        target = super().make_target(state)
        for parameter in self.module.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.T.contiguous().T
        return target


def test_tensors_that_share_bytes_without_being_tied_are_refused() -> None:
    memory = torch.zeros(12)
    target = ModuleTarget(Model({"whole": memory, "part": memory[4:8]}))
    with pytest.raises(LayoutMismatch, match="share memory"):
        target.bind(target.parameters())
    halves = ModuleTarget(Model({"low": memory[:6], "high": memory[6:]}))
    assert len(halves.bind(halves.parameters())) == 2


def released(num_bytes: int) -> Tensor:
    """As FSDP1 and offloading leave a parameter."""
    tensor = torch.ones(4, 4)
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


ODD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(4).to_sparse(), "layout sparse_coo"),
    "mkldnn": (lambda: torch.eye(4).to_mkldnn(), "layout _mkldnn"),
    "meta": (lambda: torch.ones(4, 4, device="meta"), "meta device"),
    "lazy": (lambda: nn.UninitializedParameter(), "first forward pass"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8), "qint8"),
    "conjugated": (lambda: torch.ones(4, 4, dtype=torch.complex64).conj(), "conjugated"),
    "released": (lambda: released(0), "0 of 64 bytes"),
    "dimensions": (lambda: torch.ones((1,) * 65), "65 dimensions, 64 at most can be sent"),
}


def module_with(odd: Tensor) -> nn.Module:
    made = module(plain=torch.ones(2))
    if isinstance(odd, nn.Parameter):
        made.register_parameter("odd", odd)
    else:
        made.register_buffer("odd", odd)
    return made


def plain_only(name: str) -> str | None:
    return None if name == "odd" else name


@pytest.mark.filterwarnings("ignore")  # of torch, about what is made here
@pytest.mark.parametrize(("make", "words"), ODD.values(), ids=ODD.keys())
def test_tensors_without_plain_storage_are_refused_by_name_or_left_out(
    make: Callable[[], Tensor], words: str, tmp_path: Path
) -> None:
    sources: Iterable[WeightSource] = (ModuleSource(module_with(make())), OneTensor(make()))
    calls: list[Callable[[], object]] = [
        *(StoreSender(source, tmp_path).publish for source in sources),
        lambda: StreamedWeights().take([("odd", make())]),
    ]
    if words.startswith("65"):
        calls.pop()  # which finds it when it is sent
    else:
        calls.append(ModuleTarget(module_with(make())).parameters)
    for call in calls:
        with pytest.raises(ConfigError, match=f"^'?odd.*{words}"):
            call()
    model = module_with(make())
    source = ModuleSource(model, rename=plain_only)
    target = ModuleTarget(model, rename=plain_only)
    with joined(source, target):
        target.check_unmoved()
