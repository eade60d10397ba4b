"""The walk that judges engines finds what hides from `named_parameters`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from tests.engines.reached import reached, seen


class Slots:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Plain:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def method(self) -> Any:
        return self.tensor


def closure(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def default(tensor: Tensor) -> Callable[..., Tensor]:
    def call(held: Tensor = tensor) -> Tensor:
        return held

    return call


HIDING: dict[str, Callable[[Tensor], Any]] = {
    "attribute": lambda tensor: tensor,
    "list": lambda tensor: [0, [tensor]],
    "deque": lambda tensor: deque([tensor]),
    "dict": lambda tensor: {"a": {1: tensor}},
    "dict of unnamed": lambda tensor: {Plain(tensor): 1},
    "set": lambda tensor: {Plain(tensor)},
    "slots": Slots,
    "object": lambda tensor: Plain(Plain(tensor)),
    "method": lambda tensor: Plain(tensor).method,
    "closure": closure,
    "default": default,
    "partial": lambda tensor: partial(print, 1, kept=tensor),
    "array": lambda tensor: tensor.numpy(),
    "attribute of a parameter": lambda tensor: with_attribute(tensor),
    "weak": lambda tensor: KEPT.append(Plain(tensor)) or ref(KEPT[-1]),  # type: ignore[func-returns-value]
}
KEPT: list[Plain] = []


def with_attribute(tensor: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(1), requires_grad=False)
    parameter.kept = tensor  # type: ignore[attr-defined]
    return parameter


@pytest.mark.parametrize("how", HIDING)
def test_a_tensor_that_hides_is_reached(how: str) -> None:
    model, tensor = nn.Linear(2, 2), torch.rand(3)
    model.own = HIDING[how](tensor)
    found = [path for path, one in reached(model).items() if one.data_ptr() == tensor.data_ptr()]
    assert len(found) == 1
    before = seen(model)
    tensor[1] += 1
    after = seen(model)
    assert [path for path in before if not before[path].has_bits_of(after[path])] == found


def test_a_tensor_that_two_hold_stands_under_both() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].own = model[0].weight
    assert {".0.weight", ".1.own"} <= reached(model).keys()
