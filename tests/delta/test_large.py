"""Parameters beyond 2^31 elements, in memory that is there only where it is written."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from deltasync import Policy, dtypes
from deltasync.delta.backend import Applier, Kernels, Plan, snapshot_of
from deltasync.delta.batched.staging import BatchedStaging
from deltasync.delta.batched.weights import BatchedWeights
from deltasync.delta.bits import Flat, Live, Run
from deltasync.delta.bucket import BucketReader
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host.packing import buckets
from deltasync.delta.host.staging import Lines, Staging
from deltasync.delta.readers import WireReader
from deltasync.delta.region import unpaired
from deltasync.delta.route import Part, Piece
from deltasync.delta.shard import ShardSpec, Share, rows_of, whole
from deltasync.wire.messages import ParameterSpec
from tests.delta.shards import positions_of

INT32 = 1 << 31
ROWS, COLS = 1 << 16, (1 << 15) + 9
HELD = 1 << 14  # columns that a rank of an engine keeps, the first ones
BF16 = ParameterSpec(("w",), (ROWS, COLS), dtypes.BY_NAME["bfloat16"])
BYTES = ParameterSpec(("w",), (1 << 16, 1 << 16), dtypes.BY_NAME["uint8"])
CHUNK = 1 << 12
CPU = torch.device("cpu")


def zeros(*shape: int) -> Tensor:
    return torch.from_numpy(np.zeros(shape, np.int16)).view(torch.bfloat16)


def live(laid: str) -> Live:
    if laid == "run":
        return Flat.of(zeros(ROWS, COLS))
    if laid == "transposed":
        return Flat.of(zeros(COLS, ROWS).T)
    piece = Piece.of("w", *unpaired(0, 0, [(ROWS, COLS, HELD), (HELD, 1, 1)]))
    return Part.of([piece], {"w": zeros(ROWS, HELD)}, name="w")


def staging_of(flat: Live, spec: ParameterSpec, kernels: Kernels) -> Applier:
    """Of weights that nobody has measured: their digests count as 0."""
    ledger = DigestLedger(whole((spec,)), chunk_numel=CHUNK)
    if kernels == "triton":
        return BatchedStaging(BatchedWeights({0: flat}, ledger, CPU), ledger)
    return Staging(Lines({0: flat}, 1), ledger)


def runs() -> list[Run]:
    """At the beginning, across 2^31 and at the end; sparse, dense, sparse."""
    first = torch.tensor([0, 1, INT32 - 2], dtype=torch.int32)
    last = torch.tensor([0, 7, 99_999], dtype=torch.int32)
    dense = torch.arange(1, 3001, dtype=torch.int16)
    bits = torch.tensor([1, 2, 3], dtype=torch.int16)
    return [
        Run(0, INT32 - 1, first, bits),
        Run(INT32 - 1, 3000, None, dense),
        Run(BF16.numel - 100_000, 100_000, last, bits),
    ]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("laid", ["run", "transposed", "part"])
def test_what_lies_beyond_2_to_the_31_is_written_and_taken_back(
    laid: str, kernels: Kernels
) -> None:
    flat = live(laid)
    staging, reader = staging_of(flat, BF16, kernels), BucketReader((BF16,))
    expected: dict[int, int] = {}
    for bucket in buckets([(0, run) for run in runs()], whole((BF16,)), bucket_bytes=1000):
        payload = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        written: list[tuple[int, Run, Tensor]] = []
        replace(bucket, packed=lambda *one, to=written: to.append(one)).write(payload)
        for _, run, bits in written:
            offsets = range(run.span) if run.indices is None else run.indices.tolist()
            places = (run.start + offset for offset in offsets)
            expected |= dict(zip(places, bits.tolist(), strict=True))
        staging.stage_bucket(reader.open(payload, len(bucket.rows)))
    if laid == "part":
        expected = {n: bits for n, bits in expected.items() if n % COLS < HELD}
    assert max(expected) > INT32 > min(expected)
    positions, new = torch.tensor(list(expected)), torch.tensor(list(expected.values())).short()
    assert staging.commit() == staging.ledger.total
    assert torch.equal(flat.gather(positions), new)
    ledger = DigestLedger(whole((BF16,)), chunk_numel=CHUNK)
    ledger.replace_sparse(0, positions, torch.zeros_like(new), new)
    assert np.array_equal(staging.ledger.sums, ledger.sums)
    staging.undo()
    assert not flat.gather(positions).any()


BOXES = {
    "rows across 2^31": ShardSpec(BYTES.shape, ((1 << 15) - 1, 0), (2, 1 << 16)),
    "columns across 2^31": ShardSpec(BYTES.shape, ((1 << 15) - 2, 5000), (5, 3000)),
    "columns at the end": ShardSpec(BYTES.shape, ((1 << 16) - 3, 60_000), (3, 5536)),
}


@pytest.mark.parametrize("box", BOXES.values(), ids=list(BOXES))
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_shards_beyond_2_to_the_31_arrive(box: ShardSpec, kernels: Kernels) -> None:
    ((_, region),) = rows_of(box)
    generator = torch.Generator().manual_seed(1)
    local = torch.randint(1, 256, box.size, generator=generator, dtype=torch.uint8)
    readers = [WireReader.of(local, BYTES.dtype, name="w")]
    shares = [Share(0, BYTES, region)]
    snapshot = snapshot_of(shares, readers, chunk_numel=CHUNK, kernels=kernels)
    weights = torch.from_numpy(np.zeros(BYTES.shape, np.uint8))
    inside = weights[tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))]
    positions = positions_of(box, torch.arange(box.numel))
    full = DigestLedger(whole((BYTES,)), chunk_numel=CHUNK)

    def send(plan: Plan) -> None:
        staging = staging_of(Flat.of(weights), BYTES, kernels)
        reader = BucketReader((BYTES,))
        for bucket in plan.buckets():
            assert bucket.num_bytes <= 5000  # less than a row
            payload = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            bucket.write(payload)
            staging.stage_bucket(reader.open(payload, bucket.num_rows))
        assert staging.commit() == staging.ledger.total
        plan.decided()
        assert torch.equal(inside, local)
        assert snapshot.ledger.total == full.digest_at(0, positions, local.reshape(-1))

    send(snapshot.full(bucket_bytes=5000))
    local.view(-1)[[0, 1, local.numel() - 1]] += 1
    local.view(-1)[CHUNK : 2 * CHUNK] ^= 255
    delta = snapshot.compare(
        readers,
        policy=Policy(chunk_numel=CHUNK),
        bucket_bytes=5000,
        max_held_bytes=1 << 20,
        base_version=0,
    )
    assert delta.nnz == CHUNK + 3
    send(delta)
    assert weights.count_nonzero() == local.count_nonzero()


def test_a_column_shard_beyond_2_to_the_31_is_cut_into_buckets() -> None:
    shape, dtype = (1 << 17, 1 << 17), dtypes.BY_NAME["bfloat16"]
    box = ShardSpec(shape, (0, 1 << 16), (1 << 17, 1 << 16))
    spec, size = ParameterSpec(("w",), shape, dtype), 256 << 20
    regions = [region for _, region in rows_of(box)]
    shares = [Share(0, spec, region) for region in regions]
    assert sum(region.numel for region in regions) == box.numel
    runs = [(number, Run(0, region.numel)) for number, region in enumerate(regions)]
    made = list(buckets(runs, shares, bucket_bytes=size))
    assert all(bucket.num_bytes <= size for bucket in made)
    for number, region in enumerate(regions):
        found = [run for bucket in made for n, run in bucket.runs if n == number]
        assert (found[0].start, found[-1].stop) == (0, region.numel)
        assert all(before.stop == run.start for before, run in pairwise(found))
