"""Codes of 4 bits are found wherever a kernel moves them, and written there one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.bits import as_bits, dtype_of
from deltasync.delta.codes import CODE_BITS, Codes
from deltasync.delta.region import Region
from deltasync.delta.route import Piece
from deltasync.engines.routes.learning import Moves, pieces_of

DTYPES = [torch.uint8, torch.int16, torch.int32, torch.int64]


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


def codes_of(
    process: Callable[[Tensor], Tensor], source: Tensor, held: Tensor, live: Tensor
) -> Codes:
    """What is learnt of a function of one tensor, as access to some of its elements."""
    moves = Moves(lambda given: {"live": process(given["in"])}, {"in": source}, CODE_BITS)
    elements, places = moves.places("in", {"live": live})["live"]
    where = torch.full((2 * source.nbytes,), -1)
    where[elements] = places
    count = 2 * source.element_size()
    pieces: list[Piece] = []
    for code in range(count):
        there = where[held * count + code]
        assert (there >= 0).all()
        found = pieces_of("live", held, there)
        assert found is not None
        pieces += [replace(piece, code=code) for piece in found]
    return Codes(pieces, {"live": live}, dtype_of(source), source.numel())


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    live=st.sampled_from(DTYPES),
    numel=st.integers(1, 40).map(lambda n: 8 * n),
    block=st.sampled_from([1, 2, 4, 8, 16]),
    padding=st.integers(0, 3),
    is_part=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_any_order_of_codes_is_learnt_read_and_written(
    dtype: torch.dtype,
    live: torch.dtype,
    numel: int,
    block: int,
    padding: int,
    is_part: bool,
    seed: int,
) -> None:
    """Whatever blocks of codes change places, and whatever lies between them."""
    generator = torch.Generator().manual_seed(seed)
    total = 2 * numel * dtype.itemsize
    order = torch.randperm(total // block, generator=generator)
    every = (order[:, None] * block + torch.arange(block)).view(-1)
    filled = padding * 16

    def process(tensor: Tensor) -> Tensor:
        codes = torch.full((total + filled,), 5, dtype=torch.uint8)
        codes[filled:] = unpacked(tensor)[every]
        return packed(codes, live)

    old, new = (random_bits((numel,), dtype, seed + n) for n in (0, 1))
    made = process(old)
    held = torch.arange(numel)
    if is_part:
        held = held[torch.rand(numel, generator=generator) < 0.6]
        if not len(held):
            return
    codes = codes_of(process, old, held, made)
    assert codes.numel == len(held)
    positions = codes.held(0, numel)
    assert torch.equal(held, torch.arange(numel) if positions is None else positions)
    assert torch.equal(codes.read(0, numel), as_bits(old)[held])

    wanted, address = old.clone(), made.data_ptr()
    some = held[torch.rand(len(held), generator=generator) < 0.3]
    wanted[some] = new[some]
    codes.scatter(some, as_bits(new)[some])
    assert torch.equal(made, process(wanted))
    assert torch.equal(codes.gather(some), as_bits(new)[some])

    start = int(torch.randint(0, numel, (1,), generator=generator))
    codes.write(start, as_bits(new)[start:])
    run = held[held >= start]
    wanted[run] = new[run]
    assert torch.equal(made, process(wanted))
    codes.write(0, as_bits(old))
    assert torch.equal(made, process(old))
    assert made.data_ptr() == address


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


def test_a_strided_tensor_is_written_where_it_lies() -> None:
    def process(tensor: Tensor) -> Tensor:
        return packed(unpacked(tensor).view(8, 2, 4, 8).transpose(0, 2).reshape(-1), torch.int32)

    old, new = (random_bits((64,), torch.int32, n) for n in (0, 1))
    storage = torch.zeros(8, 10, dtype=torch.int32)
    live = storage[:, 1:9].t()
    live.copy_(process(old).view(8, 8))
    codes = codes_of(lambda t: process(t).view(8, 8), old, torch.arange(64), live)
    assert torch.equal(codes.read(0, 64), old)
    codes.write(0, new)
    assert torch.equal(live, process(new).view(8, 8))
    assert not storage[:, [0, 9]].any()


@pytest.mark.parametrize(
    "process",
    [
        lambda t: t ^ -0x77777778,  # codes become signed
        lambda t: t & 0x77777777,
        lambda t: t + 0x11111111,
        lambda t: packed(unpacked(t).flip(0).maximum(unpacked(t)), torch.int32),
        lambda t: packed(unpacked(t) ^ unpacked(t).roll(1), torch.int32),
        lambda t: packed(unpacked(t).sort().values, torch.int32),
        lambda t: packed(15 - unpacked(t), torch.int32),
    ],
)
def test_codes_that_are_computed_have_no_place(process: Callable[[Tensor], Tensor]) -> None:
    source = torch.empty(512, dtype=torch.int32)
    moves = Moves(lambda given: {"live": process(given["in"])}, {"in": source}, CODE_BITS)
    found = moves.places("in", {"live": source})
    assert sum(len(elements) for elements, _ in found.values()) < 8 * 512
