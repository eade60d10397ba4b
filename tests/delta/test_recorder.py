"""A loader is watched: its copies are known, what it computes is refused, nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st
from torch import Tensor, nn

from deltasync.delta.region import Region
from deltasync.delta.route import Piece, covers, joined
from deltasync.engines.routes.recorder import CheckpointTensor, Recording, record
from deltasync.errors import ConfigError

Weights = dict[str, Tensor]
Load = Callable[[Iterable[tuple[str, Tensor]]], object]


def entries(weights: Mapping[str, Tensor]) -> list[CheckpointTensor]:
    return [CheckpointTensor(name, tuple(t.shape), t.dtype) for name, t in weights.items()]


def watched(load: Load, weights: Weights, live: Weights) -> Recording:
    """Record, with proof that nothing was written."""
    before = {name: tensor.clone() for name, tensor in live.items()}
    pointers = [tensor.data_ptr() for tensor in live.values()]
    recording = record(load, entries(weights), live)
    assert all(torch.equal(live[name], before[name]) for name in live)
    assert pointers == [tensor.data_ptr() for tensor in live.values()]
    return recording


def scattered(recording: Recording, weights: Weights, live: Weights) -> Weights:
    """What the pieces make of the live tensors."""
    made = {name: tensor.detach().clone() for name, tensor in live.items()}
    for name, pieces in recording.pieces.items():
        flat = weights[name].to(live[pieces[0].live].dtype).reshape(-1) if pieces else None
        for piece in pieces:
            assert flat is not None
            numbers = torch.arange(piece.source.numel)
            line = made[piece.live].as_strided((piece.target.stop,), (1,), 0)
            line[piece.target.places(numbers)] = flat[piece.source.places(numbers)]
    return made


def loads_as_recorded(load: Load, weights: Weights, live: Weights) -> Recording:
    """Record, load in earnest, and compare."""
    recording = watched(load, weights, live)
    made = scattered(recording, weights, live)
    with torch.no_grad():
        load(weights.items())
    assert all(torch.equal(made[name], tensor) for name, tensor in live.items())
    return recording


# Any chain of views


def narrowed(draw: st.DrawFn, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    dim = draw(st.integers(0, tensor.dim() - 1))
    begin = draw(st.integers(0, tensor.shape[dim] - 1))
    count = draw(st.integers(1, tensor.shape[dim] - begin))
    return lambda t: t.narrow(dim, begin, count)


def transposed(draw: st.DrawFn, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    first, second = draw(st.integers(0, tensor.dim() - 1)), draw(st.integers(0, tensor.dim() - 1))
    return lambda t: t.transpose(first, second)


def chunked(draw: st.DrawFn, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    dim, parts = draw(st.integers(0, tensor.dim() - 1)), draw(st.integers(1, 3))
    nth = draw(st.integers(0, len(tensor.chunk(parts, dim)) - 1))
    return lambda t: t.chunk(parts, dim)[nth]


def split(draw: st.DrawFn, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    dim = draw(st.integers(0, tensor.dim() - 1))
    sizes = [s for s in range(1, tensor.shape[dim] + 1) if tensor.shape[dim] % s == 0]
    size = draw(st.sampled_from(sizes))
    return lambda t: t.unflatten(dim, (-1, size))  # type: ignore[no-untyped-call]


def strided(draw: st.DrawFn, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    step = draw(st.integers(1, 3))
    return lambda t: t[::step]


def repeated(draw: st.DrawFn, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    count = draw(st.integers(1, 3))
    return lambda t: t.unsqueeze(0).expand(count, *t.shape)


def copied(draw: st.DrawFn, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    moved: Callable[[Tensor], Tensor] = partial(Tensor.to, device="cpu")
    return draw(st.sampled_from([Tensor.contiguous, Tensor.clone, Tensor.detach, moved]))


def reshaped(draw: st.DrawFn, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    first = draw(st.integers(0, tensor.dim() - 1))
    last = draw(st.integers(first, tensor.dim() - 1))
    return lambda t: t.flatten(first, last)


VIEWS = [narrowed, transposed, chunked, split, strided, repeated]
COPIES = [copied, reshaped]


@st.composite
def loaders(draw: st.DrawFn, steps: list[Any]) -> tuple[Load, Weights, Weights]:
    """A loader of a few tensors: each goes through `steps` into a part of a live tensor."""
    weights: Weights = {}
    live: Weights = {}
    ways: dict[str, tuple[list[Callable[[Tensor], Tensor]], tuple[slice, ...]]] = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
        weights[name] = view = torch.randint(1, 1 << 14, shape, dtype=torch.int16)
        chain = []
        for step in draw(st.lists(st.sampled_from(steps), max_size=5)):
            chain.append(step(draw, view))
            view = chain[-1](view)
        pads = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in view.shape]
        order = draw(st.permutations(range(view.dim())))
        room = [low + n + high for n, (low, high) in zip(view.shape, pads, strict=True)]
        tensor = torch.zeros([room[dim] for dim in order], dtype=torch.int16)
        inverse = [order.index(dim) for dim in range(view.dim())]
        live[f"live {name}"] = tensor.permute(inverse)
        place = tuple(slice(low, low + n) for n, (low, _) in zip(view.shape, pads, strict=True))
        ways[name] = chain, place

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in given:
            chain, place = ways[name]
            for step in chain:
                tensor = step(tensor)
            live[f"live {name}"][place].copy_(tensor)

    return load, weights, live


@given(loader=loaders(VIEWS))
def test_pieces_do_what_the_loader_does(loader: tuple[Load, Weights, Weights]) -> None:
    load, weights, live = loader
    recording = loads_as_recorded(load, weights, live)
    assert not recording.refused
    for name, tensor in live.items():
        written = (tensor != 0).all()  # no weight is 0
        assert (name not in recording.uncovered) == written
    for name, pieces in recording.pieces.items():
        for piece in pieces:
            if piece.source == Region.run(0, weights[name].numel()):
                view = piece.target.view(live[piece.live]).reshape(-1)
                assert torch.equal(view, weights[name].reshape(-1))


@given(loader=loaders([*VIEWS, *COPIES, *COPIES]))
def test_copies_on_the_way_are_followed_or_refused(loader: tuple[Load, Weights, Weights]) -> None:
    load, weights, live = loader
    recording = watched(load, weights, live)
    made = scattered(recording, weights, live)
    load(weights.items())
    for name in weights:
        same = torch.equal(made[f"live {name}"], live[f"live {name}"])
        assert same or name in recording.refused
        target(float(name not in recording.refused), label=f"{name} followed")


@given(
    order=st.integers(1, 6).flatmap(lambda count: st.permutations(range(count))),
    rows=st.integers(1, 3),
    gap=st.integers(0, 2),
    across=st.booleans(),
)
def test_parts_in_any_order_do_what_the_loader_does(
    order: list[int], rows: int, gap: int, across: bool
) -> None:
    weights = {"w": torch.randint(1, 99, (len(order) * rows, 6), dtype=torch.int16)}
    live = {"live": torch.zeros(len(order) * (rows + gap), 6, dtype=torch.int16)}
    if across:
        live["live"] = live["live"].T.contiguous().T

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in given:
            for part, place in zip(torch.split(tensor, rows), order, strict=True):
                begin = place * (rows + gap)
                live["live"][begin : begin + rows].copy_(part)

    recording = loads_as_recorded(load, weights, live)
    assert not recording.refused
    assert set(recording.uncovered) == ({"live"} if gap else set())
    if order == sorted(order):
        whole = Region.run(0, weights["w"].numel())
        assert [piece.source for piece in recording.pieces["w"]] == [whole]


def test_a_copy_in_another_order_is_followed() -> None:
    """As loaders do that take fused heads apart: view, permute, reshape."""
    live = {"live": torch.zeros(24, 5)}
    weights = {"w": torch.randn(24, 5), "empty": torch.randn(0, 3)}

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in given:
            if name == "w":
                heads = tensor.view(4, 3, 2, 5).transpose(0, 1)
                live["live"].copy_(heads.reshape(24, 5).contiguous())
            else:
                live["live"][:0, :3].copy_(tensor.clone())

    recording = loads_as_recorded(load, weights, live)
    assert recording.refused == recording.uncovered == {}
    [piece] = recording.pieces["w"]
    assert piece.source == Region.run(0, 120)


# What engines do


def test_fused_stacked_transposed_and_padded_parameters_are_followed() -> None:
    live: Weights = {
        "qkv": nn.Parameter(torch.zeros(12, 8)),
        "o": nn.Parameter(torch.zeros(8, 8)),
        "embed": nn.Parameter(torch.zeros(16, 8)),
        "w13": nn.Parameter(torch.zeros(2, 8, 8)),
        "cache": torch.zeros(3),
    }
    weights = {
        "q": torch.randn(8, 8),
        "k": torch.randn(2, 8),
        "v": torch.randn(2, 8),
        "o": torch.randn(8, 8),
        "embed": torch.randn(13, 8),
        "experts": torch.randn(2, 8, 8),
        "ignored": torch.randn(3),
    }

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        begins = {"q": 0, "k": 8, "v": 10}
        for name, tensor in given:
            if name in begins:
                live["qkv"].data.narrow(0, begins[name], len(tensor)).copy_(tensor)
            elif name == "o":
                live["o"].data.copy_(tensor.t().contiguous())
            elif name == "embed":
                live["embed"].data[:13].copy_(tensor)
                live["embed"].data[13:].fill_(0)
            elif name == "experts":
                for expert, part in enumerate(tensor.unbind()):
                    live["w13"].data[expert, :4] = part[4:]
                    live["w13"].data[expert, 4:] = part[:4]

    recording = loads_as_recorded(load, weights, live)
    assert recording.refused == recording.uncovered == {}
    assert recording.untouched == ("cache",)
    assert recording.pieces["ignored"] == ()
    assert recording.padding == {"embed": (Region.run(104, 24),)}
    assert recording.pieces["k"] == (Piece("qkv", Region.run(0, 16), Region.run(64, 16)),)
    transposed = Region(0, ((8, 1), (8, 8)))
    assert recording.pieces["o"] == (Piece("o", Region.run(0, 64), transposed),)
    sizes = {n: [piece.source.numel for piece in p] for n, p in recording.pieces.items()}
    assert sizes["experts"] == [32] * 4  # halves change places
    whole = {name for name, found in sizes.items() if found == [weights[name].numel()]}
    assert whole == {"q", "k", "v", "o", "embed"}


def test_a_tensor_that_is_kept_in_another_dtype_is_to_be_sent_as_that() -> None:
    live: Weights = {"router": torch.zeros(4), "scale": torch.zeros(4)}
    weights = {name: torch.randn(4, dtype=torch.bfloat16) for name in live}

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in given:
            live[name].copy_(tensor if name == "router" else tensor.to(torch.float32))

    recording = loads_as_recorded(load, weights, live)
    assert recording.refused == recording.uncovered == {}
    assert {name: dtype.name for name, dtype in recording.dtypes.items()} == {
        "router": "float32",
        "scale": "float32",
    }


def test_tied_names_stand_for_one_tensor() -> None:
    shared = torch.zeros(4)
    live = {"embed": shared, "head": shared}
    recording = watched(
        lambda given: [shared.copy_(t) for _, t in given], {"w": torch.randn(4)}, live
    )
    assert (recording.uncovered, recording.untouched) == ({}, ())
    assert [piece.live for piece in recording.pieces["w"]] == ["embed"]


@given(st.data())
def test_joined_tensors_are_followed_into_any_box_of_the_join(data: st.DataObject) -> None:
    """Of views, of joins too, narrowed afterwards as a rank of an engine takes its shard."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    weights = {f"w{n}": torch.randn(2, size, 3) for n, size in enumerate(sizes)}
    stacks, dim = data.draw(st.booleans()), data.draw(st.integers(-4, 3))
    turned = data.draw(st.booleans())

    def join(parts: Sequence[Tensor]) -> Tensor:
        whole = torch.cat([part.transpose(0, 2) if turned else part for part in parts], dim=1)
        if not stacks:
            return whole
        return torch.stack((whole, torch.cat([whole[:, :1], whole[:, 1:]], 1).contiguous()), dim)

    narrow = narrowed(cast("st.DrawFn", data.draw), join(list(weights.values())))
    live = {"live": torch.zeros_like(narrow(join(list(weights.values())))).contiguous()}

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        live["live"].copy_(narrow(join([tensor for _, tensor in given])))

    recording = loads_as_recorded(load, weights, live)
    assert recording.refused == recording.uncovered == {}


