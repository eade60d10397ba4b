"""Hypothesis strategies of layouts, of shares that ranks send, and of changes of their tiles."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from deltasync import dtypes
from deltasync.delta.region import Region
from deltasync.delta.shard import Share, whole
from deltasync.delta.tiles import Space
from deltasync.wire.messages import ParameterSpec
from tests.wire.reference import TILE, Tile

wire_dtypes = st.sampled_from(dtypes.DTYPES)
NUMELS = st.integers(0, 60) | st.sampled_from([TILE - 1, TILE, TILE + 1, 2 * TILE + 5])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ParameterSpec, ...]:
    """One to four parameters of one-dimensional shape; one may be empty."""
    numels = draw(st.lists(NUMELS, min_size=1, max_size=4))
    return tuple(
        ParameterSpec((f"p{i}",), (numel,), draw(wire_dtypes)) for i, numel in enumerate(numels)
    )


@st.composite
def spaces(draw: st.DrawFn, specs: tuple[ParameterSpec, ...]) -> Space:
    """All of a layout, or runs and rows of its parameters."""
    if draw(st.booleans()):
        return Space(whole(specs))
    shares = []
    for number, spec in enumerate(specs):
        start = 0
        while (left := spec.numel - start) > 0 and draw(st.booleans()):
            cols = draw(st.integers(1, left))
            stride = cols + draw(st.integers(0, 5))
            rows = draw(st.integers(1, 1 + (left - cols) // stride))
            region = Region(start, ((rows, stride), (cols, 1)))
            shares.append(Share(number, spec, region))
            start = region.stop + draw(st.integers(0, 3))
    return Space(shares)


@st.composite
def changes(draw: st.DrawFn, space: Space) -> tuple[int, list[Tile]]:
    """(item size, changes) of some tiles of one size, of which there has to be one."""
    section = draw(st.sampled_from([one for one in space.sections if one.first < one.stop]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    numbers = draw(st.sets(st.integers(section.first, section.stop - 1), min_size=1, max_size=5))
    found = []
    for number in sorted(numbers):
        numel = int(space.numel[number])
        count = draw(st.sampled_from([0, 1, 2, numel // 2, numel]))
        places = None
        if 0 < count <= numel:
            places = tuple(np.sort(rng.choice(numel, count, replace=False)).tolist())
        bits = rng.integers(0, 1 << 64, numel if places is None else count, np.uint64)
        top = (1 << 8 * section.item_size) - 1
        found.append(Tile(number, places, tuple(one & top for one in bits.tolist())))
    return section.item_size, found
