"""The codec that goes by the exponents of old values: its cost, and that it keeps every bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync import dtypes
from deltasync.delta.codecs import class_keys, class_positions
from deltasync.delta.codecs.base import unsigned_dtype
from deltasync.delta.codecs.bitstream import (
    ByteReader,
    FieldReader,
    UnaryReader,
    pack_fields,
    pack_unary,
    varints,
)
from deltasync.delta.codecs.class_order import Order, orders
from deltasync.delta.codecs.classes import ClassCodec
from deltasync.delta.codecs.subsets import Segments
from deltasync.errors import TruncatedFrame, WireError
from tests.delta.row_codec_contract import (
    RowCodecContract,
    any_pair,
    assert_round_trip,
    row_of,
    weights,
)
from tests.worlds.strategies import DTYPES, SEEDS

BF16 = dtypes.BY_NAME["bfloat16"]


class TestClass(RowCodecContract):
    codec = ClassCodec()
    golden = ("12010500021701102e", "0100030d0105128f074057ec62")


def as_array(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8)


@given(
    dtype=DTYPES,
    span=st.integers(1, 9000),
    density=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    lane_bits=st.integers(10, 13),
    seed=SEEDS,
)
def test_positions_in_lanes_of_any_size(
    dtype: dtypes.Dtype, span: int, density: float, lane_bits: int, seed: int
) -> None:
    new, old = any_pair(dtype, span, density, seed)
    indices = np.flatnonzero(new != old).astype(np.int32)
    block = class_positions.encode(indices, old, dtype, lane_bits)
    found = class_positions.decode(as_array(block), len(indices), old, dtype)
    assert np.array_equal(found, indices)


@given(
    dtype=DTYPES,
    span=st.integers(1, 9000),
    num_classes=st.integers(1, class_keys.MAX_CLASSES),
    share=st.sampled_from([0.001, 0.1, 1.0]),
    seed=SEEDS,
)
def test_places_are_those_that_a_sort_would_give(
    dtype: dtypes.Dtype, span: int, num_classes: int, share: float, seed: int
) -> None:
    rng, lane = np.random.default_rng(seed), 1 << 11
    _, old = any_pair(dtype, span, 0.0, seed)
    later = rng.permutation(np.arange(1, class_keys.num_keys(dtype)))[: num_classes - 1]
    firsts = [0, *sorted(later.tolist())]
    classes = class_keys.table(firsts, dtype).take(class_keys.keys(old, dtype))
    sorted_positions = np.lexsort((classes, np.arange(span) // lane))
    [(begin, order)] = orders(old, dtype, lane, firsts)
    chosen = np.flatnonzero(rng.random(span) < share)
    places, counts = order.places(chosen.astype(np.int32))
    assert begin == 0
    assert np.array_equal(places, np.flatnonzero(np.isin(sorted_positions, chosen)))
    assert np.array_equal(order.positions(places), chosen)
    for found, among in ((order.sizes, np.arange(span)), (counts, chosen)):
        each = among // lane * len(firsts) + classes[among]
        assert np.array_equal(found.ravel(), np.bincount(each, minlength=found.size))


def test_a_short_row_takes_no_memory_of_a_lane() -> None:
    """Models have many, and a stranger's block can say that lanes are long."""
    order = Order(np.zeros(65, np.uint16), BF16, 1 << 20, [0, 3])
    assert order._words.size == 2 * 2


def test_positions_in_several_lanes_and_groups() -> None:
    """A row longer than what is decoded at once, whose last lane is short."""
    new, old = weights((1 << 22) + (1 << 18) + 77, 0.01, np.random.default_rng(0))
    new[-1] ^= 1
    assert_round_trip(ClassCodec(), [row_of(new, old, BF16, ClassCodec.needs)])


def test_old_values_make_positions_cheap() -> None:
    """Within 6 % of the entropy given the exponents, which is well below that without."""
    new, old = weights(1 << 20, 3e-4, np.random.default_rng(0))
    indices = np.flatnonzero(new != old).astype(np.int32)
    changed = np.bincount(class_keys.keys(old[indices], BF16), minlength=256).astype(float)
    each = np.bincount(class_keys.keys(old, BF16), minlength=256).astype(float)
    bound = class_keys.entropy(changed, each).sum()
    blind = class_keys.entropy(changed.sum(), each.sum())
    assert bound < 0.8 * blind
    assert 8 * len(class_positions.encode(indices, old, BF16)) < 1.06 * bound


