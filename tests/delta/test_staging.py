"""What was written wrong is found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync.delta.bits import Flat, Live
from deltasync.delta.host import Lanes
from deltasync.delta.payloads import PayloadReader
from deltasync.delta.staging import Elements, LiveWeights
from deltasync.errors import DigestMismatch, InvalidIndices
from tests.wire.reference import Tile
from tests.worlds import strategies as own
from tests.worlds.bits import specs_of
from tests.worlds.payloads import begin_of, bucket_of, measured, stage_tiles
from tests.worlds.strategies import relaid

Model = dict[str, Tensor]


def live_of(model: Model, instead: dict[int, Live] | None = None) -> LiveWeights:
    flats: dict[int, Live] = {n: Flat.of(t) for n, t in enumerate(model.values())}
    return measured(flats | (instead or {}), specs_of(model))


@dataclass
class Faulty:
    """A parameter of which one element keeps its old bits whatever is written."""

    flat: Flat
    stuck: int
    times: int = 1 << 30

    def __getattr__(self, name: str) -> Any:
        return getattr(self.flat, name)

    def _write(self, write: Any, *arguments: Any) -> None:
        old = self.flat.read(self.stuck, self.stuck + 1).clone()
        write(*arguments)
        if self.times > 0:
            self.flat.write(self.stuck, old)
        self.times -= 1

    def write(self, start: int, bits: Tensor) -> None:
        self._write(self.flat.write, start, bits)

    def scatter(self, positions: Tensor, bits: Tensor) -> None:
        self._write(self.flat.scatter, positions, bits)


def faulty(tensor: Tensor, **arguments: int) -> tuple[LiveWeights, Any]:
    """One parameter."""
    broken: Any = Faulty(Flat.of(tensor), **arguments)
    return live_of({"w": tensor}, {0: broken}), broken


CHANGES = {"sparse": Tile(0, (1, 4), (1, 1)), "whole": Tile(0, None, (1,) * 10)}
every_change = pytest.mark.parametrize("tile", CHANGES.values(), ids=CHANGES.keys())


@pytest.mark.promise(
    "Checks",
    "What is written is read back; a write that does not persist is an error.",
)
@every_change
@pytest.mark.parametrize("layout", ["contiguous", "stepped"])
def test_a_write_that_does_not_stick_is_an_error(tile: Tile, layout: own.Layout) -> None:
    tensor = relaid(torch.zeros(10, dtype=torch.int16), layout)
    live, _ = faulty(tensor, stuck=4)
    staging = stage_tiles(live, [tile])
    with pytest.raises(DigestMismatch, match="w: the weights read back are not"):
        staging.commit()
    staging.undo()
    assert not tensor.any()
    with pytest.raises(DigestMismatch, match="w: the weights read back are not"):
        stage_tiles(live, [tile], in_place=True)


@pytest.mark.promise(
    "Checks",
    "What is written is read back; a write that does not persist is an error.",
)
def test_a_write_among_others_that_does_not_stick_is_an_error() -> None:
    """Where elements of several parameters are written together: here one twice."""
    tensor = torch.zeros(10, dtype=torch.int16)
    [lanes] = stage_tiles(live_of({"w": tensor}), [Tile(0, (4, 5), (1, 2))])._staged
    assert isinstance(lanes, Elements)
    where = getattr(lanes.put, "__self__", None)
    assert isinstance(where, Lanes)
    twice = replace(lanes, put=replace(where, places=where.places[[0, 0]]).write_checked)
    with pytest.raises(DigestMismatch, match="the weights read back are not"):
        twice.commit()
    assert lanes.restore()
    assert not replace(twice, old=twice.new).restore()


@every_change
def test_an_undo_that_does_not_stick_is_an_error(tile: Tile) -> None:
    live, broken = faulty(torch.zeros(10, dtype=torch.int16), stuck=4, times=0)
    staging = stage_tiles(live, [tile])
    staging.commit()
    broken.times = 2
    with pytest.raises(DigestMismatch, match="undo failed"):
        staging.undo()


def test_a_rank_that_sends_nothing_may_send_nothing() -> None:
    model = {"a": torch.zeros(10, dtype=torch.int16)}
    reader = PayloadReader(live_of(model))
    reader.begin(begin_of(payload_bytes=1 << 20, places=1 << 20))
    reader.take_shares(None, 0)
    with pytest.raises(InvalidIndices):
        reader.read(*bucket_of([Tile(0, (0,), (1,))], 2))
