"""Where engines move elements is learnt exactly; what they compute is never taken for a move."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from deltasync.delta.bits import as_bits
from deltasync.delta.codes import CODE_BITS
from deltasync.engines.routes.learning import Moves, pieces_of
from tests.delta.lacks import LACKS

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


def of_nibbles(tensor: Tensor) -> Tensor:
    bits = tensor.view(torch.uint8)
    return (bits >> 4 | bits << 4).view(tensor.dtype)


COMPUTED: dict[str, Step] = {
    "doubled": lambda t: t * 2,
    "clamped": lambda t: t.clamp(1e-10, 1e10),
    "the largest": lambda t: t.max().expand(t.shape).contiguous(),
    "rounded": lambda t: t.to(torch.float8_e4m3fn).to(t.dtype),
    "sorted": lambda t: t.sort(dim=0).values,
    "its magnitude": torch.abs,
    "powers of two": lambda t: (t.view(torch.int32) >> 23 << 23).view(torch.float32),
    "nibbles that change places": of_nibbles,
    "two of them": lambda t: t + t.roll(1),
}


BY_VALUE: dict[str, Step] = {
    "at most one": lambda t: t.clamp(max=1),
    "at least a little": lambda t: t.clamp(min=1e-12),
    "ones become others": lambda t: torch.where(t == 1, 2, t),
    "denormals become zeros": lambda t: torch.where(t.abs() < 1.2e-38, 0, t),
    "doubled when all are usual": lambda t: t * 2 if 0.3 < t.max() < 100 else t.clone(),
    "rising": lambda t: t.view(-1).sort().values.view(t.shape),
}


@pytest.mark.parametrize("how", [*COMPUTED, *BY_VALUE])
@pytest.mark.parametrize("is_gentle", [False, True])
def test_what_is_computed_is_not_all_moved(how: str, is_gentle: bool) -> None:
    """Nor what few elements are for some values: gentle numbers are small and rise."""
    shapes = [(64, 8)] if how in COMPUTED else [(2,), (4, 2), (64,)]
    step = (COMPUTED | BY_VALUE)[how]
    for shape in shapes:
        scale, weight = torch.empty(shape), torch.empty(64, 8, dtype=torch.int8)
        moves = Moves(
            lambda t: {"s": step(t["scale"]), "w": t["weight"]},
            {"scale": scale, "weight": weight},
            is_gentle=is_gentle,
        )
        live = {"s": torch.empty(shape), "w": weight}
        found = moves.places("scale", live)
        assert sum(len(elements) for elements, _ in found.values()) < scale.numel()
        assert len(moves.places("weight", live)["w"][0]) == 64 * 8


def refusing(scale: Tensor) -> None:
    if not bool((scale < 1).all()):
        raise ValueError("planted")


def too_large(scale: Tensor) -> None:
    """A size that no machine has, computed of a probe, which may be as large as 1e38."""
    torch.empty(int(scale.abs().max().clamp(max=1e18)), dtype=torch.uint8)


@pytest.mark.parametrize(
    "refuse",
    [refusing, too_large, *LACKS],
    ids=lambda refuse: getattr(refuse, "__name__", str(refuse)),
)
def test_values_that_code_refuses_are_not_tried_but_a_lack_of_memory_is_no_refusal(
    refuse: Exception | Callable[[Tensor], None],
) -> None:
    """A probe that was not tried proves nothing."""

    def process(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not isinstance(refuse, Exception):
            refuse(given["scale"])
        elif not bool((given["scale"] < 1).all()):
            raise refuse
        return {"s": given["scale"].flip(0)}

    if isinstance(refuse, Exception):
        with pytest.raises(type(refuse), match=re.escape(str(refuse)[:80])):
            Moves(process, {"scale": torch.empty(4)}, is_gentle=True)
    else:
        moves = Moves(process, {"scale": torch.empty(4)}, is_gentle=True)
        assert len(moves.places("scale", {"s": torch.empty(4)})["s"][0]) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, CODE_BITS])
def test_on_a_gpu_the_same_is_learnt(dtype: torch.dtype, bits: int) -> None:
    inputs = {"0": torch.empty(64, 8, dtype=dtype, device="meta")}
    found = []
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        for name, step in STEPS.items():
            moves = Moves(lambda t, s=step: {"made": s(t["0"])}, inputs, bits, device=device)  # type: ignore[misc]
            live = {"made": step(torch.zeros(64, 8, dtype=torch.uint8).to(dtype))}
            places = moves.places("0", live)
            found.append((name, {n: [x.tolist() for x in p] for n, p in places.items()}))
    half = len(STEPS)
    assert found[:half] == found[half:]


def test_what_has_no_place_of_its_own_is_left_out() -> None:
    """Elements whose bytes are torn apart, and results whose shape depends on values."""

    def process(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        torn = given["in"].view(torch.uint8).view(-1, 4).t().contiguous()
        return {"torn": torn, "some": given["in"][given["in"] > 0]}

    moves = Moves(process, {"in": torch.empty(64, 8)})
    live = {"torn": torch.empty(4, 512, dtype=torch.uint8), "some": torch.empty(32)}
    assert moves.places("in", live) == {}


@given(st.integers(0, 1 << 30))
def test_any_order_is_found_or_takes_too_many_pieces(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = 1 << int(torch.randint(0, 10, (1,), generator=generator))
    order = torch.randperm(blocks, generator=generator)
    target = torch.arange(4096).view(blocks, -1)[order].view(-1)
    pieces = pieces_of("live", torch.arange(4096), target)
    assert pieces is not None
    assert len(pieces) <= blocks
    found = torch.full((4096,), -1)
    for piece in pieces:
        count = torch.arange(piece.source.numel)
        found[piece.source.places(count)] = piece.target.places(count)
    assert torch.equal(found, target)


def test_orders_without_any_rule_are_refused() -> None:
    every = torch.arange(1 << 14)
    order = torch.randperm(1 << 14, generator=torch.Generator().manual_seed(0))
    assert pieces_of("live", every, order) is pieces_of("live", every, every.flip(0)) is None
