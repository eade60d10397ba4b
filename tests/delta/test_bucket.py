"""Runs packed into buckets and read back: the same elements, within every bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import Run, integer_dtype
from deltasync.delta.bucket import MIN_BUCKET_BYTES, BucketReader
from deltasync.delta.host.packing import Bucket, buckets
from deltasync.delta.shard import whole
from deltasync.errors import ConfigError, InvalidTable, TruncatedFrame
from deltasync.wire.messages import ParameterSpec
from deltasync.wire.table import ALIGNMENT, ROW, block_offsets
from tests.wire import strategies

Draw = Callable[[st.SearchStrategy[Any]], Any]
Pair = tuple[int, Run]
Specs = tuple[ParameterSpec, ...]
FILL = 0xEE
"""What payload memory holds before it is written: padding must not let it through."""


@st.composite
def cases(draw: Draw) -> tuple[Specs, list[Pair], int]:
    """A layout, runs over it, and a bucket size from the least to more than they need."""
    specs = draw(strategies.layouts())
    size = draw(st.integers(MIN_BUCKET_BYTES, 4096) | st.integers(4096, 1 << 18))
    return specs, draw(strategies.runs(specs)), size


def spec(name: str, numel: int, dtype: str) -> ParameterSpec:
    return ParameterSpec((name,), (numel,), dtypes.BY_NAME[dtype])


def write(bucket: Bucket) -> Tensor:
    payload = torch.full((bucket.num_bytes,), FILL, dtype=torch.uint8)
    written: list[tuple[int, Run, Tensor]] = []
    replace(bucket, packed=lambda *one: written.append(one)).write(payload)
    for (parameter, run), yielded in zip(bucket.runs, written, strict=True):
        assert (parameter, run) == yielded[:2]
        assert yielded[2].untyped_storage().data_ptr() == payload.untyped_storage().data_ptr()
        if run.bits is not None:
            assert torch.equal(yielded[2], run.bits)
    return payload


def elements(pairs: list[Pair], specs: Specs) -> list[tuple[list[int], list[int]]]:
    """For each parameter, the flat positions that `pairs` write and the bits that come there."""
    found: list[tuple[list[int], list[int]]] = [([], []) for _ in specs]
    for parameter, run in pairs:
        assert run.bits is not None
        offsets = range(run.span) if run.indices is None else run.indices.tolist()
        found[parameter][0].extend(run.start + offset for offset in offsets)
        found[parameter][1].extend(run.bits.tolist())
    return found


def covered(pairs: list[Pair]) -> list[tuple[int, int, int]]:
    """(parameter, start, stop) of what `pairs` speak of, adjoining pieces joined."""
    found: list[tuple[int, int, int]] = []
    for parameter, run in pairs:
        if found and found[-1][0] == parameter and found[-1][2] == run.start:
            found[-1] = (parameter, found[-1][1], run.stop)
        else:
            found.append((parameter, run.start, run.stop))
    return found


def check_padding(bucket: Bucket, payload: Tensor) -> None:
    """Blocks are aligned, and the bytes between them are 0."""
    index_at, value_at, end = block_offsets(bucket.rows)
    used = np.zeros(len(payload), bool)
    used[: len(bucket.rows) * ROW.itemsize] = True
    for name, begins in (("index_bytes", index_at), ("value_bytes", value_at)):
        assert not (begins % ALIGNMENT).any()
        for begin, length in zip(begins.tolist(), bucket.rows[name].tolist(), strict=True):
            assert not used[begin : begin + length].any()
            used[begin : begin + length] = True
    assert end == len(payload)
    assert not payload.numpy()[~used].any()


@given(cases())
def test_packed_then_read_gives_the_same_elements(case: tuple[Specs, list[Pair], int]) -> None:
    specs, pairs, bucket_bytes = case
    reader, found = BucketReader(specs), list[Pair]()
    for bucket in buckets(pairs, whole(specs), bucket_bytes=bucket_bytes):
        payload = write(bucket)
        assert bucket.num_bytes <= bucket_bytes
        check_padding(bucket, payload)
        found += reader.read(payload, len(bucket.rows))
    assert elements(found, specs) == elements(pairs, specs)
    assert covered(found) == covered(pairs)


@given(cases())
def test_rows_are_ordered_and_full_but_for_the_last_bucket(
    case: tuple[Specs, list[Pair], int],
) -> None:
    specs, pairs, bucket_bytes = case
    packed = list(buckets(pairs, whole(specs), bucket_bytes=bucket_bytes))
    rows = [(p, run.start, run.stop) for bucket in packed for p, run in bucket.runs]
    assert rows == sorted(rows)
    for bucket in packed[:-1]:
        # One more row with one more element takes at most a row and two blocks of 8 bytes,
        # and the padding that a cut leaves is less than two blocks.
        assert bucket.num_bytes > bucket_bytes - ROW.itemsize - 4 * ALIGNMENT - 12


@given(cases())
def test_dense_runs_left_in_the_source_are_read_from_there(
    case: tuple[Specs, list[Pair], int],
) -> None:
    specs, pairs, bucket_bytes = case
    sources = [
        torch.arange(s.numel, dtype=torch.int64).to(integer_dtype(s.dtype)) * 3 for s in specs
    ]
    late = [(p, Run(r.start, r.span) if r.indices is None else r) for p, r in pairs]
    expected = [
        (p, r if r.bits is not None else Run(r.start, r.span, None, sources[p][r.start : r.stop]))
        for p, r in late
    ]
    reader, found = BucketReader(specs), list[Pair]()

    def read(parameter: int, start: int, stop: int) -> Tensor:
        return sources[parameter][start:stop]

    for bucket in buckets(late, whole(specs), bucket_bytes=bucket_bytes, read=read):
        payload = write(bucket)
        found += reader.read(payload, len(bucket.rows))
    assert elements(found, specs) == elements(expected, specs)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dense", [True, False])
def test_a_run_larger_than_a_bucket_is_sliced(dtype: str, dense: bool) -> None:
    specs = (spec("a", 3000, dtype),)
    rng = np.random.default_rng(7)
    pairs = [(0, strategies.make_run(rng, specs[0], 0, 3000, 2000, dense=dense))]
    packed = list(buckets(pairs, whole(specs), bucket_bytes=MIN_BUCKET_BYTES))
    assert len(packed) > 10
    assert all(len(bucket.rows) == 1 for bucket in packed)
    found = [pair for bucket in packed for pair in bucket.runs]
    assert all((run.indices is None) == dense for _, run in found)
    assert covered(found) == [(0, 0, 3000)]
    assert elements(found, specs) == elements(pairs, specs)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
@pytest.mark.parametrize("dense", [True, False])
def test_every_remainder_of_a_bucket_of_odd_size(dtype: str, dense: bool) -> None:
    """A cut that ignores padding leaves a rest without elements, or one that does not fit."""
    specs = (spec("a", 512, dtype),)
    rng = np.random.default_rng(3)
    longest = strategies.make_run(rng, specs[0], 0, 512, 512, dense=dense)
    assert longest.bits is not None
    for count in range(16, 220, 3):
        indices = None if longest.indices is None else longest.indices[:count]
        pairs = [(0, Run(0, count, indices, longest.bits[:count]))]
        for bucket_bytes in range(MIN_BUCKET_BYTES, MIN_BUCKET_BYTES + 9):
            reader, found = BucketReader(specs), list[Pair]()
            for bucket in buckets(pairs, whole(specs), bucket_bytes=bucket_bytes):
                assert bucket.num_bytes <= bucket_bytes
                found += reader.read(write(bucket), len(bucket.rows))
            assert covered(found) == [(0, 0, count)]
            assert elements(found, specs) == elements(pairs, specs)


def test_slicing_does_not_touch_the_run_it_slices() -> None:
    specs = (spec("a", 3000, "float32"),)
    run = strategies.make_run(np.random.default_rng(7), specs[0], 0, 3000, 900, dense=False)
    assert run.indices is not None
    before = run.indices.clone()
    assert len(list(buckets([(0, run)], whole(specs), bucket_bytes=MIN_BUCKET_BYTES))) > 1
    assert torch.equal(run.indices, before)


def test_runs_beyond_32_bits_keep_their_place() -> None:
    specs = (spec("a", 2**40, "uint8"),)
    indices = torch.tensor([0, 2**31 - 2], dtype=torch.int32)
    bits = torch.tensor([1, 2], dtype=torch.uint8)
    pairs = [(0, Run(2**40 - 2**31 + 1, 2**31 - 1, indices, bits))]
    (bucket,) = buckets(pairs, whole(specs), bucket_bytes=MIN_BUCKET_BYTES)
    found = BucketReader(specs).read(write(bucket), 1)
    assert (
        elements(found, specs)
        == elements(pairs, specs)
        == [([2**40 - 2**31 + 1, 2**40 - 1], [1, 2])]
    )


def test_read_values_are_views_of_the_payload() -> None:
    specs = (spec("a", 4, "int32"),)
    run = Run(0, 4, torch.tensor([1], dtype=torch.int32), torch.tensor([5], dtype=torch.int32))
    (bucket,) = buckets([(0, run)], whole(specs), bucket_bytes=MIN_BUCKET_BYTES)
    payload = write(bucket)
    ((_, found),) = BucketReader(specs).read(payload, 1)
    assert found.bits is not None
    payload[-4:] = torch.tensor([9, 0, 0, 0], dtype=torch.uint8)
    assert found.bits.tolist() == [9]


def test_nothing_makes_no_bucket() -> None:
    assert list(buckets([], whole((spec("a", 4, "int32"),)), bucket_bytes=MIN_BUCKET_BYTES)) == []


def test_a_bucket_that_holds_no_element_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 256"):
        list(buckets([], whole((spec("a", 4, "int32"),)), bucket_bytes=MIN_BUCKET_BYTES - 1))


@pytest.mark.parametrize("num_rows", [1, 5])
def test_an_empty_payload_is_refused(num_rows: int) -> None:
    with pytest.raises(TruncatedFrame):
        BucketReader((spec("a", 4, "int32"),)).read(torch.empty(0, dtype=torch.uint8), num_rows)


def test_a_refused_bucket_does_not_move_the_reader() -> None:
    specs = (spec("a", 8, "uint8"), spec("b", 8, "uint8"))
    one = torch.ones(4, dtype=torch.uint8)
    low, high, other = (
        (0, Run(0, 4, None, one)),
        (0, Run(4, 4, None, one)),
        (1, Run(0, 4, None, one)),
    )
    reader = BucketReader(specs)

    def read(pair: Pair) -> list[Pair]:
        (bucket,) = buckets([pair], whole(specs), bucket_bytes=MIN_BUCKET_BYTES)
        return reader.read(write(bucket), 1)

    read(high)
    with pytest.raises(InvalidTable):
        read(low)
    with pytest.raises(InvalidTable):
        read(high)
    assert read(other)[0][0] == 1
