"""The state digest against plain integers, and its vectors."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltasync.delta.kernels import host
from deltasync.delta.ledger import digest_text
from deltasync.wire import digest as d
from tests.golden.make_golden import FOLDER
from tests.wire import reference
from tests.wire.digests import digest_at, digest_run

KEYS, SEEDS = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
ITEM_SIZES = st.sampled_from([1, 2, 4, 8])
VECTORS = json.loads((FOLDER / "digests.json").read_text())
EDGES = [host.BLOCK - 1, host.BLOCK, 1, host.BLOCK + 1]


def random_bits(rng: np.random.Generator, item_size: int, count: int) -> NDArray[Any]:
    return rng.integers(0, 256, count * item_size, np.uint8).view(f"<u{item_size}")


@given(
    key=KEYS,
    seed=SEEDS,
    item_size=ITEM_SIZES,
    start=st.integers(0, 2**62),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    dtype=st.sampled_from([np.int32, np.uint32, np.int64, np.uint64]),
)
@example(key=1, seed=1, item_size=2, start=2**40 - 5, counts=EDGES, dtype=np.int64)
def test_w18_sums_equal_plain_integers(
    key: int, seed: int, item_size: int, start: int, counts: list[int], dtype: type
) -> None:
    """Of runs, of scattered elements, and of pieces side by side that have keys of their own."""
    rng, cuts = np.random.default_rng(seed), np.cumsum([0, *counts])
    count = int(cuts[-1])
    bits = random_bits(rng, item_size, count)
    expected = reference.digest(key, range(start, start + count), bits.tolist())
    assert digest_run(bits, key=key, start=start) == expected
    top = min(2**62, int(np.iinfo(dtype).max))
    positions: NDArray[np.integer[Any]] = rng.integers(0, top, count).astype(dtype)
    expected = reference.digest(key, positions.tolist(), bits.tolist())
    assert digest_at(positions, bits, key=key) == expected
    keys = rng.integers(0, 1 << 64, len(counts), np.uint64)
    assert host.digest_pieces(positions, bits, keys, cuts).tolist() == [
        reference.digest(own, positions[a:b].tolist(), bits[a:b].tolist())
        for own, (a, b) in zip(keys.tolist(), pairwise(cuts), strict=True)
    ]


@pytest.mark.parametrize("vector", [*VECTORS["elements"], *VECTORS["runs"]])
def test_w18_vectors(vector: dict[str, Any]) -> None:
    key, dtype = d.seed(vector["name"]), f"u{vector['item_size']}"
    if "positions" in vector:
        bits = np.array([int(one, 16) for one in vector["bits"]], dtype)
        positions = np.array([int(one, 16) for one in vector["positions"]], np.int64)
        found = digest_at(positions, bits, key=key)
    else:
        ramp = np.arange(vector["count"], dtype=np.uint64) * np.uint64(int(vector["step"], 16))
        bits, start = ramp.astype(dtype), int(vector["start"], 16)
        positions = np.arange(start, start + vector["count"])
        found = digest_run(bits, key=key, start=start)
    assert found == reference.digest(key, positions.tolist(), bits.tolist())
    assert digest_text(found) == vector["digest"]


def test_w18_seeds() -> None:
    assert {name: digest_text(d.seed(name)) for name in VECTORS["seeds"]} == VECTORS["seeds"]
