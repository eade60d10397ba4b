"""Plain modules as source and target: names, ties, buffers, moved storage, what must fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from deltasync.delta.bits import Flat, dtype_of
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host.backend import HostBackend
from deltasync.delta.shard import ShardSpec, cut, narrowed, whole
from deltasync.errors import ConfigError, LayoutMismatch, SourceChanged, TargetMoved
from deltasync.sync.module import ModuleSource, ModuleTarget, ModuleWatch
from deltasync.sync.options import ReceiverOptions
from deltasync.sync.source.layout import check_engine, source_specs, specs_of
from deltasync.sync.source.streamed import StreamedWeights
from deltasync.sync.source.tensors import Index, NamedTensor, WeightSource, parts_of
from deltasync.sync.source.weights import SourceLayout
from deltasync.sync.stats import coverage_of
from deltasync.sync.target.base import WeightTarget, match_parameters
from deltasync.sync.target.bound import BoundWeights
from deltasync.testing.target import TargetContract
from deltasync.wire.messages import Hello, ParameterSpec, entries


class Model(nn.Module):
    """Two layers, a head that may be tied, a buffer that is saved and one that is not."""

    saved: Tensor
    cache: Tensor

    def __init__(self, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("saved", torch.arange(3.0))
        self.register_buffer("cache", torch.arange(5.0), persistent=False)
        self.register_buffer("unset", None)
        self.to(dtype)


def names_of(tensors: list[NamedTensor]) -> list[tuple[str, ...]]:
    return [tensor.names for tensor in tensors]


def layout_of(
    model: nn.Module,
    held: tuple[ParameterSpec, ...] = (),
    overrides: Mapping[str, str] = MappingProxyType({}),
) -> SourceLayout:
    source = ModuleSource(model)
    return SourceLayout(source, specs_of(source_specs(source.tensors()), held, overrides))


def numbers(*chosen: int) -> NDArray[np.int64]:
    return np.array(chosen, np.int64)


def hello(specs: tuple[ParameterSpec, ...], *, world: int = 1) -> Hello:
    return Hello(
        parameters=entries(specs),
        engine="e",
        rank=0,
        world=world,
        format_versions=(1,),
        stream_id=None,
        version=None,
        connection=None,
        lanes=0,
    )


TIED = [("embed.weight", "head.weight"), ("norm.weight",), ("norm.bias",), ("saved",)]


def test_source_names_every_saved_tensor_once_and_its_aliases() -> None:
    model = Model()
    tensors = ModuleSource(model).tensors()
    assert set(names_of(tensors)) == set(TIED)
    assert {name for tensor in tensors for name in tensor.names} == set(model.state_dict())
    assert tensors[1].name == tensors[1].names[0]
    untied = names_of(ModuleSource(Model(tied=False)).tensors())
    assert ("head.weight",) in untied
    assert ("embed.weight",) in untied


def test_a_module_used_twice_and_a_shared_buffer_are_ties() -> None:
    layer = nn.Linear(2, 2, bias=False)
    both = nn.Sequential(layer, layer)
    both.register_buffer("left", torch.ones(2))
    both.register_buffer("right", both.get_buffer("left"))
    assert names_of(ModuleSource(both).tensors()) == [
        ("left", "right"),
        ("0.weight", "1.weight"),
    ]


def test_empty_tensors_are_not_tied() -> None:
    model = nn.ParameterDict({"a": torch.empty(0), "b": torch.empty(0)})
    assert names_of(ModuleSource(model).tensors()) == [("a",), ("b",)]


def test_views_of_one_storage_are_tied_only_if_they_are_the_same() -> None:
    storage = torch.zeros(4)
    model = nn.Module()
    for name, view in {"a": storage[:2], "b": storage[:2], "c": storage[2:]}.items():
        model.register_buffer(name, view)
    assert names_of(ModuleSource(model).tensors()) == [("a", "b"), ("c",)]


def test_rename_changes_and_leaves_out() -> None:
    def rename(name: str) -> str | None:
        return None if name.startswith("norm") else f"model.{name}"

    expected = {("model.embed.weight", "model.head.weight"), ("model.saved",)}
    assert set(names_of(ModuleSource(Model(), rename=rename).tensors())) == expected
    held = ModuleTarget(Model(), rename=rename).parameters()
    assert {spec.names for spec in held} == expected


def test_rename_to_one_name_is_refused_for_two_tensors_and_fine_for_ties() -> None:
    with pytest.raises(ConfigError, match="'same'"):
        ModuleSource(Model(), rename=lambda _: "same").tensors()

    def tie(name: str) -> str:
        return name.replace("head", "embed")

    assert ("embed.weight",) in names_of(ModuleSource(Model(), rename=tie).tensors())


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
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(3, 4, 5))
    model.norm = nn.Parameter(torch.ones(2), requires_grad=False)
    source = ModuleSource(model, name_map=by_expert)
    tensors = source.tensors()
    assert source.tensors() is tensors
    assert [t.name for t in tensors] == [
        *(f"experts.{expert}.{part}" for expert in range(3) for part in ("gate", "up")),
        "norm",
    ]
    for number, (entry, part) in enumerate(zip(tensors, model.experts.view(6, 2, 5), strict=False)):
        assert entry.shape == (2, 5)
        assert entry.tensor.data_ptr() == part.data_ptr(), number
        assert entry.tensor.requires_grad
    layout = SourceLayout(source, source_specs(tensors))
    assert [spec.shape for spec in layout.specs] == [(2, 5)] * 6 + [(2,)]
    assert coverage_of(layout.trained, numbers(), full=False) == {
        "changed": 0,
        "unchanged": 6,
        "frozen": 1,
    }


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ((4,), "no part"),
        ((-1,), "no part"),
        ((slice(0, 4, 2),), "no part"),
        ((slice(2, 2),), "no part"),
        ((0, 0), "no part"),
        ((-2,), "no part"),
        ((None,), "no part"),
    ],
)
def test_odd_parts_are_refused_by_name(index: Any, words: str) -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(4))})
    source = ModuleSource(model, name_map=lambda name, shape: {"odd": index})
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"odd: .*{words}"):
            source.tensors()


def test_parts_of_a_tensor_whose_dimensions_are_split_are_refused() -> None:
    whole = NamedTensor(("a",), torch.zeros(2, 2, 3), ShardSpec.whole((2, 2, 3)), (4, 3))
    with pytest.raises(ConfigError, match="a: has its dimensions split"):
        list(parts_of(whole, {"b": (0,)}))


def test_parts_of_tied_parameters_and_parts_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="tied"):
        ModuleSource(Model(), name_map=lambda name, shape: {name: (0,)}).tensors()
    with pytest.raises(ConfigError, match="two tensors are named 'same'"):
        ModuleSource(Model(tied=False), name_map=lambda name, shape: {"same": ()}).tensors()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_parts_of_shards_make_up_the_parts(shape: list[int], data: st.DataObject) -> None:
    """Of any box of a tensor, however it is cut among ranks."""
    whole = torch.arange(prod(shape)).view(shape)
    index: Index = ()
    for length in shape:
        begin = data.draw(st.integers(0, length - 1))
        end = data.draw(st.integers(begin + 1, length))
        index += (begin if data.draw(st.booleans()) else slice(begin, end),)
    spec = cut(ShardSpec.whole(shape), data.draw(st.integers(1, 3)))
    found = torch.full(whole[index].shape, -1)
    for box in spec:
        local = narrowed(whole, ShardSpec.whole(shape), box).clone()
        for part in parts_of(NamedTensor(("a",), local, box), {"b": index}):
            assert part.shape == whole[index].shape
            assert part.shard is not None
            there = found.view(part.shard.shape)
            narrowed(there, ShardSpec.whole(part.shard.shape), part.shard).copy_(part.tensor)
    assert torch.equal(found, whole[index])


def test_source_and_target_of_one_model_agree() -> None:
    model = Model()
    layout = layout_of(model)
    assert ModuleTarget(model).parameters() == layout.specs
    assert layout.numbers_held(hello(layout.specs)) is None
    assert layout.numel == 6 * 4 + 4 + 4 + 3
    assert layout.num_bytes == 4 * layout.numel


def test_wire_dtypes_come_from_the_receiver_and_overrides_win() -> None:
    target = Model(dtype=torch.bfloat16)
    target.norm.float()
    layout = layout_of(Model(), ModuleTarget(target).parameters(), {"sav*": "float16"})
    assert {spec.name: spec.dtype.name for spec in layout.specs} == {
        "embed.weight": "bfloat16",
        "norm.weight": "float32",
        "norm.bias": "float32",
        "saved": "float16",
    }
    by_alias = layout_of(Model(), overrides={"head.weight": "bfloat16"})
    assert {s.name for s in by_alias.specs if s.dtype.name == "bfloat16"} == {"embed.weight"}
    with pytest.raises(ConfigError, match="'float99' is not one of"):
        layout_of(Model(), overrides={"saved": "float99"})
    with pytest.raises(ConfigError, match="float32 cannot be sent as int8"):
        layout_of(Model(), overrides={"saved": "int8"})


@pytest.mark.parametrize("how", ["data", "attribute", "dtype", "strides"])
def test_replaced_storage_is_read_anew(how: str) -> None:
    model = Model(tied=False)
    layout = layout_of(model)
    number = next(n for n, spec in enumerate(layout.specs) if spec.name == "head.weight")
    others = [reader for n, reader in enumerate(layout.readers) if n != number]
    fresh = torch.full((6, 4), 7.0)
    match how:
        case "data":
            model.head.weight.data = fresh
        case "attribute":
            model.head.weight = nn.Parameter(fresh)
        case "dtype":
            model.head.weight.data = fresh.double()
        case "strides":
            model.head.weight.data = torch.full((4, 6), 7.0).T
    layout.refresh()
    read = layout.readers[number].read(0, 24).view(torch.float32)
    assert read.tolist() == [7.0] * 24
    assert [r for n, r in enumerate(layout.readers) if n != number] == others
    assert all(a is b for a, b in zip(layout.readers[:number], others, strict=False))


class Wider(Model):
    """With a parameter that can be transposed, a vector, a scalar, and a module of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.line = nn.Parameter(torch.randn(8), requires_grad=False)
        self.one = nn.Parameter(torch.ones(()), requires_grad=False)
        self.drop = nn.Dropout()


