"""Bit patterns as numbers in the order of their values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltasync.delta.bits import torch_dtype
from deltasync.delta.steps import in_order, stepped, zigzag
from deltasync.dtypes import BY_NAME, DTYPES, Dtype


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.item_size <= 2], ids=lambda d: d.name)
def test_steps_go_from_any_pattern_to_any_in_the_order_of_the_values(dtype: Dtype) -> None:
    bits = np.arange(1 << 8 * dtype.item_size).astype(f"u{dtype.item_size}")
    bits = bits[np.argsort(in_order(bits, dtype), kind="stable")]
    if dtype.name != "bool":
        signed = torch.from_numpy(bits.view(f"i{dtype.item_size}").copy())
        values = signed.view(torch_dtype(dtype)).double()
        values = values[~values.isnan()]
        assert bool((values[1:] >= values[:-1]).all())
    other = np.random.default_rng(0).permutation(bits)
    assert np.array_equal(stepped(zigzag(other, bits, dtype), bits, dtype), other)


@pytest.mark.parametrize("name", ["float8_e5m2", "bfloat16", "float16", "float32", "float64"])
def test_minus_zero_is_one_step_below_zero(name: str) -> None:
    dtype = BY_NAME[name]
    minus = np.array([1 << 8 * dtype.item_size - 1], f"u{dtype.item_size}")
    zero = np.zeros(1, f"u{dtype.item_size}")
    assert zigzag(minus, zero, dtype).tolist() == [1]
    assert zigzag(zero, minus, dtype).tolist() == [2]
