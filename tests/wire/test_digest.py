"""The state digest against plain integers, and the identities that make it incremental."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltasync.delta.kernels import host
from deltasync.wire import digest as d
from tests.wire import reference
from tests.wire.digests import digest_at, digest_run

Bits = NDArray[Any]
KEYS = st.integers(0, 2**64 - 1)
SEEDS = st.integers(0, 2**32 - 1)
ITEM_SIZES = st.sampled_from([1, 2, 4, 8])
COUNTS = st.integers(0, 40)


def random_bits(rng: np.random.Generator, item_size: int, count: int) -> Bits:
    return rng.integers(0, 256, count * item_size, np.uint8).view(f"<u{item_size}")


@given(key=KEYS, rng_seed=SEEDS, item_size=ITEM_SIZES, count=COUNTS, start=st.integers(0, 2**62))
def test_w18_run_equals_plain_integers(
    key: int, rng_seed: int, item_size: int, count: int, start: int
) -> None:
    bits = random_bits(np.random.default_rng(rng_seed), item_size, count)
    expected = reference.digest(key, range(start, start + count), bits.tolist())
    assert digest_run(bits, key=key, start=start) == expected


@given(
    key=KEYS,
    rng_seed=SEEDS,
    item_size=ITEM_SIZES,
    positions=st.lists(st.integers(0, 2**31 - 1), max_size=40),
    dtype=st.sampled_from([np.int32, np.int64, np.uint32, np.uint64]),
)
def test_w18_scattered_equals_plain_integers(
    key: int, rng_seed: int, item_size: int, positions: list[int], dtype: type[np.integer[Any]]
) -> None:
    bits = random_bits(np.random.default_rng(rng_seed), item_size, len(positions))
    expected = reference.digest(key, positions, bits.tolist())
    assert digest_at(np.array(positions, dtype), bits, key=key) == expected


@given(key=KEYS, positions=st.lists(st.integers(2**31, 2**62 - 1), min_size=1, max_size=8))
def test_positions_beyond_32_bits(key: int, positions: list[int]) -> None:
    bits = np.arange(len(positions), dtype=np.uint16)
    expected = reference.digest(key, positions, bits.tolist())
    assert digest_at(np.array(positions, np.int64), bits, key=key) == expected


@pytest.mark.parametrize("item_size", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [host.BLOCK - 1, host.BLOCK, host.BLOCK + 1, 2 * host.BLOCK + 1])
def test_block_boundaries(item_size: int, count: int) -> None:
    bits = random_bits(np.random.default_rng(count), item_size, count)
    start, key = 2**40 - 5, d.seed("w")
    expected = reference.digest(key, range(start, start + count), bits.tolist())
    assert digest_run(bits, key=key, start=start) == expected
    assert digest_at(np.arange(start, start + count), bits, key=key) == expected


@given(
    rng_seed=SEEDS,
    item_size=ITEM_SIZES,
    counts=st.lists(
        st.sampled_from([1, 2, 3, 40, host.BLOCK - 1, host.BLOCK, host.BLOCK + 1]),
        max_size=6,
    ),
)
def test_pieces_side_by_side_have_their_own_keys(
    rng_seed: int, item_size: int, counts: list[int]
) -> None:
    rng, cuts = np.random.default_rng(rng_seed), np.cumsum([0, *counts])
    keys = rng.integers(0, 1 << 64, len(counts), np.uint64)
    positions = rng.integers(0, 1 << 31, cuts[-1]).astype(np.int32)
    bits = random_bits(rng, item_size, int(cuts[-1]))
    found = host.digest_pieces(positions, bits, keys, cuts)
    assert found.tolist() == [
        digest_at(positions[a:b], bits[a:b], key=int(key))
        for key, (a, b) in zip(keys, pairwise(cuts), strict=True)
    ]


@given(
    key=KEYS, rng_seed=SEEDS, item_size=ITEM_SIZES, cuts=st.lists(st.integers(0, 300), max_size=5)
)
def test_pieces_sum_to_the_whole(key: int, rng_seed: int, item_size: int, cuts: list[int]) -> None:
    bits = random_bits(np.random.default_rng(rng_seed), item_size, 300)
    bounds = sorted({0, 300, *cuts})
    pieces = (digest_run(bits[a:b], key=key, start=a) for a, b in pairwise(bounds))
    assert sum(pieces) & d.MASK == digest_run(bits, key=key, start=0)


@given(key=KEYS, rng_seed=SEEDS, item_size=ITEM_SIZES, count=st.integers(0, 300))
def test_a_patch_changes_it_by_new_minus_old(
    key: int, rng_seed: int, item_size: int, count: int
) -> None:
    rng = np.random.default_rng(rng_seed)
    old = random_bits(rng, item_size, 300)
    positions = np.sort(rng.choice(300, count, replace=False)).astype(np.int32)
    new = old.copy()
    new[positions] = random_bits(rng, item_size, count)
    gained = digest_at(positions, new[positions], key=key)
    lost = digest_at(positions, old[positions], key=key)
    kept = digest_run(old, key=key, start=0)
    assert (kept + gained - lost) & d.MASK == digest_run(new, key=key, start=0)


def test_arguments_are_not_changed() -> None:
    positions, bits = np.arange(5, dtype=np.uint64), np.arange(5, dtype=np.uint64)
    digest_at(positions, bits, key=1)
    digest_run(bits, key=1, start=0)
    assert positions.tolist() == bits.tolist() == [0, 1, 2, 3, 4]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_seed_is_that_of_the_reference(name: str) -> None:
    assert d.seed(name) == reference.seed(name)


def test_order_names_and_single_bits_are_seen() -> None:
    a = np.array([1, 2, 3], np.uint16)
    swapped = a[[1, 0, 2]]
    one = digest_run(a, key=d.seed("a"), start=0)
    assert one != digest_run(swapped, key=d.seed("a"), start=0)
    assert one != digest_run(a, key=d.seed("b"), start=0)
    assert one != digest_run(a, key=d.seed("a"), start=1)
    assert one != digest_run(a ^ np.uint16(0x8000), key=d.seed("a"), start=0)
