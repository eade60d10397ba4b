"""Coded payloads: a few streams of bytes, each of which is a zstd frame if that is shorter.

docs/wire-format.md, section 4.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import LimitExceeded, TruncatedFrame
from deltasync.wire.compression import compress, inflate

STREAMS = 4
"""Of a payload."""

_HEADER = struct.Struct(f"<{2 * STREAMS}Q")  # the length of each, and how many bytes it takes here
_LEAST_COMPRESSED = 64  # bytes: shorter streams are stored
_MOST = 4  # times the length of what a payload stands for


def packed(streams: Sequence[bytes]) -> bytes:
    """The payload that has these streams."""
    stored = list(map(_shortest, streams))
    lengths = (len(one) for pair in zip(streams, stored, strict=True) for one in pair)
    return b"".join((_HEADER.pack(*lengths), *stored))


def unpacked(data: memoryview, raw_bytes: int) -> list[NDArray[np.uint8]]:
    """The streams of a payload that stands for `raw_bytes`. Raises WireError."""
    if len(data) < _HEADER.size:
        raise TruncatedFrame(f"coded payload of {len(data)} bytes has no header")
    lengths = _HEADER.unpack(data[: _HEADER.size])
    if _HEADER.size + sum(lengths[1::2]) != len(data):
        raise TruncatedFrame(f"coded payload of {len(data)} bytes, its streams have others")
    if sum(lengths[::2]) > _MOST * raw_bytes:
        raise LimitExceeded(f"coded streams of over {_MOST} times the {raw_bytes} they stand for")
    found, at = list[NDArray[np.uint8]](), _HEADER.size
    for full, stored in zip(lengths[::2], lengths[1::2], strict=True):
        stream = data[at : at + stored]
        found.append(np.frombuffer(stream if full == stored else inflate(stream, full), np.uint8))
        at += stored
    return found


def _shortest(stream: bytes) -> bytes:
    if len(stream) < _LEAST_COMPRESSED:
        return stream
    frame = compress(stream)
    return frame if len(frame) < len(stream) else stream
