"""Bit patterns as numbers in the order of their values."""

from __future__ import annotations

import numpy as np
import pytest

from deltasync.dtypes import BY_NAME
from deltasync.files.steps import zigzag


@pytest.mark.parametrize("name", ["float8_e5m2", "bfloat16", "float16", "float32", "float64"])
def test_minus_zero_is_one_step_below_zero(name: str) -> None:
    dtype = BY_NAME[name]
    minus = np.array([1 << 8 * dtype.item_size - 1], f"u{dtype.item_size}")
    zero = np.zeros(1, f"u{dtype.item_size}")
    assert zigzag(minus, zero, dtype).tolist() == [1]
    assert zigzag(zero, minus, dtype).tolist() == [2]
