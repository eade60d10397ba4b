"""What routes ask of regions: which elements are where, and the same pairs in another order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from torch import Tensor

from deltasync.delta.region import Region, paired


def place_of(region: Region, number: int) -> int:
    """Where element `number` lies."""
    found = region.start
    for size, stride in reversed(region.dims):
        number, index = divmod(number, size)
        found += index * stride
    return found


def find(region: Region, places: Tensor) -> tuple[Tensor, Tensor]:
    """(bool[n], int64[n]): whether an element lies at each of int64[n] places, and which one.

    The number means nothing where no element lies. The region must be rising.
    """
    rest = places - region.start
    inside, number = rest >= 0, rest.new_zeros(rest.shape)
    for size, stride in region.dims:
        index = rest.div(stride, rounding_mode="floor")
        inside &= index < size
        rest, number = rest - index * stride, number * size + index
    return inside & (rest == 0), number


def select(region: Region, numbers: Region) -> Region | None:
    """The elements with these numbers, in that order; None if no region of them is found.

    If the numbers are a box along the dimensions of this region, there is always one.
    """
    if len(region.dims) <= 1 or not numbers.numel:
        step = region.dims[0][1] if region.dims else 1
        dims = tuple((size, stride * step) for size, stride in numbers.dims)
        return Region(region.start + numbers.start * step, dims)
    spaces = [prod(region.shape[place + 1 :]) for place in range(len(region.dims))]
    digits = [
        numbers.start // space % size for space, size in zip(spaces, region.shape, strict=True)
    ]
    found: list[tuple[int, int]] = []
    for size, stride in numbers.dims:
        if (split := _split(region, size, stride, spaces, digits)) is None:
            return None
        found += split
    return Region(place_of(region, numbers.start), tuple(found))


def _split(
    region: Region, count: int, step: int, spaces: Sequence[int], digits: list[int]
) -> list[tuple[int, int]] | None:
    """One dimension of numbers, along the dimensions here that it runs through.

    Args:
        count, step: Its size and stride.
        spaces: How many elements are inside a step of each dimension here.
        digits: How far the numbers have gone in each of these; updated.
    """
    if count > 1 and step == 0:
        return [(count, 0)]
    found: list[tuple[int, int]] = []
    while count > 1:
        place = next(n for n, space in enumerate(spaces) if space <= step)
        size, stride = region.dims[place]
        leap, odd = divmod(step, spaces[place])
        fits = digits[place] + (count - 1) * leap < size
        here = count if fits else size // leap  # else it goes on in the next one outwards
        digits[place] += (here - 1) * leap
        if odd or digits[place] >= size or (not fits and (here < 2 or size % leap or count % here)):
            return None
        found.insert(0, (here, leap * stride))
        count, step = count // here, step * here
    return found


def unpaired(start: int, other: int, dims: Iterable[tuple[int, int, int]]) -> tuple[Region, Region]:
    """Two regions with these dimensions, which begin at `start` and at `other`."""
    dims = list(dims)
    first = Region(start, tuple((size, stride) for size, stride, _ in dims))
    return first, Region(other, tuple((size, stride) for size, _, stride in dims))


def ordered(one: Region, other: Region) -> tuple[Region, Region]:
    """The same pairs of elements, in the order in which the elements of `one` lie: see `paired`."""
    dims = sorted(paired(one, other), key=lambda dim: (-dim[1], dim[0]))
    return unpaired(one.start, other.start, dims)