def swap_names(model: Model) -> None:
    """The same tensors in the same order, under each other's names."""
    weight, bias = model.norm.weight, model.norm.bias
    del model.norm.weight, model.norm.bias
    model.norm.bias, model.norm.weight = weight, bias


def rename(model: Model) -> None:
    model.last = model.norm
    del model.norm


def move_over(model: Model) -> None:
    """The last parameter of one module becomes the first of the next one."""
    bias, weight = model.norm.bias, model.head.weight
    del model.norm.bias, model.head.weight
    model.head.bias, model.head.weight = bias, weight


def unpersist(model: Model) -> None:
    model._non_persistent_buffers_set.add("saved")


def replace_one(model: Wider) -> None:
    model.one = nn.Parameter(model.one.detach().clone())
    model.one.data += 1


def half_of(model: Wider) -> None:
    model.line.data = model.line.data[:4]


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
    "parameter of one equal element": replace_one,
    "module": lambda m: setattr(m, "norm", nn.LayerNorm(4)),
    "buffer": lambda m: setattr(m, "saved", torch.full((3,), 3.0)),
    "untied": lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.detach() + 1)),
    "tied": lambda m: setattr(m.norm, "bias", m.norm.weight),
    "added": lambda m: m.norm.register_parameter("more", nn.Parameter(torch.ones(1))),
    "added where nothing was": lambda m: m.drop.register_buffer("more", torch.ones(1)),
    "removed": lambda m: delattr(m.norm, "bias"),
    "set to None": lambda m: setattr(m.norm, "bias", None),
    "renamed": rename,
    "names swapped": swap_names,
    "moved over": move_over,
    "not persistent": unpersist,
    "memory released": lambda m: m.norm.weight.untyped_storage().resize_(0),
    "memory grown": lambda m: m.norm.weight.untyped_storage().resize_(64),
    "transposed": lambda m: setattr(m.square, "data", m.square.data.t()),
    "transposed in place": lambda m: m.square.t_(),
    "shape of the same memory": lambda m: setattr(m.line, "data", m.line.data.view(4, 2)),
    "beginning of the same memory": half_of,
    "tensors swapped": lambda m: swap(m.norm.weight, m.norm.bias),
}


