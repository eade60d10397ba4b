"""Tiles of shares, against plain reckoning; shares as a table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltasync import dtypes
from deltasync.delta.tiles import CHUNK_TILES, space_of
from deltasync.errors import InvalidIndices, InvalidTable
from deltasync.wire.changes import TILE
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
    with pytest.raises(InvalidIndices):
        space.find(np.array([len(space)]))


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
