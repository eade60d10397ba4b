"""Engines that replace what they have loaded are followed where they keep it, or refused by name:
what they repack is written there, and what they compute of small tensors is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
from tests.worlds.toy_engines import (
    Layered,
    fixed,
    is_as,
    of,
    state_of,
)

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


def dropped(matrix: Any) -> None:
    Matrix.work(matrix)
    del matrix.scale


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


def halved_above(matrix: Any) -> None:
    turned(matrix)
    scale = matrix.scale.data.t().contiguous()
    matrix.scale = fixed(scale / 2 if float(matrix.whole) > 100 else scale)


def without_nan(matrix: Any) -> None:
    turned(matrix)
    matrix.whole = fixed(matrix.whole.data.nan_to_num(1.0))


def mapped(matrix: Any) -> None:
    turned(matrix)
    matrix.map.data[matrix.map.data == -1] = 0


def checked(matrix: Any) -> None:
    assert bool((matrix.map.data >= 0).all())
    turned(matrix)


class Inner(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = fixed(torch.empty(rows, 8, dtype=FP8))
        self.scale = fixed(torch.empty(rows // 4, 2))


class Outer(Matrix):
    """Its tensors are in a module of their own, and are worked on from outside."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale, self.weight
        self.inner = Inner(16)

    def load(self, name: str, tensor: Tensor) -> None:
        part, which = name.split(".")
        super().load(f"{part}.{which}", tensor)

    def get_parameter(self, target: str) -> nn.Parameter:
        return self.inner.get_parameter(target)

    def work(self) -> None:
        turned(self.inner)
        self.inner.scale = fixed(1 / self.inner.scale.data)


class Joint(Matrix):
    """Two modules are given the larger one of their scales, once."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale, self.weight
        self.parts = nn.ModuleList([Inner(8), Inner(8)])
        self.worked_on = 0

    def load(self, name: str, tensor: Tensor) -> None:
        self.parts.get_parameter(name).data.copy_(tensor)

    def work(self) -> None:
        if self.worked_on:
            return
        self.worked_on += 1
        inner: Any = list(self.parts)
        self.largest = torch.maximum(*(one.scale.data.max() for one in inner))
        for one in inner:
            turned(one)
            one.scale = fixed(one.scale.data / self.largest)


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


def of_whole(step: Step, value: float) -> Row:
    return row(step, *({"whole": torch.tensor([one])} for one in (0.7, value)))


def of_two(dtype: torch.dtype, one: int, other: int) -> Row:
    pairs = (torch.tensor(pair).to(dtype).view(2, 1) for pair in ((one, other), (7, 2)))
    return row(maximum, *({"one": pair[0], "two": pair[1]} for pair in pairs))


def of_map(step: Step, dtype: torch.dtype, *values: int) -> Row:
    then = torch.tensor(values, dtype=dtype)
    return row(step, {"map": torch.full_like(then, 5)}, {"map": then})


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
        made.__name__: (kind, matrices(0), [matrices(1), matrices(2)])
        for made, kind in [
            *((step, having(step)) for step in (rounded, twice, dropped, clamped, careful)),
            *((made, of(made)) for made in (Outer, Joint)),
        ]
    },
    **{
        step.__name__: (having(step), reordered(0.5), [reordered(v) for v in (2, 1, 5000, 0, 3e38)])
        for step in (ones, beyond)
    },
    "maximum": of_two(torch.float32, 4, 4),
    "maximum of numbers": of_two(torch.int32, 0, 0),
    "halved above": of_whole(halved_above, 1000.0),
    "without infinity": of_whole(without_nan, float("inf")),
    "mapped": of_map(mapped, torch.int32, 0, 1, 2, -1),
    "mapped bytes": of_map(mapped, torch.int8, 0, 1, 2, -1),
    "codes in an uneven order": (of(Uneven), codes(0), [drawn(1, INT4)]),
    "checked": of_map(checked, torch.int64, 1, 2, 3),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_follows_from_small_tensors_alone_is_computed_again(name: str) -> None:
    kind, first, changes = FOLLOWED[name]
    with followed(kind.started(first), first) as it:
        for change in changes:
            it.follows(change)


def loud(matrix: Any) -> None:
    """Weights are halved where a scale is large."""
    weight = matrix.weight.data.t().contiguous()
    matrix.weight = fixed(weight / 2 if bool(matrix.scale.data.max() > 100) else weight)


def choosy(matrix: Any) -> None:
    """Takes few scales, and clamps those."""
    if not bool(((matrix.scale.data > 0.01) & (matrix.scale.data < 100)).all()):
        raise RuntimeError("no such scales")
    turned(matrix)
    matrix.scale.data.clamp_(max=2.0)


def weights_without_nan(matrix: Any) -> None:
    matrix.weight.data.nan_to_num_(0.0)
    matrix.scale = fixed(matrix.scale.data.t().contiguous())


@pytest.mark.parametrize(
    ("step", "scale", "nan"),
    [(loud, 1000.0, ""), (choosy, 20.0, ""), (weights_without_nan, 1.0, "layers.1.0.weight")],
)
def test_large_tensors_are_right_or_refused(step: Step, scale: float, nan: str) -> None:
    likes = {} if step is choosy else {"weight": torch.empty(16, 8, dtype=torch.bfloat16)}

    def positive(seed: int, scale: float) -> State:
        found = matrices(seed)
        found |= {n: t.clamp(min=0.2) * scale for n, t in found.items() if n.endswith("scale")}
        weights = {n: t.float().nan_to_num() for n, t in found.items() if n.endswith("weight")}
        return found | ({n: t.bfloat16() for n, t in weights.items()} if likes else {})

    first, then = positive(0, 1.0), positive(1, scale)
    if nan:
        then[nan][0, 0] = float("nan")
    engine = having(step, **likes).started(first)
    before = state_of(engine)
    try:
        with followed(engine, first) as it:
            it.follows(then)
    except ConfigError:
        assert is_as(engine, before)


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


def beside(matrix: Any) -> None:
    """What it makes of its weights lies in an object."""
    matrix.made = {"sum": matrix.weight.data.float().nan_to_num().sum(1)}
    Matrix.work(matrix)


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
        (having(beside), matrices(0), r"layers\.\d\.made\.sum"),
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
    before = state_of(engine)
    with fleet(copied(it.now | other)) as here:  # the engine was started on others
        here.add(verified(engine, it.now))
        here.wait(1)
        with pytest.raises(SyncAborted, match=said):
            here.sender.send_weights()
    assert is_as(engine, before)
