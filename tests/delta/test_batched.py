"""The Triton kernels against the plain path: same deltas, same digests, nothing written too early.

Without a GPU they run under Triton's interpreter, which takes milliseconds for each program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltasync import Policy, dtypes
from deltasync.delta.backend import Delta, snapshot_of
from deltasync.delta.batched.masks import Masks
from deltasync.delta.batched.staging import BatchedStaging, _Dense, _Sparse
from deltasync.delta.batched.warm_up import sync_tiny_models
from deltasync.delta.batched.weights import BatchedWeights
from deltasync.delta.bits import Flat, as_bits
from deltasync.delta.bucket import BucketReader
from deltasync.delta.digests import DigestLedger
from deltasync.delta.readers import WireReader
from deltasync.delta.shard import whole
from deltasync.errors import ConfigError, DigestMismatch, InvalidIndices, LimitExceeded
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from deltasync.quant.nvfp4 import CompressedNvfp4
from deltasync.testing.bits import random_bits, specs_of
from deltasync.wire.table import ROW
from tests.quant.kernels import kernel_of
from tests.worlds import strategies as own
from tests.worlds.strategies import same_bits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = 0xA5
Model = dict[str, Tensor]
few = settings(max_examples=15 if DEVICE.type == "cpu" else 200)


def placed(model: Model) -> Model:
    return {name: tensor.to(DEVICE).contiguous().clone() for name, tensor in model.items()}


def ledger_of(model: Model, chunk_numel: int) -> DigestLedger:
    ledger = DigestLedger(whole(specs_of(model)), chunk_numel=chunk_numel)
    for number, tensor in enumerate(model.values()):
        ledger.measure(number, Flat.of(tensor.cpu()).read)
    return ledger


def equal(left: Model, right: Model) -> bool:
    return all(same_bits(left[name].cpu(), right[name].cpu()) for name in left)


@dataclass
class Ends:
    """A sender's snapshot of `source` and a receiver's `replica`, both on the kernels."""

    source: Model
    replica: Model
    policy: Policy
    receiver_chunk: int

    def __post_init__(self) -> None:
        self.specs = specs_of(self.replica)
        self.snapshot = snapshot_of(
            whole(self.specs),
            self.readers,
            chunk_numel=self.policy.chunk_numel_on("cuda"),
            kernels="triton",
        )
        self.ledger = ledger_of(self.replica, self.receiver_chunk)
        flats = {number: Flat.of(tensor) for number, tensor in enumerate(self.replica.values())}
        self.weights = BatchedWeights(flats, self.ledger, DEVICE)

    @property
    def readers(self) -> list[WireReader]:
        pairs = zip(self.source.values(), self.specs, strict=True)
        return [WireReader.of(tensor, spec.dtype, name=spec.name) for tensor, spec in pairs]

    def compare(self, *, bucket_bytes: int, max_held_bytes: int) -> Delta:
        return self.snapshot.compare(
            self.readers,
            policy=self.policy,
            bucket_bytes=bucket_bytes,
            max_held_bytes=max_held_bytes,
            base_version=0,
        )

    def staged(self, delta: Delta, *, in_place: bool = False) -> BatchedStaging:
        """The delta, packed into poisoned payloads and staged."""
        staging = BatchedStaging(self.weights, self.ledger, in_place=in_place)
        reader = BucketReader(self.specs)
        reader.begin(delta.sparse_bytes + delta.dense_bytes)
        for bucket in delta.buckets():
            payload = torch.full((bucket.num_bytes,), POISON, dtype=torch.uint8, device=DEVICE)
            bucket.write(payload)
            staging.stage_bucket(reader.open(payload, bucket.num_rows))
        return staging

    def snapshot_is(self, model: Model) -> bool:
        held = zip(self.snapshot.flats.values(), model.values(), strict=True)
        return all(torch.equal(f.line.cpu(), as_bits(t.cpu()).reshape(-1)) for f, t in held)


models = own.models().filter(lambda model: any(t.numel() for t in model.values()))


@st.composite
def ends(draw: st.DrawFn) -> Ends:
    """Two ends at the same version that cut parameters into different chunks."""
    model = draw(models)
    policy = draw(own.policies())
    return Ends(placed(model), placed(model), policy, draw(st.sampled_from([1, 5, 16, 1000])))


def mutate(model: Model, seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.values():
        if tensor.dtype == torch.bool:
            continue
        bits = as_bits(tensor).view(-1)
        chosen = torch.rand(len(bits), generator=generator) < share
        bits ^= chosen.to(DEVICE, bits.dtype)


sizes = st.sampled_from([256, 700, 1 << 16])
held = st.sampled_from([0, 60, 1 << 30])
shares = st.sampled_from([0.02, 0.3, 1.0])


@few
@given(both=ends(), seed=own.SEEDS, share=shares, bucket_bytes=sizes, max_held_bytes=held)
def test_a_delta_arrives_and_is_taken_back(
    both: Ends, seed: int, share: float, bucket_bytes: int, max_held_bytes: int
) -> None:
    before = {name: tensor.clone() for name, tensor in both.replica.items()}
    mutate(both.source, seed, share)
    delta = both.compare(bucket_bytes=bucket_bytes, max_held_bytes=max_held_bytes)
    staging = both.staged(delta)
    assert equal(both.replica, before)
    expected = ledger_of(both.source, both.policy.chunk_numel_on("cuda"))
    assert isinstance(delta.ledger, DigestLedger)
    assert np.array_equal(delta.ledger.sums, expected.sums)
    assert np.array_equal(staging.ledger.sums, ledger_of(both.source, both.receiver_chunk).sums)
    assert staging.commit() == expected.total
    assert equal(both.replica, both.source)
    staging.undo()
    assert equal(both.replica, before)
    delta.decided()
    assert both.snapshot_is(both.source)
    assert np.array_equal(both.snapshot.ledger.sums, expected.sums)


@few
@given(both=ends(), seed=own.SEEDS, share=shares, bucket_bytes=sizes, max_held_bytes=held)
def test_a_delta_is_written_in_place(
    both: Ends, seed: int, share: float, bucket_bytes: int, max_held_bytes: int
) -> None:
    mutate(both.source, seed, share)
    delta = both.compare(bucket_bytes=bucket_bytes, max_held_bytes=max_held_bytes)
    staging = both.staged(delta, in_place=True)
    assert staging.commit() == delta.ledger.total == ledger_of(both.source, 7).total
    assert equal(both.replica, both.source)
    with pytest.raises(DigestMismatch):
        staging.undo()


@few
@given(both=ends(), seed=own.SEEDS, decide=st.lists(st.booleans(), min_size=2, max_size=4))
def test_a_sync_after_aborted_ones_sends_the_union(
    both: Ends, seed: int, decide: list[bool]
) -> None:
    for turn, is_decided in enumerate([*decide, True]):
        mutate(both.source, seed + turn, 0.1)
        delta = both.compare(bucket_bytes=700, max_held_bytes=100)
        staging = both.staged(delta)
        if is_decided:
            assert staging.commit() == delta.ledger.total
            both.ledger = staging.ledger
            delta.decided()
            assert both.snapshot_is(both.source)
    assert equal(both.replica, both.source)
    assert both.snapshot.ledger.total == ledger_of(both.source, 9).total


@few
@given(both=ends(), bucket_bytes=sizes)
def test_a_full_sync_brings_the_snapshot(both: Ends, bucket_bytes: int) -> None:
    mutate(both.replica, 1, 0.5)
    both.ledger = ledger_of(both.replica, both.receiver_chunk)
    staging = BatchedStaging(both.weights, both.ledger, in_place=True)
    reader = BucketReader(both.specs)
    for bucket in both.snapshot.full(bucket_bytes=bucket_bytes).buckets():
        payload = torch.full((bucket.num_bytes,), POISON, dtype=torch.uint8, device=DEVICE)
        bucket.write(payload)
        staging.stage_bucket(reader.open(payload, bucket.num_rows))
    assert staging.commit() == both.snapshot.ledger.total
    assert equal(both.replica, both.source)


def bf16_ends(values: Tensor) -> Ends:
    """A float32 source and a bfloat16 replica that holds zeros."""
    replica = {"w": torch.zeros(len(values), dtype=torch.bfloat16, device=DEVICE)}
    return Ends({"w": torch.zeros_like(values)}, replica, Policy(chunk_numel=3000), 1000)


@few
@given(seed=own.SEEDS, dense_above=st.sampled_from([0.0, 1.0]))
def test_float32_is_rounded_as_elsewhere(seed: int, dense_above: float) -> None:
    bits = random_bits(dtypes.BY_NAME["float32"], 500, np.random.default_rng(seed))
    values = bits.view(torch.float32).to(DEVICE)
    both = bf16_ends(values)
    both.policy = Policy(chunk_numel=3000, dense_above=dense_above)
    both.source["w"].copy_(values)
    delta = both.compare(bucket_bytes=1 << 16, max_held_bytes=1 << 20)
    assert both.staged(delta).commit() == delta.ledger.total
    plain = WireReader.of(values.cpu(), dtypes.BY_NAME["bfloat16"], name="w").read(0, 500)
    assert torch.equal(as_bits(both.replica["w"].cpu()), plain)


@pytest.mark.parametrize("dense_above", [0.0, 1.0])
def test_float32_between_two_numbers_goes_to_the_even_one(dense_above: float) -> None:
    halves = (torch.arange(0x3F00, 0x4000, dtype=torch.int32) << 16) + 0x8000
    both = bf16_ends(torch.zeros(2 * len(halves), device=DEVICE))
    both.policy = Policy(chunk_numel=3000, dense_above=dense_above)
    both.source["w"].copy_(torch.cat([halves.view(torch.float32), -halves.view(torch.float32)]))
    delta = both.compare(bucket_bytes=1 << 16, max_held_bytes=1 << 20)
    assert both.staged(delta).commit() == delta.ledger.total
    assert equal(both.replica, {"w": both.source["w"].bfloat16()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_negative_zero_is_a_change_in_whole_blocks_and_in_the_last(dtype: torch.dtype) -> None:
    model = {"w": torch.zeros(4096 + 9, dtype=dtype)}
    both = Ends(placed(model), placed(model), Policy(chunk_numel=1 << 20, dense_above=1.0), 1000)
    for at in (0, 1, 4095, 4096, 4104):
        both.source["w"][at] = -0.0
    delta = both.compare(bucket_bytes=1 << 16, max_held_bytes=1 << 20)
    assert delta.nnz == 5
    assert both.staged(delta).commit() == delta.ledger.total
    assert equal(both.replica, both.source)


def test_what_kernels_cannot_read_in_place_is_read_through_copies() -> None:
    source = {
        "strided": torch.randn(30, 20, device=DEVICE).t(),
        "half": torch.randn(50, device=DEVICE),
        "unaligned": torch.randn(101, device=DEVICE, dtype=torch.bfloat16)[1:],
    }
    dtypes_there = {"strided": torch.float32, "half": torch.float16, "unaligned": torch.bfloat16}
    replica = {
        name: torch.zeros(tensor.shape, dtype=dtypes_there[name], device=DEVICE)
        for name, tensor in source.items()
    }
    both = Ends(source, replica, Policy(chunk_numel=64), 64)
    for flat in both.snapshot.flats.values():
        flat.line.zero_()
    both.snapshot.ledger = ledger_of(replica, 64)
    for _ in range(2):
        delta = both.compare(bucket_bytes=1 << 16, max_held_bytes=1 << 20)
        staging = both.staged(delta)
        assert staging.commit() == delta.ledger.total
        both.ledger = staging.ledger
        delta.decided()
        expected = {name: t.to(dtypes_there[name]) for name, t in source.items()}
        assert equal(replica, expected)
        for tensor in source.values():
            tensor[3:6] += 1


def payload_of(indices: list[int], numel: int = 100) -> tuple[Ends, Tensor, BucketReader]:
    """A payload with one sparse row whose indices are replaced by these."""
    model = {"a": torch.zeros(4, dtype=torch.int16), "w": torch.zeros(numel, dtype=torch.int16)}
    both = Ends(placed(model), placed(model), Policy(dense_above=1.0), 1000)
    both.source["w"][: len(indices)] = 7
    delta = both.compare(bucket_bytes=1 << 16, max_held_bytes=1 << 20)
    (bucket,) = delta.buckets()
    payload = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=DEVICE)
    bucket.write(payload)
    wrong = torch.tensor(indices, dtype=torch.int32, device=DEVICE).view(torch.uint8)
    payload[ROW.itemsize : ROW.itemsize + len(wrong)] = wrong
    return both, payload, BucketReader(both.specs)


@pytest.mark.parametrize(
    "indices",
    [[3, 3], [5, 4], [-1, 4], [4, 100], [2**31 - 1, 4], [-(2**31), 4], [0, 100], [1, 2, 3, 3]],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_bad_indices_are_found_before_a_write(indices: list[int], *, in_place: bool) -> None:
    both, payload, reader = payload_of(indices)
    staging = BatchedStaging(both.weights, both.ledger, in_place=in_place)
    staging.stage_bucket(reader.open(payload, 1))
    with pytest.raises(InvalidIndices, match="w: "):
        staging.commit()
    assert not both.replica["w"].any()


@pytest.mark.promise("Errors", "In place, nothing of a bad bucket, or of later ones, is written.")
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_in_place_nothing_of_a_bucket_with_bad_indices_is_written_nor_of_later_ones(
    bad: int,
) -> None:
    """Whatever its item sizes."""
    kinds = (torch.int16, torch.int32, torch.int8)
    model = {name: torch.zeros(100, dtype=dtype) for name, dtype in zip("abc", kinds, strict=True)}
    both = Ends(placed(model), placed(model), Policy(dense_above=1.0), 1000)
    for tensor in both.source.values():
        tensor[:3] = 7
    (bucket,) = both.compare(bucket_bytes=1 << 16, max_held_bytes=1 << 20).buckets()
    payload = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=DEVICE)
    bucket.write(payload)
    reader = BucketReader(both.specs)
    staging = BatchedStaging(both.weights, both.ledger, in_place=True)
    wrong, good = payload.clone(), payload
    at = int(reader.open(wrong, 3).index_at[bad])
    wrong[at : at + 4] = wrong[at + 4 : at + 8].clone()  # the first index is the second again
    for each in (wrong, good):
        reader.begin()
        staging.stage_bucket(reader.open(each, 3))
    with pytest.raises(InvalidIndices, match=f"{'abc'[bad]}: "):
        staging.commit()
    assert not any(tensor.any() for tensor in both.replica.values())


def test_a_sync_larger_than_declared_is_refused() -> None:
    both, payload, reader = payload_of([1, 2, 3])
    reader.begin(3 * 6 - 1)
    with pytest.raises(LimitExceeded, match="1 bytes larger than its begin declared"):
        reader.open(payload, 1)
    reader.begin(3 * 6)
    staging = BatchedStaging(both.weights, both.ledger)
    staging.stage_bucket(reader.open(payload, 1))


@pytest.mark.parametrize(("max_bytes", "in_place"), [(12, False), (11, True)])
def test_a_sync_is_written_in_place_if_it_does_not_fit(max_bytes: int, *, in_place: bool) -> None:
    backend = bf16_ends(torch.zeros(8, device=DEVICE)).snapshot
    staging = backend.stage(
        sparse_bytes=8, dense_bytes=4, max_bytes=max_bytes, writing=lambda: None
    )
    assert staging.in_place == in_place


@pytest.mark.promise(
    "Checks",
    "What is written is read back; a write that does not persist is an error.",
)
def test_weights_that_do_not_keep_what_is_written_are_found() -> None:
    both, payload, reader = payload_of([1, 2, 3])
    staging = BatchedStaging(both.weights, both.ledger)
    staging.stage_bucket(reader.open(payload, 1))
    expected = staging.ledger.total
    assert staging.commit() == expected
    both.replica["w"][2] = 9  # somebody else wrote: undo finds other bits than it left
    staging.undo()
    assert not both.replica["w"].any()


class Stop(BaseException):
    """What no code expects: as if somebody had pressed Ctrl-C."""


def stop_after(calls: int, work: Callable[..., None]) -> Callable[..., None]:
    left = [calls]

    def stopping(*args: Any, **kwargs: Any) -> None:
        work(*args, **kwargs)
        left[0] -= 1
        if left[0] == 0:
            raise Stop

    return stopping


def test_a_snapshot_that_is_ahead_when_packing_breaks_off_is_known_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = {
        "w": torch.zeros(300, dtype=torch.int16),
        "f": torch.zeros(300, dtype=torch.int32),
    }
    both = Ends(placed(model), placed(model), Policy(chunk_numel=100, dense_above=1.0), 100)
    both.source["w"][5], both.source["w"][150], both.source["f"][3] = 1, 2, 9
    delta = both.compare(bucket_bytes=1 << 16, max_held_bytes=0)
    with monkeypatch.context() as patch:
        patch.setattr(Masks, "_collect", stop_after(1, Masks._collect))
        with pytest.raises(Stop):
            both.staged(delta)
    delta = both.compare(bucket_bytes=1 << 16, max_held_bytes=0)
    assert both.staged(delta).commit() == delta.ledger.total
    delta.decided()
    assert equal(both.replica, both.source)
    assert both.snapshot.ledger.total == ledger_of(both.source, 100).total


def in_parts(dense_above: float, receiver_chunk: int) -> tuple[Ends, BatchedStaging]:
    """Several parts: sparse rows, or dense ones that are whole chunks or not."""
    model = {"w": torch.arange(400, dtype=torch.int16)}
    policy = Policy(chunk_numel=100, dense_above=dense_above)
    both = Ends(placed(model), placed(model), policy, receiver_chunk)
    both.source["w"][::4] = 3
    staging = both.staged(both.compare(bucket_bytes=300, max_held_bytes=0))
    assert {type(part) for part, _ in staging._staged} == {_Dense if dense_above == 0 else _Sparse}
    return both, staging


every_kind = pytest.mark.parametrize(
    ("dense_above", "receiver_chunk"), [(1.0, 150), (0.0, 150), (0.0, 100), (0.0, 1000)]
)


@pytest.mark.parametrize("calls", [0, 1, 2])
@every_kind
def test_a_commit_that_breaks_off_is_taken_back(
    calls: int, dense_above: float, receiver_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, staging = in_parts(dense_above, receiver_chunk)
    write = staging._write
    left = [calls]

    def stopping(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stop
        write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "_write", stopping)
        with pytest.raises(Stop):
            staging.commit()
    before = torch.arange(400, dtype=torch.int16)
    assert torch.equal(both.replica["w"].cpu(), before) == (calls == 0)
    staging.undo()
    assert torch.equal(both.replica["w"].cpu(), before)


@pytest.mark.parametrize("calls", [1, 2])
@every_kind
def test_a_write_that_nobody_counted_is_not_taken_for_undone(
    calls: int, dense_above: float, receiver_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, staging = in_parts(dense_above, receiver_chunk)
    with monkeypatch.context() as patch:
        patch.setattr(staging, "_write", stop_after(calls, staging._write))
        with pytest.raises(Stop):
            staging.commit()
    with pytest.raises(DigestMismatch):
        staging.undo()


@pytest.mark.parametrize(("dense_above", "receiver_chunk"), [(1.0, 150), (0.0, 1000)])
def test_weights_that_changed_after_they_were_checked_cannot_be_put_back(
    dense_above: float, receiver_chunk: int
) -> None:
    both, staging = in_parts(dense_above, receiver_chunk)
    assert staging.ledger.total == ledger_of(both.source, 7).total
    both.replica["w"][352] = 9
    assert staging.commit() == staging.ledger.total
    with pytest.raises(DigestMismatch):
        staging.undo()


@pytest.mark.parametrize(("box_dims", "has_gaps"), [(0, False), (1, False), (3, True)])
def test_what_compiles_kernels_runs_through(box_dims: int, *, has_gaps: bool) -> None:
    pairs = (("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32"))
    formats = frozenset((dtypes.BY_NAME[own], dtypes.BY_NAME[wire]) for own, wire in pairs)
    forms = BlockFp8("ue8m0"), Fp8(), Int4(), CompressedNvfp4()
    quantized = frozenset((own, kernel_of(form)) for own, _ in formats for form in forms)
    sync_tiny_models(
        formats, 1 << 18, DEVICE, quantized=quantized, box_dims=box_dims, has_gaps=has_gaps
    )


def test_batches_that_are_not_possible_are_refused() -> None:
    model = {"w": torch.zeros(0)}
    with pytest.raises(ConfigError, match="no elements"):
        Ends(placed(model), placed(model), Policy(), 10)


@pytest.mark.gpu
def test_indices_stay_right_beyond_2_to_the_31() -> None:
    numel = (1 << 31) + 5000
    model = {"w": torch.zeros(numel, dtype=torch.uint8, device=DEVICE)}
    places = torch.tensor([0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, numel - 1], device=DEVICE)
    specs = specs_of(model)
    reader = WireReader.of(model["w"], specs[0].dtype, name="w")
    snapshot = snapshot_of(whole(specs), [reader], chunk_numel=1 << 20)
    model["w"][places] = 3
    delta = snapshot.compare(
        [reader],
        policy=Policy(chunk_numel=1 << 20),
        bucket_bytes=1 << 20,
        max_held_bytes=1 << 20,
        base_version=0,
    )
    assert delta.nnz == len(places)
    replica = torch.zeros_like(model["w"])
    ledger = snapshot.ledger.copy()
    staging = BatchedStaging(BatchedWeights({0: Flat.of(replica)}, ledger, DEVICE), ledger)
    reading = BucketReader(specs)
    for bucket in delta.buckets():
        payload = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=DEVICE)
        bucket.write(payload)
        staging.stage_bucket(reading.open(payload, bucket.num_rows))
    assert staging.commit() == delta.ledger.total
    assert torch.equal(replica, model["w"])
    delta.decided()
    assert torch.equal(snapshot.flats[0].line, model["w"])