@pytest.mark.parametrize("is_glanced", [True, False])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_whatever_moves_is_read_as_it_is_or_refused(
    move: Callable[[Wider], object], is_glanced: bool
) -> None:
    model = Wider()
    layout = layout_of(model)
    layout.refresh()
    with torch.no_grad():
        move(model)
    if is_glanced:
        layout.glance()
    try:
        layout.refresh()
    except (SourceChanged, ConfigError):
        return
    now = SourceLayout(ModuleSource(model), layout.specs)
    for reader, fresh in zip(layout.readers, now.readers, strict=True):
        assert torch.equal(reader.read(0, reader.numel), fresh.read(0, fresh.numel))
    assert layout.glance()
    readers = layout.readers
    layout.refresh()
    assert layout.readers is readers


@pytest.mark.parametrize(
    "name", ["untied", "tied", "added", "removed", "renamed", "moved over", "memory released"]
)
def test_moves_after_which_the_model_is_another_are_refused(name: str) -> None:
    model = Wider()
    layout = layout_of(model)
    with torch.no_grad():
        MOVES[name](model)
    for is_glanced in (True, False):
        if is_glanced:
            layout.glance()
        with pytest.raises((SourceChanged, ConfigError)):
            layout.refresh()


@pytest.mark.parametrize("strides", [(5, 1), (1, 5)])
def test_another_part_of_memory_that_is_not_contiguous_is_seen(strides: tuple[int, int]) -> None:
    """Of as many elements, at the same address, with the same strides."""
    memory = torch.arange(40.0)
    model = nn.Module()
    model.part = nn.Parameter(memory.as_strided((2, 3), strides))
    watch = ModuleWatch(model)
    assert watch.is_unmoved()
    model.part.data = memory.as_strided((3, 2), strides)
    assert not watch.is_unmoved()


