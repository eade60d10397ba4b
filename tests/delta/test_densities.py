"""Coded syncs at any density: the same bits, and never more bytes than without a codec."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from deltasync import Policy, SenderOptions, dtypes
from deltasync.delta.bits import as_bits, torch_dtype
from deltasync.delta.codecs.coding import Coding
from deltasync.dtypes import Dtype
from deltasync.testing.bits import flipped, random_bits
from tests.worlds.links import Model, bits_equal, fleet

DENSITIES = (0.0, 1e-4, 0.01, 0.1, 0.5, 0.9, 1.0)
SPARSE, DENSE = Policy(dense_above=1.0), Policy(dense_above=0.0)

Moves = Literal["near", "far"]
Weights = dict[str, Tensor]


def changed(
    dtype: Dtype, numel: int, density: float, moves: Moves, *, together: bool, seed: int
) -> tuple[Tensor, Tensor]:
    """(new, old) weights. `near` moves by one or two steps, `far` to any other bits."""
    rng = np.random.default_rng(seed)
    old = random_bits(dtype, numel, rng)
    if dtype.name in ("bfloat16", "float32"):
        old = as_bits((torch.from_numpy(rng.standard_normal(numel)) * 0.02).to(torch_dtype(dtype)))
    count = min(numel, max(int(density > 0), round(numel * density)))
    begin = (numel - count) // 2
    at = np.arange(begin, begin + count) if together else rng.choice(numel, count, replace=False)
    new = old.clone()
    if moves == "near" and dtype.name != "bool":
        steps = torch.from_numpy(rng.choice([1, 1, 2, -1, -1, -2], count))
        new[torch.from_numpy(at)] += steps.to(old.dtype)
    else:
        new = flipped(old, np.isin(np.arange(numel), at), rng)
    return new.view(torch_dtype(dtype)), old.view(torch_dtype(dtype))


def sent(new: Weights, old: Weights, coding: Coding, policy: Policy) -> int:
    """Sync what changed to an engine that holds the old weights. Returns the payloads' bytes."""
    source, target = (Model({n: t.clone() for n, t in old.items()}) for _ in range(2))
    options = SenderOptions(compression=coding, policy=policy)
    with fleet(source, options=options) as here:
        here.add(target)
        here.wait(1)
        here.sender.send_weights()
        for name, parameter in source.named_parameters():
            parameter.data.copy_(new[name])
        stats = here.sender.send_weights()
        assert bits_equal(source, target)
    return stats.payload_bytes


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize(
    ("coding", "name"),
    [("gap", "bfloat16"), ("block", "uint8"), ("class", "bfloat16"), ("class", "float32")],
)
def test_no_density_takes_more_than_raw(coding: Coding, name: str, density: float) -> None:
    """Than the best of all sparse, all dense, and what is decided by default."""
    ways: list[tuple[Moves, bool]] = [("near", False), ("far", True)]
    for moves, together in ways:
        new, old = changed(dtypes.BY_NAME[name], 30_003, density, moves, together=together, seed=7)
        models = {"w": new}, {"w": old}
        found = sent(*models, coding, Policy())
        assert (found == 0) == (density == 0.0)
        assert found <= min(sent(*models, "none", policy) for policy in (SPARSE, DENSE, Policy()))