def in_place(w: Tensor, live: Tensor) -> None:
    live.copy_(w.mul_(2))


def exchanged(w: Tensor, live: Tensor) -> None:
    whole = torch.cat((w[2:], w[:2]))
    whole.data = whole.data.flip(0)
    live.copy_(whole)


def through_a_buffer(w: Tensor, live: Tensor) -> None:
    buffer = torch.empty(4)
    buffer.copy_(w)
    live.copy_(buffer)


COMPUTED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda w, live: live.copy_(w + 1),
    "exponential": lambda w, live: live.copy_(-torch.exp(w)),
    "concatenation with others": lambda w, live: live.copy_(
        torch.cat((w[2:], torch.ones(2, device=w.device)))
    ),
    "view of a concatenation": lambda w, live: live.copy_(torch.cat((w[2:], w[:2])).flip(0)),
    "index": lambda w, live: live.copy_(w[torch.tensor([3, 2, 1, 0])]),
    "view of a sum": lambda w, live: live.copy_((w + 1).flip(0)),
    "in place": in_place,
    "exchanged": exchanged,
    "buffer": through_a_buffer,
    "filled with it": lambda w, live: live.fill_(w[0]),
    "negated view": lambda w, live: torch._neg_view(live).copy_(w),
    "addition": lambda w, live: live.add_(w),
    "two dtypes": lambda w, live: (live[:2].copy_(w[:2].half()), live[2:].copy_(w[2:].double())),
    "other bits": lambda w, live: live.view(torch.int32).copy_(w.view(torch.int32)),
}