def test_what_is_trained_is_seen_as_it_was_at_the_last_look() -> None:
    model = Model()
    layout = layout_of(model)
    assert coverage_of(layout.trained, numbers(), full=False)["frozen"] == 1  # a buffer
    model.norm.requires_grad_(False)
    assert coverage_of(layout.trained, numbers(), full=False)["frozen"] == 1
    assert layout.glance()
    layout.refresh()
    assert coverage_of(layout.trained, numbers(), full=False)["frozen"] == 3


class Listing(WeightSource):
    """A module's tensors, in a list of its own each time."""

    def __init__(self, module: nn.Module) -> None:
        self._source = ModuleSource(module)

    def tensors(self) -> list[NamedTensor]:
        return list(self._source.tensors())


class Viewing(Listing):
    """The same, with a view of each tensor that did not exist before."""

    def tensors(self) -> list[NamedTensor]:
        return [NamedTensor(one.names, one.tensor.detach()) for one in super().tensors()]


@pytest.mark.parametrize("kind", [ModuleSource, Listing, Viewing])
def test_unchanged_source_keeps_its_readers(kind: type[WeightSource]) -> None:
    source = kind(Model())  # type: ignore[call-arg]
    layout = SourceLayout(source, source_specs(source.tensors()))
    before = layout.readers
    each = list(before)
    layout.refresh()
    assert layout.readers is before  # a back end looks nothing up again
    assert all(a is b for a, b in zip(each, layout.readers, strict=True))


