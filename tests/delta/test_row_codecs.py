"""Codecs of sparse rows: the contract, and what the blocks of each must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltasync.delta.bits import torch_dtype
from deltasync.delta.codecs.base import CodedRow, Needs, SparseRow, unsigned_dtype
from deltasync.delta.codecs.blocks import BlockCodec, Shape, decode_indices, encode_indices
from deltasync.delta.codecs.class_order import Order
from deltasync.delta.codecs.classes import ClassCodec
from deltasync.delta.codecs.gap import GapUlp, decode_gaps, encode_gaps
from deltasync.delta.codecs.steps import in_order, stepped, zigzag
from deltasync.dtypes import BY_NAME, DTYPES, Dtype
from deltasync.errors import InvalidIndices, WireError
from tests.delta.row_codec_contract import RowCodecContract, assert_round_trip, row_of, weights

BF16 = BY_NAME["bfloat16"]
MAX_SPAN = (1 << 31) - 1


def _block(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


class TestGap(RowCodecContract):
    codec = GapUlp()
    golden = ("010002000f1a", "020112ffffe43e5ebc")


class TestBlock(RowCodecContract):
    codec = BlockCodec()
    golden = ("040200001700000030440f00", "e10300000f000000e43e5ebc")


class TestClass(RowCodecContract):
    codec = ClassCodec()
    golden = ("12010500021701102e", "0100030d0105128f074057ec62")


# Gaps and steps


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
@example(gaps=[1, 300] * 40_000)  # longer than what is worked on at once
def test_any_gap_comes_back(gaps: list[int]) -> None:
    indices = (np.cumsum(np.array(gaps) + 1) - 1).astype(np.int32)
    span = int(indices[-1]) + 1
    block = _block(encode_gaps(indices))
    assert np.array_equal(decode_gaps(block, len(indices), span), indices)
    with pytest.raises(InvalidIndices):
        decode_gaps(block, len(indices), span - 1)


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


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        (0x3F80, 0x3F81, "02"),
        (0x3F80, 0x3F7F, "01"),
        (0x0000, 0x8000, "01"),
        (0x3F80, 0x7FC1, "ffc17f"),
        (0x3F80, 0x3FFF, "fe"),  # the largest step is 254
        (0x3F80, 0x3F00, "ff003f"),
        (0x3F80, 0x4000, "ff0040"),
    ],
)
def test_w28_steps_are_zigzagged_and_far_ones_are_new_bits(old: int, new: int, value: str) -> None:
    bits = np.array([new], np.uint16), np.array([old], np.uint16)
    row = SparseRow(np.zeros(1, np.int32), *bits, 1, BF16)
    assert GapUlp().encode([row])[0][1].hex() == value


@pytest.mark.parametrize("value", ["", "0000", "000000ff", "0000ff", "000000c17f", "ffffff0000"])
def test_w28_value_blocks_of_another_length_are_refused(value: str) -> None:
    coded = CodedRow(_block(b"\x01\0\0\0"), _block(bytes.fromhex(value)), 3, 9, BY_NAME["float16"])
    with pytest.raises(WireError):
        GapUlp().values([coded], GapUlp().indices([coded]), [np.zeros(3, np.uint16)])


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.item_size <= 2], ids=lambda d: d.name)
def test_steps_go_from_any_pattern_to_any_in_the_order_of_the_values(dtype: Dtype) -> None:
    bits = np.arange(1 << 8 * dtype.item_size).astype(unsigned_dtype(dtype))
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
    minus = np.array([1 << 8 * dtype.item_size - 1], unsigned_dtype(dtype))
    zero = np.zeros(1, unsigned_dtype(dtype))
    assert zigzag(minus, zero, dtype).tolist() == [1]
    assert zigzag(zero, minus, dtype).tolist() == [2]


# Blocks


@pytest.mark.parametrize("block_bits", range(4, 17))
def test_every_width_of_blocks(block_bits: int) -> None:
    rng = np.random.default_rng(block_bits)
    indices = np.flatnonzero(rng.random(200_001) < 0.03).astype(np.int32)
    most = np.bincount(indices >> block_bits).max()
    for count_bits in {int(most).bit_length(), block_bits + 1}:
        block = _block(encode_indices(indices, Shape(block_bits, count_bits), 200_001))
        assert np.array_equal(decode_indices(block, len(indices), 200_001), indices)


@pytest.mark.parametrize("count", [2, 4])
def test_blocks_that_count_other_changes_are_refused(count: int) -> None:
    """The index block has three changes, and offsets for them."""
    indices = np.array([1, 2, 300], np.int32)
    block = bytearray(encode_indices(indices, Shape(8, 8), 512))
    block[4] = count - 1
    with pytest.raises(InvalidIndices):
        decode_indices(_block(bytes(block)), 3, 512)


# Classes


def test_positions_in_several_lanes_and_groups() -> None:
    """A row longer than what is decoded at once, whose last lane is short."""
    new, old = weights((1 << 22) + (1 << 18) + 77, 0.01, np.random.default_rng(0))
    new[-1] ^= 1
    assert_round_trip(ClassCodec(), [row_of(new, old, BF16, Needs.SPAN)])


def test_a_short_row_takes_no_memory_of_a_lane() -> None:
    """Models have many, and a stranger's block can say that lanes are long."""
    order = Order(np.zeros(65, np.uint16), BF16, 1 << 20, [0, 3])
    assert order._words.size == 2 * 2


@pytest.mark.parametrize(("dtype", "bits"), [("uint8", 4), ("int32", 4), ("uint16", 8)])
def test_steps_of_codes_that_share_an_integer_are_cheap(dtype: str, bits: int) -> None:
    """A step of one of several codes takes about as long as the place of the code, and a sign."""
    rng = np.random.default_rng(0)
    kind = BY_NAME[dtype]
    old: NDArray[Any] = rng.integers(0, 1 << 8 * kind.item_size, 1 << 17)
    old = old.astype(unsigned_dtype(kind))
    places = 8 * kind.item_size // bits
    shift = rng.integers(0, places, len(old)).astype(np.uint64) * np.uint64(bits)
    moved = np.where(rng.random(len(old)) < 0.02, np.uint64(1) << shift, np.uint64(0))
    new = np.where(rng.random(len(old)) < 0.5, old + moved, old - moved).astype(old.dtype)
    pair = row_of(new, old, kind, Needs.SPAN)
    ((_, value),) = assert_round_trip(ClassCodec(), [pair])
    assert 8 * len(value) < (np.log2(2 * places) + 2.2) * len(pair[0].indices)
