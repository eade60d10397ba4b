"""Hypothesis strategies of layouts, and of shares that ranks send."""

from __future__ import annotations

from hypothesis import strategies as st

from deltasync import dtypes
from deltasync.delta.region import Region
from deltasync.delta.shard import Share, whole
from deltasync.delta.tiles import Space
from deltasync.wire.messages import ParameterSpec
from tests.wire.reference import TILE

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
