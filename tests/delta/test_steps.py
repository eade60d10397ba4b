"""The order of bit patterns, and distances in it: every dtype, every pattern."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from numpy.typing import NDArray

from deltasync.delta.bits import torch_dtype
from deltasync.delta.codecs.base import unsigned_dtype
from deltasync.delta.codecs.steps import in_order, ordered, stepped, unordered, zigzag
from deltasync.dtypes import BY_NAME, DTYPES, Dtype
from tests.worlds.strategies import DTYPES as ANY_DTYPE
from tests.worlds.strategies import SEEDS

SMALL = [dtype for dtype in DTYPES if dtype.item_size <= 2]


def _every(dtype: Dtype) -> NDArray[Any]:
    return np.arange(1 << 8 * dtype.item_size).astype(unsigned_dtype(dtype))


def _random(dtype: Dtype, n: int, seed: int) -> NDArray[Any]:
    data = np.random.default_rng(seed).bytes(n * dtype.item_size)
    return np.frombuffer(data, unsigned_dtype(dtype))


@pytest.mark.parametrize("dtype", SMALL, ids=lambda d: d.name)
def test_each_pattern_has_a_number_of_its_own(dtype: Dtype) -> None:
    bits = _every(dtype)
    numbers = ordered(bits, dtype)
    assert len(np.unique(numbers)) == len(bits)
    assert np.array_equal(unordered(numbers, dtype), bits)


@pytest.mark.parametrize("dtype", [d for d in SMALL if d.name != "bool"], ids=lambda d: d.name)
def test_numbers_are_in_the_order_of_the_values(dtype: Dtype) -> None:
    bits = _every(dtype)
    bits = bits[np.argsort(in_order(bits, dtype), kind="stable")]
    signed = torch.from_numpy(bits.view(f"i{dtype.item_size}").copy())
    values = signed.view(torch_dtype(dtype)).double()
    values = values[~values.isnan()]
    assert bool((values[1:] >= values[:-1]).all())


@given(dtype=ANY_DTYPE, seed=SEEDS)
def test_a_step_from_the_old_bits_gives_the_new_ones(dtype: Dtype, seed: int) -> None:
    old, new = _random(dtype, 300, seed), _random(dtype, 300, seed + 1)
    assert np.array_equal(stepped(zigzag(new, old, dtype), old, dtype), new)


@pytest.mark.parametrize("name", ["float8_e5m2", "bfloat16", "float16", "float32", "float64"])
def test_minus_zero_is_one_step_below_zero(name: str) -> None:
    dtype = BY_NAME[name]
    kind = unsigned_dtype(dtype)
    minus = np.array([1 << 8 * dtype.item_size - 1], kind)
    zero = np.zeros(1, kind)
    assert zigzag(minus, zero, dtype).tolist() == [1]
    assert zigzag(zero, minus, dtype).tolist() == [2]
    assert zigzag(zero, zero, dtype).tolist() == [0]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_no_elements_have_no_steps(dtype: Dtype) -> None:
    none = np.zeros(0, unsigned_dtype(dtype))
    assert len(zigzag(none, none, dtype)) == len(stepped(none, none, dtype)) == 0