def test_a_source_that_is_not_the_same_model_any_more() -> None:
    model = Model()
    layout = layout_of(model)
    model.norm.weight = nn.Parameter(torch.ones(5))
    with pytest.raises(SourceChanged, match=r"norm\.weight: shape \(4,\) became \(5,\)"):
        layout.refresh()
    untied = Model()
    layout = layout_of(untied)
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    with pytest.raises(SourceChanged, match="ties"):
        layout.refresh()
    grown = Model()
    layout = layout_of(grown)
    grown.register_buffer("late", torch.zeros(1))
    with pytest.raises(SourceChanged, match="appeared or vanished"):
        layout.refresh()
    del grown.late, grown.saved
    with pytest.raises(SourceChanged, match="appeared or vanished"):
        layout.refresh()


def test_meta_parameter_is_named() -> None:
    model = Model()
    model.norm.weight = nn.Parameter(torch.empty(4, device="meta"))
    with pytest.raises(ConfigError, match=r"norm\.weight"):
        layout_of(model)
    with pytest.raises(ConfigError, match=r"norm\.weight"):
        ModuleTarget(model).bind(ModuleTarget(model).parameters())


def test_coverage_counts_every_parameter() -> None:
    model = Model()
    model.norm.requires_grad_(False)
    layout = layout_of(model)
    number = next(n for n, spec in enumerate(layout.specs) if spec.name == "norm.weight")
    assert coverage_of(layout.trained, numbers(), full=False) == {
        "changed": 0,
        "unchanged": 1,
        "frozen": 3,
    }
    assert coverage_of(layout.trained, numbers(number), full=False) == {
        "changed": 1,
        "unchanged": 1,
        "frozen": 2,
    }
    assert coverage_of(layout.trained, numbers(), full=True) == {
        "changed": 4,
        "unchanged": 0,
        "frozen": 0,
    }


def test_missing_and_extra_names_are_named() -> None:
    layout = layout_of(Model())
    held = ModuleTarget(Model()).parameters()
    without = tuple(spec for spec in held if spec.name != "norm.bias")
    with pytest.raises(LayoutMismatch, match=r"e takes nothing of 'norm\.bias'; if it has no use"):
        check_engine(layout, [hello(without)])
    numbers = layout.numbers_held(hello(without, world=2))
    assert numbers is not None
    assert {layout.specs[n].name for n in numbers} == {spec.name for spec in without}
    extra = replace(held[0], names=("lm.extra",))
    with pytest.raises(LayoutMismatch, match=r"the sender has no parameter 'lm\.extra'"):
        layout.numbers_held(hello((*held, extra)))


def test_ranks_of_an_engine_cover_the_layout_together() -> None:
    layout = layout_of(Model())
    a, b, c, d = layout.specs
    assert check_engine(layout, [hello(layout.specs)]) == [None]
    held = check_engine(layout, [hello((a, b), world=2), hello((b, c, d), world=2)])
    assert held == [frozenset({0, 1}), frozenset({1, 2, 3})]
    with pytest.raises(LayoutMismatch, match=f"e takes nothing of '{d.name}'"):
        check_engine(layout, [hello((a, b), world=2), hello((c,), world=2)])


def test_other_dtype_or_shape_is_refused_by_name() -> None:
    layout = layout_of(Model())
    mixed = Model()
    mixed.norm.weight.data = mixed.norm.weight.data.half()
    with pytest.raises(LayoutMismatch, match=r"norm\.weight: float16 here, float32 on the wire"):
        ModuleTarget(mixed).bind(layout.specs)
    mixed.norm.weight.data = torch.ones(5)
    with pytest.raises(LayoutMismatch, match=r"norm\.weight: shape \(5,\) here, \(4,\) at the"):
        ModuleTarget(mixed).bind(layout.specs)


def test_ties_on_one_side_only_are_refused() -> None:
    tied, untied = layout_of(Model()).specs, layout_of(Model(tied=False)).specs
    with pytest.raises(LayoutMismatch, match=r"'embed\.weight', 'head\.weight' are tied here"):
        ModuleTarget(Model()).bind(untied)
    with pytest.raises(LayoutMismatch, match=r"'embed\.weight' are tied at the sender, not here"):
        ModuleTarget(Model(tied=False)).bind(tied)


