"""Parameters beyond 2^31 elements, in memory that is there only where it is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import Flat, Live
from deltasync.delta.shard import whole
from deltasync.delta.staging import LiveWeights
from deltasync.delta.tiles import Space
from deltasync.engines.routes.regions import unpaired
from deltasync.engines.routes.route import Part, Piece
from deltasync.wire.changes import TILE
from deltasync.wire.messages import ParameterSpec
from tests.wire.reference import Tile
from tests.worlds.payloads import stage_tiles

INT32 = 1 << 31
ROWS, COLS = 1 << 16, (1 << 15) + 9
HELD = 1 << 14  # columns that a rank of an engine keeps, the first ones
BF16 = ParameterSpec(("w",), (ROWS, COLS), dtypes.BY_NAME["bfloat16"])


def zeros(*shape: int) -> Tensor:
    return torch.from_numpy(np.zeros(shape, np.int16)).view(torch.bfloat16)


def live(laid: str) -> Live:
    if laid == "run":
        return Flat.of(zeros(ROWS, COLS))
    piece = Piece.of("w", *unpaired(0, 0, [(ROWS, COLS, HELD), (HELD, 1, 1)]))
    return Part.of([piece], {"w": zeros(ROWS, HELD)}, name="w")


LAST = -(-BF16.numel // TILE) - 1
TILES = [
    Tile(0, (0, 1, 4095), (1, 2, 3)),
    Tile(INT32 // TILE - 1, (7, 4095), (4, 5)),
    Tile(INT32 // TILE, None, tuple(range(1, TILE + 1))),
    Tile(LAST - 20, (0, 9), (6, 7)),
    Tile(LAST, None, (8,) * (BF16.numel - LAST * TILE)),
]
"""At the beginning, across 2^31 and at the end."""


@pytest.mark.parametrize("laid", ["run", "part"])
def test_what_lies_beyond_2_to_the_31_is_written_and_taken_back(laid: str) -> None:
    """Of weights that nobody has measured: their digests count as 0."""
    flat = live(laid)
    weights = LiveWeights({0: flat}, Space(whole((BF16,))))
    expected = {
        tile.number * TILE + place: bits
        for tile in TILES
        for place, bits in zip(
            range(TILE) if tile.places is None else tile.places, tile.bits, strict=False
        )
    }
    if laid == "part":
        expected = {n: bits for n, bits in expected.items() if n % COLS < HELD}
    assert max(expected) > INT32 > min(expected)
    positions, new = torch.tensor(list(expected)), torch.tensor(list(expected.values())).short()
    staging = stage_tiles(weights, TILES)
    assert staging.commit() == staging.ledger.total
    assert torch.equal(flat.gather(positions), new)
    chunks = np.flatnonzero(staging.ledger.sums)
    sums = weights.ledger.sums.copy()
    for sign, bits in ((np.add, new), (np.subtract, torch.zeros_like(new))):
        sign.at(sums, *weights.digests_at(0, positions, bits))
    assert np.array_equal(staging.ledger.sums, sums)
    assert len(chunks) == len({n // (64 * TILE) for n in expected})
    staging.undo()
    assert not flat.gather(positions).any()