@pytest.mark.parametrize("way", COMPUTED.values(), ids=COMPUTED)
def test_what_is_not_only_copied_is_refused(way: Callable[[Tensor, Tensor], object]) -> None:
    live = {"good": torch.zeros(4), "bad": torch.zeros(4)}
    weights = {name: torch.randn(4) for name in live}

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in given:
            if name == "good":
                live[name].copy_(tensor)
            else:
                way(tensor, live[name])

    recording = watched(load, weights, live)
    assert set(recording.refused) == {"bad"}
    assert set(recording.pieces) == {"good"}
    assert "bad" in {*recording.uncovered, *recording.untouched}
    assert "good" not in {*recording.uncovered, *recording.untouched}


def test_parts_of_a_join_may_be_freed_before_it_is_copied() -> None:
    live = {"live": torch.zeros(6)}

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        parts = [tensor for _, tensor in given]
        whole = torch.cat(parts)
        for part in parts:
            part.data = torch.empty(0, device=part.device)
        live["live"].copy_(whole)

    recording = watched(load, {"a": torch.randn(2), "b": torch.randn(4)}, live)
    assert recording.refused == recording.uncovered == {}
    assert set(recording.pieces) == {"a", "b"}


def test_storage_that_is_freed_is_not_taken_for_another() -> None:
    live = {"w": torch.zeros(4, 4)}

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in given:
            tensor.data = tensor.data.t().contiguous()
            live["w"].copy_(torch.exp(tensor))

    for _ in range(20):
        assert set(watched(load, {"w": torch.randn(4, 4)}, live).refused) == {"w"}


