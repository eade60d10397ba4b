"""Regions, against the places of all of their elements."""

from __future__ import annotations

from itertools import pairwise, product

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from deltasync.delta.region import Region
from deltasync.engines.routes.regions import find, place_of

Dims = list[tuple[int, int]]

DIMS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4)


def places_of(start: int, dims: Dims) -> list[int]:
    """Where the elements lie, by plain index arithmetic."""
    strides = [stride for _, stride in dims]
    indices = product(*(range(size) for size, _ in dims))
    return [start + sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices]


def in_order(region: Region) -> list[int]:
    return places_of(region.start, list(region.dims))


@example(start=0, dims=[(2, 1), (2, 1)])  # a place is twice there where steps are equal
@given(start=st.integers(0, 9), dims=DIMS)
def test_a_region_has_the_elements_that_its_dimensions_say(start: int, dims: Dims) -> None:
    region, places = Region(start, tuple(dims)), places_of(start, dims)
    assert in_order(region) == places
    assert region.numel == len(places)
    assert region.shape == tuple(size for size, _ in region.dims)
    assert region.strides == tuple(stride for _, stride in region.dims)
    assert region.places(torch.arange(len(places))).tolist() == places
    assert [place_of(region, n) for n in range(len(places))] == places
    steps = [b - a for a, b in pairwise(places)]
    assert region.is_run == all(step == 1 for step in steps)
    assert region.is_rising == all(step > 0 for step in steps)
    assert region.repeats == (len(set(places)) < len(places))
    if places:
        assert (region.start, region.stop) == (places[0], max(places) + 1)
        line = torch.arange(region.stop)
        assert region.view(line).reshape(-1).tolist() == places
    if region.is_rising:
        inside, numbers = find(region, torch.arange(60))
        assert inside.tolist() == [place in places for place in range(60)]
        assert numbers[inside].tolist() == list(range(sum(place < 60 for place in places)))
    if region.rows is not None and region.is_rising:
        per_row, gap = region.rows
        assert [start + n + n // per_row * gap for n in range(region.numel)] == places
