"""Engines of several ranks, none of which holds the whole checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deltasync import ReceiverOptions, SenderOptions
from deltasync.delta.bits import as_bits
from deltasync.delta.codecs.coding import Coding
from deltasync.delta.region import Region
from deltasync.delta.route import Part, Piece
from deltasync.engines.routed import RoutedTarget
from deltasync.engines.routes.recorder import CheckpointTensor, record
from deltasync.errors import ConfigError, LayoutMismatch, SyncAborted
from deltasync.sync.protocol.sender_session import copies
from deltasync.testing.bits import specs_of
from tests.worlds.links import Model, bits_equal, fleet, random_model, step

SHAPES = {
    "embed": (13, 4),
    "q": (8, 4),
    "kv": (2, 4),
    "fused": (12, 4),  # 4 rows of each of three, one after another
    "o": (4, 8),
    "gate0": (6, 4),
    "gate1": (6, 4),
    "down0": (4, 6),
    "down1": (4, 6),
    "norm": (4,),
    "last": (5, 4),
}
CHECKPOINT = [CheckpointTensor(name, shape, torch.bfloat16) for name, shape in SHAPES.items()]


class Rank(nn.Module):
    """One of two: rows or columns of most tensors, all of some, none of others.

    Attributes:
        padding: Rows of the vocabulary beyond the checkpoint's.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        shapes = {
            "embed": (8, 4),  # of 16 rows, 3 of them padding
            "qkv": (6, 4),  # half of q, all of kv
            "fused": (6, 4),
            "o": (4, 4),
            "w1": (2, 3, 4),
            "w2": (2, 4, 3),
            "norm": (4,),
        }
        for name, shape in (shapes | ({"last": (5, 4)} if rank else {})).items():
            weights = torch.zeros(shape, dtype=torch.bfloat16)
            self.register_parameter(name, nn.Parameter(weights, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            match name.rstrip("01"):
                case "embed":
                    rows = tensor[8 * self.rank :][:8]
                    self._data("embed")[: len(rows)].copy_(rows)
                    self._data("embed")[len(rows) :].zero_()
                case "q":
                    self._data("qkv")[:4].copy_(tensor.chunk(2)[self.rank])
                case "kv":
                    self._data("qkv")[4:].copy_(tensor)
                case "fused":
                    for number, third in enumerate(tensor.chunk(3)):
                        here = self._data("fused").narrow(0, 2 * number, 2)
                        here.copy_(third.chunk(2)[self.rank])
                case "o":
                    self._data("o").copy_(tensor.narrow(1, 4 * self.rank, 4))
                case "gate":
                    self._data("w1")[int(name[-1])].copy_(tensor.chunk(2)[self.rank])
                case "down":
                    self._data("w2")[int(name[-1])].copy_(tensor.chunk(2, dim=1)[self.rank])
                case "last":
                    if self.rank:
                        self._data("last").copy_(tensor)
                case _:
                    self._data(name).copy_(tensor)

    def _data(self, name: str) -> Tensor:
        return self.get_parameter(name).data


def trainer(seed: int) -> Model:
    return random_model(SHAPES, seed)


def rank_of(source: nn.Module, rank: int) -> Rank:
    """What a fresh rank holds of the trainer's weights."""
    made = Rank(rank)
    made.load_weights((name, w.data.bfloat16()) for name, w in source.named_parameters())
    return made


@settings(max_examples=25, deadline=None)
@given(
    same=st.booleans(),
    bucket_bytes=st.sampled_from([300, 1 << 20]),
    staged_bytes=st.sampled_from([0, None]),
    chunk_numel=st.sampled_from([None, 7]),
    shares=st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.0]), max_size=4),
    compression=st.sampled_from(["none", "gap", "block"]),
    seed=st.integers(0, 99),
)
def test_every_rank_has_what_its_loader_would_load(
    same: bool,
    bucket_bytes: int,
    staged_bytes: int | None,
    chunk_numel: int | None,
    shares: list[float],
    compression: Coding,
    seed: int,
) -> None:
    source, generator = trainer(seed), torch.Generator().manual_seed(seed)
    ranks = [rank_of(source if same else trainer(seed + 1), n) for n in range(2)]
    options = ReceiverOptions(
        max_staged_bytes=staged_bytes, chunk_numel=chunk_numel, stall_timeout_s=5
    )
    sending = SenderOptions(bucket_bytes=bucket_bytes, compression=compression)
    with fleet(source, options=sending) as here:
        for number, rank in enumerate(ranks):
            here.add(RoutedTarget(rank, CHECKPOINT), rank=number, world=2, options=options)
        here.wait(2)
        stats = here.sender.send_weights()
        assert (stats.joined, stats.full_synced) == (2, 0 if same else 2)
        for share in shares:
            step(source, generator, share)
            assert here.sender.send_weights().receivers == 2
            assert all(bits_equal(rank, rank_of(source, rank.rank)) for rank in ranks)