def test_what_the_loader_does_not_ask_for_is_refused() -> None:
    live = {"a": torch.zeros(4), "b": torch.zeros(4)}

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        live["a"].copy_(next(iter(given))[1])

    recording = watched(load, {name: torch.randn(4) for name in live}, live)
    assert recording.refused == {"b": "is not asked for"}


def test_nothing_may_be_filled_in_any_way() -> None:
    live = {"w": torch.zeros(4)}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            live["w"].copy_(tensor)
            live["w"][4:].zero_()
            live["w"][4:].normal_()

    recording = record(load, [CheckpointTensor("w", (4,), torch.float32)], live)
    assert (recording.uncovered, recording.padding) == ({}, {})


def test_empty_tensors_are_not_tied() -> None:
    live = {"a": torch.zeros(0, 4), "b": torch.zeros(0, 4)}
    weights = {name: torch.zeros(0, 4) for name in live}
    recording = loads_as_recorded(
        lambda given: [live[name].copy_(tensor) for name, tensor in given], weights, live
    )
    assert recording.refused == recording.uncovered == {}
    assert {name: piece.live for name, [piece] in recording.pieces.items()} == {"a": "a", "b": "b"}


def filled_twice(w: Tensor, live: Tensor) -> None:
    live.zero_()
    live.copy_(w)


OVERWRITTEN: dict[str, Callable[[Tensor, Tensor], object]] = {
    "half": lambda w, live: live[:2].copy_(w[:2]),
    "twice": lambda w, live: (live.copy_(w), live[:1].copy_(w[:1])),
    "filled and written": filled_twice,
    "random": lambda w, live: (live.copy_(w), live[:1].normal_()),
    "real values": lambda w, live: (live[:2].copy_(w[:2]), live[2:].copy_(torch.ones(2))),
}


