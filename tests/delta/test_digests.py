"""The digest of a model: every fault shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.bits import Flat
from deltasync.delta.digests import DigestLedger
from deltasync.delta.shard import whole
from tests.worlds import strategies as own
from tests.worlds.bits import flipped, specs_of


def measured(model: dict[str, Tensor], chunk_numel: int) -> DigestLedger:
    ledger = DigestLedger(whole(specs_of(model)), chunk_numel=chunk_numel)
    for number, tensor in enumerate(model.values()):
        ledger.measure(number, Flat.of(tensor).read)
    return ledger


def total(model: dict[str, Tensor], chunk_numel: int = 7) -> int:
    return measured(model, chunk_numel).total


MODEL = st.fixed_dictionaries(
    {name: own.tensors(shapes=st.just((4, 5))) for name in ("embed.weight", "norm.weight")}
)


@pytest.mark.promise("Checks", "The digest depends on every bit and its position.")
@given(model=MODEL, seed=own.SEEDS)
def test_every_fault_shows(model: dict[str, Tensor], seed: int) -> None:
    """A flipped bit, two elements or parameters that change places, and one that is missing."""
    rng, before, weight = np.random.default_rng(seed), total(model), model["norm.weight"]
    mask = np.arange(20) == rng.integers(20)
    assert total(model | {"norm.weight": flipped(weight, mask, rng).view(weight.dtype)}) != before
    assert total({"norm.weight": weight}) != before
    bits = [Flat.of(tensor).read(0, 20).clone() for tensor in model.values()]
    if bits[0].dtype == bits[1].dtype and not torch.equal(*bits):
        assert total(dict(zip(model, reversed(model.values()), strict=True))) != before
    pair, flat = torch.from_numpy(rng.choice(20, 2, replace=False)), Flat.of(weight)
    old = flat.gather(pair)
    flat.scatter(pair, old.flip(0))
    assert (total(model) == before) == bool(old[0] == old[1])


@pytest.mark.parametrize("repeat", [1, 2])
def test_a_delta_shows_on_a_wrong_base_and_may_be_applied_twice(repeat: int) -> None:
    base, wrong = torch.arange(20), torch.arange(20)
    wrong[7] = 99
    positions, new = torch.tensor([2, 11]), torch.tensor([-1, -2])
    wanted = base.clone()
    wanted[positions] = new
    for live, arrives in ((base, True), (wrong, False)):
        for _ in range(repeat):
            ledger, flat = measured({"w": live}, 8), Flat.of(live)
            ledger.replace_sparse(0, positions, flat.gather(positions), new)
            flat.scatter(positions, new)
            assert ledger.total == total({"w": live})
            assert (ledger.total == total({"w": wanted})) == arrives
