"""The digest of a model: every fault shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.bits import Flat
from deltasync.delta.ledger import Ledger
from deltasync.delta.tiles import CHUNK
from deltasync.wire.digest import MASK
from tests.wire import reference
from tests.worlds import strategies as own
from tests.worlds.bits import flipped, specs_of
from tests.worlds.payloads import measured


def ledger_of(model: dict[str, Tensor]) -> Ledger:
    flats = {number: Flat.of(tensor) for number, tensor in enumerate(model.values())}
    return measured(flats, specs_of(model)).ledger


def total(model: dict[str, Tensor]) -> int:
    return ledger_of(model).total


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


def test_sums_are_told_by_chunk_parameter_and_copy() -> None:
    model = {
        "a": torch.arange(CHUNK + 9, dtype=torch.int32),
        "b": torch.arange(5, dtype=torch.uint8),
        "c": torch.zeros(0),
    }
    ledger = ledger_of(model)
    digests = [
        reference.digest(reference.seed(name), range(one.numel()), one.tolist())
        for name, one in model.items()
    ]
    assert ledger.by_share().tolist() == digests
    assert ledger.total == sum(digests) & MASK
    assert ledger.digest_of(np.array([2, 0, 5], np.uint64)) == 2 * digests[0] & MASK
    assert ledger.digest_of(None) == ledger.total
    assert ledger.parameter_of(np.array([0, 2])).tolist() == [1, 0]
