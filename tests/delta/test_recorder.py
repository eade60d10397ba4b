"""A loader is watched: its copies are known, what it computes is refused, nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.region import Region
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

    load.__name__ = "of_views" if steps == VIEWS else "of_copies"
    return load, weights, live


@given(loader=loaders(VIEWS) | loaders([*VIEWS, *COPIES, *COPIES]))
def test_pieces_do_what_the_loader_does(loader: tuple[Load, Weights, Weights]) -> None:
    """Views are followed, and copies on the way are followed or refused."""
    load, weights, live = loader
    recording = watched(load, weights, live)
    made = scattered(recording, weights, live)
    load(weights.items())
    for name in weights:
        same = torch.equal(made[f"live {name}"], live[f"live {name}"])
        assert same or name in recording.refused
        target(float(name not in recording.refused), label=f"{name} followed")
    if load.__name__ == "of_views":
        assert not recording.refused
    if recording.refused:
        return
    for name, tensor in live.items():
        assert (name not in recording.uncovered) == (tensor != 0).all()  # no weight is 0
    for name, pieces in recording.pieces.items():
        for piece in pieces:
            if piece.source == Region.run(0, weights[name].numel()):
                view = piece.target.view(live[piece.live]).reshape(-1)
                assert torch.equal(view, weights[name].reshape(-1))


def test_a_copy_of_columns_in_rows_of_another_length_is_refused() -> None:
    live = {"w": torch.zeros(3, 2).t()}

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in given:
            live["w"].copy_(tensor.t().reshape(2, 3))

    recording = watched(load, {"w": torch.randn(2, 3)}, live)
    assert recording.refused == {"w": "is not only copied: a rearrangement that cannot be followed"}


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
    "view of a concatenation": lambda w, live: live.copy_(torch.cat((w[2:], w[:2])).flip(0)),
    "index": lambda w, live: live.copy_(w[torch.tensor([3, 2, 1, 0])]),
    "in place": in_place,
    "exchanged": exchanged,
    "buffer": through_a_buffer,
    "filled with it": lambda w, live: live.fill_(w[0]),
    "negated view": lambda w, live: torch._neg_view(live).copy_(w),
    "two dtypes": lambda w, live: (live[:2].copy_(w[:2].half()), live[2:].copy_(w[2:].double())),
    "other bits": lambda w, live: live.view(torch.int32).copy_(w.view(torch.int32)),
}


def filled_twice(w: Tensor, live: Tensor) -> None:
    live.zero_()
    live.copy_(w)


OVERWRITTEN: dict[str, Callable[[Tensor, Tensor], object]] = {
    "half": lambda w, live: live[:2].copy_(w[:2]),
    "filled and written": filled_twice,
    "random": lambda w, live: (live.copy_(w), live[:1].normal_()),
}


@pytest.mark.parametrize("how", [*COMPUTED, *OVERWRITTEN])
def test_what_does_not_follow_the_checkpoint_alone_is_named(how: str) -> None:
    """What is not only copied is refused, and what is written otherwise too is not covered."""
    live = {"good": torch.zeros(4), "bad": torch.zeros(4)}
    weights = {name: torch.randn(4) for name in live}

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in given:
            if name == "good":
                live[name].copy_(tensor)
            else:
                (COMPUTED | OVERWRITTEN)[how](tensor, live[name])

    recording = watched(load, weights, live)
    assert set(recording.refused) == ({"bad"} if how in COMPUTED else set())
    assert recording.refused or set(recording.uncovered) == {"bad"}
    assert "good" in recording.pieces


def test_storage_that_is_freed_is_not_taken_for_another() -> None:
    live = {"w": torch.zeros(4, 4)}

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in given:
            tensor.data = tensor.data.t().contiguous()
            live["w"].copy_(torch.exp(tensor))

    for _ in range(20):
        assert set(watched(load, {"w": torch.randn(4, 4)}, live).refused) == {"w"}


@pytest.mark.parametrize(
    ("raised", "is_left_out"),
    [
        (KeyError("layers.0.mlp.bias"), True),  # as its table of parameters has no such key
        (KeyError("layers.0.mlp.weight"), False),  # it has that
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
