"""Every kernel module gives the same answers, and the ones that plain Python gives."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.kernels import Kernels, host, reference
from deltasync.wire import digest
from deltasync.wire.changes import TILE

MODULES: list[Kernels] = [host, reference]
INTEGERS = [torch.uint8, torch.int16, torch.int32, torch.int64]
MASK = (1 << 64) - 1
KEY = digest.seed("layers.0.weight")

every_kernel = pytest.mark.parametrize(
    "kernels", MODULES, ids=lambda module: module.__name__.rsplit(".", 1)[-1]
)
every_width = pytest.mark.parametrize("dtype", INTEGERS, ids=str)
widths = st.sampled_from(INTEGERS)
lengths = st.integers(0, 70)
seeds = st.integers(0, 1 << 32)


def mix(key: int, position: int, bits: int) -> int:
    """The specification, with Python's integers."""
    x = (key + position * 0x9E3779B97F4A7C15 + bits) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def unsigned(bits: Tensor) -> list[int]:
    mask = (1 << 8 * bits.element_size()) - 1
    return [value & mask for value in bits.tolist()]


def random_integers(dtype: torch.dtype, n: int, seed: int) -> Tensor:
    noise = np.random.default_rng(seed).integers(0, 256, (n + 1) * dtype.itemsize, np.uint8)
    return torch.from_numpy(noise).view(dtype)[:n]


@every_width
@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (2, 1)])
def test_kernels_agree_on_long_runs(dtype: torch.dtype, offsets: tuple[int, int]) -> None:
    """Wherever these lie, across all blocks, and with any density of what changed."""
    numel = (1 << 18) + 5
    new, old = (random_integers(dtype, numel + 3, 0)[o : o + numel] for o in offsets)
    old.copy_(new)
    generator = torch.Generator().manual_seed(1)
    density = torch.tensor([1e-4, 0.01, 0.9]).repeat_interleave(-(-numel // 3))[:numel]
    mask = torch.rand(numel, generator=generator) < density
    mask[[0, (1 << 18) - 1, 1 << 18, -6, -1]] = True
    new[mask] ^= 1
    count = int(mask.sum())
    for most in (count - 1, count):
        found, other = (kernels.changed(new, old, most) for kernels in (host, reference))
        if most < count:
            assert found is None
            assert other is None
            continue
        assert found is not None
        assert other is not None
        assert found.tolist() == mask.nonzero().squeeze(1).tolist() == other.tolist()
    assert host.digest_run(new, KEY, 5) == reference.digest_run(new, KEY, 5)


@given(
    dtype=widths,
    numel=st.integers(1, 9) | st.sampled_from([TILE - 1, TILE, TILE + 1, 3 * TILE, 3 * TILE + 9]),
    data=st.data(),
    seed=seeds,
    offset=st.integers(0, 2),
)
def test_tiles_differ_as_plain_reckoning_says(
    dtype: torch.dtype, numel: int, data: st.DataObject, seed: int, offset: int
) -> None:
    """Few changes, or most, or those of a tile at its ends; and tiles that go whole anyway.

    Some tiles are shorter, as those of several small tensors.
    """
    old = random_integers(dtype, numel + offset, seed)[offset:].numpy()
    rng, size, new = np.random.default_rng(seed), dtype.itemsize, old.copy()
    others = data.draw(st.sets(st.integers(0, numel - 1), max_size=4))
    begins = np.array(sorted({*range(0, numel, TILE), *others}))
    parts = [slice(*one) for one in pairwise([*begins.tolist(), numel])]
    ahead = np.zeros(len(begins), np.bool_)
    for tile, part in enumerate(parts):
        inside = new[part]
        density = data.draw(st.sampled_from([0.0, 0.001, 0.3, size / (2 + size), 0.9, 1.0]))
        inside[rng.random(len(inside)) < density] ^= 1
        if data.draw(st.booleans()):
            inside[0] ^= 1
            inside[-1] ^= 1
        ahead[tile] = data.draw(st.integers(0, 5)) == 0
    new, old = (bits.view(f"u{size}") for bits in (new, old))
    tiles, counts, places, values, changed = [], [], [], [], []
    for tile, part in enumerate(parts):
        where = np.flatnonzero(new[part] != old[part])
        if not len(where) and not ahead[tile]:
            continue
        is_whole = ahead[tile] or len(where) * (2 + size) > len(new[part]) * size
        tiles.append(tile)
        changed.append(len(new[part]) if ahead[tile] else len(where))
        counts.append(0 if is_whole else len(where))
        if not is_whole:
            places += where.tolist()
            values += new[part][where].tolist()
    found = host.differing(new, old, begins, ahead)
    if not tiles:
        assert found is None
        return
    assert found is not None
    assert [column.tolist() for column in found] == [tiles, counts, places, values, changed]


@every_kernel
@given(
    row=st.lists(st.integers(-1, 9) | st.sampled_from([-(1 << 31), (1 << 31) - 1]), max_size=5),
    is_sorted=st.booleans(),
    span=st.integers(1, 10) | st.just(1 << 33),
)
def test_indices_have_to_increase_within_their_span(
    kernels: Kernels, row: list[int], is_sorted: bool, span: int
) -> None:
    row = sorted(row) if is_sorted else row
    good = row == sorted(set(row)) and all(0 <= n < span for n in row)
    assert kernels.is_increasing(torch.tensor(row, dtype=torch.int32), span) == good


@every_kernel
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2])
def test_is_increasing_looks_across_its_blocks(kernels: Kernels, blocks: int, offset: int) -> None:
    n = blocks * host._COMPARED + offset
    good = torch.arange(n, dtype=torch.int32)
    assert kernels.is_increasing(good, n)
    for at in {host._COMPARED - 1, host._COMPARED, host._COMPARED + 1, n - 1} & set(range(1, n)):
        bad = good.clone()
        bad[at] = bad[at - 1]
        assert not kernels.is_increasing(bad, n), at


@every_kernel
@given(
    dtype=widths,
    n=lengths,
    seed=seeds,
    start=st.sampled_from([0, 1, (1 << 31) - 3, 1 << 40]),
    key=st.sampled_from([KEY, MASK]),
)
def test_digest_of_a_run(
    kernels: Kernels, dtype: torch.dtype, n: int, seed: int, start: int, key: int
) -> None:
    bits = random_integers(dtype, n, seed)
    expected = sum(mix(key, start + i, value) for i, value in enumerate(unsigned(bits))) & MASK
    assert kernels.digest_run(bits, key, start) == expected