@pytest.mark.parametrize(("dtype", "bits"), [("uint8", 4), ("int32", 4), ("uint16", 8)])
def test_steps_of_codes_that_share_an_integer_are_cheap(dtype: str, bits: int) -> None:
    """A step of one of several codes takes about as long as the place of the code, and a sign."""
    rng = np.random.default_rng(0)
    kind = dtypes.BY_NAME[dtype]
    old = rng.integers(0, 1 << 8 * kind.item_size, 1 << 17).astype(unsigned_dtype(kind))
    places = 8 * kind.item_size // bits
    shift = rng.integers(0, places, len(old)).astype(np.uint64) * np.uint64(bits)
    moved = np.where(rng.random(len(old)) < 0.02, np.uint64(1) << shift, np.uint64(0))
    signs = rng.random(len(old)) < 0.5
    new = np.where(signs, old + moved, old - moved).astype(old.dtype)
    pair = row_of(new, old, kind, ClassCodec.needs)
    ((_, value),) = assert_round_trip(ClassCodec(), [pair])
    assert 8 * len(value) < (np.log2(2 * places) + 2.2) * len(pair[0].indices)


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    shares=st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=8, max_size=8),
    seed=SEEDS,
)
def test_subsets_round_trip(sizes: list[int], shares: list[float], seed: int) -> None:
    each = np.array(sizes)
    share = np.repeat(shares[: len(each)], each)
    mask = np.random.default_rng(seed).random(len(share)) < share
    ends = np.concatenate([[0], np.cumsum(mask)])
    stops = np.cumsum(each)
    segments = Segments.of(each, ends[stops] - ends[stops - each])
    places = np.flatnonzero(mask)
    quotients, remainders, widths = segments.coded(places)
    unary = UnaryReader(as_array(pack_unary(quotients)))
    fields = FieldReader(as_array(pack_fields(remainders, widths)))
    assert np.array_equal(segments.decoded(unary, fields), places)
    unary.finish()
    fields.finish()


def test_gaps_too_long_for_any_integer_are_refused() -> None:
    segments = Segments.of(np.array([(1 << 31) - 1]), np.array([1]))
    far = as_array(bytes(1 << 12) + b"\1")
    with pytest.raises(WireError):
        segments.decoded(UnaryReader(far), FieldReader(as_array(bytes(8))))


@given(numbers=st.lists(st.tuples(st.integers(0, 56), st.integers(0, 1 << 56)), max_size=40))
def test_fields_round_trip(numbers: list[tuple[int, int]]) -> None:
    widths = np.array([width for width, _ in numbers], np.int64)
    values = np.array([value & (1 << width) - 1 for width, value in numbers], np.uint64)
    data = as_array(pack_fields(values, widths))
    reader, half = FieldReader(data), len(widths) // 2
    found = np.concatenate([reader.take(widths[:half]), reader.take(widths[half:])])
    assert np.array_equal(found, values)
    reader.finish()
    with pytest.raises(TruncatedFrame):
        FieldReader(data).take(np.append(widths, 8))


@given(numbers=st.lists(st.integers(0, 40), max_size=50), cut=st.integers(0, 50))
def test_unary_round_trip(numbers: list[int], cut: int) -> None:
    data = as_array(pack_unary(np.array(numbers, np.int64)))
    reader = UnaryReader(data)
    found = [*reader.take(min(cut, len(numbers))), *reader.take(max(0, len(numbers) - cut))]
    assert found == numbers
    reader.finish()
    with pytest.raises(TruncatedFrame):
        UnaryReader(data).take(len(numbers) + 1)
    longer = UnaryReader(as_array(bytes(data) + b"\0"))
    longer.take(len(numbers))
    with pytest.raises(TruncatedFrame):
        longer.finish()


@given(number=st.integers(0, (1 << 35) - 1))
def test_varints_round_trip(number: int) -> None:
    data = varints(number)
    assert ByteReader(as_array(data + b"\0")).varint() == number
    with pytest.raises(TruncatedFrame):
        ByteReader(as_array(data[:-1])).varint()


def test_least_cost_divides_keys() -> None:
    """Two densities, three keys each, make two classes."""
    few = class_keys.spans(np.array([1.0, 1, 1, 500, 500, 500]))
    cost = class_keys.entropy(few, class_keys.spans(np.full(6, 1000.0))) + 20
    assert class_keys.divide(cost) == [0, 3]
