"""Every kernel module gives the same answers, and the ones that plain Python gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.kernels import KERNELS, Kernels, host, reference
from deltasync.wire import digest

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


def increasing(n: int, span: int, seed: int) -> Tensor:
    """int64[n] distinct positions below `span`, sorted."""
    chosen = np.random.default_rng(seed).choice(span, n, replace=False)
    return torch.from_numpy(np.sort(chosen).astype(np.int64))


@every_kernel
@given(dtype=widths, n=lengths, seed=seeds, density=st.sampled_from([0, 0.1, 0.5, 1]))
def test_changed(kernels: Kernels, dtype: torch.dtype, n: int, seed: int, density: float) -> None:
    old = random_integers(dtype, n, seed)
    mask = torch.from_numpy(np.random.default_rng(seed).random(n) < density)
    new = torch.where(mask, old ^ 1, old)
    expected = [
        i for i, (a, b) in enumerate(zip(new.tolist(), old.tolist(), strict=True)) if a != b
    ]
    for limit in (len(expected), len(expected) + 0.5, n):
        count, found = kernels.changed(new, old, limit)
        assert found is not None
        positions, news, olds = found
        assert positions.dtype == torch.int32
        assert (count, positions.tolist()) == (len(expected), expected)
        assert torch.equal(news, new[expected])
        assert torch.equal(olds, old[expected])
    if expected:
        for limit in (0, len(expected) - 1, len(expected) - 0.5):
            assert kernels.changed(new, old, limit) == (len(expected), None)


@every_width
@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 3), (2, 1)])
@pytest.mark.parametrize("density", [1e-4, 0.01, 0.9])
def test_changed_in_long_runs_wherever_they_lie(
    dtype: torch.dtype, offsets: tuple[int, int], density: float
) -> None:
    numel = (1 << 18) + 5
    new, old = (random_integers(dtype, numel + 3, 0)[o : o + numel] for o in offsets)
    old.copy_(new)
    mask = torch.rand(numel, generator=torch.Generator().manual_seed(1)) < density
    mask[[0, (1 << 18) - 1, 1 << 18, -6, -1]] = True
    new[mask] ^= 1
    (count, found), (expected_count, expected) = (
        kernels.changed(new, old, numel) for kernels in (host, reference)
    )
    assert count == expected_count == int(mask.sum())
    assert found is not None
    assert expected is not None
    assert all(map(torch.equal, found, expected))
    assert host.changed(new, old, count - 1) == (count, None)


@every_kernel
def test_positions_found_outlive_the_next_call(kernels: Kernels) -> None:
    zeros, ones = torch.zeros(8, dtype=torch.int16), torch.ones(8, dtype=torch.int16)
    _, found = kernels.changed(ones, zeros, 8)
    kernels.changed(zeros, zeros, 8)
    kernels.changed(torch.zeros(100, dtype=torch.int64), torch.ones(100, dtype=torch.int64), 1)
    assert found is not None
    assert [column.tolist() for column in found] == [list(range(8)), [1] * 8, [0] * 8]


@every_kernel
@every_width
def test_negative_views_differ_in_their_highest_bit_alone(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    old = torch.zeros(3, dtype=dtype)
    new = old.clone()
    new[1] = torch.iinfo(dtype).min if dtype.is_signed else 128
    count, found = kernels.changed(new, old, 3)
    assert found is not None
    assert (count, found[0].tolist()) == (1, [1])


@every_kernel
@given(n=st.integers(0, 40), seed=seeds)
def test_is_increasing(kernels: Kernels, n: int, seed: int) -> None:
    good = increasing(n, 100, seed).to(torch.int32)
    last = int(good[-1]) if n else -1
    assert kernels.are_increasing([good], [100])
    assert kernels.are_increasing([good], [last + 1])
    assert kernels.are_increasing([good], [1 << 33])
    if not n:
        return
    assert not kernels.are_increasing([good], [last])
    at = seed % n
    for wrong in (-1, 100, (1 << 31) - 1, -(1 << 31)):
        bad = good.clone()
        bad[at] = wrong
        assert not kernels.are_increasing([bad], [100])
    if n > 1:
        bad = good.clone()
        bad[at] = bad[at - 1]
        assert not kernels.are_increasing([bad], [100])
        assert not kernels.are_increasing([good.flip(0)], [100])


@every_kernel
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(-1, 9), max_size=5).map(sorted), st.integers(1, 10)),
        max_size=5,
    )
)
def test_each_of_several_lists_has_to_increase(
    kernels: Kernels, rows: list[tuple[list[int], int]]
) -> None:
    good = all(len(set(row)) == len(row) and set(row) <= set(range(span)) for row, span in rows)
    lists = [torch.tensor(row, dtype=torch.int32) for row, _ in rows]
    assert kernels.are_increasing(lists, [span for _, span in rows]) == good


@every_kernel
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2])
def test_is_increasing_looks_across_its_blocks(kernels: Kernels, blocks: int, offset: int) -> None:
    n = blocks * host._COMPARED + offset
    good = torch.arange(n, dtype=torch.int32)
    assert kernels.are_increasing([good], [n])
    for at in {host._COMPARED - 1, host._COMPARED, host._COMPARED + 1, n - 1} & set(range(1, n)):
        bad = good.clone()
        bad[at] = bad[at - 1]
        assert not kernels.are_increasing([bad], [n]), at


@every_kernel
@given(
    dtype=widths,
    n=lengths,
    span=st.sampled_from([0, 1, 2, 70, 71, 600, 5000]),
    before=st.integers(0, 9),
    at_the_ends=st.booleans(),
    seed=seeds,
)
def test_scatter_writes_its_elements_and_no_others(
    kernels: Kernels,
    dtype: torch.dtype,
    n: int,
    span: int,
    before: int,
    at_the_ends: bool,
    seed: int,
) -> None:
    storage = random_integers(dtype, before + span + 9, seed)
    indices = increasing(min(n, span), span, seed).to(torch.int32)
    if at_the_ends and len(indices) > 1:
        indices[0], indices[-1] = 0, span - 1
    bits, expected = random_integers(dtype, len(indices), seed + 1), storage.tolist()
    for index, value in zip(indices.tolist(), bits.tolist(), strict=True):
        expected[before + index] = value
    kernels.scatter(storage[before : before + span], indices, bits)
    assert storage.tolist() == expected


@every_kernel
@every_width
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("densities", [(1, 0.5, 0.01), (0.01, 1, 1), (0.5, 0.01, 1)], ids=str)
def test_scatter_in_long_runs_of_any_density(
    kernels: Kernels, dtype: torch.dtype, densities: tuple[float, ...], offset: int
) -> None:
    """Each third has enough elements for more than one block, whatever way that is written."""
    rng = np.random.default_rng(0)
    counts = [host._WRITTEN + offset, 2 * host._WRITTEN + offset, host._WRITTEN + 1]
    gaps = [
        np.where(rng.random(n) < density, 1, rng.integers(1, int(2 / density) + 1, n))
        for n, density in zip(counts, densities, strict=True)
    ]
    indices = torch.from_numpy(np.cumsum(np.concatenate(gaps))).to(torch.int32)
    line = random_integers(dtype, int(indices[-1]) + 1, 1)
    bits, expected = random_integers(dtype, len(indices), 2), line.clone()
    expected[indices.long()] = bits
    kernels.scatter(line, indices, bits)
    assert torch.equal(line, expected)


@every_kernel
@given(dtype=widths, n=lengths, seed=seeds, start=st.sampled_from([0, 1, (1 << 31) - 3, 1 << 40]))
def test_digest_of_a_run(
    kernels: Kernels, dtype: torch.dtype, n: int, seed: int, start: int
) -> None:
    bits = random_integers(dtype, n, seed)
    expected = sum(mix(KEY, start + i, value) for i, value in enumerate(unsigned(bits))) & MASK
    assert kernels.digest_run(bits, KEY, start) == expected


@every_kernel
@given(
    dtype=widths,
    n=st.integers(1, 50),
    seed=seeds,
    span=st.sampled_from([50, 1000, 1 << 33]),
    chunk_numel=st.sampled_from([1, 7, 64, 1 << 18]),
)
def test_digests_of_scattered_elements_by_chunk(
    kernels: Kernels, dtype: torch.dtype, n: int, seed: int, span: int, chunk_numel: int
) -> None:
    chunk_numel = max(chunk_numel, span >> 16)  # a sum is kept for each chunk in between
    rng = np.random.default_rng(seed)
    positions = torch.from_numpy(np.unique(rng.integers(0, span, n)))
    bits = random_integers(dtype, len(positions), seed)
    first, sums = kernels.digest_chunks(positions, bits, KEY, chunk_numel)
    expected: dict[int, int] = {}
    for position, value in zip(positions.tolist(), unsigned(bits), strict=True):
        chunk = position // chunk_numel
        expected[chunk] = (expected.get(chunk, 0) + mix(KEY, position, value)) & MASK
    assert first == min(expected)
    assert len(sums) == max(expected) - first + 1
    assert sums.dtype == np.uint64
    assert {first + int(c): int(sums[c]) for c in np.flatnonzero(sums)} == expected


@every_width
@pytest.mark.parametrize("n", [host.BLOCK - 1, host.BLOCK, host.BLOCK + 1, 2 * host.BLOCK])
@pytest.mark.parametrize("chunk_numel", [host.BLOCK - 1, host.BLOCK, 3, 1 << 30])
def test_kernels_agree_across_blocks(dtype: torch.dtype, n: int, chunk_numel: int) -> None:
    bits = random_integers(dtype, n, n)
    assert host.digest_run(bits, KEY, 5) == reference.digest_run(bits, KEY, 5)
    positions = increasing(n, 3 * n, n)
    ours = host.digest_chunks(positions, bits, KEY, chunk_numel)
    theirs = reference.digest_chunks(positions, bits, KEY, chunk_numel)
    assert ours[0] == theirs[0]
    assert same(ours[1], theirs[1])
    whole = torch.arange(n)
    _, sums = host.digest_chunks(whole, bits, KEY, chunk_numel)
    assert int(sums.sum()) & MASK == host.digest_run(bits, KEY, 0)


def test_reference_mixes_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = random_integers(torch.int32, 100, 0)
    whole = reference.digest_run(bits, KEY, 3)
    monkeypatch.setattr(reference, "_BLOCK", 7)
    assert reference.digest_run(bits, KEY, 3) == whole


@every_kernel
@pytest.mark.filterwarnings("error")
def test_a_key_that_wraps_around(kernels: Kernels) -> None:
    bits = torch.full((3,), -1, dtype=torch.int64)
    expected = sum(mix(MASK, (1 << 33) + i, MASK) for i in range(3)) & MASK
    assert kernels.digest_run(bits, MASK, 1 << 33) == expected
    _, sums = kernels.digest_chunks(torch.arange(1 << 33, (1 << 33) + 3), bits, MASK, 1 << 33)
    assert sums.tolist() == [expected]


def test_host_memory_has_the_host_kernels() -> None:
    assert KERNELS["cpu"] is host
    assert KERNELS["meta"] is reference


def same(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> bool:
    return bool(np.array_equal(left, right))
