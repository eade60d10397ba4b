"""Codec `gap` + `ulp`, W27 and W28: what it writes, what it refuses, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltasync.delta.codecs.base import CodedRow, SparseRow, unsigned_dtype
from deltasync.delta.codecs.gap import GapUlp, decode_gaps, encode_gaps
from deltasync.dtypes import BY_NAME, Dtype
from deltasync.errors import InvalidIndices, WireError
from tests.worlds.strategies import DTYPES, SEEDS

MAX_SPAN = (1 << 31) - 1
CODEC = GapUlp()


def _bits(dtype: Dtype, n: int, rng: np.random.Generator) -> NDArray[Any]:
    return np.frombuffer(rng.bytes(n * dtype.item_size), unsigned_dtype(dtype))


def _block(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _there_and_back(row: SparseRow) -> tuple[NDArray[np.int32], NDArray[Any]]:
    [(index, value)] = CODEC.encode([row])
    coded = CodedRow(_block(index), _block(value), len(row.indices), row.span, row.dtype)
    [indices] = CODEC.indices([coded])
    [values] = CODEC.values([coded], [indices], [row.old])
    return indices, values


@given(dtype=DTYPES, seed=SEEDS, span=st.integers(1, 300_000), density=st.floats(0, 1))
def test_any_row_comes_back(dtype: Dtype, seed: int, span: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    count = max(1, int(span * density**3))
    indices = np.sort(rng.choice(span, count, replace=False)).astype(np.int32)
    old, new = _bits(dtype, count, rng), _bits(dtype, count, rng).copy()
    near = rng.random(count) < 0.9
    new[near] = old[near] + rng.integers(0, 3, near.sum()).astype(old.dtype)
    found, values = _there_and_back(SparseRow(indices, new, old, span, dtype))
    assert np.array_equal(found, indices)
    assert np.array_equal(values, new)


@given(
    gaps=st.lists(
        st.one_of(
            st.integers(0, 600), st.sampled_from([254, 255, 256, 510, 65_534, 65_535, 131_070])
        ),
        min_size=1,
        max_size=50,
    )
)
@example(gaps=[MAX_SPAN - 1])
@example(gaps=[0, MAX_SPAN - 2])
def test_any_gap_comes_back(gaps: list[int]) -> None:
    indices = (np.cumsum(np.array(gaps) + 1) - 1).astype(np.int32)
    span = int(indices[-1]) + 1
    block = encode_gaps(indices)
    assert np.array_equal(decode_gaps(_block(block), len(indices), span), indices)
    with pytest.raises(InvalidIndices):
        decode_gaps(_block(block), len(indices), span - 1)


def test_w27_few_changes_have_gaps_of_two_bytes_side_by_side() -> None:
    assert encode_gaps(np.array([0, 1, 5], np.int32)).hex() == "01" + "000003"
    assert encode_gaps(np.array([255, 600], np.int32)).hex() == "01" + "ff00" + "ff59"
    assert encode_gaps(np.array([0x203, 0x1000], np.int32)).hex() == "02" + "03fc" + "020d"


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ("", "no width"),
        ("00" + "0000", "width 0"),
        ("03" + "0000", "width 3"),
        ("01" + "00", "too few gaps"),
        ("01" + "000000", "too many gaps"),
        ("01" + "00ff", "an escape at the end"),
        ("01" + "ffffff", "escapes alone"),
        ("02" + "000000", "half a gap"),
        ("01" + "00fe", "beyond the span"),
    ],
)
def test_w27_other_blocks_are_refused(block: str, why: str) -> None:
    with pytest.raises(WireError):
        decode_gaps(_block(bytes.fromhex(block)), 2, 200)


def test_w28_steps_are_zigzagged_and_far_ones_are_new_bits() -> None:
    dtype = BY_NAME["bfloat16"]
    old = np.array([0x3F80, 0x3F80, 0x0000, 0x3F80], np.uint16)
    new = np.array([0x3F81, 0x3F7F, 0x8000, 0x7FC1], np.uint16)
    row = SparseRow(np.arange(4, dtype=np.int32), new, old, 4, dtype)
    [(_, value)] = CODEC.encode([row])
    assert value.hex() == "02" + "01" + "01" + "ff" + "c17f"


@pytest.mark.parametrize(("new", "value"), [(0x3FFF, "fe"), (0x3F00, "ff003f"), (0x4000, "ff0040")])
def test_w28_the_largest_step_is_254(new: int, value: str) -> None:
    bits = np.array([new], np.uint16), np.array([0x3F80], np.uint16)
    row = SparseRow(np.zeros(1, np.int32), *bits, 1, BY_NAME["bfloat16"])
    assert CODEC.encode([row])[0][1].hex() == value


@pytest.mark.parametrize("value", ["", "0000", "000000ff", "0000ff", "000000c17f", "ffffff0000"])
def test_w28_value_blocks_of_another_length_are_refused(value: str) -> None:
    coded = CodedRow(_block(b"\x01\0\0\0"), _block(bytes.fromhex(value)), 3, 9, BY_NAME["float16"])
    old = np.zeros(3, np.uint16)
    with pytest.raises(WireError):
        CODEC.values([coded], CODEC.indices([coded]), [old])


@given(dtype=DTYPES, data=st.binary(max_size=60), count=st.integers(1, 40))
def test_arbitrary_blocks_are_refused_or_sound(dtype: Dtype, data: bytes, count: int) -> None:
    coded = CodedRow(_block(data[:20]), _block(data[20:]), count, 100, dtype)
    try:
        [indices] = CODEC.indices([coded])
    except WireError:
        pass
    else:
        assert len(indices) == count
        assert 0 <= indices[0] <= indices[-1] < 100
        assert (np.diff(indices) > 0).all()
    old = np.zeros(count, unsigned_dtype(dtype))
    try:
        [values] = CODEC.values([coded], [np.arange(count, dtype=np.int32)], [old])
    except WireError:
        return
    assert len(values) == count


def test_a_count_beyond_the_block_takes_no_memory() -> None:
    coded = CodedRow(_block(b"\x01"), _block(b""), MAX_SPAN, MAX_SPAN, BY_NAME["float32"])
    with pytest.raises(WireError):
        CODEC.indices([coded])
    with pytest.raises(WireError):
        CODEC.values([coded], [], [np.zeros(0, np.uint32)])
