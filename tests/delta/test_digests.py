"""The ledger of digests: kept up to date equals measured anew, and every fault shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import Flat
from deltasync.delta.digests import DigestLedger
from deltasync.delta.shard import whole
from deltasync.testing.bits import flipped, random_bits, specs_of
from deltasync.wire.digest import MASK
from deltasync.wire.messages import ParameterSpec
from tests.worlds import strategies as own
from tests.worlds.strategies import relaid

chunk_numels = st.sampled_from([1, 2, 7, 16, 1000])


def measured(model: dict[str, Tensor], chunk_numel: int) -> DigestLedger:
    ledger = DigestLedger(whole(specs_of(model)), chunk_numel=chunk_numel)
    for number, tensor in enumerate(model.values()):
        ledger.measure(number, Flat.of(tensor).read)
    return ledger


def total(model: dict[str, Tensor], chunk_numel: int = 7) -> int:
    return measured(model, chunk_numel).total


@given(model=own.models(), left=chunk_numels, right=chunk_numels)
def test_total_does_not_depend_on_chunks_or_strides(
    model: dict[str, Tensor], left: int, right: int
) -> None:
    plain = {name: relaid(tensor, "contiguous") for name, tensor in model.items()}
    assert total(model, left) == total(plain, right)


@given(model=own.models(), chunk_numel=chunk_numels, seed=own.SEEDS)
def test_kept_up_to_date_equals_measured_anew(
    model: dict[str, Tensor], chunk_numel: int, seed: int
) -> None:
    ledger, rng = measured(model, chunk_numel), np.random.default_rng(seed)
    flats = [Flat.of(tensor) for tensor in model.values()]
    for _ in range(6):
        number = int(rng.integers(len(flats)))
        if flats[number].numel:
            change(ledger, number, flats[number], rng)
    assert np.array_equal(ledger.sums, measured(model, chunk_numel).sums)


def change(ledger: DigestLedger, number: int, flat: Flat, rng: np.random.Generator) -> None:
    """Write a random run and account for it; the digest returned is that of the new bits."""
    low = int(rng.integers(flat.numel))
    high = int(rng.integers(low, flat.numel)) + 1
    fresh = random_bits(flat.dtype, high - low, rng)
    if rng.integers(2):
        gained = ledger.replace_dense(number, low, fresh, flat.read)
        flat.write(low, fresh)
        assert gained == ledger.digest_run(number, fresh, low)
        return
    chosen = np.sort(rng.choice(high - low, int(rng.integers(1, high - low + 1)), replace=False))
    positions, new = torch.from_numpy(chosen) + low, fresh[chosen]
    gained = ledger.replace_sparse(number, positions, flat.gather(positions), new)
    flat.scatter(positions, new)
    assert gained == ledger.digest_at(number, positions, new)


def test_old_bits_are_read_only_at_ragged_ends() -> None:
    model = {"w": torch.arange(20, dtype=torch.int32)}
    ledger = measured(model, 8)
    asked: list[tuple[int, int]] = []

    def read_old(low: int, high: int) -> Tensor:
        asked.append((low, high))
        return model["w"][low:high]

    ledger.replace_dense(0, 5, torch.zeros(15, dtype=torch.int32), read_old)
    assert asked == [(5, 8)]  # [8, 16) is a whole chunk, and so is the short last one


@given(model=own.models(), chunk_numel=chunk_numels)
def test_totals_of_pieces_add_up(model: dict[str, Tensor], chunk_numel: int) -> None:
    ledger = measured(model, chunk_numel)
    numbers = range(len(model))
    each = np.eye(len(model), dtype=np.uint64)
    assert sum(ledger.digest_of(each[n]) for n in numbers) & MASK == ledger.total
    assert ledger.digest_of(each.sum(0)) == ledger.digest_of(None) == ledger.total
    assert ledger.digest_of(each.sum(0) * 3) == ledger.total * 3 & MASK
    for name, number in zip(model, numbers, strict=True):
        assert ledger.digest_of(each[number]) == total({name: model[name]})


def test_a_copy_is_changed_apart() -> None:
    ledger = measured({"w": torch.arange(9)}, 4)
    other = ledger.copy()
    position, old, new = torch.tensor([3]), torch.tensor([3]), torch.tensor([9])
    other.replace_sparse(0, position, old, new)
    assert other.total != ledger.total
    other.replace_sparse(0, position, new, old)
    assert other.total == ledger.total
    assert other.specs is ledger.specs


def test_measure_of_some_chunks_leaves_the_others() -> None:
    bits = torch.arange(20)
    ledger = measured({"w": bits}, 8)
    before = ledger.sums.copy()
    bits += 1
    ledger.measure(0, Flat.of(bits).read, start=8, stop=16)
    assert (ledger.sums != before).tolist() == [False, True, False]


@given(chunk_numel=st.integers(1, 30), start=st.integers(0, 90), length=st.integers(1, 90))
def test_chunks_cover_a_run_once(chunk_numel: int, start: int, length: int) -> None:
    ledger = DigestLedger(whole([]), chunk_numel=chunk_numel)
    pieces = list(ledger.chunks(start, start + length))
    elements = [p for _, low, high in pieces for p in range(low, high)]
    assert elements == list(range(start, start + length))
    assert all(low // chunk_numel == (high - 1) // chunk_numel == c for c, low, high in pieces)


def test_digests_beyond_int32_positions() -> None:
    numel = (1 << 31) + 5
    spec = ParameterSpec(("w",), (numel,), dtypes.BY_NAME["uint8"])
    ledger = DigestLedger(whole([spec]), chunk_numel=1 << 24)
    positions = torch.tensor([1, (1 << 31) - 1, 1 << 31, numel - 1])
    old, new = torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    ledger.replace_sparse(0, positions, old, new)
    assert np.flatnonzero(ledger.sums).tolist() == [0, 127, 128]
    ledger.replace_dense(0, 1 << 31, torch.ones(5, dtype=torch.uint8), lambda *_: old)
    assert int(ledger.sums[128]) == ledger.digest_run(0, torch.ones(5, dtype=torch.uint8), 1 << 31)


MODEL = st.fixed_dictionaries(
    {name: own.tensors(shapes=st.just((4, 5))) for name in ("embed.weight", "norm.weight")}
)


@pytest.mark.promise("Checks", "The digest depends on every bit and its position.")
@given(model=MODEL, seed=own.SEEDS)
def test_one_flipped_bit_shows(model: dict[str, Tensor], seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask = np.arange(20) == rng.integers(20)
    before = total(model)
    weight = model["norm.weight"]
    model["norm.weight"] = flipped(weight, mask, rng).view(weight.dtype)
    assert total(model) != before


@pytest.mark.promise("Checks", "The digest depends on every bit and its position.")
@given(model=MODEL, seed=own.SEEDS)
def test_swapped_elements_show(model: dict[str, Tensor], seed: int) -> None:
    flat = Flat.of(model["norm.weight"])
    pair = torch.from_numpy(np.random.default_rng(seed).choice(20, 2, replace=False))
    old, before = flat.gather(pair), total(model)
    flat.scatter(pair, old.flip(0))
    assert (total(model) == before) == (int(old[0]) == int(old[1]))


@given(model=MODEL)
def test_dropped_and_exchanged_parameters_show(model: dict[str, Tensor]) -> None:
    before = total(model)
    assert total({"norm.weight": model["norm.weight"]}) != before
    exchanged = dict(zip(model, reversed(model.values()), strict=True))
    left, right = (Flat.of(tensor).read(0, 20).numpy() for tensor in model.values())
    same_bytes = left.tobytes() == right.tobytes()
    if left.dtype == right.dtype and not same_bytes:
        assert total(exchanged) != before


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
