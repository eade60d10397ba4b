"""Tiles of shares, against plain reckoning; shares as a table."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltasync import dtypes
from deltasync.delta.shard import ShardSpec, Share, rows_of
from deltasync.delta.tiles import CHUNK_TILES, Space, space_of, table_of
from deltasync.errors import InvalidIndices, InvalidTable
from deltasync.wire.changes import ALIGNMENT, TILE, Sizes, padded
from deltasync.wire.digest import GOLDEN_RATIO, MASK
from deltasync.wire.messages import ParameterSpec
from tests.wire import reference, strategies


@given(strategies.layouts(), st.data())
def test_tiles_are_what_the_format_says(
    specs: tuple[ParameterSpec, ...], data: st.DataObject
) -> None:
    space = data.draw(strategies.spaces(specs))
    shares = [(share.spec.dtype.item_size, share.numel) for share in space.given]
    expected = reference.tiles_of(shares)
    assert len(space) == len(expected)
    assert space.shares == tuple(space.given[n] for n in space.order)
    found = zip(space.order[space.share].tolist(), space.start, space.numel, strict=True)
    assert [tuple(map(int, one)) for one in found] == expected
    found_again = space.find(np.arange(len(space)))
    of_all: tuple[NDArray[np.integer], ...] = space.share, space.start, space.numel
    for columns in zip(found_again, of_all, strict=True):
        assert np.array_equal(*columns)
    keys = space.keys_of(space.share, space.start)
    for tile, (number, start, _) in enumerate(expected):
        share = space.given[number]
        key = reference.seed(share.spec.name) + (share.region.start + start) * GOLDEN_RATIO
        assert int(keys[tile]) == key & MASK
    for section in space.sections:
        sizes = {shares[expected[tile][0]][0] for tile in range(section.first, section.stop)}
        assert sizes <= {section.item_size}
        assert space.section_of(section.item_size) == section
    covered = sum(section.stop - section.first for section in space.sections)
    assert covered == len(space)
    chunks = [(number, start // (CHUNK_TILES * TILE)) for number, start, _ in expected]
    assert space.chunk.tolist() == [list(dict.fromkeys(chunks)).index(one) for one in chunks]
    if len(space):
        low = data.draw(st.integers(0, len(space) - 1))
        high = data.draw(st.integers(low + 1, len(space)))
        parts = [(space.order[share], start, stop) for share, start, stop in space.parts(low, high)]
        pieces = dict[int, list[int]]()
        for number, start, numel in expected[low:high]:
            pieces.setdefault(number, [start, 0])[1] = start + numel
        assert [(int(n), a, b) for n, a, b in parts] == [(n, a, b) for n, (a, b) in pieces.items()]
    with pytest.raises(InvalidIndices):
        space.find(np.array([len(space)]))


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
)
def test_boxes_of_ranks_come_back_from_their_table(shape: list[int], data: st.DataObject) -> None:
    offset = [data.draw(st.integers(0, size - 1)) for size in shape]
    size = [data.draw(st.integers(1, n - at)) for n, at in zip(shape, offset, strict=True)]
    box = ShardSpec(tuple(shape), tuple(offset), tuple(size))
    spec = ParameterSpec(("w",), tuple(shape), dtypes.BY_NAME["int16"])
    space = Space([Share(0, spec, region) for _, region in rows_of(box)])
    again = space_of(table_of(space), (spec,))
    assert again.given == space.given
    every = torch.arange(math.prod(shape)).view(shape)
    inside = every[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]
    places = [share.region.places(torch.arange(share.numel)) for share in again.given]
    assert torch.equal(torch.cat(places), inside.reshape(-1))
    for number, region in again.gaps.items():
        assert again.shares[number].gap > 0
        assert region.start == 0


ROW = (0, 0, 4, 2, 3, 5)  # of 20 elements: 4, 5, 6 and 9, 10, 11
LIES = {
    "reserved": [(0, 1, 4, 2, 3, 5)],
    "a parameter that is not there": [(1, 0, 4, 2, 3, 5)],
    "no rows": [(0, 0, 4, 0, 3, 5)],
    "no columns": [(0, 0, 4, 2, 0, 5)],
    "rows that overlap": [(0, 0, 4, 2, 3, 2)],
    "beyond the parameter": [(0, 0, 13, 2, 3, 5)],
    "far beyond": [(0, 0, (1 << 64) - 1, 2, 3, 5)],
    "so many rows that they wrap around": [(0, 0, 4, 1 << 62, 3, 1 << 62)],
    "twice": [ROW, ROW],
    "overlapping the one before": [ROW, (0, 0, 11, 1, 1, 1)],
    "before the one before": [ROW, (0, 0, 0, 1, 1, 1)],
}


@pytest.mark.parametrize("rows", LIES.values(), ids=LIES.keys())
def test_w17_tables_that_lie_are_refused(rows: list[tuple[int, ...]]) -> None:
    spec = ParameterSpec(("w",), (20,), dtypes.BY_NAME["int16"])
    table = b"".join(reference.SHARE.pack(*row) for row in rows)
    with pytest.raises(InvalidTable):
        space_of(np.frombuffer(table, np.uint8), (spec,))
    space = space_of(np.frombuffer(reference.SHARE.pack(*ROW), np.uint8), (spec,))
    assert [share.numel for share in space.given] == [6]


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.integers(0, 1 << 20), min_size=3, max_size=3),
    st.lists(st.integers(0, 1 << 20), min_size=3, max_size=3),
)
def test_columns_of_a_payload_follow_each_other(
    item_size: int, counts: list[int], others: list[int]
) -> None:
    sizes, end = Sizes(item_size, *counts), 0
    widths = (4, 2, 2, item_size, item_size)
    numbers = (counts[0], counts[0], counts[1], counts[1], counts[2])
    for (begin, length), width, number in zip(sizes.columns, widths, numbers, strict=True):
        assert (begin, length) == (end, width * number)
        assert begin % ALIGNMENT == 0
        end = padded(begin + length)
        assert 0 <= end - begin - length < ALIGNMENT
    assert sizes.num_bytes == end
    both = sizes + Sizes(item_size, *others)
    assert both == Sizes(item_size, *map(int.__add__, counts, others))
