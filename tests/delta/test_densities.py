"""Coded payloads at any density: never longer than what they stand for, and the same bits."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import Flat, as_bits, torch_dtype
from deltasync.delta.bucket import BucketReader
from deltasync.delta.codecs.base import Bits, unsigned_dtype
from deltasync.delta.codecs.coding import Coder, Coding, policy_for
from deltasync.delta.codecs.decoding import decode_payload
from deltasync.delta.codecs.encoding import encode_payload
from deltasync.delta.codecs.old import LiveOld
from deltasync.delta.diff import diff
from deltasync.delta.host.packing import buckets
from deltasync.delta.patch import runs_of
from deltasync.delta.policy import Policy
from deltasync.delta.shard import whole
from deltasync.dtypes import Dtype
from deltasync.testing.bits import random_bits, specs_of
from deltasync.testing.payloads import payloads
from deltasync.wire.codecs import IndexCodec
from tests.delta.codec_contract import Runs
from tests.worlds.strategies import SEEDS, same_bits

CODECS: tuple[Coding, ...] = ("gap", "block", "class")
NAMES = ("bfloat16", "float32", "int8", "uint8")
DENSITIES = (0.0, 1e-4, 0.01, 0.1, 0.5, 0.9, 1.0)
SPARSE, DENSE = Policy(dense_above=1.0), Policy(dense_above=0.0)

HEADER_BYTES = 48  # the lengths of the sections
ROW_BYTES = 8  # the digest of a row's old values

Moves = Literal["near", "far"]
Places = Literal["spread", "together"]
Model = dict[str, Tensor]


def weights(dtype: Dtype, numel: int, rng: np.random.Generator) -> Bits:
    """unsigned[numel]: of bfloat16 and float32 like weights, otherwise any bits."""
    values = (0.02 * rng.standard_normal(numel)).astype(np.float32).view(np.uint32)
    if dtype.name == "float32":
        return values
    if dtype.name == "bfloat16":
        return (values >> 16).astype(np.uint16)
    return random_bits(dtype, numel, rng).numpy().view(unsigned_dtype(dtype))


def chosen(numel: int, density: float, places: Places, rng: np.random.Generator) -> Bits:
    """int[n] places of changes, increasing; at least one unless the density is 0."""
    count = min(numel, max(int(density > 0), round(numel * density)))
    if places == "together":
        return np.arange(count) + (numel - count) // 2
    return np.sort(rng.choice(numel, count, replace=False))


def changed(
    dtype: Dtype, numel: int, density: float, moves: Moves, places: Places, seed: int
) -> tuple[Tensor, Tensor]:
    """(new, old) weights. `near` moves by one or two steps, `far` to any other bits."""
    rng = np.random.default_rng(seed)
    old = weights(dtype, numel, rng)
    new, at = old.copy(), chosen(numel, density, places, rng)
    if dtype.name == "bool":
        new[at] ^= 1
    elif moves == "near":
        new[at] += rng.choice([1, 1, 2, -1, -1, -2], len(at)).astype(new.dtype)
    else:
        noise = rng.integers(1, 1 << 8, (len(at), new.itemsize), np.uint8)
        new[at] ^= noise.view(new.dtype)[:, 0]
    return tensor_of(new, dtype), tensor_of(old, dtype)


def tensor_of(bits: Bits, dtype: Dtype) -> Tensor:
    return torch.from_numpy(bits.view(np.uint8)).view(torch_dtype(dtype))


def runs_between(new: Model, old: Model, policy: Policy) -> Runs:
    found: Runs = []
    for number, name in enumerate(new):
        patch = diff(old[name], new[name], name=name, policy=policy)
        found += [(number, run) for run in runs_of(patch)] if patch is not None else []
    return found


def coded_and_back(payload: Tensor, num_rows: int, before: LiveOld, coding: Coding) -> Runs:
    """The runs of a payload that was coded, with and without zstd, in no more bytes than it has."""
    made = encode_payload(payload.numpy(), num_rows, before, IndexCodec[coding.upper()])
    for is_compressed in (False, True):
        data = made.to_bytes(compressed=is_compressed)
        assert len(data) <= len(payload) + HEADER_BYTES + ROW_BYTES * num_rows
        raw = decode_payload(
            memoryview(data),
            num_rows,
            len(payload),
            before,
            numels=np.array([spec.numel for spec in before.specs], np.uint64),
            item_sizes=np.array([spec.dtype.item_size for spec in before.specs], np.uint64),
        )
        found = BucketReader(tuple(before.specs)).read(torch.from_numpy(raw), num_rows)
    return found


def assert_short_and_sound(
    new: Model, old: Model, coding: Coding, policy: Policy, bucket_bytes: int = 1 << 20
) -> int:
    """Send what changed, coded in every way, to the old weights; the bytes that were sent."""
    specs, sent = specs_of(old), 0
    before = LiveOld(specs, {n: Flat.of(old[spec.name]) for n, spec in enumerate(specs)})
    found = {name: tensor.clone() for name, tensor in old.items()}
    runs = runs_between(new, old, policy)
    packed = buckets(runs, whole(specs), bucket_bytes=bucket_bytes, old_of=lambda _: before)
    for bucket in packed:
        payload = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        bucket.write(payload)
        travels, _ = Coder(coding).coded(payload, bucket)
        assert len(travels) <= len(payload)
        sent += len(travels)
        for number, run in coded_and_back(payload, bucket.num_rows, before, coding):
            assert run.bits is not None
            run.write(Flat.of(found[specs[number].name]), run.bits)
    for name, tensor in new.items():
        assert same_bits(found[name], tensor)
    return sent


def raw_bytes(new: Model, old: Model, policy: Policy) -> int:
    """What changed takes without a codec."""
    packed = payloads(runs_between(new, old, policy), specs_of(old))
    return sum(len(payload) for payload, _ in packed)


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("coding", CODECS)
def test_no_density_takes_more_than_raw(coding: Coding, name: str, density: float) -> None:
    dtype = dtypes.BY_NAME[name]
    for moves in ("near", "far"):
        for places in ("spread", "together"):
            new, old = changed(dtype, 100_003, density, moves, places, 7)
            num_changed = int((as_bits(new) != as_bits(old)).sum())
            assert num_changed == round(100_003 * density)
            models = {"w": new}, {"w": old}
            assert_short_and_sound(*models, coding, SPARSE)
            sent = assert_short_and_sound(*models, coding, policy_for(Policy(), coding))
            assert (sent == 0) == (density == 0.0)
            assert sent <= min(raw_bytes(*models, policy) for policy in (SPARSE, DENSE, Policy()))


@st.composite
def models(draw: st.DrawFn) -> tuple[Model, Model]:
    """(new, old) of several parameters, each of a dtype and a density of its own."""
    new, old = Model(), Model()
    for number in range(draw(st.integers(1, 5))):
        new[f"w{number}"], old[f"w{number}"] = changed(
            draw(st.sampled_from(dtypes.DTYPES)),
            draw(st.integers(1, 40) | st.integers(1, 4000)),
            draw(st.sampled_from(DENSITIES) | st.floats(0, 1)),
            draw(st.sampled_from(["near", "far"])),
            draw(st.sampled_from(["spread", "together"])),
            draw(SEEDS),
        )
    return new, old


@pytest.mark.parametrize("coding", CODECS)
@given(model=models(), dense_above=st.sampled_from([None, 0.0, 0.3, 1.0]))
def test_no_model_takes_more_than_raw(
    coding: Coding, model: tuple[Model, Model], dense_above: float | None
) -> None:
    policy = Policy(dense_above=dense_above, chunk_numel=500)
    assert_short_and_sound(*model, coding, policy, bucket_bytes=8192)


@pytest.mark.parametrize("coding", CODECS)
@given(
    dtype=st.sampled_from(dtypes.DTYPES),
    numel=st.integers(1, 3000),
    density=st.floats(0, 1),
    seed=SEEDS,
)
def test_elements_that_are_sent_and_stay_the_same_take_no_more_than_raw(
    coding: Coding, dtype: Dtype, numel: int, density: float, seed: int
) -> None:
    """A fold of deltas has them: an element that moved, and moved back."""
    new, old = changed(dtype, numel, max(density, 1e-9), "near", "spread", seed)
    specs, runs = specs_of({"w": new}), runs_between({"w": new}, {"w": old}, SPARSE)
    assert len(runs) == 1
    before = LiveOld(specs, {0: Flat.of(new)})
    for payload, num_rows in payloads(runs, specs):
        [(_, found)] = coded_and_back(payload, num_rows, before, coding)
        assert found.bits is not None
        assert found.indices is not None
        assert torch.equal(found.bits, as_bits(new).view(-1)[found.indices])
