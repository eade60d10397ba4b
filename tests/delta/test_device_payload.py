"""Coded payloads on a device: what the host makes of the same bytes, both ways.

Without a GPU kernels run under Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.batched.decoding import DeviceDecoder
from deltasync.delta.bits import Flat, Live, Run, as_bits, torch_dtype
from deltasync.delta.bucket import BucketReader
from deltasync.delta.codecs.coding import Coded
from deltasync.delta.codecs.encoding import encode_payload
from deltasync.delta.codecs.old import LiveOld
from deltasync.delta.policy import Policy
from deltasync.delta.shard import ShardSpec
from deltasync.dtypes import BY_NAME, Dtype
from deltasync.errors import (
    InvalidTable,
    LimitExceeded,
)
from deltasync.wire.codecs import IndexCodec
from deltasync.wire.messages import Bucket, ParameterSpec
from tests.delta.device_payloads import (
    DEVICE,
    Change,
    by_host,
    change_of,
    decoded_alike,
    flats_of,
    near,
    on_device,
    specs_of,
    weights_of,
)
from tests.delta.ends import Rank, box_of
from tests.delta.test_boxes import Held, bits_for, helds
from tests.worlds.bits import random_bits
from tests.worlds.payloads import payloads
from tests.worlds.strategies import DTYPES, SEEDS

few = settings(max_examples=5 if DEVICE.type == "cpu" else 200)
BF16 = BY_NAME["bfloat16"]
DENSITIES = st.sampled_from([0.0, 0.002, 0.05, 0.4, 1.0])


def change(dtypes: list[tuple[Dtype, float]], seed: int, numel: int = 3000) -> Change:
    """Parameters of these dtypes and densities, of different lengths."""
    specs = specs_of(*((dtype, numel + 7 * n) for n, (dtype, _) in enumerate(dtypes)))
    return change_of(specs, near(specs, [density for _, density in dtypes], seed), seed)


def typical(seed: int = 0) -> Change:
    """Coded rows, a raw one of odd length before others, and a dense one."""
    kinds = [(BF16, 0.0), (BF16, 0.05), (BY_NAME["uint8"], 1.0), (BY_NAME["float32"], 0.02)]
    return change([*kinds, (BF16, 0.1)], seed)


def host_coded(given: Change, *, compressed: bool = False) -> bytes:
    old = LiveOld(given.specs, given.flats)
    made = encode_payload(given.payload.cpu().numpy(), given.num_rows, old, IndexCodec.BLOCK)
    return made.to_bytes(compressed=compressed)


def coded(given: Change) -> bytes:
    made = on_device(given)
    assert made is not None
    assert sum(made.bytes_by_codec.values()) == len(made.data) < len(given.payload)
    return made.data.cpu().numpy().tobytes()


def args(given: Change) -> tuple[Any, ...]:
    return given.num_rows, len(given.payload), given.specs, given.flats


@few
@given(kinds=st.lists(st.tuples(DTYPES, DENSITIES), min_size=1, max_size=4), seed=SEEDS)
def test_either_end_decodes_what_either_has_coded(
    kinds: list[tuple[Dtype, float]], seed: int
) -> None:
    here = change([(BF16, 0.05), *kinds], seed)  # one at least pays
    assert decoded_alike(coded(here), *args(here)) == here.raw
    there = host_coded(here)
    found = decoded_alike(there, *args(here))
    assert found in (here.raw, None)  # None: the host has used other codecs, too
    assert by_host(there, *args(here)) == here.raw


@pytest.mark.promise(
    "Errors",
    "A GPU decodes and refuses the payloads that the host decodes and refuses, before "
    "anything is written.",
)
@few
@given(seed=SEEDS, data=st.data())
def test_damage_ends_alike(seed: int, data: st.DataObject) -> None:
    """Blocks that lie: `tests/wire/test_lies`."""
    here = typical(seed % 5)
    damaged = bytearray(coded(here))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1) | st.integers(0, 48 + 56 * here.num_rows))
        damaged[at] = data.draw(st.integers(0, 255))
    decoded_alike(bytes(damaged), *args(here))


@pytest.mark.promise(
    "Errors",
    "A GPU decodes and refuses the payloads that the host decodes and refuses, before "
    "anything is written.",
)
@few
@given(given_helds=helds(), seed=SEEDS, is_wrong=st.booleans())
def test_who_holds_boxes_decodes_as_the_host_does(
    given_helds: list[Held], seed: int, is_wrong: bool
) -> None:
    """Parts, strided weights and codes of 4 bits, and what another rank holds."""
    specs = (*(held.spec for held in given_helds), ParameterSpec(("more",), (2000,), BF16))
    before = flats_of(specs, seed)
    runs = [
        (number, replace(run, bits=moved(before[number].line, run)))
        for number, held in enumerate(given_helds)
        for run in held.runs
    ]
    [(_, more)] = near(specs[-1:], [0.1], seed)
    runs.append((len(given_helds), replace(more, bits=moved(before[len(given_helds)].line, more))))
    [(payload, num_rows)] = payloads(runs, specs)
    there = Change(specs, before, runs, payload.to(DEVICE), num_rows)
    made = coded(there)
    flats: dict[int, Live] = {len(given_helds): before[len(given_helds)]}
    for number, held in enumerate(given_helds):
        if held.pieces:
            flats[number] = held.access(bits_for(held))
            flats[number].write(0, before[number].read(0, held.spec.numel))
            if is_wrong:
                flats[number].write(0, before[number].read(0, held.spec.numel) ^ 1)
    found = decoded_alike(made, num_rows, len(payload), specs, dict(sorted(flats.items())))
    if not is_wrong:
        assert isinstance(found, bytes)


def moved(old: Tensor, run: Run) -> Tensor:
    """One more than before, in bits."""
    old = old[run.start : run.stop].cpu()
    return (old if run.indices is None else old[run.indices.long()]) + 1


@few
@given(
    box=st.tuples(st.integers(0, 9), st.integers(60, 90), st.integers(0, 20), st.integers(1, 24)),
    dtype=st.sampled_from(["bfloat16", "float32", "uint8"]),
    chunk_numel=st.sampled_from([300, 5000]),
    max_held=st.sampled_from([0, 1 << 30]),
    seed=SEEDS,
)
def test_shards_with_gaps_are_coded_in_the_coordinates_of_the_layout(
    box: tuple[int, int, int, int], dtype: str, chunk_numel: int, max_held: int, seed: int
) -> None:
    above, rows, left, cols = box
    shape, rng = (above + rows + 3, left + cols + 2), np.random.default_rng(seed)
    old = random_bits(BY_NAME[dtype], prod(shape), rng).view(torch_dtype(BY_NAME[dtype]))
    whole, shard = old.clone().view(shape), ShardSpec(shape, (above, left), (rows, cols))
    spec = ParameterSpec(("a",), shape, BY_NAME[dtype])
    held = {"a": box_of(whole, shard).clone()}
    policy = Policy(chunk_numel=chunk_numel, dense_above=0.6)
    rank = Rank([spec], {"a": shard}, held, "triton", policy)
    bits = as_bits(held["a"])
    bits += torch.from_numpy(rng.random(bits.shape) < 0.2).to(bits.dtype)
    rank.write(held)
    flats: dict[int, Live] = {0: Flat.of(old.to(DEVICE))}
    for bucket in rank.delta(max_held, 1 << 20).buckets():
        payload = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=DEVICE)
        encode, made = bucket.encoder(IndexCodec.BLOCK), list[Coded | None]()
        assert encode is not None
        bucket.write(payload, lambda: made.append(encode(payload)))  # noqa: B023 - at once
        [found] = made
        if not max_held or found is None:  # the snapshot was overwritten, or it is short
            continue
        sent = found.data.cpu().numpy().tobytes()
        got = decoded_alike(sent, bucket.num_rows, len(payload), (spec,), flats)
        assert got == payload.cpu().numpy().tobytes()


def test_a_reader_takes_what_devices_decode_and_what_they_leave_to_the_host() -> None:
    """Payloads that begin anywhere, raw rows among them; in order, and as declared."""
    here = typical()
    made = on_device(here)
    assert made is not None
    assert {"raw", "block", "dense"} < made.bytes_by_codec.keys()
    memory = torch.frombuffer(bytearray(5) + coded(here), dtype=torch.uint8).to(DEVICE)
    sent, reader = memory[5:], reader_of(here)
    found = reader.unpack(message_of(here), sent)
    assert found.payload.cpu().numpy().tobytes() == here.raw
    with pytest.raises(InvalidTable, match="out of order"):  # rule W13
        reader.unpack(message_of(here), sent)
    reader.begin(1000)
    with pytest.raises(LimitExceeded, match="begin"):
        reader.unpack(message_of(here), sent)
    compressed = bytearray(host_coded(here, compressed=True))
    there = torch.frombuffer(compressed, dtype=torch.uint8).to(DEVICE)
    found = reader_of(here).unpack(message_of(here), there)
    assert found.payload.cpu().numpy().tobytes() == here.raw


def reader_of(here: Change) -> BucketReader:
    decoder = DeviceDecoder(weights_of(here.specs, here.flats), here.flats)
    return BucketReader(here.specs, 1, here.flats, decoder)


def message_of(here: Change) -> Bucket:
    sizes = {"num_rows": here.num_rows, "raw_bytes": len(here.payload)}
    return Bucket(version=1, sequence=0, compression="coded", **sizes)  # type: ignore[arg-type]
