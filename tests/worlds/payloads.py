"""Runs as receivers get them: packed into payloads that do not last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from deltasync.delta.backend import Applier
from deltasync.delta.bits import Run
from deltasync.delta.bucket import BucketReader
from deltasync.delta.host.packing import buckets
from deltasync.delta.shard import whole
from deltasync.wire.messages import ParameterSpec

POISON = 0xEE  # of bytes that are not written


def payloads(
    runs: Iterable[tuple[int, Run]],
    layout: Sequence[ParameterSpec],
    *,
    bucket_bytes: int = 1 << 20,
) -> Iterator[tuple[Tensor, int]]:
    """(uint8[n], rows) for (parameter, run) that hold their bits, in layout order."""
    for bucket in buckets(runs, whole(layout), bucket_bytes=bucket_bytes):
        payload = torch.full((bucket.num_bytes,), POISON, dtype=torch.uint8)
        bucket.write(payload)
        yield payload, bucket.num_rows


def stage_runs(
    staging: Applier,
    runs: Iterable[tuple[int, Run]],
    layout: Sequence[ParameterSpec],
    *,
    bucket_bytes: int = 1 << 20,
) -> None:
    """Bring (parameter, run) to a receiver, each payload overwritten when it was taken over."""
    reader = BucketReader(tuple(layout))
    for payload, num_rows in payloads(runs, layout, bucket_bytes=bucket_bytes):
        staging.stage_bucket(reader.open(payload, num_rows))
        payload.fill_(POISON)
