"""The codec `class`: what is decoded is what was coded, and wrong bytes are refused by type."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.bits import Flat, Live, as_bits, dtype_of
from deltasync.delta.changes import Changes
from deltasync.delta.detector import HostSnapshot
from deltasync.delta.host import Table
from deltasync.delta.readers import WireReader
from deltasync.delta.shard import whole
from deltasync.delta.staging import Lane, LiveWeights
from deltasync.delta.tiles import Space
from deltasync.dtypes import BY_NAME
from deltasync.errors import ProtocolViolation, SyncError, WireError
from deltasync.files.classes import codec as class_codec
from deltasync.files.classes.codec import ClassCodec
from deltasync.wire.changes import Sizes
from deltasync.wire.messages import ParameterSpec
from deltasync.wire.streams import packed, unpacked
from tests.worlds import strategies as own
from tests.worlds.bits import flipped, random_bits

BF16 = BY_NAME["bfloat16"]
MAX_ALLOCATED_BYTES = 16 << 20  # for rows of some thousands of elements
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
    snapshot = HostSnapshot(space, [Flat.of(old[n]).line for n in space.order])
    plan = snapshot.compare(
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
        data = ClassCodec().encode(changes, snapshot)
    assert data is not None
    return data, changes


def same(left: Changes, right: Changes) -> bool:
    names = ("tiles", "counts", "places", "values", "whole")
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in names)


def test_many_small_changes_come_back_in_less_than_they_are() -> None:
    """In several lanes and groups, and a last lane that is short."""
    rng, span = np.random.default_rng(1), (1 << 21) + (1 << 18) + 77
    value = torch.from_numpy(rng.standard_normal(span, dtype=np.float32)) * 0.02
    step = torch.from_numpy(rng.standard_normal(span, dtype=np.float32)) * 0.0002
    old, new = [value.bfloat16()], [(value + step).bfloat16()]
    data, changes = coded(old, new)
    assert same(ClassCodec().decode(memoryview(data), changes.sizes, lane_of(old)), changes)
    assert len(data) < changes.sizes.num_bytes


@given(pair=versions())
def test_any_changes_come_back(pair: tuple[Version, Version]) -> None:
    data, changes = coded(*pair)
    assert same(ClassCodec().decode(memoryview(data), changes.sizes, lane_of(pair[0])), changes)


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
def test_w30_w31_w32_w33_wrong_payloads_are_an_error_by_type_or_sound(
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
            hit += rng.bytes(int(rng.integers(20)))
        more = [int(rng.choice([-1, 0, 0, 0, 1])) for _ in range(3)]
        lie = Sizes(sizes.item_size, *(n + m for n, m in zip(_counts(sizes), more, strict=True)))
        if lie.tiles < 1 or lie.places < 0 or lie.whole < 0:
            continue
        tracemalloc.start()
        try:
            found = ClassCodec().decode(memoryview(packed(list(map(bytes, hurt)))), lie, lane)
            Table(lane.space, found).check()
            assert found.sizes.places == lie.places
        except (WireError, SyncError):
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < MAX_ALLOCATED_BYTES


def _counts(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.tiles, sizes.places, sizes.whole
