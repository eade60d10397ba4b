"""The codec of fixed widths: its cost, and that it keeps every bit."""

from __future__ import annotations

import numpy as np
import pytest

from deltasync import dtypes
from deltasync.delta.codecs.blocks import BlockCodec, Shape, decode_indices, encode_indices
from deltasync.errors import InvalidIndices, WireError
from tests.delta.row_codec_contract import RowCodecContract, row_of, weights

BF16 = dtypes.BY_NAME["bfloat16"]


class TestBlock(RowCodecContract):
    codec = BlockCodec()
    golden = ("040200001700000030440f00", "e10300000f000000e43e5ebc")


def test_weights_cost_little() -> None:
    """Below what offsets of 8 bits, a byte for each 256 elements and 3 bits a step would cost."""
    new, old = weights(1 << 20, 3e-4, np.random.default_rng(0))
    row, _ = row_of(new, old, BF16, BlockCodec.needs)
    ((index, value),) = BlockCodec().encode([row])
    assert len(index) < len(row.indices) + (1 << 20) // 256
    assert 8 * len(value) < 4 * len(row.indices)


@pytest.mark.parametrize("block_bits", range(4, 17))
def test_every_width_of_blocks(block_bits: int) -> None:
    rng = np.random.default_rng(block_bits)
    indices = np.flatnonzero(rng.random(200_001) < 0.03).astype(np.int32)
    most = np.bincount(indices >> block_bits).max()
    for count_bits in {int(most).bit_length(), block_bits + 1}:
        shape = Shape(block_bits, count_bits)
        block = np.frombuffer(encode_indices(indices, shape, 200_001), np.uint8)
        found = decode_indices(block, len(indices), 200_001)
        assert np.array_equal(found, indices)


def test_a_full_block_can_be_counted() -> None:
    indices = np.arange(512, dtype=np.int32)
    block = np.frombuffer(encode_indices(indices, Shape.of(indices, 512), 512), np.uint8)
    assert np.array_equal(decode_indices(block, 512, 512), indices)


@pytest.mark.parametrize("count", [2, 4])
def test_blocks_that_count_other_changes_are_refused(count: int) -> None:
    """The index block has three changes, and offsets for them."""
    indices = np.array([1, 2, 300], np.int32)
    block = bytearray(encode_indices(indices, Shape(8, 8), 512))
    block[4] = count - 1
    with pytest.raises(InvalidIndices):
        decode_indices(np.frombuffer(block, np.uint8), 3, 512)


@pytest.mark.parametrize(
    "header", ["03010000", "11010000", "08000000", "080a0000", "08010001", "08"]
)
def test_headers_outside_the_table(header: str) -> None:
    block = np.frombuffer(bytes.fromhex(header) + bytes(8), np.uint8)
    with pytest.raises(WireError):
        decode_indices(block[: len(header) // 2] if len(header) < 8 else block, 1, 300)
