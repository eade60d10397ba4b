"""Regions, against the places of all of their elements."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from deltasync.delta.region import Region, ordered, paired, row_major, unpaired

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


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Region]:
    """A shape, and a box of it whose dimensions may be in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    start, dims = 0, []
    for size, stride in zip(shape, row_major(shape), strict=True):
        low = draw(st.integers(0, size - 1))
        start += low * stride
        dims.append((draw(st.integers(1, size - low)), stride))
    return shape, Region(start, tuple(draw(st.permutations(dims))))


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


@given(one=regions(), other=regions())
def test_equal_regions_have_the_same_elements_in_the_same_order(one: Region, other: Region) -> None:
    assert (one == other) == (in_order(one) == in_order(other))
    assert one.meets(other) == bool(set(in_order(one)) & set(in_order(other)))


@given(dims=DIMS, cut=st.lists(st.integers(1, 4), max_size=3))
def test_a_dimension_may_be_said_in_several(dims: Dims, cut: list[int]) -> None:
    """A split dimension, and dimensions of one element, make no other region."""
    whole = prod(cut)
    fine = [(size, stride) for size, stride in zip(cut, row_major(cut), strict=True)]
    split = [*dims, (1, 5), *((size, 3 * stride) for size, stride in fine)]
    assert Region(2, tuple(split)) == Region(2, (*dims, (whole, 3)))


@given(region=regions(), places=st.lists(st.integers(0, 60)))
def test_elements_are_found_by_their_places(region: Region, places: list[int]) -> None:
    assume(region.is_rising)
    elements = in_order(region)
    inside, numbers = region.find(torch.tensor([*places, *elements]))
    assert inside.tolist() == [place in elements for place in (*places, *elements)]
    found = numbers[inside].tolist()
    assert found == [elements.index(place) for place in (*places, *elements) if place in elements]


@given(dims=DIMS, width=st.integers(1, 9), data=st.data())
def test_rows_say_where_elements_lie(dims: Dims, width: int, data: st.DataObject) -> None:
    cols = data.draw(st.integers(1, width))
    for region in (Region(3, ((4, width), (cols, 1))), Region(3, tuple(dims))):
        two = len(region.dims) <= 1 or (len(region.dims) == 2 and region.dims[-1][1] == 1)
        assert region.is_rows == two
        if region.is_rows and region.is_rising:
            per_row, gap = region.rows
            found = [region.start + n + n // per_row * gap for n in range(region.numel)]
            assert found == in_order(region)


@given(region=regions(), count=st.integers(0, 3), step=st.integers(0, 9))
def test_a_region_several_times(region: Region, count: int, step: int) -> None:
    found = in_order(region.times(count, step))
    assert found == [place + n * step for n in range(count) for place in in_order(region)]


@given(box=boxes(), data=st.data())
def test_a_box_of_a_region_is_selected(
    box: tuple[tuple[int, ...], Region], data: st.DataObject
) -> None:
    """Along the dimensions of the region there is always one."""
    shape, numbers = box
    strides = [data.draw(st.integers(0, 40)) for _ in shape]
    region = Region(5, tuple(zip(shape, strides, strict=True)))
    found = region.select(numbers)
    assert found is not None
    assert in_order(found) == [region.place(number) for number in in_order(numbers)]


@given(region=regions(), data=st.data())
def test_what_is_selected_are_the_elements_of_these_numbers(
    region: Region, data: st.DataObject
) -> None:
    numbers = data.draw(regions())
    assume(numbers.stop <= region.numel)
    found = region.select(numbers)
    if found is not None:
        assert in_order(found) == [region.place(number) for number in in_order(numbers)]


@given(numel=st.integers(0, 48), data=st.data())
def test_pairs_of_elements_stay_pairs(numel: int, data: st.DataObject) -> None:
    """In dimensions that both have, and in the order in which those of one lie."""
    if numel == 0:
        empty = Region.run(data.draw(st.integers(0, 9)), 0)
        assert ordered(empty, empty) == (empty, empty)
        return
    sizes = data.draw(regions(numel=numel)).shape
    one, other = (
        Region(start, tuple((size, data.draw(st.integers(0, 40))) for size in sizes))
        for start in (1, 2)
    )
    assert unpaired(1, 2, paired(one, other)) == (one, other)
    pairs = list(zip(in_order(one), in_order(other), strict=True))
    assert sorted(zip(*map(in_order, ordered(one, other)), strict=True)) == sorted(pairs)


@given(shape=st.lists(st.integers(1, 5), max_size=4), data=st.data())
def test_a_transposed_tensor_is_a_run_in_its_own_order(
    shape: list[int], data: st.DataObject
) -> None:
    tensor = torch.zeros(shape).permute(data.draw(st.permutations(range(len(shape)))))
    target, source = Region.of(tensor), Region.run(0, tensor.numel())
    assert ordered(target, source)[0] == Region.run(0, tensor.numel())
    assert ordered(*ordered(target, source)[::-1]) == (source, target)


def test_the_bytes_of_a_tensor_are_those_of_its_elements() -> None:
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16)[1:3, ::2]
    found = in_order(Region.of_bytes(tensor))
    elements = [tensor[row, col].data_ptr() for row in range(2) for col in range(3)]
    assert found == [address + nth for address in elements for nth in range(2)]
