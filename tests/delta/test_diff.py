"""Finding what changed: runs against plain torch, at chunk boundaries and beyond 2^31 elements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import Flat, Run, are_equal, as_bits, dtype_of, integer_dtype, torch_dtype
from deltasync.delta.diff import find_runs
from deltasync.delta.patch import CHUNK_NUMEL
from deltasync.delta.policy import Policy
from deltasync.delta.readers import WireReader
from tests.worlds import strategies as own

HUGE = (1 << 31) + 5
HUGE_CHUNK = 1 << 24


def runs_between(new: Tensor, old: Tensor, policy: Policy) -> tuple[list[Run], int]:
    return find_runs(WireReader.of(new, dtype_of(old), name="w"), Flat.of(old), policy)


def covered(runs: list[Run]) -> list[int]:
    """Flat positions that the runs write."""
    return [
        run.start + offset
        for run in runs
        for offset in (range(run.span) if run.indices is None else run.indices.tolist())
    ]


@given(pair=own.pairs(), policy=own.policies())
def test_runs_are_what_a_plain_comparison_finds(
    pair: tuple[Tensor, Tensor], policy: Policy
) -> None:
    new, old = pair
    runs, nnz = runs_between(new, old, policy)
    different = (as_bits(new) != as_bits(old)).flatten()
    assert nnz == int(different.sum())
    positions = covered(runs)
    assert positions == sorted(set(positions))
    assert set(different.nonzero().flatten().tolist()) <= set(positions)
    flat_bits = as_bits(new).flatten()
    ends = [0]
    for run in runs:
        assert run.start >= ends[-1]
        ends.append(run.stop)
        if run.indices is not None:
            assert run.bits is not None
            where = run.start + run.indices.long()
            assert different[where].all()
            assert torch.equal(run.bits, flat_bits[where])
    assert ends[-1] <= new.numel()


@given(pair=own.pairs(), chunk_numel=st.integers(1, 20), dense_above=st.floats(0, 1))
def test_a_chunk_is_dense_exactly_above_the_policy_s_density(
    pair: tuple[Tensor, Tensor], chunk_numel: int, dense_above: float
) -> None:
    new, old = pair
    policy = Policy(dense_above=dense_above, chunk_numel=chunk_numel)
    runs, _ = runs_between(new, old, policy)
    dense = {p for run in runs if run.indices is None for p in range(run.start, run.stop)}
    different = (as_bits(new) != as_bits(old)).flatten().tolist()
    for start in range(0, new.numel(), chunk_numel):
        chunk = different[start : start + chunk_numel]
        assert (start in dense) == (sum(chunk) > dense_above * len(chunk))


@pytest.mark.parametrize("numel", [CHUNK_NUMEL - 1, CHUNK_NUMEL, CHUNK_NUMEL + 1])
def test_changes_at_the_edges_of_default_chunks(numel: int) -> None:
    old = torch.zeros(2 * numel, dtype=torch.int16)
    new = old.clone()
    edges = [0, numel - 1, numel, 2 * numel - 1, CHUNK_NUMEL - 1, CHUNK_NUMEL]
    new[edges] = -1
    runs, nnz = runs_between(new, old, Policy(dense_above=1))
    assert covered(runs) == sorted(set(edges))
    assert nnz == len(set(edges))


@dataclass
class Huge:
    """Stands in for a parameter of 2^31 + 5 bytes: zeros but for a few, and never allocated."""

    changed: dict[int, int] = field(default_factory=dict)
    zeros: Tensor = field(default_factory=lambda: torch.zeros(HUGE_CHUNK, dtype=torch.uint8))
    numel: int = HUGE

    @property
    def line(self) -> Tensor:
        return self.zeros

    @property
    def flat(self) -> Huge:
        return self

    def read(self, start: int, stop: int) -> Tensor:
        inside = [position for position in self.changed if start <= position < stop]
        if not inside:
            return self.zeros[: stop - start]
        block = self.zeros[: stop - start].clone()
        for position in inside:
            block[position - start] = self.changed[position]
        return block

    def gather(self, positions: Tensor) -> Tensor:
        found = [self.changed.get(position, 0) for position in positions.tolist()]
        return torch.tensor(found, dtype=torch.uint8)

    def scatter(self, positions: Tensor, bits: Tensor) -> None:
        self.changed.update(zip(positions.tolist(), bits.tolist(), strict=True))

    def write(self, start: int, bits: Tensor) -> None:
        self.scatter(torch.arange(start, start + len(bits)), bits)


def find_huge(new: Huge, policy: Policy) -> tuple[list[Run], int]:
    reader, old = cast("Any", (new, Huge()))
    return find_runs(reader, old, policy)


def test_more_than_int32_elements_stay_in_chunks() -> None:
    changed = {0: 1, HUGE_CHUNK: 2, (1 << 31) - 1: 3, 1 << 31: 4, HUGE - 1: 5}
    runs, nnz = find_huge(Huge(changed), Policy(chunk_numel=HUGE_CHUNK, dense_above=0.5))
    assert nnz == len(changed)
    assert covered(runs) == sorted(changed)
    assert all(run.indices is not None and run.span <= HUGE_CHUNK for run in runs)
    assert [v for run in runs if run.bits is not None for v in run.bits.tolist()] == [1, 2, 3, 4, 5]


def test_dense_tail_beyond_int32_is_one_chunk() -> None:
    runs, nnz = find_huge(Huge({HUGE - 1: 9}), Policy(chunk_numel=HUGE_CHUNK, dense_above=0.1))
    assert nnz == 1
    assert runs == [Run(1 << 31, 5)]


def test_the_crossover_is_as_asked_or_that_of_the_device() -> None:
    assert Policy().crossover("cpu") == 5.7 / 38.0
    assert Policy().crossover("cuda") == 0.0081 / 0.0567
    assert Policy().crossover("xpu") == Policy().crossover("cuda")
    assert (
        Policy(dense_above=0.3).crossover("cpu") == Policy(dense_above=0.3).crossover("xpu") == 0.3
    )


@given(tensor=own.tensors())
def test_flat_access_is_row_major_whatever_the_strides(tensor: Tensor) -> None:
    flat, expected = Flat.of(tensor), as_bits(tensor).contiguous().flatten()
    rng = np.random.default_rng(tensor.numel())
    assert torch.equal(flat.read(0, flat.numel), expected)
    start, stop = sorted(rng.integers(0, flat.numel + 1, 2).tolist())
    assert torch.equal(flat.read(start, stop), expected[start:stop])
    positions = torch.from_numpy(np.flatnonzero(rng.random(flat.numel) < 0.3))
    assert torch.equal(flat.gather(positions), expected[positions])
    flipped = expected ^ 1
    flat.write(start, flipped[start:stop])
    expected[start:stop] = flipped[start:stop]
    flat.scatter(positions, flipped[positions])
    expected[positions] = flipped[positions]
    assert torch.equal(flat.read(0, flat.numel), expected)


@given(
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]),
    numel=st.integers(1, 40),
    offsets=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    step=st.integers(1, 2),
    data=st.data(),
)
def test_bits_are_equal_unless_one_of_them_differs(
    dtype: torch.dtype, numel: int, offsets: tuple[int, int], step: int, data: st.DataObject
) -> None:
    left, right = (torch.zeros(100, dtype=dtype)[n::step][:numel] for n in offsets)
    assert are_equal(left, right)
    left[data.draw(st.integers(0, numel - 1))] = 1
    assert not are_equal(left, right)
    assert are_equal(left[:0], right[:0])


@pytest.mark.promise("Bits", "-0.0, NaN payloads, denormals and every dtype arrive as they are.")
def test_every_dtype_of_the_table_is_known() -> None:
    for dtype in dtypes.DTYPES:
        tensor = torch.zeros(1, dtype=torch_dtype(dtype))
        assert dtype_of(tensor) == dtype
        assert tensor.element_size() == dtype.item_size
        assert as_bits(tensor).dtype == integer_dtype(dtype)
        assert tensor.dtype.is_floating_point == dtype.is_floating
