"""What the golden bytes of one format version say, and how they are made.

They are made from the plain reference (tests/wire/reference.py) and the tables below, never from
the package that they test. A change of the bytes takes a new format version and with it a new
folder. The messages stand in the bytes alone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import zstandard

from tests.wire import reference
from tests.wire.reference import Tile

FOLDER = Path(__file__).parent / "v2"


def said(path: Path) -> dict[str, Any]:
    """The members of a frame's message, in the order of its bytes."""
    data = path.read_bytes()
    message: dict[str, Any] = json.loads(data[24 : 24 + int.from_bytes(data[8:12], "little")])
    return message


MESSAGES: dict[str, dict[str, Any]] = {
    path.stem: said(path)
    for path in sorted(FOLDER.glob("*.bin"))
    if not path.stem.startswith(("bucket", "shares"))
}
"""Those without a payload."""

SHARES = [(0, 0, 2, 4, 8), (0, 20, 1, 8, 8), (3, 5, 1, 50, 50), (4, 1, 2, 1, 2)]
"""Parameter, start, rows, columns and stride of what a rank sends."""

CHANGED: list[Any] = [
    [["layer.weight"], [30, 301], 16],
    [["bias"], [120], 18],
    [["codes"], [12, 16], 3],
    [["ids"], [5], 6],
]
"""The layout of the buckets: bfloat16, float32, int8, int64."""

EXAMPLE = [Tile(1, (0, 4095), (0x3F80, 0x8000)), Tile(2, (4,), (0x7FC1,))]
BUCKETS: dict[str, tuple[int, list[Tile]]] = {
    "example": (2, EXAMPLE),
    "mixed": (
        2,
        [
            Tile(1, (1, 2, 3, 64, 4000), (0xFFFF, 0x0000, 0x8000, 0x0001, 0x7F80)),
            Tile(3, None, tuple(0x3F00 + n for n in range(838))),
        ],
    ),
    "whole": (1, [Tile(0, None, tuple(range(192)))]),
    "float32": (4, [Tile(4, (0, 119), (0x80000000, 0xFFC00001))]),
    "int64": (8, [Tile(5, None, (0, 1, 1 << 63, (1 << 64) - 1, 7))]),
}
"""Bytes of an element, and changes."""


def old(tile: int, place: int) -> int:
    """The bits that an element of `CHANGED` has before: none of them fills a byte."""
    return (37 * tile + place) % 251


CODED: dict[str, tuple[int, list[Tile]]] = {
    "near": (
        2,
        [
            Tile(
                1, (3840, 3843, 4095), (old(1, 3840) + 1, (old(1, 3843) - 127) % (1 << 16), 0x7FC1)
            ),
            Tile(2, (254, 510), (old(2, 254), old(2, 510) + 127)),
        ],
    ),
    "far": (2, [Tile(1, (0,), (0,)), Tile(3, (600,), (0x8000,))]),
    "escapes": (1, [Tile(0, (5, 6, 191), (255, 128, 0))]),
    "whole": (8, [Tile(5, None, (old(5, 0), old(5, 1) + 127, (1 << 64) - 1, 0, 1 << 63))]),
}
"""Those that are coded with `gap`. No stream is long enough to be compressed."""

UNSTABLE = ("bucket-zstd.bin", "bucket-gap-zstd.bin")
"""Files that depend on a library's version: tests only decode them."""


def bucket_message(
    tiles: list[Tile], item_size: int, *, compression: str = "none"
) -> dict[str, Any]:
    sizes = reference.sizes(tiles, item_size)
    known = {"kind": "bucket", "version": 8, "sequence": 0}
    return {**known, **sizes, "compression": compression}


def text_of(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def frame(message: dict[str, Any], payload: bytes = b"") -> bytes:
    return reference.header(text_of(message), payload_bytes=len(payload)) + payload


def zipped(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def coded(item_size: int, tiles: list[Tile], *, width: int = 1) -> list[bytes]:
    return reference.streams(tiles, item_size, old, width=width)


def files() -> dict[str, bytes]:
    """File name -> bytes, of all but the vectors of digests."""
    made = {f"{name}.bin": frame(message) for name, message in MESSAGES.items()}
    table = b"".join(reference.SHARE.pack(n, 0, *rest) for n, *rest in SHARES)
    made["shares.bin"] = frame({"kind": "shares", "version": 8, "num_shares": len(SHARES)}, table)
    for name, (size, tiles) in BUCKETS.items():
        payload = reference.payload(tiles, size)
        made[f"bucket-{name}.bin"] = frame(bucket_message(tiles, size), payload)
    for name, (size, tiles) in CODED.items():
        message = bucket_message(tiles, size, compression="gap")
        payload = reference.coded(coded(size, tiles, width=2 if name == "far" else 1))
        made[f"bucket-gap-{name}.bin"] = frame(message, payload)
    size, tiles = BUCKETS["mixed"]
    packed = zipped(reference.payload(tiles, size))
    made["bucket-zstd.bin"] = frame(bucket_message(tiles, size, compression="zstd"), packed)
    packed = reference.coded(coded(size, tiles), zipped)
    made["bucket-gap-zstd.bin"] = frame(bucket_message(tiles, size, compression="gap"), packed)
    return made
