"""Each way in which live storage moves is noticed when a target looks, which it does before it
writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync import ModuleTarget
from deltasync.errors import TargetMoved
from tests.worlds.toy_engines import fixed, layers, routed

SIZE = 4
Move = Callable[[Any, int], object]


def data(change: Callable[[Tensor], Tensor]) -> Move:
    """Let the parameter be something else."""
    return lambda model, at: setattr(model[at].weight, "data", change(model[at].weight.data))


def swapped(model: Any, at: int) -> None:
    one, other = (model[n].weight for n in (at, (at + 1) % SIZE))
    one.data, other.data = other.data, one.data


def awake_elsewhere(model: Any, at: int) -> list[Tensor]:
    weight = model[at].weight
    storage, held = weight.untyped_storage(), weight.clone()
    num_bytes, address = storage.nbytes(), weight.data_ptr()
    storage.resize_(0)
    taken = [torch.zeros_like(held) for _ in range(64)]  # one of them is where it was
    storage.resize_(num_bytes)
    weight.copy_(held)
    assert weight.data_ptr() != address
    return taken


MOVES: dict[str, Move] = {
    "another address": data(torch.clone),
    "another parameter": lambda m, at: setattr(m[at], "weight", fixed(m[at].weight.data.clone())),
    "another module": lambda m, at: m.__setitem__(at, copy.deepcopy(m[at])),
    "other strides": data(lambda weight: weight.view(3, 4).t()),
    "fewer elements": data(lambda weight: weight[:2]),
    "another dtype": data(lambda weight: weight.view(torch.float16)),
    "swapped": swapped,
    "removed": lambda m, at: m.__delitem__(at),
    "registered": lambda m, at: m[at].register_buffer("late", torch.zeros(1)),
    "asleep": lambda m, at: m[at].weight.untyped_storage().resize_(0),
    "awake elsewhere": awake_elsewhere,
}
STAYS: dict[str, Move] = {
    "another parameter of the same storage": lambda m, at: setattr(
        m[at], "weight", fixed(m[at].weight.data)
    ),
    "a buffer that is not saved": lambda m, at: setattr(m[at], "cache", torch.ones(3)),
}


@pytest.mark.parametrize("at", [0, SIZE - 1], ids=["first", "last"])
@pytest.mark.parametrize("name", [*MOVES, *STAYS])
@pytest.mark.parametrize("make", [ModuleTarget, routed], ids=["module", "routed"])
def test_storage_that_moved_is_noticed_each_time_that_a_target_looks(
    make: Callable[[Any], Any], name: str, at: int
) -> None:
    model = layers(SIZE, 0)
    target = make(model)
    target.bind(target.parameters())
    target.check_unmoved()
    kept = (MOVES | STAYS)[name](model, at)
    for _ in range(2):
        if name in STAYS:
            target.check_unmoved()
            continue
        with pytest.raises(TargetMoved):
            target.check_unmoved()
    del kept
