"""What changed between two versions of weights: against plain reckoning, element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync import sparsity
from deltasync.delta.bits import as_bits, dtype_of
from deltasync.errors import LayoutMismatch
from deltasync.files.sparsity import MAX_STEP, Sparsity
from tests.worlds import strategies as own

FLOATS = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])


def between(first: float, second: float, dtype: torch.dtype) -> Sparsity:
    return sparsity(torch.tensor([first], dtype=dtype), torch.tensor([second], dtype=dtype))


@given(pair=own.pairs())
def test_elements_whose_bits_differ_are_counted(pair: tuple[Tensor, Tensor]) -> None:
    new, old = pair
    found = sparsity(old, new)
    changed = int((as_bits(new) != as_bits(old)).sum())
    assert (found.numel, found.changed) == (old.numel(), changed)
    assert found.density == (changed / old.numel() if old.numel() else 0)
    assert found.steps.sum() == changed
    assert found.steps[0] == 0
    if dtype_of(old).is_floating:
        assert found.exponents.sum(1).tolist() == [old.numel(), changed]


@given(dtype=FLOATS, start=st.floats(-1e4, 1e4, width=16), count=st.integers(1, 2 * MAX_STEP))
def test_a_step_is_the_next_representable_value(
    dtype: torch.dtype, start: float, count: int
) -> None:
    first = torch.tensor([abs(start)], dtype=dtype)  # upwards from here bits count up
    second = (as_bits(first) + count).view(dtype)
    for old, new in ((first, second), (second, first), (-first, -second), (-second, -first)):
        assert sparsity(old, new).steps[min(count, MAX_STEP)] == 1


def test_a_sign_costs_the_way_through_zero() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        assert between(0.0, -0.0, dtype).steps[1] == 1
        tiny = as_bits(torch.zeros(1, dtype=dtype)).add(3).view(dtype)
        assert sparsity(-tiny, tiny).steps[7] == 1
        assert between(math.inf, -math.inf, dtype).steps[MAX_STEP] == 1
    assert between(-3, 4, torch.int8).steps[7] == 1  # integers count as they are
    assert between(100, 228, torch.uint8).steps[128] == 1
    ends = torch.tensor([-(1 << 63), (1 << 63) - 1])
    assert sparsity(ends, ends.flip(0)).steps[MAX_STEP] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_exponents_are_those_of_the_old_values(dtype: torch.dtype) -> None:
    old = torch.tensor([0.0, -1.0, 1.5, 0.0625, 3.0, torch.inf], dtype=dtype)
    found = sparsity(old, torch.where(old == 1.5, 2 * old, old))
    elements, changed = found.exponents
    assert {int(e): int(elements[e]) for e in np.flatnonzero(elements)} == {
        0: 1, 123: 1, 127: 2, 128: 1, 255: 1,
    }  # fmt: skip
    assert np.flatnonzero(changed).tolist() == [127]
    assert sparsity(old, old, exponents=False).exponents.sum() == 0
    halves = zip(old.chunk(2), torch.where(old == 1.5, 2 * old, old).chunk(2), strict=True)
    together = sum((sparsity(*half) for half in halves), Sparsity())
    assert np.array_equal(together.exponents, found.exponents)
    assert np.array_equal(together.steps, found.steps)


def test_bytes_of_encodings() -> None:
    old = torch.zeros(100_000, dtype=torch.bfloat16)
    new = old.clone()
    as_bits(new)[[0, 1, 300, 99_999]] = torch.tensor([1, -1, 126, 500], dtype=torch.int16)
    found = sparsity(old, new).encodings
    gaps = (0, 0, 298, 99_698)
    assert found["dense"] == 200_000
    assert found["int32 + value"] == 4 * 6
    assert found["bitmap + value"] == 12_500 + 4 * 2
    assert found["u16 gap + value"] == sum(2 + 2 * (g // 65_535) for g in gaps) + 4 * 2
    # -1 as bits is a NaN, far from 0; so is the step of 500.
    assert found["u8 gap + u8 step"] == sum(1 + g // 255 for g in gaps) + 4 + 2 * 2
    assert sparsity(old, new, encodings=False).encodings == {}
    same = sparsity(old, old).encodings
    assert {name for name, size in same.items() if size} == {"dense"}


def test_a_wider_dtype_is_rounded_as_on_the_wire() -> None:
    old = torch.ones(4, dtype=torch.bfloat16)
    new = torch.tensor([1.0, 1.001, 1.003, 1.01])  # half a ULP above 1 is 1.0039
    assert sparsity(old, new).changed == 1
    with pytest.raises(LayoutMismatch, match="shape"):
        sparsity(torch.zeros(2, 3), torch.zeros(3, 2))


@pytest.mark.gpu
def test_weights_on_a_gpu_are_measured_as_on_the_host() -> None:
    old = torch.randn(3, 500_000).bfloat16()
    new = torch.where(torch.rand(old.shape) < 0.01, old * 1.01, old)
    here, there = sparsity(old, new), sparsity(old.cuda(), new.cuda())
    assert (there.numel, there.changed) == (here.numel, here.changed)
    assert np.array_equal(there.steps, here.steps)
    assert np.array_equal(there.exponents, here.exponents)
    assert there.encodings["int32 + value"] == here.encodings["int32 + value"]
