"""The wire format once more, in plain Python integers and `struct`: slow, obvious, independent.

Nothing of `deltasync.wire` is used here, so that what both agree on is what the document says.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Sequence

MODULUS = 1 << 64
ROW = struct.Struct("<IBBBBQQQQQ")


def seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:8], "little")


def mix(key: int, position: int, bits: int) -> int:
    x = (key + position * 0x9E3779B97F4A7C15 + bits) % MODULUS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
    return x ^ (x >> 31)


def digest(key: int, positions: Iterable[int], bits: Iterable[int]) -> int:
    return sum(mix(key, i, b) for i, b in zip(positions, bits, strict=True)) % MODULUS


def header(message: bytes, *, payload_bytes: int = 0) -> bytes:
    before = b"DSYN" + struct.pack("<HHI", 1, 0, len(message))
    after = struct.pack("<Q", payload_bytes) + message
    return before + struct.pack("<I", zlib.crc32(before + after)) + after


def payload(rows: Sequence[tuple[int, ...]], blocks: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Rows as the ten fields of section 3, and the bytes of each row's indices and values."""
    data = b"".join(ROW.pack(*row) for row in rows)
    for block in (block for pair in blocks for block in pair if block):
        data += bytes(-len(data) % 8) + block
    return data
