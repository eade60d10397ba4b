"""The codec `block` in Triton: the same bytes as in numpy, and back.

Without a GPU kernels run under Triton's interpreter.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync.delta.codecs.base import Needs, SparseRow
from deltasync.dtypes import BY_NAME, Dtype
from tests.delta.device_rows import (
    DEVICE,
    check,
)
from tests.delta.row_codec_contract import any_pair, row_of, weights
from tests.worlds.strategies import DTYPES, SEEDS

few = settings(max_examples=15 if DEVICE.type == "cpu" else 200)


@few
@given(
    dtype=DTYPES,
    shapes=st.lists(
        st.tuples(st.integers(1, 4000), st.sampled_from([0.0, 0.01, 0.3, 1.0])),
        min_size=1,
        max_size=4,
    ),
    seed=SEEDS,
)
def test_any_rows(dtype: Dtype, shapes: list[tuple[int, float]], seed: int) -> None:
    rows = list[SparseRow]()
    for number, (span, density) in enumerate(shapes):
        new, old = any_pair(dtype, span, density, seed + number)
        rows.append(row_of(new, old, dtype, Needs.CHANGED)[0])
    check(rows)


def test_rows_longer_than_a_tile() -> None:
    """Weights of few changes; and full rows: every tile of changes and fields has a next one."""
    rng = np.random.default_rng(3)
    pairs = [weights(span, 3e-4, rng) for span in (100_000, 30_001)]
    old = np.zeros(5000, np.uint16)
    pairs += [(rng.integers(1, 30, 5000).astype(np.uint16), old)] * 2
    check([row_of(*pair, BY_NAME["bfloat16"], Needs.CHANGED)[0] for pair in pairs])
