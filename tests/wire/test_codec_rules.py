"""Rules W32 to W36 of docs/wire-format.md: blocks of `block` and `class` that must be refused."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from deltasync import dtypes
from deltasync.delta.codecs import blocks, class_positions, class_values
from deltasync.delta.codecs.bitstream import pack_unary, varints
from deltasync.errors import InvalidIndices, InvalidTable, TruncatedFrame, WireError

BF16, FLOAT64 = (dtypes.BY_NAME[name] for name in ("bfloat16", "float64"))
OLD = np.full(2000, 0x3F80, np.uint16)  # all of one key
SPAN = len(OLD)
LANE = varints(10)
ONE_CLASS = varints(1)


def array(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def unary(*numbers: int) -> bytes:
    return pack_unary(np.array(numbers, np.int64))


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("030200000000000000000000", InvalidTable),  # blocks of 8
        ("110200000000000000000000", InvalidTable),  # and of 2^17
        ("080000000000000000000000", InvalidTable),  # no bits for counts
        ("080a00000000000000000000", InvalidTable),  # more than a block can need
        ("080101000100000000000000", InvalidTable),
        ("080100010100000000000000", InvalidTable),
        ("080100", TruncatedFrame),
        ("0801000001000000", TruncatedFrame),
        ("08010000010000000000000000", TruncatedFrame),
        ("080100000300000000000000", InvalidIndices),  # two changes of one
        ("080100000000000000000000", InvalidIndices),
    ],
)
def test_w32_index_blocks(block: str, error: type[WireError]) -> None:
    good = bytes.fromhex("080100000100000007000000")
    assert blocks.decode_indices(array(good), 1, SPAN).tolist() == [7]
    with pytest.raises(error):
        blocks.decode_indices(array(bytes.fromhex(block)), 1, SPAN)


@pytest.mark.parametrize("block", ["", "0b0000", "0b000000", "0b00000001000000", "0b000000" * 4])
def test_w33_value_blocks(block: str) -> None:
    """Codes 3 and 2: a whole value of 2 bytes, and a nibble."""
    good = bytes.fromhex("0b00000001000000cdab0000")
    found = blocks.decode_values(array(good), OLD[:2], BF16)
    assert found.tolist() == [0xABCD, 0x3F80 + 2]  # zigzag 4
    with pytest.raises(TruncatedFrame):
        blocks.decode_values(array(bytes.fromhex(block)), OLD[:2], BF16)


def positions(block: bytes, count: int = 1) -> list[int]:
    return list(class_positions.decode(array(block), count, OLD, BF16))


def values(block: bytes, count: int = 2) -> list[int]:
    return list(class_values.decode(array(block), OLD[:count], BF16))


GOOD_POSITIONS = LANE + ONE_CLASS + varints(0, 1) + b"\1" + varints(1) + unary(0) + b"\7\0"
GOOD_VALUES = ONE_CLASS + varints(0) + varints(1, 0) + varints(1, 0) + b"\1" + unary(1, 3)


def test_w34_numbers_outside_their_limits() -> None:
    assert positions(GOOD_POSITIONS) == [7]
    assert values(GOOD_VALUES) == [1, 10]
    rest = GOOD_POSITIONS[len(LANE + ONE_CLASS) :]
    for header in (
        varints(9) + ONE_CLASS,
        varints(21) + ONE_CLASS,
        LANE + varints(0),
        LANE + varints(65, *[1] * 64),
        LANE + varints(2, 0),
        LANE + varints(2, 256),
        LANE + ONE_CLASS + varints((1 << 10) + 1),
        LANE + ONE_CLASS + varints(0, 12),
    ):
        with pytest.raises(InvalidTable):
            positions(header + rest)
    for numbers in (varints(65) + bytes(200), varints(0) + varints(1, 57)):
        with pytest.raises(InvalidTable):
            values(ONE_CLASS + numbers + GOOD_VALUES[3:])
    frequent = array(ONE_CLASS + varints(1) + bytes(99))
    with pytest.raises(InvalidTable):
        class_values.decode(frequent, np.zeros(1, np.uint64), FLOAT64)
    with pytest.raises(TruncatedFrame):
        positions(b"\x8a\x80\x80\x80\x80\0" + GOOD_POSITIONS[1:])


def test_w35_more_changes_or_longer_gaps_than_there_are() -> None:
    with pytest.raises(InvalidIndices):
        positions(GOOD_POSITIONS, count=2)
    last_lane = LANE + ONE_CLASS + varints(1000, 0) + varints(0)  # of 976 elements
    with pytest.raises(InvalidIndices):
        positions(last_lane, count=2000)
    far = LANE + ONE_CLASS + varints(0, 1) + b"\1" + varints(1) + unary(4) + b"\7\0"
    with pytest.raises(InvalidIndices):
        positions(far)
    with pytest.raises(InvalidIndices):
        values(ONE_CLASS + varints(0) + varints(3, 0) + varints(1, 0) + b"\1" + unary(1, 3))


def test_w36_bytes_too_few_or_too_many() -> None:
    for cut in range(len(GOOD_POSITIONS)):
        with pytest.raises(TruncatedFrame):
            positions(GOOD_POSITIONS[:cut])
    for cut in range(len(GOOD_VALUES)):
        with pytest.raises(TruncatedFrame):
            values(GOOD_VALUES[:cut])
    for decode, good in ((positions, GOOD_POSITIONS), (values, GOOD_VALUES)):
        with pytest.raises(TruncatedFrame):
            decode(good + b"\0")
    escaped = ONE_CLASS + varints(0) + varints(1, 0) + varints(4, 0) + b"\1"
    assert values(escaped + unary(1, 24) + b"\x64\0") == [1, 204]
    with pytest.raises(InvalidTable):
        values(escaped + unary(1, 25) + b"\x64\0")
