"""The codec `block` in Triton: the same bytes as in numpy, and back.

Without a GPU kernels run under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync.delta.codecs import blocks
from deltasync.delta.codecs.base import Bits, Needs, SparseRow, unsigned_dtype
from deltasync.delta.codecs.blocks import Shape
from deltasync.delta.codecs.device_blocks import likely_bits
from deltasync.dtypes import BY_NAME, Dtype
from deltasync.errors import WireError
from tests.delta.device_rows import (
    DEVICE,
    check,
    decoded_indices,
    decoded_values,
    encoded,
    placed,
    rows_of,
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


@pytest.mark.parametrize("density", [1e-4, 3e-4, 1e-2])
def test_weights(density: float) -> None:
    rng = np.random.default_rng(3)
    pairs = [weights(span, density, rng) for span in (100_000, 30_001)]
    check([row_of(*pair, BY_NAME["bfloat16"], Needs.CHANGED)[0] for pair in pairs])


def test_blocks_of_more_tiles_than_one() -> None:
    """A full row: every tile of changes, fields and blocks has a next one."""
    old = np.zeros(5000, np.uint16)
    new = np.random.default_rng(0).integers(1, 30, 5000).astype(np.uint16)
    check([row_of(new, old, BY_NAME["bfloat16"], Needs.CHANGED)[0]] * 2)


def test_likely_shapes_are_nearly_the_best() -> None:
    for density in (1e-4, 1e-3, 1e-2, 0.1, 0.5):
        mask = np.random.default_rng(0).random(1 << 18) < density
        indices = np.flatnonzero(mask).astype(np.int32)
        [bits] = likely_bits(np.array([len(indices)]), np.array([1 << 18])).tolist()
        most = int(np.bincount(indices >> bits).max())
        cost = Shape(bits, most.bit_length()).index_bits(len(indices), 1 << 18)
        best = Shape.of(indices, 1 << 18).index_bits(len(indices), 1 << 18)
        assert cost < 1.05 * best


def answer(decode: Callable[[], Bits]) -> Bits | None:
    """What it returns; None if it refuses."""
    try:
        return decode()
    except WireError:
        return None


@few
@given(seed=SEEDS, cut=st.integers(-8, 8), dtype=st.sampled_from(["bfloat16", "float64"]))
def test_damaged_blocks_are_a_wire_error_or_rows(seed: int, cut: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    new, old = any_pair(BY_NAME[dtype], 3000, 0.05, seed)
    row, _ = row_of(new, old, BY_NAME[dtype], Needs.CHANGED)
    made = encoded([row])
    these = rows_of([row])
    index, value = made.index.clone(), made.value.clone()
    for block in (index, value):
        for at in rng.integers(0, len(block), 2).tolist():
            block[at] = int(rng.integers(256))
    longer = torch.zeros(max(cut, 0), dtype=torch.uint8, device=DEVICE)
    index = torch.cat([index[: len(index) + min(cut, 0)], longer])
    lengths = np.array([len(index)])
    host = np.array(index.tolist(), np.uint8)
    wanted = answer(lambda: blocks.decode_indices(host, len(row.indices), 3000))
    found = answer(lambda: decoded_indices(these, index, lengths).cpu().numpy())
    if wanted is not None:  # the host refuses positions beyond the row, too
        assert found is not None
        assert np.array_equal(found, wanted)
    host, before = np.array(value.tolist(), np.uint8), placed(row.old)
    wanted = answer(lambda: blocks.decode_values(host, row.old, row.dtype))
    found = answer(
        lambda: (
            decoded_values(these, value, made.value_bytes, before)
            .cpu()
            .numpy()
            .view(unsigned_dtype(row.dtype))
        )
    )
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert np.array_equal(found, wanted)
