"""The codec `gap`: gaps and steps of any size come back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from deltasync.delta import gap
from deltasync.delta.changes import Changes
from deltasync.wire.changes import TILE, Sizes


def changes_of(codes: list[int]) -> Changes:
    """One element of a byte for each code."""
    tiles, counts = np.unique(np.array(codes) // TILE, return_counts=True)
    sizes = Sizes(1, len(tiles), len(codes), 0)
    changes = Changes.of(torch.zeros(sizes.num_bytes, dtype=torch.uint8), sizes)
    changes.tiles.copy_(torch.from_numpy(tiles))
    changes.counts.copy_(torch.from_numpy(counts))
    changes.places.copy_(torch.tensor(codes) % TILE)
    return changes


def old_of(changes: Changes) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.zeros(len(bits), np.uint8) for bits in (changes.values, changes.whole))  # type: ignore[return-value]


@given(
    first=st.integers(0, 1 << 40),
    gaps=st.lists(
        st.integers(0, 600) | st.sampled_from([254, 255, 256, 510, 65_534, 65_535, 131_070]),
        min_size=1,
        max_size=50,
    ),
)
@example(first=0, gaps=[1, 300] * 40_000)  # longer than what is worked on at once
@example(first=0, gaps=[0])
@example(first=(1 << 44) - 1, gaps=[0])
def test_any_gap_comes_back(first: int, gaps: list[int]) -> None:
    codes = (first + np.cumsum([0, *(one + 1 for one in gaps[1:])])).tolist()
    changes = changes_of(codes)
    coded = gap.encode(changes, *old_of(changes))
    is_far = codes[-1] - codes[0] > 65_535 * len(codes)
    assert (coded is None) == is_far
    if coded is None:
        return
    found = gap.decode(memoryview(coded), changes.sizes, old_of)
    assert torch.equal(found.memory, changes.memory)


@pytest.mark.parametrize("size", [1, 2])
def test_steps_go_from_any_pattern_to_any(size: int) -> None:
    rng, every = np.random.default_rng(0), np.arange(1 << 8 * size).astype(f"u{size}")
    olds = rng.permutation(every), every + every.dtype.type(1), every[::-1].copy()
    nearest_that_are_far = every[-128:], np.zeros_like(every[-128:])
    for new, old in [*((every, old) for old in olds), nearest_that_are_far]:
        block = np.frombuffer(gap._encode_steps(new, old), np.uint8)
        assert np.array_equal(gap._decode_steps(block, old), new)
