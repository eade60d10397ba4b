"""Parameters beyond 2^31 elements, in memory that is there only where it is written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.backend import Applier, Kernels
from deltasync.delta.batched.staging import BatchedStaging
from deltasync.delta.batched.weights import BatchedWeights
from deltasync.delta.bits import Flat, Live, Run
from deltasync.delta.bucket import BucketReader
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host.packing import buckets
from deltasync.delta.host.staging import Lines, Staging
from deltasync.delta.region import unpaired
from deltasync.delta.route import Part, Piece
from deltasync.delta.shard import whole
from deltasync.wire.messages import ParameterSpec

INT32 = 1 << 31
ROWS, COLS = 1 << 16, (1 << 15) + 9
HELD = 1 << 14  # columns that a rank of an engine keeps, the first ones
BF16 = ParameterSpec(("w",), (ROWS, COLS), dtypes.BY_NAME["bfloat16"])
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


@pytest.mark.parametrize(
    ("laid", "kernels"),
    [("run", "torch"), ("transposed", "torch"), ("run", "triton"), ("part", "triton")],
)
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
