"""Engines that keep what they compute from their weights where a proof could overlook it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltasync.delta.bits import as_bits
from deltasync.engines.proof.other_weights import other_bits
from deltasync.engines.proof.reach import Reach
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import ConfigError
from tests.worlds.toy_engines import (
    Engine,
    Layered,
    Projection,
    checkpoint,
    of,
    proof_of,
    specs,
)

Kept = Callable[[Tensor], Any]
"""What an engine keeps of float32[6, 4]."""


class Named(NamedTuple):
    packed: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    packed: Any


class Private:
    __slots__ = ("__packed",)

    def __init__(self, packed: Tensor) -> None:
        self.__packed = packed

    def used(self) -> Tensor:
        return self.__packed


def read_only(values: Tensor) -> Any:
    made = values.numpy().copy()
    made.setflags(write=False)
    return made


def closure(value: Any) -> Callable[[], Any]:
    return lambda: value


KINDS: dict[str, tuple[Kept, Callable[[Any], Any]]] = {
    "array": (lambda w: w.numpy().copy(), lambda kept: kept),
    "backwards": (lambda w: w.numpy().copy()[::-1], lambda kept: kept),
    "constant array": (read_only, lambda kept: kept),
    "array of objects": (lambda w: np.array([float(w.max()), None]), lambda kept: kept),
    "number of numpy": (lambda w: w.numpy().max(), lambda kept: kept),
    "number": (lambda w: float(w.max()), lambda kept: kept),
    "numbers": (lambda w: w.flatten().tolist(), lambda kept: kept),
    "tuple": (lambda w: tuple(w.flatten().tolist()), lambda kept: kept),
    "set": (lambda w: set(w.flatten().tolist()), lambda kept: kept),
    "integer": (lambda w: int(w.max() * 1e6), lambda kept: kept),
    "complex": (lambda w: complex(w.max(), w.min()), lambda kept: kept),
    "text": (lambda w: str(w.max()), lambda kept: kept),
    "bytes": (lambda w: w.numpy().tobytes(), lambda kept: kept),
    "bytearray": (lambda w: bytearray(w.numpy().tobytes()), lambda kept: kept),
    "deque": (lambda w: deque([w]), lambda kept: kept[0]),
    "ordered": (lambda w: OrderedDict(a=w), lambda kept: kept["a"]),
    "proxy": (lambda w: MappingProxyType({"a": w}), lambda kept: kept["a"]),
    "named tuple": (Named, lambda kept: kept.packed),
    "named number": (lambda w: Named(float(w.max())), lambda kept: kept.packed),
    "frozen": (Frozen, lambda kept: kept.packed),
    "frozen number": (lambda w: Frozen(float(w.max())), lambda kept: kept.packed),
    "private": (Private, Private.used),
    "partial": (lambda w: partial(max, float(w.max())), lambda kept: kept.args),
    "closure": (lambda w: closure(float(w.max())), lambda kept: kept()),
    "closure of closures": (lambda w: closure(closure(w)), lambda kept: kept()()),
    "cached function": (lambda w: lru_cache(closure(w)), lambda kept: kept()),
    "signs": (torch.sign, lambda kept: kept),
    "positive": (lambda w: w > 0, lambda kept: kept),
}


def keeping(kind: str, *, once: bool) -> tuple[type[Layered], Callable[[Any], list[str]]]:
    """An engine whose layers keep this, and what it computes with besides its weights."""
    make, read = KINDS[kind]

    class Keeping(Projection):
        def work(self) -> None:
            if not (once and hasattr(self, "kept")):
                self.kept = make(self.weight.data.float() * 2)

    def used(engine: Any) -> list[str]:
        return [repr(read(layer.kept)) for layer in engine.layers]

    return of(Keeping, Engine), used


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_derived_each_time_follows(kind: str) -> None:
    engine_kind, used = keeping(kind, once=False)
    before, after = checkpoint(0), checkpoint(1)
    engine = engine_kind.started(before)
    target = RoutedTarget(engine, specs(before))
    target.verify_routes(before.items(), lambda: proof_of(engine))
    assert used(engine) == used(engine_kind.started(before))
    layout = target.parameters()
    lives = target.bind(layout)
    for weights in after, before, after:
        for number, live in lives.items():
            live.write(0, as_bits(weights[layout[number].name]).view(-1))
        target.finish(list(lives))
        assert used(engine) == used(engine_kind.started(weights))


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_derived_once_is_refused(kind: str) -> None:
    engine_kind, used = keeping(kind, once=True)
    weights = checkpoint()
    engine = engine_kind.started(weights)
    before = used(engine)
    target = RoutedTarget(engine, specs(weights))
    with pytest.raises(ConfigError, match=r"'layers.0.kept[^']*': the engine computes with it"):
        target.verify_routes(weights.items(), lambda: proof_of(engine))
    assert used(engine) == before


class Closed:
    """As msgspec's structures, which refuse to be set by others than themselves."""

    __slots__ = ("number", "other")

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("closed")


class Holding(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


def test_slots_are_put_back_whatever_their_class_lets_be_set() -> None:
    one, frozen = Closed(), Frozen(1.0)
    object.__setattr__(one, "number", 1)
    found = Reach([("", Holding([one, frozen]))])
    object.__setattr__(one, "number", 2)
    object.__setattr__(one, "other", 3)
    object.__setattr__(frozen, "packed", 2.0)
    found.put_back()
    assert (one.number, hasattr(one, "other"), frozen.packed) == (1, False, 1.0)  # type: ignore[attr-defined]


FLOATS = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e8m0fnu], ids=str)
def test_other_floats_are_smaller_by_10_to_50_percent_and_differ_at_each_place(
    dtype: torch.dtype,
) -> None:
    """With the other sign, half of them, if there are both."""
    ones = torch.ones(600_000).to(dtype)
    first, second = (as_bits(other_bits(ones, name)) for name in "ab")
    for step in (1, 64, 4096, 1 << 18):  # elements, rows, blocks are in another order
        assert not torch.equal(first[step:], first[:-step])
    assert not torch.equal(first[:64], second[:64])
    odd = torch.tensor([0.0, 1e-7, 1.0, 1e4, torch.inf, torch.nan]).to(dtype)
    assert bool((as_bits(other_bits(odd, "a")) != as_bits(odd)).all())
    assert torch.equal(as_bits(other_bits(odd, "a")), as_bits(other_bits(odd, "a")))
    one, two = as_bits(torch.tensor([1.0, 2.0]).to(dtype)).tolist()
    assert len(set(first.tolist())) >= max(2, min(90, (two - one) * 3 // 4))
    for signs in ((1, 1), (-1, -1), (1, -1)) if dtype in FLOATS else ():
        values = torch.logspace(-4, 2, 100_000).clamp(min=torch.finfo(dtype).tiny * 4)
        values = (values * torch.tensor(signs).repeat(50_000)).to(dtype)
        ratios = other_bits(values, "a").double() / values.double()
        assert 0.5 <= ratios.abs().min() <= 0.58
        assert 0.83 <= ratios.abs().max() <= 0.9
        turned = (ratios < 0).double().mean()
        assert 0.49 < turned < 0.51 if signs == (1, -1) else turned == 0


def test_other_integers_are_the_same_in_another_order() -> None:
    numbers = torch.arange(-17, 18, dtype=torch.int8).view(7, 5)
    other = other_bits(numbers, "a")
    assert not torch.equal(other, numbers)
    assert torch.equal(other.flatten().sort().values, numbers.flatten())
