"""Engines that replace what they have loaded are followed where they keep it, or refused by name:
what they repack is written there, and what they compute of small tensors is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync import ReceiverOptions
from deltasync.delta.bits import as_bits
from deltasync.errors import ConfigError, SyncAborted
from tests.engines.repacked import packed, tiles_of_marlin, unpacked
from tests.worlds.links import fleet, until
from tests.worlds.repacking_engines import (
    FP8,
    INT4,
    Fused,
    Int4,
    Matrix,
    beyond,
    clamped,
    codes,
    copied,
    drawn,
    filled,
    followed,
    having,
    matrices,
    reordered,
    scaled,
    turned,
    verified,
)
from tests.worlds.toy_engines import Layered, fixed, is_as, of, state_of

State = dict[str, Tensor]
Step = Callable[[Any], None]


def more(**extra: Tensor) -> State:
    """Of all layers."""
    return {f"layers.{n}.0.{name}": one for n in range(3) for name, one in extra.items()}


def rounded(matrix: Any) -> None:
    """Scales become powers of two."""
    Matrix.work(matrix)
    matrix.scale = fixed((matrix.scale.data.view(torch.int32) >> 23 << 23).view(torch.float32))


def twice(matrix: Any) -> None:
    kept = matrix.scale.data.t().contiguous()
    Matrix.work(matrix)
    matrix.other = fixed(kept)


def careful(matrix: Any) -> None:
    if bool((matrix.scale.data.isnan() | (matrix.scale.data < 0)).any()):
        raise RuntimeError("scales were never loaded")
    Matrix.work(matrix)


def ones(matrix: Any) -> None:
    turned(matrix)
    matrix.scale = fixed(torch.where(matrix.scale.data == 1, 0.25, matrix.scale.data))


def maximum(matrix: Any) -> None:
    turned(matrix)
    both = torch.maximum(matrix.one.data, matrix.two.data)
    matrix.one, matrix.two = fixed(both), fixed(both.clone())


def mapped(matrix: Any) -> None:
    turned(matrix)
    matrix.map.data[matrix.map.data == -1] = 0


class Uneven(Int4):
    """The high codes of a word are in another order than the low ones."""

    @staticmethod
    def repacked(words: Tensor) -> Tensor:
        found = unpacked(words).view(*words.shape, 8)
        low, high = found[..., :4], found[..., 4:].transpose(0, 1)
        return packed(torch.cat([low.flatten(), high.flatten()])).view(words.shape)


Row = tuple[type[Layered], State, list[State]]


def row(step: Step, first: State, *then: State) -> Row:
    """Of engines that have these tensors besides."""
    changes = [matrices(1) | more(**one) for one in then]
    return having(step, **first), matrices(0) | more(**first), changes


def of_two(dtype: torch.dtype, one: int, other: int) -> Row:
    pairs = (torch.tensor(pair).to(dtype).view(2, 1) for pair in ((one, other), (7, 2)))
    return row(maximum, *({"one": pair[0], "two": pair[1]} for pair in pairs))


def of_map(dtype: torch.dtype) -> Row:
    then = torch.tensor([0, 1, 2, -1], dtype=dtype)
    return row(mapped, {"map": torch.full_like(then, 5)}, {"map": then})


ODD = [0.0, -0.0, 1e-45, 3e38, float("inf"), float("nan"), -1.0]
PARTS = [("0.0", 50.0), ("2.1", 70.0), ("0.0", 0.1)]
FOLLOWED: dict[str, Row] = {
    "odd values": (of(Fused), scaled(0), [filled(scaled(0), "whole", odd) for odd in ODD]),
    "one part of a maximum": (
        of(Fused),
        scaled(0),
        [{f"layers.{at}.inputs": torch.tensor([value])} for at, value in PARTS],
    ),
    **{
        step.__name__: (having(step), matrices(0), [matrices(1), matrices(2)])
        for step in (rounded, twice, clamped, careful)
    },
    **{
        step.__name__: (having(step), reordered(0.5), [reordered(v) for v in (2, 1, 5000, 0, 3e38)])
        for step in (ones, beyond)
    },
    "maximum": of_two(torch.float32, 4, 4),
    "maximum of numbers": of_two(torch.int32, 0, 0),
    "mapped": of_map(torch.int32),
    "mapped bytes": of_map(torch.int8),
    "codes in an uneven order": (of(Uneven), codes(0), [drawn(1, INT4)]),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_follows_from_small_tensors_alone_is_computed_again(name: str) -> None:
    kind, first, changes = FOLLOWED[name]
    with followed(kind.started(first), first) as it:
        for change in changes:
            it.follows(change)


# What is refused.


def merged(matrix: Any) -> None:
    """One scale for both matrices, which are quantized with it again."""
    both = matrix.weight.data.float().view(2, 8, 8) * matrix.scale.data[:2, :1, None]
    Matrix.work(matrix)
    again = (both / matrix.scale.data.max()).to(FP8).view(16, 8)
    matrix.weight = fixed(again.view(torch.int32))


def in_order(matrix: Any) -> None:
    """Rows in the order of their scales, as kernels of ordered activations want them."""
    Matrix.work(matrix)
    order = matrix.scale.data[:4, 0].argsort()
    matrix.weight = fixed(matrix.weight.data.view(4, -1)[order].contiguous())


def loud(matrix: Any) -> None:
    """Weights are halved where a scale is large."""
    weight = matrix.weight.data.t().contiguous()
    matrix.weight = fixed(weight / 2 if bool(matrix.scale.data.max() > 100) else weight)


def without_nan(matrix: Any) -> None:
    """Weights that seem to stay where they are loaded."""
    matrix.weight.data.nan_to_num_(0.0)
    matrix.scale = fixed(matrix.scale.data.t().contiguous())


def wide(weights: State) -> State:
    """With matrices of bfloat16, of which none is NaN."""
    found = {n: t.float().nan_to_num() for n, t in weights.items() if n.endswith("weight")}
    return weights | {n: t.bfloat16() for n, t in found.items()}


WIDE = torch.empty(16, 8, dtype=torch.bfloat16)


def looking(matrix: Any) -> None:
    if not bool((matrix.scale.data > 0).all()):
        raise RuntimeError("scales are positive")
    Matrix.work(matrix)


class Mixed(Fused):
    """One of its scales follows from the codes, too."""

    def work(self) -> None:
        largest = as_bits(self.weight.data).max().float()
        super().work()
        self.alpha = fixed(self.alpha.data * largest)


class Random(Fused):
    """Does not make the same twice."""

    def work(self) -> None:
        super().work()
        self.whole = fixed(self.whole.data * (1 + torch.rand(())))


class Signed(Int4):
    """Codes become signed as well."""

    @staticmethod
    def repacked(words: Tensor) -> Tensor:
        return tiles_of_marlin(words) ^ -0x77777778


class LastOdd(Layered):
    """One layer of a kind is learnt; another one works otherwise."""

    made = Int4

    def __init__(self) -> None:
        super().__init__()
        last: Any = self.layers[2]
        last.repacked = lambda words: tiles_of_marlin(words.flip(0))


@pytest.mark.parametrize(
    ("kind", "first", "said"),
    [
        (having(merged), matrices(0), r"layers\.0\.0\.weight' is computed"),
        (having(in_order), matrices(0), r"layers\.\d\.\d\.weight"),
        (having(loud, weight=WIDE), wide(matrices(0)), r"layers\.\d\.\d\.weight"),
        (having(without_nan, weight=WIDE), wide(matrices(0)), r"layers\.\d\.\d\.weight"),
        (having(looking), matrices(0), r"scales are positive"),
        (of(Mixed), scaled(0), r"layers\.\d\.(alpha|kernel\.limit)' depends on more than"),
        (of(Random), scaled(0), r"layers\.\d\.(\d\.)?whole"),
        (of(Signed), codes(0), r"layers\.0\.0\.weight_packed' is computed"),
        (LastOdd, codes(0), r"layers\.2\.\d\.weight_packed"),
    ],
)
def test_what_is_more_than_moved_or_computed_again_is_refused_by_name(
    kind: type[Layered], first: State, said: str
) -> None:
    engine = kind.started(first)
    before = state_of(engine)
    with pytest.raises(ConfigError, match=said):
        verified(engine, first)
    assert is_as(engine, before)


def test_orders_that_kernels_do_not_find_are_refused_if_kernels_are_asked_for() -> None:
    first = codes(0)
    with fleet(copied(first)) as here:
        target = verified(of(Uneven).started(first), first)
        serving = here.add(target, options=ReceiverOptions(kernels="triton"))
        here.wait(1)
        with pytest.raises(SyncAborted):
            here.sender.send_weights()
        until(lambda: bool(serving.errors))
        assert "spread over words in another way" in str(serving.errors[0])


def test_shapes_that_are_loaded_over_each_other_may_not_change() -> None:
    first, other = codes(0), {"layers.1.0.weight_shape": torch.tensor([1, 96])}
    said = r"'layers\.1\.0\.weight_shape' may not change"
    engine = of(Int4).started(first)
    with followed(engine, first) as it:
        it.fails(drawn(1, INT4) | other, said)
        it.follows(drawn(1, INT4))
