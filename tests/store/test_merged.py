"""Merged deltas: as if they were written one after another."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta import coding
from deltasync.delta.bits import Flat, dtype_of
from deltasync.delta.coding import Coding
from deltasync.delta.readers import WireReader
from deltasync.delta.shard import whole
from deltasync.delta.snapshot import Plan, snapshot_of
from deltasync.errors import DeltaSyncError
from deltasync.files.classes import codec as class_codec
from deltasync.store import merged
from deltasync.store.merged import Merged, Overlay, plan_of_anchor, plan_of_deltas
from deltasync.sync.protocol.one_way import OneWayReader, one_way_frames
from deltasync.transports.base import Frame
from deltasync.wire.messages import ParameterSpec
from tests.worlds.bits import flipped
from tests.worlds.strategies import SEEDS, same_bits, tensors

Versions = list[list[Tensor]]
SHAPES = st.sampled_from([(), (0,), (7,), (3, 5), (4096,), (4097,), (3, 4100)])
SHARES = st.sampled_from([0.0, 0.001, 0.1, 0.4, 1.0])


@st.composite
def histories(draw: st.DrawFn) -> Versions:
    """Successive versions of a few parameters; some return to earlier ones."""
    versions = [draw(st.lists(tensors(shapes=SHAPES), min_size=1, max_size=3))]
    for _ in range(draw(st.integers(2, 4))):
        versions.append([draw(_next(n, versions)) for n in range(len(versions[0]))])
    return versions


@st.composite
def _next(draw: st.DrawFn, number: int, versions: Versions) -> Tensor:
    if draw(st.booleans()):
        return draw(st.sampled_from(versions))[number]
    last, rng = versions[-1][number], np.random.default_rng(draw(SEEDS))
    return flipped(last, rng.random(last.numel()) < draw(SHARES), rng).view(last.dtype)


def specs_of(version: Sequence[Tensor]) -> tuple[ParameterSpec, ...]:
    return tuple(
        ParameterSpec((f"w{n}",), tuple(tensor.shape), dtype_of(tensor))
        for n, tensor in enumerate(version)
    )


def readers_of(version: Sequence[Tensor]) -> list[WireReader]:
    return [WireReader.of(one, dtype_of(one), name="w") for one in version]


def flats_of(version: Sequence[Tensor]) -> dict[int, Any]:
    copies = (one.clone(memory_format=torch.contiguous_format) for one in version)
    return {n: Flat.of(copy) for n, copy in enumerate(copies)}


def frames_of(plan: Plan, specs: tuple[ParameterSpec, ...], how: Coding = "none") -> list[Frame]:
    return list(one_way_frames(plan, specs, stream_id="run", version=2, digest=0, compression=how))


def delta(old: Sequence[Tensor], new: Sequence[Tensor], how: Coding = "none") -> list[Frame]:
    specs = specs_of(old)
    snapshot = snapshot_of(whole(specs), readers_of(old))
    plan = snapshot.compare(
        readers_of(new), bucket_bytes=20_000, max_held_bytes=1 << 30, base_version=1
    )
    return frames_of(plan, specs, how)


def written(base: Sequence[Tensor], frames: Sequence[Frame]) -> dict[int, Any]:
    """What one sync makes of weights."""
    flats = flats_of(base)
    for received in OneWayReader(flats_of=lambda _: flats).read(frames):
        table, space = received.table, received.lane.space
        where = torch.from_numpy(table.positions())
        for share, lanes in table.by_share():
            flats[int(space.parameter[share])].scatter(where[lanes], received.changes.values[lanes])
        for run in table.runs():
            flat = flats[int(space.parameter[run.share])]
            flat.write(run.start, received.changes.whole[run.there])
    return flats


def are(flats: dict[int, Any], version: Sequence[Tensor], numbers: Sequence[int]) -> bool:
    """Whether weights are a version, read as a whole, in parts, and at places."""
    for number in numbers:
        flat, wanted = flats[number], Flat.of(version[number])
        numel = wanted.numel
        places = torch.arange(numel).flip(0)[::2]
        same = torch.equal(flat.gather(places), wanted.gather(places))
        for start in {0, numel // 2, min(numel, 4096)}:
            same &= torch.equal(flat.read(start, numel), wanted.read(start, numel))
        if not same:
            return False
    return True


class Anchor:
    """What a plan asks of a checkpoint."""

    def release(self) -> None:
        """Nothing was read."""


@settings(deadline=None)
@given(
    versions=histories(),
    codings=st.lists(st.sampled_from(["none", "zstd", "gap", "class"]), min_size=4, max_size=4),
    bucket_bytes=st.sampled_from([100, 20_000, 1 << 24]),
    data=st.data(),
)
def test_merged_deltas_are_what_they_make_one_after_another(
    versions: Versions, codings: list[Coding], bucket_bytes: int, data: st.DataObject
) -> None:
    """Each is decoded by what those before have made; what is not held is left out."""
    first, specs = versions[0], specs_of(versions[0])
    held = sorted(data.draw(st.sets(st.integers(0, len(specs) - 1), min_size=1)))
    base = flats_of(first)
    found = Merged({n: base[n] for n in held}, specs)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(coding, "LONGEST", 1e9)
        patched.setattr(class_codec, "LEAST", 1)
        patched.setattr(merged, "_BUCKET_BYTES", bucket_bytes)
        for old, new, how in zip(versions, versions[1:], codings, strict=False):
            found.add(delta(old, new, how))
            assert are(found.flats, new, held)
        assert are(base, first, held), "what is merged over is only read"
        last, digest = versions[-1], 0
        deltas = frames_of(plan_of_deltas(found, base_version=1, digest=digest), specs)
        full = frames_of(plan_of_anchor(found, Anchor(), digest=digest), specs)  # type: ignore[arg-type]
    for frames, base_of in ((deltas, first), (full, [torch.zeros_like(one) for one in first])):
        made = written(base_of, frames)
        assert are(made, last, held)
        others = [n for n in range(len(specs)) if n not in held]
        assert are(made, base_of, others)


def test_a_damaged_delta_changes_nothing() -> None:
    old = [torch.arange(9000, dtype=torch.float32)]
    new = [old[0] + (torch.arange(9000) % 7 == 0)]
    newer = [new[0] * 2]
    found = Merged(flats_of(old), specs_of(old))
    found.add(delta(old, new))
    for frames in (delta(new, newer)[:-1], delta(new, newer, "gap")[:3]):
        with pytest.raises(DeltaSyncError):
            found.add(frames)
        assert are(found.flats, new, [0])
    found.add(delta(new, newer))
    assert are(found.flats, newer, [0])
    assert isinstance(found.flats[0], Overlay)


def test_memory_is_of_what_changes() -> None:
    """At each of many deltas that change the same elements."""
    versions = [[torch.zeros(1 << 20, dtype=torch.int16)]]
    for n in range(1, 5):
        versions.append([versions[-1][0].clone()])
        versions[-1][0][::1000] = n
    found = Merged(flats_of(versions[0]), specs_of(versions[0]))
    for old, new in pairwise(versions):
        found.add(delta(old, new))
    layer = found.layers[2]
    assert len(layer.codes) == len(versions[0][0][::1000])
    assert layer.codes.itemsize == 4
    assert not len(layer.tiles)
    assert same_bits(found.flats[0].read(0, 1 << 20), versions[-1][0])


def test_many_small_tensors_take_memory_by_their_elements() -> None:
    """As the scales of experts: one element each, and whole."""
    old = [torch.full((2,), n, dtype=torch.float32) for n in range(500)]
    new, last = ([one + n for one in old] for n in (1, 2))
    found = Merged(flats_of(old), specs_of(old))
    tracemalloc.start()
    for frames in (delta(old, new), delta(new, last, "gap")):
        found.add(frames)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert are(found.flats, last, range(500))
    assert peak < 2 << 20
