"""The codec `class` in Triton: the same bytes as in numpy, and back.

Without a GPU kernels run under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltasync import dtypes
from deltasync.delta.codecs import class_positions, class_values, steps
from deltasync.delta.codecs.base import Bits, Needs, SparseRow
from deltasync.delta.codecs.classes import ClassCodec
from deltasync.delta.codecs.device_class_choices import Changes, choose
from deltasync.dtypes import BY_NAME, Dtype
from deltasync.errors import WireError
from tests.delta.device_class_rows import (
    array,
    check,
    check_decoding,
    decoded_indices,
    decoded_values,
)
from tests.delta.device_rows import DEVICE, old_of, placed
from tests.delta.row_codec_contract import any_pair, row_of, weights
from tests.strategies import DTYPES, SEEDS

BF16 = BY_NAME["bfloat16"]
ON_HOST = DEVICE.type == "cpu"
few = settings(max_examples=3 if ON_HOST else 200, suppress_health_check=[HealthCheck.too_slow])


def row(new: Bits, old: Bits, dtype: Dtype) -> SparseRow:
    return row_of(new, old, dtype, Needs.SPAN)[0]


def pairs(dtype: Dtype, spans: list[int], densities: list[float], seed: int) -> list[SparseRow]:
    return [
        row(*any_pair(dtype, span, density, seed + n), dtype)
        for n, (span, density) in enumerate(zip(spans, densities, strict=False))
    ]


@few
@given(
    dtype=DTYPES,
    spans=st.lists(st.integers(1, 30) | st.integers(1, 600), min_size=1, max_size=2),
    densities=st.lists(st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]), min_size=3, max_size=3),
    seed=SEEDS,
)
def test_any_rows(dtype: Dtype, spans: list[int], densities: list[float], seed: int) -> None:
    check(pairs(dtype, spans, densities, seed))


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=lambda dtype: dtype.name)
def test_every_dtype(dtype: Dtype) -> None:
    """NaNs, infinities, -0.0 and denormals before and after, a few changes and nearly all."""
    check(pairs(dtype, [700, 1, 90], [0.05, 1.0, 0.95], 5))


def test_rows_of_several_stretches_and_lanes() -> None:
    """The last lane is short, and so are its stretch and its block; one row has one element."""
    rng, rows = np.random.default_rng(3), list[SparseRow]()
    for span, count in (((1 << 18) + 700, 40), (1, 1), (33_000, 7)):
        old = weights(span, 0.0, rng)[0]
        new = old.copy()
        new[np.append(rng.integers(0, span, count - 1), span - 1)] += 1
        rows.append(row(new, old, BF16))
    check(rows)


@pytest.mark.parametrize("lane_bits", [10, 11, 20])
def test_lanes_of_any_size_are_decoded(lane_bits: int) -> None:
    rows = pairs(BF16, [3000, 1024, 1], [0.02, 0.2, 1.0], 9)
    blocks = [
        (
            class_positions.encode(one.indices, old_of(one), BF16, lane_bits),
            ClassCodec().encode([one])[0][1],
        )
        for one in rows
    ]
    check_decoding(rows, blocks)


@pytest.mark.parametrize("density", [1e-4, 1e-2, 30.0])
def test_weights(density: float) -> None:
    rng = np.random.default_rng(3)
    rows = [row(*weights(span, density, rng), BF16) for span in (900, 401)]
    check(rows)


def test_more_classes_than_fit_into_one_histogram() -> None:
    """All 64, as another writer may choose them; and keys outside of the window."""
    rng = np.random.default_rng(0)
    old = (rng.integers(0, 256, 1000) << 7).astype(np.uint16)
    new = old ^ (rng.random(1000) < 0.2).astype(np.uint16)
    one = row(new, old, BF16)
    check([one])
    firsts = list(range(64))
    index = class_positions.encode(one.indices, old, BF16, 10, firsts)
    before_, zigzag = old[one.indices], steps.zigzag(one.new, old[one.indices], BF16)
    value = class_values.encode(zigzag, before_, BF16, (firsts, np.arange(64) % 57))
    check_decoding([one], [(index, value)])


def test_steps_of_codes_that_share_an_integer() -> None:
    """Frequent steps: those that numpy lists, in its order."""
    rng = np.random.default_rng(0)
    rows = list[SparseRow]()
    for span in (700, 40):
        old = rng.integers(0, 1 << 32, span).astype(np.uint32)
        moved = np.uint32(1) << (4 * rng.integers(0, 8, span)).astype(np.uint32)
        new = np.where(rng.random(span) < 0.3, old + moved, old - moved)
        new = np.where(rng.random(span) < 0.4, new, old)
        new[0] = ~old[0]
        rows.append(row(new.astype(np.uint32), old, BY_NAME["int32"]))
    check(rows)


def test_choices_are_nearly_the_best() -> None:
    """What numpy makes with those of a device is hardly longer than with its own."""
    new, old = weights(200_000, 1e-4, np.random.default_rng(0))
    one = row(new, old, BF16)
    at, counts = old[one.indices], np.array([len(one.indices)])
    whole = placed(old)
    chosen = choose(
        Changes(placed(one.new), placed(at), counts, BF16),
        np.array([whole.data_ptr()]),
        np.array([len(old)]),
    )
    index, value = (
        [int((classes[0] < number).sum()) for number in range(int(count[0]))]
        for classes, count in ((chosen.index, chosen.num_index), (chosen.value, chosen.num_value))
    )
    parameters = np.array(chosen.parameters[0, : len(value)].tolist())
    zigzag = steps.zigzag(one.new, at, BF16)
    made = len(class_positions.encode(one.indices, old, BF16, firsts=index))
    made += len(class_values.encode(zigzag, at, BF16, (value, parameters)))
    assert made < 1.01 * sum(map(len, ClassCodec().encode([one])[0]))


def answer(decode: Callable[[], Any]) -> Any:
    """What it returns, or the type of the error that it raises."""
    try:
        return decode()
    except WireError as error:
        return type(error)


def assert_alike(one: SparseRow, index: bytes, value: bytes) -> None:
    """The device makes of blocks what numpy makes of them, be it an error."""
    old, dtype = old_of(one), one.dtype
    wanted = answer(lambda: class_positions.decode(array(index), len(one.indices), old, dtype))
    assert_same(answer(lambda: decoded_indices([one], [index])), wanted)
    at = old[one.indices]
    wanted = answer(lambda: steps.stepped(class_values.decode(array(value), at, dtype), at, dtype))
    assert_same(answer(lambda: decoded_values([one], [value])), wanted)


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(found, type) or isinstance(wanted, type):
        assert found is wanted
    else:
        assert np.array_equal(found, wanted)


@few
@given(
    dtype=st.sampled_from(["bfloat16", "float8_e5m2", "uint8", "int32", "float64"]).map(
        BY_NAME.get
    ),
    span=st.sampled_from([20, 300, 900]),
    density=st.sampled_from([0.0, 0.03, 0.3, 0.8, 1.0]),
    seed=SEEDS,
    cut=st.integers(-9, 9),
)
def test_damaged_blocks_are_what_numpy_makes_of_them(
    dtype: Dtype, span: int, density: float, seed: int, cut: int
) -> None:
    rng = np.random.default_rng(seed)
    (one,) = pairs(dtype, [span], [density], seed)
    blocks = [bytearray(block) for block in ClassCodec().encode([one])[0]]
    for block in blocks:
        for _ in range(int(rng.integers(3))):
            block[rng.integers(len(block))] ^= 1 << rng.integers(8)
        if rng.integers(2):
            block[len(block) + min(cut, 0) :] = rng.integers(
                0, 256, max(cut, 0), np.uint8
            ).tobytes()
    assert_alike(one, bytes(blocks[0]), bytes(blocks[1]))


@few
@given(dtype=DTYPES, seed=SEEDS, index=st.binary(max_size=100), value=st.binary(max_size=100))
def test_arbitrary_blocks_are_what_numpy_makes_of_them(
    dtype: Dtype, seed: int, index: bytes, value: bytes
) -> None:
    (one,) = pairs(dtype, [600], [0.1], seed)
    assert_alike(one, index, value)


@pytest.mark.gpu
@pytest.mark.parametrize("density", [1e-6, 1e-4, 1e-2])
def test_large_rows_on_a_gpu(density: float) -> None:
    """Of many lanes, in one of which nothing changes."""
    rng = np.random.default_rng(1)
    rows = [row(*weights(span, density, rng), BF16) for span in (20_000_000, 3_000_001, 100)]
    check(rows)


def test_memory_follows_from_classes_and_changes() -> None:
    """Nothing has the size of the weights: 2 bytes for each class of 512 elements, and changes."""
    numel = 1 << 16
    old = np.full(numel, 0x3F80, np.uint16)
    new = old.copy()
    new[[5, 40_000, numel - 1]] += 1
    one, peak = row(new, old, BF16), list[int]()
    make = torch.empty

    def noted(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        peak.append(made.nbytes)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", noted)
        check([one])
    assert max(peak) <= 8192