def test_a_target_may_hold_one_of_the_tied_names() -> None:
    spec = next(spec for spec in layout_of(Model()).specs if len(spec.names) == 2)
    for name in spec.names:
        assert match_parameters([replace(spec, names=(name,))], [spec]) == [0]


def test_target_notices_every_way_to_move_storage() -> None:
    model = Model()
    target = ModuleTarget(model)
    layout = target.parameters()

    def moved(name: str) -> None:
        with pytest.raises(TargetMoved, match=name):
            target.check_unmoved()
        target.bind(layout)
        target.check_unmoved()

    target.bind(layout)
    target.check_unmoved()
    model.norm.weight.data = model.norm.weight.data.clone()
    moved(r"norm\.weight")
    model.norm.bias = nn.Parameter(model.norm.bias.detach().clone())
    moved(r"norm\.bias")
    model.embed.weight.data = model.embed.weight.data.T.contiguous().T
    moved(r"embed\.weight', 'head\.weight")
    model.embed.weight.data = model.embed.weight.data.as_strided((6, 4), (4, 1))
    moved(r"embed\.weight', 'head\.weight")
    model.saved = model.saved.clone()
    moved("saved")
    model.register_buffer("late", torch.zeros(1))
    with pytest.raises(TargetMoved, match="'late'"):
        target.check_unmoved()
    del model.late
    model.cache = model.cache.clone()  # not a part of the checkpoint
    target.check_unmoved()


def test_tied_weights_are_bound_once() -> None:
    model = Model()
    target = ModuleTarget(model)
    layout = target.parameters()
    flats = target.bind(layout)
    number = next(n for n, spec in enumerate(layout) if len(spec.names) == 2)
    flats[number].write(0, torch.full((24,), -1, dtype=torch.int32))
    assert model.head.weight is model.embed.weight
    assert (model.head.weight.view(torch.int32) == -1).all()


def scrub_model(
    held: frozenset[int] = frozenset(range(4)),
) -> tuple[HostBackend, list[Tensor]]:
    tensors = [torch.zeros(10), torch.empty(0), torch.zeros(()), torch.zeros(5, 5)]
    specs = [ParameterSpec((f"w{n}",), tuple(t.shape), dtype_of(t)) for n, t in enumerate(tensors)]
    ledger = DigestLedger(whole(specs), chunk_numel=4, held=held)
    flats = {number: Flat.of(tensors[number]) for number in held}
    for number, flat in flats.items():
        ledger.measure(number, flat.read)
    return HostBackend(flats, ledger), tensors


def scrubbed(every: int, backend: HostBackend) -> BoundWeights:
    target, options = ModuleTarget(nn.Module()), ReceiverOptions(scrub_every=every)
    weights = BoundWeights(target, options, lambda event: None)
    weights.backend = backend
    return weights


@pytest.mark.promise(
    "Checks",
    "The scrub checks all weights within 64 syncs and names what changed; a full sync repairs it.",
)
@pytest.mark.parametrize("every", [1, 2, 3, 64])
def test_scrub_looks_at_everything_within_its_share_of_calls(every: int) -> None:
    for number, position in ((0, 0), (0, 9), (2, 0), (3, 24)):
        backend, tensors = scrub_model()
        weights = scrubbed(every, backend)
        assert all(weights.scrub() is None for _ in range(every))
        tensors[number].view(-1)[position] = -0.0
        found = [weights.scrub() for _ in range(every)]
        assert {name for name in found if name is not None} == {f"w{number}"}


def test_scrub_can_be_off_and_skips_what_others_hold() -> None:
    backend, tensors = scrub_model()
    tensors[0].fill_(1)
    assert scrubbed(0, backend).scrub() is None
    backend, tensors = scrub_model(held=frozenset({1, 2, 3}))
    tensors[0].fill_(1)
    assert scrubbed(1, backend).scrub() is None
    empty = DigestLedger(whole([]), chunk_numel=4)
    assert scrubbed(1, HostBackend({}, empty)).scrub() is None


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
    module = nn.Module()
    module.register_parameter("whole", nn.Parameter(memory))
    module.register_parameter("part", nn.Parameter(memory[4:8]))
    target = ModuleTarget(module)
    with pytest.raises(LayoutMismatch, match="share memory"):
        target.bind(target.parameters())
    halves = nn.Module()
    halves.register_parameter("low", nn.Parameter(memory[:6]))
    halves.register_parameter("high", nn.Parameter(memory[6:]))
    assert len(ModuleTarget(halves).bind(ModuleTarget(halves).parameters())) == 2