def test_receivers_of_parts_get_gaps_where_class_is_asked_for() -> None:
    source, generator = trainer(0), torch.Generator().manual_seed(0)
    ranks = [rank_of(trainer(1), n) for n in range(2)]
    with fleet(source, options=SenderOptions(compression="class")) as here:
        for number, rank in enumerate(ranks):
            here.add(RoutedTarget(rank, CHECKPOINT), rank=number, world=2)
        here.wait(2)
        for _ in range(3):
            assert here.sender.send_weights().compression == "gap"
            assert all(bits_equal(rank, rank_of(source, rank.rank)) for rank in ranks)
            step(source, generator, 0.2)


def test_one_wrong_element_of_one_rank_is_found() -> None:
    source = trainer(0)
    ranks = [rank_of(source, n) for n in range(2)]
    with fleet(source) as here:
        for number, rank in enumerate(ranks):
            here.add(RoutedTarget(rank, CHECKPOINT), rank=number, world=2)
        here.wait(2)
        assert here.sender.send_weights().full_synced == 0
        as_bits(ranks[1].get_parameter("o").data)[2, 3] ^= 1
        source.get_parameter("o").data[2, 7] *= 3  # the same element: its old bits are looked at
        with pytest.raises(SyncAborted, match="DigestMismatch"):
            here.sender.send_weights()
        here.wait(2)
        assert here.sender.send_weights().full_synced == 2
        assert all(bits_equal(rank, rank_of(source, rank.rank)) for rank in ranks)


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([0, 0], "engine takes nothing of 'last'"),
        ([0, 1, 0], "its ranks hold 84 elements of 'embed', which has 52"),
    ],
)
def test_ranks_that_do_not_add_up_are_refused_by_name(ranks: list[int], why: str) -> None:
    with fleet(trainer(0)) as here:
        for number, rank in enumerate(ranks):
            here.add(RoutedTarget(Rank(rank), CHECKPOINT), rank=number, world=len(ranks))
        here.wait(len(ranks))
        with pytest.raises(SyncAborted, match=why):
            here.sender.send_weights()


def test_the_same_part_twice_is_not_the_whole() -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name not in ("last", "embed")}
    source = Model({name: torch.randn(shape) for name, shape in shapes.items()})
    checkpoint = [one for one in CHECKPOINT if one.name in shapes]
    ranks = [Rank(0), Rank(0)]
    with fleet(source) as here:
        for number, rank in enumerate(ranks):
            here.add(RoutedTarget(rank, checkpoint), rank=number, world=2)
        here.wait(2)
        with pytest.raises(SyncAborted, match="DigestMismatch"):
            here.sender.send_weights()


def test_copies_are_counted_and_uneven_ones_refused() -> None:
    specs = specs_of({"a": torch.zeros(6), "b": torch.zeros(4), "none": torch.zeros(0)})
    half = (frozenset({0, 1, 2}), {0: 3})
    assert copies(specs, [half, half]).tolist() == [1, 2, 0]
    assert copies(specs, [(None, {}), half, half]).tolist() == [2, 3, 0]
    with pytest.raises(LayoutMismatch, match="9 elements of 'a', which has 6"):
        copies(specs, [half, half, half])
    for number, numel in ((0, 0), (0, 7), (2, 1), (3, 1)):
        with pytest.raises(LayoutMismatch, match="cannot be held"):
            copies(specs, [(None, {number: numel})])


