"""Codes of 4 bits are found wherever a kernel moves them, and written there one by one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.bits import dtype_of
from deltasync.delta.region import Region
from deltasync.engines.routes.codes import Codes
from deltasync.engines.routes.route import Piece


def unpacked(tensor: Tensor) -> Tensor:
    """uint8[codes] of a tensor, the low ones first."""
    both = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.stack((both & 15, both >> 4), 1).view(-1)


def packed(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes[::2] | codes[1::2] << 4).view(dtype)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return drawn.view(dtype).view(shape)


@given(st.integers(0, 1 << 20))
def test_neighbours_in_a_word_keep_their_bits(seed: int) -> None:
    """Two tensors whose codes alternate in every byte; the storage has an odd number of bytes."""
    old, new = (random_bits((2, 8), torch.uint8, seed + n) for n in (0, 1))
    codes = torch.stack([unpacked(one) for one in old], 1).view(-1)
    live = torch.cat([packed(codes, torch.uint8), torch.tensor([7], dtype=torch.uint8)])
    pieces = [
        [
            Piece("live", Region.run(0, 8), Region(first + 2 * code, ((8, 4),)), code)
            for code in (0, 1)
        ]
        for first in (0, 1)
    ]
    both = [Codes(one, {"live": live}, dtype_of(old), 8) for one in pieces]
    both[0].write(0, new[0])
    assert torch.equal(both[0].read(0, 8), new[0])
    assert torch.equal(both[1].read(0, 8), old[1])
    both[1].scatter(torch.tensor([7, 2]), new[1][[7, 2]])
    assert torch.equal(both[0].read(0, 8), new[0])
    assert torch.equal(both[1].gather(torch.tensor([2, 7])), new[1][[2, 7]])
    assert live[-1] == 7
