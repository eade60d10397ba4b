"""Which tensors share bytes, against every byte of theirs listed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.bits import Flat, overlapping

MEMORY = torch.zeros(96, dtype=torch.uint8)
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.complex64)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Any strides over a small storage, in any dtype, its elements wherever they fit."""
    line = MEMORY.view(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    start = draw(st.integers(0, max(0, len(line) - extent)))
    if extent > len(line):
        shape, strides = [2], [3]
    return line.as_strided(shape, strides, start)


def elements_of(tensor: Tensor) -> Iterator[frozenset[int]]:
    """The bytes of each element."""
    size = tensor.element_size()
    for index in product(*map(range, tensor.shape)):
        steps = sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        first = tensor.data_ptr() + steps * size
        yield frozenset(range(first, first + size))


def bytes_of(tensor: Tensor) -> frozenset[int]:
    return frozenset().union(*elements_of(tensor))


def has_twice(tensor: Tensor) -> bool:
    found = list(elements_of(tensor))
    return len(set(found)) < len(found)


@given(st.lists(views().filter(lambda tensor: not has_twice(tensor)), min_size=2, max_size=5))
def test_tensors_that_share_a_byte_are_found_and_no_others(tensors: list[Tensor]) -> None:
    held = [(str(number), Flat.of(tensor)) for number, tensor in enumerate(tensors)]
    pairs = {
        (str(a), str(b))
        for a, b in combinations(range(len(tensors)), 2)
        if bytes_of(tensors[a]) & bytes_of(tensors[b])
    }
    found = overlapping(held)
    assert (found is None) is (not pairs)
    if found is not None:
        assert tuple(sorted(found)) in pairs


def test_views_too_hard_for_a_search_are_told_apart_by_their_bytes() -> None:
    line = torch.zeros(17 << 20, dtype=torch.uint8)
    apart = [
        line.as_strided((64, 128), (17, 9146), 3174),
        line.as_strided((64, 2, 2, 16), (237854, 234265, 634, 34), 1831),
    ]
    sharing = [
        line.as_strided((64, 64, 128), (2, 198305, 40968), 2513),
        line.as_strided((3, 16, 128), (96639, 7, 187), 773),
    ]
    assert overlapping([("a", Flat.of(apart[0])), ("b", Flat.of(apart[1]))]) is None
    assert overlapping([("a", Flat.of(sharing[0])), ("b", Flat.of(sharing[1]))]) is not None
