"""Regions, against the places of all of their elements."""

from __future__ import annotations

from itertools import pairwise, product

import torch
from hypothesis import given
from hypothesis import strategies as st

from deltasync.delta.region import Region, ordered, paired, unpaired

Dims = list[tuple[int, int]]

DIMS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4)


def places_of(start: int, dims: Dims) -> list[int]:
    """Where the elements lie, by plain index arithmetic."""
    strides = [stride for _, stride in dims]
    indices = product(*(range(size) for size, _ in dims))
    return [start + sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices]


def in_order(region: Region) -> list[int]:
    return places_of(region.start, list(region.dims))


@st.composite
def regions(draw: st.DrawFn, numel: int | None = None) -> Region:
    """Any, or one of so many elements."""
    dims = draw(DIMS)
    if numel is not None:
        sizes, rest = [], numel
        while rest > 1:
            sizes.append(draw(st.sampled_from([n for n in range(2, rest + 1) if rest % n == 0])))
            rest //= sizes[-1]
        dims = [(size, draw(st.integers(0, 40))) for size in sizes]
    return Region(draw(st.integers(0, 9)), tuple(dims))


@given(start=st.integers(0, 9), dims=DIMS)
def test_a_region_has_the_elements_that_its_dimensions_say(start: int, dims: Dims) -> None:
    region, places = Region(start, tuple(dims)), places_of(start, dims)
    assert in_order(region) == places
    assert region.numel == len(places)
    assert region.shape == tuple(size for size, _ in region.dims)
    assert region.strides == tuple(stride for _, stride in region.dims)
    assert region.places(torch.arange(len(places))).tolist() == places
    assert [region.place(n) for n in range(len(places))] == places
    steps = [b - a for a, b in pairwise(places)]
    assert region.is_run == all(step == 1 for step in steps)
    assert region.is_rising == all(step > 0 for step in steps)
    assert region.repeats == (len(set(places)) < len(places))
    if places:
        assert (region.start, region.stop) == (places[0], max(places) + 1)
        line = torch.arange(region.stop)
        assert region.view(line).reshape(-1).tolist() == places
    if region.is_rising:
        inside, numbers = region.find(torch.arange(60))
        assert inside.tolist() == [place in places for place in range(60)]
        assert numbers[inside].tolist() == list(range(sum(place < 60 for place in places)))
    if region.rows is not None and region.is_rising:
        per_row, gap = region.rows
        assert [start + n + n // per_row * gap for n in range(region.numel)] == places


@given(numel=st.integers(1, 48), data=st.data())
def test_pairs_of_elements_stay_pairs(numel: int, data: st.DataObject) -> None:
    """In dimensions that both have, and in the order in which those of one lie."""
    sizes = data.draw(regions(numel=numel)).shape
    one, other = (
        Region(start, tuple((size, data.draw(st.integers(0, 40))) for size in sizes))
        for start in (1, 2)
    )
    assert unpaired(1, 2, paired(one, other)) == (one, other)
    pairs = list(zip(in_order(one), in_order(other), strict=True))
    assert sorted(zip(*map(in_order, ordered(one, other)), strict=True)) == sorted(pairs)
