"""Codecs of sparse rows: what all of them keep to, and what the blocks of each must be.

A new codec is done when it stands in CODECS. Payloads of coded rows: `test_coded_payload`; damaged
ones: `tests/wire/test_lies`.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltasync.delta.bits import as_bits, torch_dtype
from deltasync.delta.codecs.base import (
    Bits,
    CodedRow,
    Indices,
    Needs,
    RowCodec,
    SparseRow,
    unsigned_dtype,
)
from deltasync.delta.codecs.blocks import BlockCodec, Shape, decode_indices, encode_indices
from deltasync.delta.codecs.gap import decode_gaps, decode_steps, encode_gaps, encode_steps
from deltasync.delta.codecs.steps import in_order, stepped, zigzag
from deltasync.dtypes import BY_NAME, DTYPES, Dtype
from deltasync.errors import InvalidIndices, WireError
from deltasync.store.classes.codec import ClassCodec
from deltasync.wire.codecs import IndexCodec, ValueCodec
from tests.worlds import strategies as own
from tests.worlds.bits import flipped, random_bits


class GapUlp:
    """Gaps and steps, which payloads also combine with raw blocks."""

    index_codec, value_codec, needs = IndexCodec.GAP, ValueCodec.ULP, Needs.CHANGED

    def encode(self, row: SparseRow) -> tuple[bytes, bytes]:
        return encode_gaps(row.indices), encode_steps(row)

    def indices(self, row: CodedRow) -> Indices:
        return decode_gaps(row.index, row.count, row.span)

    def values(self, row: CodedRow, old: Bits) -> Bits:
        return decode_steps(row, old)


CODECS: list[RowCodec] = [GapUlp(), BlockCodec(), ClassCodec()]
BF16 = BY_NAME["bfloat16"]
MAX_SPAN = (1 << 31) - 1
MAX_ALLOCATED_BYTES = 4 << 20  # for rows of a few thousand elements

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.index_codec.name.lower())


@st.composite
def bit_pairs(draw: st.DrawFn) -> tuple[Dtype, Bits, Bits]:
    """A dtype, new and old bits of which at least one differs: special values and noise."""
    dtype, span = draw(own.DTYPES), draw(st.integers(1, 20) | st.integers(1, 3000))
    rng = np.random.default_rng(draw(own.SEEDS))
    density = draw(st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]))
    old = random_bits(dtype, span, rng)
    new = flipped(old, rng.random(span) < density, rng)
    if dtype.name != "bool" and draw(st.booleans()):
        other = as_bits(random_bits(dtype, span, rng))
        new[new != old] = other[new != old]
    if bool((new == old).all()):
        new[rng.integers(span)] ^= 1
    unsigned = unsigned_dtype(dtype)
    return dtype, new.numpy().view(unsigned), old.numpy().view(unsigned)


def weights(span: int, density: float) -> tuple[Bits, Bits]:
    """uint16[span] new and old bfloat16 weights: small ones change more often, and by more."""
    rng = np.random.default_rng(1)
    value = (rng.standard_normal(span) * 0.02).astype(np.float32)
    size = 0.02 * density * rng.standard_normal(span).astype(np.float32)
    old, new = (whole.view(np.uint32) >> 16 for whole in (value, value + size))
    return new.astype(np.uint16), old.astype(np.uint16)


def row_of(codec: RowCodec, dtype: Dtype, new: Bits, old: Bits) -> SparseRow:
    indices = np.flatnonzero(new != old).astype(np.int32)
    known = old if codec.needs is Needs.SPAN else old[indices]
    return SparseRow(indices, new[indices], known, len(old), dtype)


def decoded(codec: RowCodec, row: SparseRow, old: Bits, *blocks: bytes) -> tuple[Bits, Bits]:
    """(indices, values) that blocks say, the indices checked as callers do."""
    index, value = (np.frombuffer(block, np.uint8) for block in blocks)
    known = old if codec.needs is Needs.SPAN else None
    coded = CodedRow(index, value, len(row.indices), row.span, row.dtype, known)
    found = codec.indices(coded)
    assert found.dtype == np.int32
    assert len(found) == coded.count
    if (np.diff(found) < 1).any() or found[0] < 0 or found[-1] >= row.span:
        raise WireError("not increasing")
    return found, codec.values(coded, old[found])


def assert_comes_back(codec: RowCodec, dtype: Dtype, new: Bits, old: Bits) -> int:
    """Returns the bytes of the blocks."""
    row = row_of(codec, dtype, new, old)
    blocks = codec.encode(row)
    indices, values = decoded(codec, row, old, *blocks)
    assert values.dtype == unsigned_dtype(dtype)
    assert np.array_equal(indices, row.indices)
    assert np.array_equal(values, row.new)
    return sum(map(len, blocks))


@every_codec
@given(case=bit_pairs())
def test_rows_of_any_bits_come_back(codec: RowCodec, case: tuple[Dtype, Bits, Bits]) -> None:
    assert_comes_back(codec, *case)


@every_codec
def test_weights_of_any_density_come_back_and_take_no_more_than_raw(codec: RowCodec) -> None:
    """The longest row has several lanes and groups of `class`, and a last lane that is short."""
    long = (1 << 21) + (1 << 18) + 77
    for span, density in ((300_000, 1e-4), (long, 1e-2), (300_000, 0.99), (300_000, 30.0)):
        new, old = weights(span, density)
        new[-1] ^= 1
        taken = assert_comes_back(codec, BF16, new, old)
        assert taken < 1.01 * 6 * np.count_nonzero(new != old) + 64, density


@every_codec
@given(
    case=bit_pairs(),
    seed=own.SEEDS,
    cut=st.integers(-9, 9),
    other=st.tuples(st.binary(max_size=100), st.binary(max_size=100)),
)
def test_wrong_blocks_are_a_wire_error_or_sound_rows(
    codec: RowCodec,
    case: tuple[Dtype, Bits, Bits],
    seed: int,
    cut: int,
    other: tuple[bytes, bytes],
) -> None:
    """Damaged ones, and arbitrary ones beside one that is right or not."""
    dtype, new, old = case
    row, rng = row_of(codec, dtype, new, old), np.random.default_rng(seed)
    good = codec.encode(row)
    damaged = [bytearray(block) for block in good]
    for block in damaged[: 1 + seed % 2]:
        for at in rng.integers(0, max(1, len(block)), seed % 5 if block else 0):
            block[at] = int(rng.choice(np.array([0, 1, 127, 128, 255, rng.integers(256)])))
    hit = damaged[seed // 2 % 2]
    hit[len(hit) + min(cut, 0) :] = bytes(max(cut, 0))
    for blocks in (other, (good[0], other[1]), (other[0], good[1]), tuple(map(bytes, damaged))):
        tracemalloc.start()
        try:
            indices, values = decoded(codec, row, old, *blocks)
            assert (len(values), values.dtype) == (len(indices), unsigned_dtype(dtype))
        except WireError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < MAX_ALLOCATED_BYTES


def _block(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


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
    assert encode_steps(row).hex() == value


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


@pytest.mark.parametrize("block_bits", [4, 5, 8, 15, 16])
def test_blocks_of_any_width_come_back_and_lies_about_their_counts_do_not(block_bits: int) -> None:
    rng = np.random.default_rng(block_bits)
    indices = np.flatnonzero(rng.random(200_001) < 0.03).astype(np.int32)
    for count_bits in (int(np.bincount(indices >> block_bits).max()).bit_length(), block_bits + 1):
        block = encode_indices(indices, Shape(block_bits, count_bits), 200_001)
        assert np.array_equal(decode_indices(_block(block), len(indices), 200_001), indices)
        for bit in (1, 2):  # of the count of the first block: one more or less, or two
            wrong = bytearray(block)
            wrong[4] ^= bit if count_bits > 1 else 1
            with pytest.raises(InvalidIndices):
                decode_indices(_block(bytes(wrong)), len(indices), 200_001)