def test_an_element_that_is_kept_twice_is_refused() -> None:
    live = {"w": torch.zeros(8, dtype=torch.bfloat16)}
    pieces = [
        Piece("w", Region.run(0, 4), Region.run(0, 4)),
        Piece("w", Region.run(3, 4), Region.run(4, 4)),
    ]
    with pytest.raises(ConfigError, match="twice"):
        Part.of(pieces, live, name="w")


@pytest.mark.parametrize("view", [lambda w: w.expand(4, 6), lambda w: w.unfold(0, 3, 1)])
def test_elements_that_one_copy_keeps_twice_are_refused(
    view: Callable[[Tensor], Tensor],
) -> None:
    live = {"w": torch.zeros(view(torch.zeros(6)).shape, dtype=torch.bfloat16)}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            live["w"].copy_(view(tensor))

    [pieces] = record(load, [CheckpointTensor("w", (6,), torch.bfloat16)], live).pieces.values()
    with pytest.raises(ConfigError, match="twice"):
        Part.of(pieces, live, name="w")


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[slice, ...]]]:
    """A shape, and boxes of it that do not overlap."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    dim = draw(st.integers(0, len(shape) - 1))
    ends = sorted(draw(st.sets(st.integers(0, shape[dim]), min_size=2, max_size=4)))
    rest = [slice(*sorted(draw(st.sets(st.integers(0, n), min_size=2, max_size=2)))) for n in shape]
    boxes = [(*rest[:dim], slice(a, b), *rest[dim + 1 :]) for a, b in pairwise(ends)]
    return shape, boxes


@settings(max_examples=200, deadline=None)
@given(cuts(), st.integers(0, 2**31), st.booleans())
def test_parts_are_read_and_written_where_a_loader_would(
    cut: tuple[tuple[int, ...], list[tuple[slice, ...]]], seed: int, transpose: bool
) -> None:
    shape, boxes = cut
    rng = np.random.default_rng(seed)
    whole = torch.from_numpy(rng.integers(-99, 99, shape, dtype=np.int16)).view(torch.bfloat16)
    live = {str(n): torch.zeros(_shape(whole[box], transpose)) for n, box in enumerate(boxes)}
    live = {name: tensor.bfloat16() for name, tensor in live.items()}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            for number, box in enumerate(boxes):
                part = tensor[box]
                live[str(number)].copy_(part.mT if transpose and part.dim() > 1 else part)

    [(_, pieces)] = record(
        load, [CheckpointTensor("w", shape, torch.bfloat16)], live
    ).pieces.items()
    part = Part.of(pieces, live, name="w")
    mask = torch.zeros(shape, dtype=torch.bool)
    for box in boxes:
        mask[box] = True
    kept = mask.view(-1).nonzero().squeeze(1)
    assert part.numel == len(kept)
    start, stop = sorted(int(n) for n in rng.integers(0, whole.numel() + 1, 2))
    here = kept[(kept >= start) & (kept < stop)]
    assert torch.equal(part.held(start, stop), here)
    bits = as_bits(whole).reshape(-1)
    part.write(start, bits[start:stop])
    assert torch.equal(part.read(0, whole.numel())[(kept >= start) & (kept < stop)], bits[here])
    part.scatter(kept, bits[kept])
    assert torch.equal(part.gather(kept), bits[kept])
    written = {name: tensor.clone() for name, tensor in live.items()}
    load([("w", whole)])
    assert all(torch.equal(as_bits(live[n]), as_bits(written[n])) for n in live)


def _shape(part: Tensor, transpose: bool) -> tuple[int, ...]:
    return tuple((part.mT if transpose and part.dim() > 1 else part).shape)
