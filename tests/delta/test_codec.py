"""The raw codecs, as buckets write and read them."""

from __future__ import annotations

import torch
from torch import Tensor

from deltasync.delta.bucket import BucketReader, buckets
from deltasync.testing.codec import CodecContract, Runs, Specs


class TestRawCodecs(CodecContract):
    golden = (
        # parameter, kind, codecs, reserved, start, span, count, index bytes, value bytes
        "0000000001010100"
        "010000000000000005000000000000000300000000000000"
        "0c000000000000000600000000000000"
        "0100000002000100"
        "000000000000000005000000000000000500000000000000"
        "00000000000000000500000000000000"
        "0200000002000100"
        "000000000000000001000000000000000100000000000000"
        "00000000000000000800000000000000"
        "00000000020000000400000000000000"  # indices 0, 2, 4 and padding
        "0080c17f01000000"  # -0.0, a NaN, a denormal, padding
        "000102feff000000"  # dense uint8 and padding
        "ffffffffffffffff"  # dense float64
    )

    def encode(self, runs: Runs, specs: Specs) -> tuple[Tensor, int]:
        (bucket,) = buckets(runs, specs, bucket_bytes=1 << 20)
        payload = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        for _ in bucket.write(payload, no_source):
            pass
        return payload, len(bucket.rows)

    def decode(self, payload: Tensor, num_rows: int, specs: Specs) -> Runs:
        return BucketReader(specs).read(payload, num_rows)


def no_source(parameter: int, start: int, stop: int) -> Tensor:
    raise AssertionError("every run holds its bits")
