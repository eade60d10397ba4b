"""Compression of host payloads: none or zstd. Never inflates past the declared size.

docs/wire-format.md, rule W9. A zstd frame may carry its own content size, and the decompressor
then ignores the limit it is given, so that size is compared before anything is allocated.
"""

from __future__ import annotations

from typing import Literal

import zstandard

from deltasync.errors import LimitExceeded, TruncatedFrame, WireError

Compression = Literal["none", "zstd", "gap", "class"]
"""Of a payload that travels. Codecs of changes are in `delta`."""


def compress(data: bytes | memoryview) -> bytes:
    """`data` as one zstd frame that carries its content size, and a checksum of the content."""
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(data)


def inflate(data: bytes | memoryview, raw_bytes: int) -> bytes:
    """Exactly `raw_bytes` bytes, from a zstd frame.

    Raises:
        LimitExceeded: The frame would inflate beyond `raw_bytes`, or does not say how far.
        TruncatedFrame: It inflates to less.
        WireError: `data` is damaged, or not one whole frame.
    """
    try:
        declared = zstandard.frame_content_size(data)
        if declared < 0:
            raise LimitExceeded("zstd frame does not say how many bytes it holds")
        if declared != raw_bytes:
            fault = LimitExceeded if declared > raw_bytes else TruncatedFrame
            raise fault(f"zstd frame holds {declared} bytes, {raw_bytes} were declared")
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"damaged zstd frame: {error}") from error
