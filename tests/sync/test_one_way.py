"""Frames that go one way: what they carry is what a receiver would have been sent."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.backend import Plan, snapshot_of
from deltasync.delta.bits import Flat, as_bits
from deltasync.delta.codecs.coding import Coding
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host.staging import Lines, Staging
from deltasync.delta.policy import Policy
from deltasync.delta.readers import WireReader
from deltasync.delta.shard import whole
from deltasync.sync.protocol.one_way import OneWayReader, one_way_frames
from deltasync.testing.bits import specs_of
from tests.worlds.strategies import models, mutations, policies, same_bits

CHUNK = 16


def readers_of(model: dict[str, Tensor]) -> list[WireReader]:
    specs = specs_of(model)
    return [
        WireReader.of(tensor, spec.dtype, name=spec.name)
        for spec, tensor in zip(specs, model.values(), strict=True)
    ]


def written(plan: Plan, old: dict[str, Tensor], base: int, compression: Coding) -> None:
    """Send a plan one way and write it into `old`; the digests must be those it carries."""
    specs = specs_of(old)
    frames = one_way_frames(
        plan, specs, stream_id="run", version=8, digest=base, compression=compression
    )
    flats = {number: Flat.of(tensor) for number, tensor in enumerate(old.values())}
    ledger = DigestLedger(whole(specs), chunk_numel=CHUNK)
    for number, flat in flats.items():
        ledger.measure(number, flat.read)
    staging = Staging(Lines(flats, len(specs)), ledger, in_place=True)
    reader = OneWayReader(flats=flats)
    for bucket in reader.read(frames):
        staging.stage_bucket(bucket)
    assert reader.specs == specs
    assert reader.sealed is not None
    assert reader.sealed.version == 8
    assert int(reader.sealed.digest, 16) == staging.ledger.total


@given(
    data=st.data(),
    old=models(),
    policy=policies(),
    bucket_bytes=st.sampled_from([256, 4096]),
    compression=st.sampled_from(["none", "zstd", "gap", "block", "class"]),
    is_full=st.booleans(),
)
def test_a_plan_arrives_bit_for_bit(
    data: st.DataObject,
    old: dict[str, Tensor],
    policy: Policy,
    bucket_bytes: int,
    compression: Coding,
    is_full: bool,
) -> None:
    old = {name: tensor.contiguous() for name, tensor in old.items()}
    new = {name: data.draw(mutations(tensor)) for name, tensor in old.items()}
    source = new if is_full else old
    shares = whole(specs_of(old))
    snapshot = snapshot_of(shares, readers_of(source), chunk_numel=policy.chunk_numel or 1)
    base = snapshot.ledger.total
    plan: Plan
    if is_full:
        plan = snapshot.full(bucket_bytes=bucket_bytes)
        for tensor in old.values():
            as_bits(tensor).zero_()
    else:
        plan = snapshot.compare(
            readers_of(new),
            policy=policy,
            bucket_bytes=bucket_bytes,
            max_held_bytes=64,
            base_version=7,
        )
    written(plan, old, base, compression)
    assert all(same_bits(old[name], torch.clone(new[name])) for name in old)