ODD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(4).to_sparse(), "layout sparse_coo"),
    "csr": (lambda: torch.eye(4).to_sparse_csr(), "layout sparse_csr"),
    "mkldnn": (lambda: torch.eye(4).to_mkldnn(), "layout _mkldnn"),
    "nested": (lambda: nested(torch.strided), "a nested tensor"),
    "jagged": (lambda: nested(torch.jagged), "a nested tensor"),
    "meta": (lambda: torch.ones(4, 4, device="meta"), "meta device"),
    "lazy": (lambda: nn.UninitializedParameter(), "first forward pass"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8), "qint8"),
    "complex128": (lambda: torch.ones(4, 4, dtype=torch.complex128), "complex128"),
    "conjugated": (lambda: torch.ones(4, 4, dtype=torch.complex64).conj(), "conjugated"),
    "released": (lambda: released(0), "0 of 64 bytes"),
    "shrunk": (lambda: released(60), "60 of 64 bytes"),
}


def released(num_bytes: int) -> Tensor:
    """As FSDP1 and offloading leave a parameter."""
    tensor = torch.ones(4, 4)
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def module_with(odd: Tensor) -> nn.Module:
    module = nn.Module()
    module.register_parameter("plain", nn.Parameter(torch.ones(2)))
    if isinstance(odd, nn.Parameter):
        module.register_parameter("odd", odd)
    else:
        module.register_buffer("odd", odd)
    return module


class OneTensor:
    """A source of a user's own."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def tensors(self) -> list[NamedTensor]:
        return [NamedTensor(("odd",), self._tensor)]


@pytest.mark.filterwarnings("ignore")  # of torch, about what is made here
@pytest.mark.parametrize(("make", "words"), ODD.values(), ids=ODD.keys())
def test_tensors_without_plain_storage_are_refused_by_name(
    make: Callable[[], Tensor], words: str
) -> None:
    for source in (ModuleSource(module_with(make())), OneTensor(make())):
        with pytest.raises(ConfigError, match=f"^odd: .*{words}"):
            source_specs(source.tensors())
    with pytest.raises(ConfigError, match=f"^odd: .*{words}"):
        ModuleTarget(module_with(make())).parameters()
    streamed = StreamedWeights()
    with pytest.raises(ConfigError, match=f"^odd: .*{words}"):
        streamed.take([("odd", make())])


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("odd" * 2000, (2,), "its name has 6000 characters, 1 to 4096 can be sent"),
        ("odd", (1,) * 65, "65 dimensions, 64 at most can be sent"),
    ],
)
def test_what_no_message_can_carry_is_refused_by_name(
    name: str, shape: tuple[int, ...], words: str
) -> None:
    tensor = torch.ones(2 if shape == (2,) else 1).reshape(shape)
    with pytest.raises(ConfigError, match=f"^'odd.{{0,90}}: {words}"):
        source_specs([NamedTensor((name,), tensor)])
    module = module_with(tensor)
    target = ModuleTarget(module, rename=lambda own: name if own == "odd" else own)
    with pytest.raises(ConfigError, match=f"^'odd.{{0,90}}: {words}"):
        entries(target.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [make for make, _ in ODD.values()], ids=ODD.keys())
def test_tensors_without_plain_storage_can_be_left_out(make: Callable[[], Tensor]) -> None:
    def rename(name: str) -> str | None:
        return None if name == "odd" else name

    module = module_with(make())
    source, target = ModuleSource(module, rename=rename), ModuleTarget(module, rename=rename)
    assert names_of(source.tensors()) == [("plain",)]
    assert source.tensors() is source.tensors()
    assert len(target.bind(target.parameters())) == 1
    target.check_unmoved()
