"""Where engines move elements is learnt exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from deltasync.delta.bits import as_bits
from deltasync.engines.routes.learning import Moves, pieces_of

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.bfloat16,
    torch.float32,
    torch.int32,
    torch.int64,
]
Step = Callable[[Tensor], Tensor]


def rows_in_blocks(tensor: Tensor) -> Tensor:
    """As kernels of 128 rows by 4 columns want scales: a box in five dimensions."""
    rows, cols = tensor.shape
    tiles = tensor.view(rows // 32, 4, 8, cols // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(rows, cols)


def interleaved(tensor: Tensor) -> Tensor:
    """Rows of two halves in turn."""
    halves = tensor.view(2, -1, tensor.shape[1])
    return halves.transpose(0, 1).contiguous().view(tensor.shape)


STEPS: dict[str, Step] = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.t(),
    "transposed in memory": lambda t: t.t().contiguous(),
    "padded": lambda t: as_bits_padded(t),
    "swapped halves": lambda t: torch.cat([t[32:], t[:32]]),
    "tiled": rows_in_blocks,
    "interleaved": interleaved,
    "seen as bytes": lambda t: t.contiguous().view(torch.uint8),
    "a part of a larger one": lambda t: torch.cat([torch.ones_like(t), t], 1)[:, t.shape[1] :],
}


def as_bits_padded(tensor: Tensor) -> Tensor:
    return pad(as_bits(tensor), (0, 4, 0, 32)).view(tensor.dtype)


def random_bits(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (like.numel() * like.element_size(),)
    bits = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return bits.view(like.dtype).view(like.shape)


def written(moves: Moves, name: str, values: Tensor, live: dict[str, Tensor]) -> int:
    """Write an input to where its elements are. How many there are."""
    count = 0
    for result, (elements, places) in moves.places(name, live).items():
        order = elements.argsort()
        pieces = pieces_of(result, elements[order], places[order])
        assert pieces is not None
        seen = torch.empty(0, dtype=values.dtype).set_(live[result].untyped_storage())
        for piece in pieces:
            target = as_bits(piece.target.view(seen))
            target.copy_(as_bits(piece.source.view(values)).view(target.shape))
            count += piece.source.numel
    return count


@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=3, max_size=3),
    seed=st.integers(0, 1 << 20),
)
def test_what_is_written_through_moves_is_what_the_engine_makes(
    dtypes: list[torch.dtype], steps: list[str], seed: int
) -> None:
    inputs = {str(n): torch.empty(64, 8, dtype=dtype) for n, dtype in enumerate(dtypes)}

    def process(loaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            f"made {name}": STEPS[step](tensor)
            for (name, tensor), step in zip(loaded.items(), steps, strict=False)
        }

    moves = Moves(process, inputs)
    old, new = ({n: random_bits(t, seed + k) for n, t in inputs.items()} for k in (0, 1))
    live = process({name: tensor.clone() for name, tensor in old.items()})
    wanted = process({name: tensor.clone() for name, tensor in new.items()})
    for name, values in new.items():
        assert written(moves, name, values, live) == values.numel()
    for name, tensor in wanted.items():
        assert torch.equal(as_bits(live[name]), as_bits(tensor)), steps


def test_what_has_no_place_of_its_own_is_left_out() -> None:
    """Elements whose bytes are torn apart, and results whose shape depends on values."""

    def process(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        torn = given["in"].view(torch.uint8).view(-1, 4).t().contiguous()
        return {"torn": torn, "some": given["in"][given["in"] > 0]}

    moves = Moves(process, {"in": torch.empty(64, 8)})
    live = {"torn": torch.empty(4, 512, dtype=torch.uint8), "some": torch.empty(32)}
    assert moves.places("in", live) == {}


def test_orders_without_any_rule_are_refused() -> None:
    every = torch.arange(1 << 14)
    order = torch.randperm(1 << 14, generator=torch.Generator().manual_seed(0))
    assert pieces_of("live", every, order) is pieces_of("live", every, every.flip(0)) is None
