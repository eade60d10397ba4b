"""Which tensors share bytes, against every byte of theirs listed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.bits import Flat, overlapping
from deltasync.delta.region import Region

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


@given(views())
def test_elements_that_share_storage_are_found_and_no_others(tensor: Tensor) -> None:
    assert Region.of(tensor).repeats is has_twice(tensor)


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


C = torch.zeros(6, dtype=torch.complex64)
LINE = torch.zeros(17 << 20, dtype=torch.uint8)
# Too hard for a search: their bytes are marked.
HARD = LINE.as_strided((64, 128), (17, 9146), 3174)
APART = {
    "hard": [HARD, LINE.as_strided((64, 2, 2, 16), (237854, 234265, 634, 34), 1831)],
    "real and imaginary": [C.real, C.imag],
}
SHARING = {
    "hard": [
        LINE.as_strided((64, 64, 128), (2, 198305, 40968), 2513),
        LINE.as_strided((3, 16, 128), (96639, 7, 187), 773),
    ],
    "complex and floats": [C, torch.view_as_real(C)[:, 1]],
}


def found_in(tensors: list[Tensor]) -> tuple[str, str] | None:
    return overlapping([(str(n), Flat.of(tensor)) for n, tensor in enumerate(tensors)])


@pytest.mark.parametrize("how", [*APART, *(f"{name}, sharing" for name in SHARING)])
def test_views_that_interleave_are_told_from_views_that_share(how: str) -> None:
    shares = how.endswith("sharing")
    tensors = SHARING[how.removesuffix(", sharing")] if shares else APART[how]
    assert (found_in(tensors) is not None) == shares