@pytest.mark.parametrize("way", OVERWRITTEN.values(), ids=OVERWRITTEN)
def test_live_tensors_that_do_not_follow_the_checkpoint_alone_are_named(
    way: Callable[[Tensor, Tensor], object],
) -> None:
    live = {"w": torch.zeros(4)}
    recording = watched(
        lambda given: [way(t, live["w"]) for _, t in given], {"w": torch.randn(4)}, live
    )
    assert set(recording.uncovered) == {"w"}


def test_storage_that_the_loader_exchanges_is_put_back() -> None:
    live: Weights = {"w": nn.Parameter(torch.zeros(4))}
    pointer = live["w"].data_ptr()

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for _ in given:
            live["w"].data = torch.ones(4)

    recording = record(load, entries({"w": torch.ones(4)}), live)
    assert live["w"].data_ptr() == pointer
    assert recording.uncovered == {"w": "the loader replaces its storage"}


def test_a_loader_that_reads_values_is_said_with_the_tensor() -> None:
    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in given:
            if tensor.sum() > 0:
                return

    live = {"w": torch.zeros(4)}
    with pytest.raises(ConfigError, match=r"at 'first' it raised ") as raised:
        record(load, entries({"first": torch.ones(4), "second": torch.ones(4)}), live)
    assert "leave" not in str(raised.value)
    assert not live["w"].any()


@pytest.mark.parametrize(
    ("raised", "is_left_out"),
    [
        (KeyError("layers.0.mlp.bias"), True),  # as its table of parameters has no such key
        (KeyError("layers.0.mlp.gate_up_proj.bias"), True),  # what it would be fused into
        (ValueError("There is no module or parameter named 'model.layers.0' in Model"), True),
        (AttributeError("'Model' object has no attribute 'model'"), True),
        (AssertionError(), False),
        (ValueError("cannot reshape (4, 1) into (4,)"), False),
        (KeyError("layers.0.mlp.weight"), False),  # it has that
        (KeyError("stage"), False),
        (RuntimeError("bias"), False),
    ],
)
def test_leaving_out_is_proposed_only_for_what_the_engine_does_not_have(
    raised: Exception, is_left_out: bool
) -> None:
    """Elsewhere it would stay as it is."""

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for _ in given:
            raise raised

    live = {"layers.0.mlp.weight": torch.zeros(4)}
    with pytest.raises(ConfigError, match=r"at 'model\.layers\.0\.mlp\.bias'") as error:
        record(load, entries({"model.layers.0.mlp.bias": torch.ones(4)}), live)
    says_so = "leave it out: SenderOptions(leave_out=['model.layers.0.mlp.bias'])"
    assert (says_so in str(error.value)) is is_left_out


# Pieces


def run(start: int, live_start: int, numel: int, live: str = "w") -> Piece:
    return Piece(live, Region.run(start, numel), Region.run(live_start, numel))


def test_rows_that_stand_at_equal_distances_are_one_piece() -> None:
    rows = [run(4 * n, 100 + 8 * n, 4) for n in range(5)]
    assert joined(rows[::-1]) == (Piece("w", Region.run(0, 20), Region(100, ((5, 8), (4, 1)))),)


def test_parts_that_continue_each_other_are_one_piece() -> None:
    parts = [run(a, 7 + a, b - a) for a, b in ((0, 4), (4, 13), (13, 15))]
    assert joined(parts) == (run(0, 7, 15),)
    assert len(joined([*parts, run(15, 22, 1, live="v")])) == 2


@given(
    cuts=st.lists(st.integers(0, 20), max_size=4),
    drop=st.integers(0, 4),
    shift=st.integers(-1, 1),
)
def test_regions_cover_a_tensor_or_do_not(cuts: list[int], drop: int, shift: int) -> None:
    live = torch.zeros(30)[5:25]
    ends = [0, *sorted(cuts), 20]
    regions = [Region.run(5 + low, high - low) for low, high in pairwise(ends)]
    assert covers(live, regions)
    changed = [r for n, r in enumerate(regions) if n != drop or shift]
    if drop < len(regions) and shift:
        moved = regions[drop]
        changed[drop] = Region.run(moved.start + shift, moved.numel)
    same = [r for r in changed if r.numel] == [r for r in regions if r.numel]
    assert covers(live, changed) == same
    assert covers(live.view(4, 5).t(), changed) == same
