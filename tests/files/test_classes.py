"""The codec `class`: what is decoded is what was coded, and wrong bytes are refused by type."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.bits import Flat, Live, as_bits, dtype_of
from deltasync.delta.changes import Changes
from deltasync.delta.detector import HostDetector
from deltasync.delta.host import Table
from deltasync.delta.kernels.host import unsigned
from deltasync.delta.readers import WireReader
from deltasync.delta.shard import whole
from deltasync.delta.snapshot import Snapshot
from deltasync.delta.staging import Lane, LiveWeights
from deltasync.delta.steps import stepped, zigzag
from deltasync.delta.tiles import Ints, Space
from deltasync.dtypes import BY_NAME, Dtype
from deltasync.errors import ProtocolViolation, SyncError, WireError
from deltasync.files.classes import codec as class_codec
from deltasync.files.classes import positions, values
from deltasync.files.classes.bitstream import Bits, unsigned_dtype
from deltasync.files.classes.codec import ClassCodec
from deltasync.wire.changes import Sizes
from deltasync.wire.messages import ParameterSpec
from deltasync.wire.streams import packed, unpacked
from tests.worlds import strategies as own
from tests.worlds.bits import flipped, random_bits

BF16 = BY_NAME["bfloat16"]
MAX_ALLOCATED_BYTES = 4 << 20  # for rows of a few thousand elements
Case = tuple[Dtype, Bits, Bits]


@st.composite
def bit_pairs(draw: st.DrawFn) -> Case:
    """A dtype, new and old bits of which at least one differs: special values and noise."""
    dtype, span = draw(own.DTYPES), draw(st.integers(1, 20) | st.integers(1, 3000))
    rng = np.random.default_rng(draw(own.SEEDS))
    density = draw(st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]))
    old = random_bits(dtype, span, rng)
    new = flipped(old, rng.random(span) < density, rng)
    if dtype.name != "bool" and draw(st.booleans()):
        other = as_bits(random_bits(dtype, span, rng))
        new[new != old] = other[new != old]
    if bool((new == old).all()):
        new[rng.integers(span)] ^= 1
    kind = unsigned_dtype(dtype)
    return dtype, new.numpy().view(kind), old.numpy().view(kind)


def weights(span: int, density: float) -> tuple[Bits, Bits]:
    """uint16[span] new and old bfloat16 weights: small ones change more often, and by more."""
    rng = np.random.default_rng(1)
    value = (rng.standard_normal(span) * 0.02).astype(np.float32)
    size = 0.02 * density * rng.standard_normal(span).astype(np.float32)
    old, new = (whole.view(np.uint32) >> 16 for whole in (value, value + size))
    return new.astype(np.uint16), old.astype(np.uint16)


# Blocks


def blocks_of(dtype: Dtype, new: Bits, old: Bits) -> tuple[bytes, bytes]:
    where = np.flatnonzero(new != old).astype(np.int32)
    before = old[where]
    steps = zigzag(new[where], before, dtype)
    return positions.encode(where, old, dtype), values.encode(steps, before, dtype)


def decoded(dtype: Dtype, count: int, old: Bits, *blocks: bytes) -> tuple[Bits, Bits]:
    """(places, bits) that blocks say. Raises WireError."""
    index, value = (np.frombuffer(block, np.uint8) for block in blocks)
    where = positions.decode(index, count, old, dtype)
    assert where.dtype == np.int32
    before = old[where]
    return where, stepped(values.decode(value, before, dtype), before, dtype)


def assert_comes_back(dtype: Dtype, new: Bits, old: Bits) -> int:
    """Returns the bytes of the blocks."""
    wanted, blocks = np.flatnonzero(new != old), blocks_of(dtype, new, old)
    where, bits = decoded(dtype, len(wanted), old, *blocks)
    assert bits.dtype == unsigned_dtype(dtype)
    assert np.array_equal(where, wanted)
    assert np.array_equal(bits, new[wanted])
    return sum(map(len, blocks))


@given(case=bit_pairs())
def test_any_bits_come_back(case: Case) -> None:
    assert_comes_back(*case)


def test_weights_of_any_density_come_back_and_take_no_more_than_raw() -> None:
    """The longest has several lanes and groups, and a last lane that is short."""
    long = (1 << 21) + (1 << 18) + 77
    for span, density in ((300_000, 1e-4), (long, 1e-2), (300_000, 0.99), (300_000, 30.0)):
        new, old = weights(span, density)
        new[-1] ^= 1
        taken = assert_comes_back(BF16, new, old)
        assert taken < 1.01 * 6 * np.count_nonzero(new != old) + 64, density


@given(
    case=bit_pairs(),
    seed=own.SEEDS,
    cut=st.integers(-9, 9),
    other=st.tuples(st.binary(max_size=100), st.binary(max_size=100)),
)
def test_w31_w32_w33_wrong_blocks_are_a_wire_error_or_sound(
    case: Case, seed: int, cut: int, other: tuple[bytes, bytes]
) -> None:
    """Damaged ones, and arbitrary ones beside one that is right or not."""
    dtype, new, old = case
    count, rng = int(np.count_nonzero(new != old)), np.random.default_rng(seed)
    good = blocks_of(*case)
    damaged = [bytearray(block) for block in good]
    for block in damaged[: 1 + seed % 2]:
        for at in rng.integers(0, max(1, len(block)), seed % 5 if block else 0):
            block[at] = int(rng.choice(np.array([0, 1, 127, 128, 255, rng.integers(256)])))
    hit = damaged[seed // 2 % 2]
    hit[len(hit) + min(cut, 0) :] = bytes(max(cut, 0))
    for blocks in (other, (good[0], other[1]), (other[0], good[1]), tuple(map(bytes, damaged))):
        tracemalloc.start()
        try:
            where, bits = decoded(dtype, count, old, *blocks)
            assert (np.diff(where) > 0).all()
            assert 0 <= where[0] <= where[-1] < len(old)
            assert (len(bits), bits.dtype) == (count, unsigned_dtype(dtype))
        except WireError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < MAX_ALLOCATED_BYTES


# Payloads


Version = Sequence[Tensor]


@st.composite
def versions(draw: st.DrawFn) -> tuple[Version, Version]:
    """Two versions of some parameters of one item size; of some tiles most elements change."""
    rng = np.random.default_rng(draw(own.SEEDS))
    dtypes = draw(st.sampled_from([["bfloat16", "int16"], ["int8", "float8_e5m2"], ["float32"]]))
    old, new = list[Tensor](), list[Tensor]()
    for n, numel in enumerate(
        draw(st.lists(st.sampled_from([3, 500, 9000]), min_size=1, max_size=4))
    ):
        dtype = BY_NAME[dtypes[n % len(dtypes)]]
        density = np.repeat(rng.choice([0, 0.02, 0.3, 1.0], 3), 4096)[:numel]
        old.append(random_bits(dtype, numel, rng))
        new.append(flipped(old[-1], rng.random(numel) < density, rng).view(old[-1].dtype))
    old.append(old[0][:1].clone())
    new.append((as_bits(old[-1]) ^ 1).view(old[-1].dtype))  # something changes
    return old, new


def space_of(version: Version) -> Space:
    specs = [ParameterSpec((f"w{n}",), tuple(t.shape), dtype_of(t)) for n, t in enumerate(version)]
    return Space(whole(tuple(specs)))


def lane_of(version: Version, held: Sequence[int] | None = None) -> Lane:
    held = range(len(version)) if held is None else held
    space = space_of(version)
    flats: dict[int, Live] = {n: Flat.of(version[n]) for n in held}
    return Lane(LiveWeights(flats, space), space)


def coded(old: Version, new: Version) -> tuple[bytes, Changes]:
    """A payload with all that differs, and what it stands for."""
    space = space_of(old)
    detector = HostDetector(space, [Flat.of(old[n]).line for n in space.order])
    plan = Snapshot(detector).compare(
        [WireReader.of(one, dtype_of(one), name="w") for one in new],
        bucket_bytes=1 << 24,
        max_held_bytes=1 << 30,
        base_version=1,
    )
    [bucket] = plan.buckets()
    payload = torch.zeros(bucket.sizes.num_bytes, dtype=torch.uint8)
    bucket.pack(payload, lambda: None)
    changes = Changes.of(payload, bucket.sizes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(class_codec, "LEAST", 1)
        data = ClassCodec().encode(changes, detector)
    assert data is not None
    return data, changes


def same(left: Changes, right: Changes) -> bool:
    names = ("tiles", "counts", "places", "values", "whole")
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in names)


@given(pair=versions())
def test_any_changes_come_back(pair: tuple[Version, Version]) -> None:
    data, changes = coded(*pair)
    assert same(ClassCodec().decode(memoryview(data), changes.sizes, lane_of(pair[0])), changes)


@given(pair=versions(), data=st.data())
def test_who_lacks_a_parameter_decodes_the_others(
    pair: tuple[Version, Version], data: st.DataObject
) -> None:
    held = sorted(data.draw(st.sets(st.integers(0, len(pair[0]) - 1))))
    made, changes = coded(*pair)
    lane = lane_of(pair[0], held)
    found = ClassCodec().decode(memoryview(made), changes.sizes, lane)
    got, wanted = (Table(lane.space, one) for one in (found, changes))
    got.check()
    shares = {share: (places, bits) for share, places, bits in _lanes(got, found)}
    for share, places, bits in _lanes(wanted, changes):
        if int(lane.space.parameter[share]) in held:
            assert np.array_equal(places, shares[share][0])
            assert np.array_equal(bits, shares[share][1])


def test_who_lacks_a_parameter_takes_rows_with_whole_tiles_in_them() -> None:
    """However many places the tiles around them have."""
    rng, whole_one = np.random.default_rng(0), np.arange(4 * 4096) // 4096 == 1
    old = [random_bits(BF16, 4 * 4096, rng), random_bits(BF16, 100, rng)]
    masks = whole_one | (rng.random(4 * 4096) < 0.4), np.arange(100) < 9
    new = [flipped(one, mask, rng) for one, mask in zip(old, masks, strict=True)]
    (made, changes), lane = coded(old, new), lane_of(old, [1])
    found = ClassCodec().decode(memoryview(made), changes.sizes, lane)
    Table(lane.space, found).check()
    assert torch.equal(found.values[-9:], changes.values[-9:])
    streams, sizes = unpacked(memoryview(made), changes.sizes.num_bytes), changes.sizes
    rows = np.frombuffer(head := bytearray(streams[0]), class_codec._ROW, offset=8)
    more = 3 * 4096 + 1 - int(rows["count"][0])
    rows["count"][0] += more
    lie = replace(sizes, places=sizes.places + more)
    with pytest.raises(WireError, match="more changes than elements"):
        ClassCodec().decode(memoryview(packed([bytes(head), *map(bytes, streams[1:])])), lie, lane)


def _lanes(table: Table, changes: Changes) -> Iterator[tuple[int, Ints, Bits]]:
    """(share, places, bits) of each share that has lanes."""
    for share, lanes in table.by_share():
        yield share, table.positions()[lanes], unsigned(changes.values)[lanes]


def test_who_holds_a_part_is_told() -> None:
    class Half(Flat):
        def held(self, start: int, stop: int) -> Tensor:
            return torch.arange(start, min(stop, self.numel // 2))

    old = [torch.zeros(9000, dtype=torch.bfloat16)]
    data, changes = coded(old, [old[0] + (torch.arange(9000) % 9 == 0)])
    flat, space = Flat.of(old[0]), space_of(old)
    half = Half(flat.tensor, flat.dtype, flat.line, flat.numel, is_contiguous=True)
    lane = Lane(LiveWeights({0: half}, space), space)
    with pytest.raises(ProtocolViolation, match="a part is held here"):
        ClassCodec().decode(memoryview(data), changes.sizes, lane)


@given(pair=versions(), seed=own.SEEDS)
def test_w30_wrong_payloads_are_an_error_by_type_or_sound(
    pair: tuple[Version, Version], seed: int
) -> None:
    """Bytes of each stream that are others, fewer or more, and sizes that lie."""
    data, changes = coded(*pair)
    lane, rng, sizes = lane_of(pair[0]), np.random.default_rng(seed), changes.sizes
    streams = [bytearray(stream) for stream in unpacked(memoryview(data), sizes.num_bytes)]
    for _ in range(8):
        hurt = [bytearray(stream) for stream in streams]
        hit = hurt[rng.integers(4)]
        for at in rng.integers(0, max(1, len(hit)), rng.integers(4) if hit else 0):
            hit[at] = int(rng.choice(np.array([0, 1, 127, 128, 255, rng.integers(256)])))
        if rng.random() < 0.3:
            del hit[rng.integers(len(hit) + 1) :]
        more = [int(rng.choice([-1, 0, 0, 0, 1])) for _ in range(3)]
        lie = Sizes(sizes.item_size, *(n + m for n, m in zip(_counts(sizes), more, strict=True)))
        if lie.tiles < 1 or lie.places < 0 or lie.whole < 0:
            continue
        try:
            found = ClassCodec().decode(memoryview(packed(list(map(bytes, hurt)))), lie, lane)
            Table(lane.space, found).check()
        except (WireError, SyncError):
            continue
        assert found.sizes.places == lie.places


def _counts(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.tiles, sizes.places, sizes.whole
