"""The raw codecs, as buckets write and read them."""

from __future__ import annotations

from torch import Tensor

from deltasync.delta.bucket import BucketReader
from deltasync.testing.payloads import payloads
from tests.delta.codec_contract import CodecContract, Runs, Specs


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
        (packed,) = payloads(runs, specs)
        return packed

    def decode(self, payload: Tensor, num_rows: int, specs: Specs) -> Runs:
        return BucketReader(specs).read(payload, num_rows)
