"""What staged changes write, wherever weights lie; and what was written wrong is found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import Flat, Live, integer_dtype
from deltasync.delta.codes import Codes
from deltasync.delta.host import HostLanes
from deltasync.delta.payloads import PayloadReader
from deltasync.delta.region import Region, unpaired
from deltasync.delta.route import Part, Piece
from deltasync.delta.staging import LiveWeights
from deltasync.delta.tiles import Space
from deltasync.errors import DigestMismatch, InvalidIndices
from deltasync.wire.changes import TILE
from deltasync.wire.digest import MASK
from deltasync.wire.messages import ParameterSpec
from tests.wire import reference
from tests.wire.reference import Tile
from tests.worlds import strategies as own
from tests.worlds.bits import specs_of
from tests.worlds.payloads import begin_of, bucket_of, measured, stage_tiles
from tests.worlds.strategies import relaid

Model = dict[str, Tensor]


def live_of(model: Model, instead: dict[int, Live] | None = None) -> LiveWeights:
    flats: dict[int, Live] = {n: Flat.of(t) for n, t in enumerate(model.values())}
    return measured(flats | (instead or {}), specs_of(model))


# What is wrong with a payload is found before a write


BAD_PLACES = {
    "unsorted": (3, 2),
    "repeated": (2, 2),
    "repeated at the end": (1, 2, 3, 3),
    "beyond the tile": (1, 10),
    "far beyond": (1, 65535),
}


@pytest.mark.parametrize("bad", BAD_PLACES.values(), ids=BAD_PLACES.keys())
@pytest.mark.parametrize("is_held", [True, False])
def test_bad_places_are_found_before_any_write(is_held: bool, bad: tuple[int, ...]) -> None:
    """Of parameters that are held, and of those of other ranks of the engine."""
    model = {n: torch.zeros(10, dtype=torch.int16) for n in "ab"}
    flats = {0: Flat.of(model["a"])} | ({1: Flat.of(model["b"])} if is_held else {})
    reader = PayloadReader(measured(flats, specs_of(model)))
    reader.begin(begin_of(payload_bytes=1 << 20, places=1 << 20))
    with pytest.raises(InvalidIndices, match="b: places"):
        reader.read(*bucket_of([Tile(0, (0,), (1,)), Tile(1, bad, (1,) * len(bad))], 2))
    assert not any(tensor.any() for tensor in model.values())


@pytest.mark.promise("Errors", "In place, nothing of a bad bucket, or of later ones, is written.")
@pytest.mark.parametrize("bad", range(4))
def test_in_place_a_bucket_is_checked_whole_before_its_first_element_is_written(bad: int) -> None:
    """Whatever way its tiles are taken: together, or one by one where they are strided."""
    model = {name: torch.zeros(10, dtype=torch.int16) for name in "abcd"}
    model["c"] = torch.zeros(10, 2, dtype=torch.int16)[:, 0]
    places = [(3, 3) if n == bad else (2, 3) for n in range(4)]
    tiles = [Tile(n, some, (1, 1)) for n, some in enumerate(places)]
    tiles[(bad + 1) % 4] = Tile((bad + 1) % 4, None, (1,) * 10)
    said = list[bool]()
    with pytest.raises(InvalidIndices, match=f"{'abcd'[bad]}: "):
        stage_tiles(live_of(model), tiles, in_place=True, writing=lambda: said.append(True))
    assert not said
    assert not any(tensor.any() for tensor in model.values())


# Weights that do not lie in one run


@dataclass
class Held:
    """One parameter: what is held of it, if anything, and what a sync says of it.

    With `is_spread`, all first codes of 4 bits lie in a row, then all second ones, and so on, so
    that a word has codes of several elements.
    """

    spec: ParameterSpec
    pieces: list[Piece]
    is_spread: bool

    def access(self, storage: Tensor) -> Live:
        first, spec = self.pieces[0], self.spec
        if self.is_spread:
            spread = [
                Piece(one.live, one.source, replace(one.target, start=one.target.start + begin), k)
                for k, begin in enumerate(range(0, 2 * storage.nbytes, len(storage)))
                for one in self.pieces
            ]
            return Codes(spread, {"": storage}, spec.dtype, spec.numel)
        if first.source == Region.run(0, self.spec.numel):
            return Flat.of(first.target.view(storage))
        return Part.of(self.pieces, {"": storage}, name=self.spec.name)

    def bits(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.spec.numel)
        bits = torch.randint(1 << 62, (4 * self.spec.numel + 4,), generator=generator)
        return bits.to(integer_dtype(self.spec.dtype))

    @property
    def places(self) -> dict[int, int]:
        """Where each element that is held is in storage; of codes, the first one."""
        found = dict[int, int]()
        for one in self.pieces:
            count = torch.arange(one.source.numel)
            targets = one.target.places(count).tolist()
            found |= dict(zip(one.source.places(count).tolist(), targets, strict=True))
        return found


def piece_of(draw: st.DrawFn, shape: tuple[int, ...], ranges: list[range], start: int) -> Piece:
    """A box whose dimensions lie in storage in any order, from `start` on."""
    steps = list(accumulate(reversed(shape), int.__mul__, initial=1))[-2::-1]
    live_step, dims = draw(st.integers(1, 2)), []
    for dim in draw(st.permutations(range(len(shape)))):
        dims.append((len(ranges[dim]), steps[dim], live_step))
        live_step *= len(ranges[dim])
    begin = sum(found.start * step for found, step in zip(ranges, steps, strict=True))
    return Piece.of("", *unpaired(begin, start, dims))


def pieces_of(draw: st.DrawFn, shape: tuple[int, ...], numel: int) -> list[Piece]:
    """All of it, one or two boxes of it, or nothing."""
    match draw(st.sampled_from(["nothing", "all", "boxes"])):
        case "nothing":
            return []
        case "all":
            return [piece_of(draw, shape, [range(size) for size in shape], 1)]
    bounds = sorted(draw(st.sets(st.integers(0, shape[0]), min_size=2, max_size=3)))
    others = [part_of(draw, size) for size in shape[1:]]
    return [
        piece_of(draw, shape, [range(low, high), *others], 2 * numel * nth)
        for nth, (low, high) in enumerate(pairwise(bounds))
    ]


def part_of(draw: st.DrawFn, size: int) -> range:
    low = draw(st.integers(0, size - 1))
    return range(low, draw(st.integers(low + 1, size)))


SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3) | st.sampled_from(
    [[3, 2000], [TILE + 3], [2, 3, 1500]]
)


@st.composite
def helds(draw: st.DrawFn) -> list[Held]:
    found = []
    for number in range(draw(st.integers(1, 4))):
        is_spread = draw(st.booleans())
        names = ["uint8", "int32", "int64"] if is_spread else ["bfloat16", "float32", "uint8"]
        dtype = dtypes.BY_NAME[draw(st.sampled_from(names))]
        shape = tuple(draw(SHAPES))
        spec = ParameterSpec((f"w{number}",), shape, dtype)
        found.append(Held(spec, pieces_of(draw, shape, spec.numel), is_spread))
    return found


@st.composite
def changed(draw: st.DrawFn, space: Space) -> list[Tile]:
    """Any tiles, sparse and whole."""
    rng, found = np.random.default_rng(draw(st.integers(0, 99))), list[Tile]()
    for number, (share, numel) in enumerate(zip(space.share.tolist(), space.numel, strict=True)):
        density = draw(st.sampled_from([0.0, 0.3, 1.0, None]))
        places = np.flatnonzero(rng.random(numel) < (density or 0))
        count = len(places) if density is not None else int(numel)
        bits = rng.integers(0, 1 << 64, count, np.uint64).tolist()
        top = (1 << 8 * int(space.item_size[share])) - 1
        some = None if density is None else tuple(places.tolist())
        if count:
            found.append(Tile(number, some, tuple(one & top for one in bits)))
    return found


def codes_of(element: int, item_size: int) -> list[int]:
    return [element >> 4 * code & 15 for code in range(2 * item_size)]


def element_at(held: Held, storage: Tensor, place: int) -> int:
    """The unsigned bits of an element, in plain integers."""
    size = storage.element_size()
    if not held.is_spread:
        return int(storage[place]) % (1 << 8 * size)
    data, found = storage.view(torch.uint8), 0
    for code, begin in enumerate(range(0, 2 * storage.nbytes, len(storage))):
        byte = int(data[(place + begin) // 2])
        found |= (byte >> 4 * ((place + begin) % 2) & 15) << 4 * code
    return found


@given(given_helds=helds(), data=st.data(), in_place=st.booleans())
def test_boxes_and_codes_are_written_as_plain_reckoning_says(
    given_helds: list[Held], data: st.DataObject, in_place: bool
) -> None:
    """What is held of each parameter, and no byte of storage beside it."""
    specs = tuple(held.spec for held in given_helds)
    storages, before = ([held.bits() for held in given_helds] for _ in range(2))
    flats = {
        number: held.access(storages[number])
        for number, held in enumerate(given_helds)
        if held.pieces
    }
    live = measured(flats, specs)
    tiles = data.draw(changed(live.space))
    staging = stage_tiles(live, tiles, in_place=in_place)
    if not in_place:
        assert all(map(torch.equal, storages, before))
    assert staging.commit() == staging.ledger.total
    wanted = [
        {place: element_at(held, old, at) for place, at in held.places.items()}
        for held, old in zip(given_helds, before, strict=True)
    ]
    for tile in tiles:
        share, start = int(live.space.share[tile.number]), int(live.space.start[tile.number])
        number = live.space.shares[share].number
        within = range(len(tile.bits)) if tile.places is None else tile.places
        for place, bits in zip(within, tile.bits, strict=True):
            if start + place in wanted[number]:
                wanted[number][start + place] = bits
    total = 0
    for number, held in enumerate(given_helds):
        now = {p: element_at(held, storages[number], at) for p, at in held.places.items()}
        assert now == wanted[number]
        key = reference.seed(held.spec.name)
        total += reference.digest(key, now.keys(), now.values())
    assert staging.ledger.total == total & MASK
    assert np.array_equal(live.measure(np.arange(live.space.num_chunks)), staging.ledger.sums)
    if in_place:
        with pytest.raises(DigestMismatch):
            staging.undo()
    else:
        staging.undo()
        assert all(map(torch.equal, storages, before))


# Writes that do not stick


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
    assert isinstance(lanes, HostLanes)
    twice = replace(lanes, where=replace(lanes.where, places=lanes.where.places[[0, 0]]))
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


def test_undo_after_a_write_that_raised_restores_what_was_written() -> None:
    model = {"a": torch.zeros(4), "b": torch.zeros(4)}
    broken: Any = Faulty(Flat.of(model["b"]), stuck=0, times=0)
    live = live_of(model, {1: broken})
    staging = stage_tiles(live, [Tile(n, None, (1,) * 4) for n in (0, 1)])
    broken.write = broken.scatter = None  # the first write of "b" raises
    with pytest.raises(TypeError):
        staging.commit()
    assert model["a"].any()
    del broken.write, broken.scatter
    staging.undo()
    assert not any(tensor.any() for tensor in model.values())


@pytest.mark.parametrize("kind", ["sparse", "whole"])
def test_weights_of_many_tiles_and_chunks_are_written_and_taken_back(kind: str) -> None:
    """Some are written in several blocks, and their digests are in several chunks."""
    numel = (1 << 18) + 5 * TILE + 7
    model = {"a": torch.zeros(numel, dtype=torch.int16), "b": torch.zeros(9, dtype=torch.int16)}
    live, tiles = live_of(model), list[Tile]()
    for number, count in enumerate(live.space.numel.tolist()):
        places = tuple(range(0, count, 3)) if kind == "sparse" else None
        tiles.append(Tile(number, places, (7,) * (count if places is None else len(places))))
    staging = stage_tiles(live, tiles)
    staging.commit()
    assert np.array_equal(live.measure(np.arange(live.space.num_chunks)), staging.ledger.sums)
    step = 3 if kind == "sparse" else 1
    assert int((model["a"] == 7).sum()) == sum(
        len(range(0, n, step)) for n in live.space.numel[:-1]
    )
    staging.undo()
    assert not any(tensor.any() for tensor in model.values())


def test_a_rank_that_sends_nothing_may_send_nothing() -> None:
    model = {"a": torch.zeros(10, dtype=torch.int16)}
    reader = PayloadReader(live_of(model))
    reader.begin(begin_of(payload_bytes=1 << 20, places=1 << 20))
    reader.take_shares(None, 0)
    with pytest.raises(InvalidIndices):
        reader.read(*bucket_of([Tile(0, (0,), (1,))], 2))
