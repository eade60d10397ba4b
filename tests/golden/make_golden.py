"""Writes the golden bytes of one format version: `python -m tests.golden.make_golden`.

They are made from the plain references in tests/wire (reference.py, coded_reference.py) and the
tables below and in coded.py, never from the package that they test. Files that exist are never
overwritten: a change of the bytes takes a new format version and with it a new folder. Files that
are missing are added.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import zstandard

from tests.golden import coded
from tests.wire import reference

FOLDER = Path(__file__).parent / "v1"

PARAMETERS: list[Any] = [
    [["embed.weight", "head.weight"], [16, 8], 16],
    [["gew\u00f6hnlich.\u6b0a\u91cd"], [], 18],
    [["empty"], [0, 7], 19],
    [["mask"], [64], 1],
    [["steps"], [2, 2], 6],
    [["scale"], [40], 36],
]
"""Names, shape and dtype code: tied bfloat16, float32, float64, bool, int64, float8_e8m0fnu."""

LAYOUT_HASH = "0123456789abcdef" * 4
CONNECTION = "00112233445566778899aabbccddeeff"
DIGEST = "00ff00ff89abcdef"

MESSAGES: dict[str, dict[str, Any]] = {
    "hello": {
        "parameters": PARAMETERS,
        "kind": "hello",
        "engine": "engine-0",
        "rank": 1,
        "world": 2,
        "format_versions": [1],
        "stream_id": None,
        "version": None,
        "connection": None,
        "lanes": 0,
    },
    "hello-again": {
        "parameters": [],
        "kind": "hello",
        "engine": "engine-0",
        "rank": 0,
        "world": 1,
        "format_versions": [1, 2],
        "stream_id": "run-7",
        "version": 9007199254740991,
        "connection": None,
        "lanes": 0,
    },
    "hello-lanes": {
        "parameters": PARAMETERS,
        "kind": "hello",
        "engine": "engine-0",
        "rank": 0,
        "world": 1,
        "format_versions": [1],
        "stream_id": None,
        "version": None,
        "connection": CONNECTION,
        "lanes": 3,
    },
    "lane": {"kind": "lane", "connection": CONNECTION},
    "layout": {
        "parameters": PARAMETERS,
        "kind": "layout",
        "stream_id": "run-7",
        "version": 0,
        "digest": DIGEST,
    },
    "held": {
        "kind": "held",
        "digest": DIGEST,
        "parts": [],
        "half_written": False,
        "max_staged_bytes": 67108864,
    },
    "held-parts": {
        "kind": "held",
        "digest": DIGEST,
        "parts": [[0, 3], [7, 4294967296]],
        "half_written": True,
        "max_staged_bytes": 0,
    },
    "welcome": {"kind": "welcome", "full_sync": ["engine-0", "engine-1"]},
    "upcoming": {"kind": "upcoming", "version": 8},
    "begin": {
        "kind": "begin",
        "stream_id": "run-7",
        "version": 8,
        "base_version": 7,
        "layout_hash": LAYOUT_HASH,
        "sparse_bytes": 120,
        "dense_bytes": 0,
        "timeout_s": 60.0,
    },
    "begin-full": {
        "kind": "begin",
        "stream_id": "run-7",
        "version": 8,
        "base_version": None,
        "layout_hash": LAYOUT_HASH,
        "sparse_bytes": 0,
        "dense_bytes": 9223372036854775807,
        "timeout_s": 0.5,
    },
    "attempt": {"kind": "attempt", "number": 4},
    "prepare": {"kind": "prepare", "version": 1, "num_buckets": 0},
    "sealed": {"kind": "sealed", "version": 8, "digest": DIGEST},
    "prepared": {"kind": "prepared", "version": 8, "digest": DIGEST, "staged_bytes": 512},
    "commit": {"kind": "commit", "version": 8},
    "committed": {"kind": "committed", "version": 8, "digest": DIGEST, "commit_s": 0.0078125},
    "finish": {"kind": "finish", "version": 8, "undo": ["engine-1"]},
    "abort": {"kind": "abort", "version": 8, "reason": "peer 2 is gone"},
    "failed": {
        "kind": "failed",
        "version": None,
        "error": "InvalidTable",
        "reason": 'row 3: \u00b5 "quoted"\n',
    },
    "refused": {"kind": "refused", "error": "LayoutMismatch", "reason": "names differ"},
}
"""Members in the order of the bytes."""

Row = tuple[int, int, int, list[int] | None, str, list[int]]
"""Parameter, start, span, indices or None when dense, struct letter of a value, values."""

SPARSE: list[Row] = [(0, 0, 128, [0, 5, 127], "H", [0x8000, 0x7FC1, 0x3F80])]
MIXED: list[Row] = [
    (0, 0, 128, [1, 2, 3, 64, 127], "H", [0xFFFF, 0x0000, 0x8000, 0x0001, 0x7F80]),
    (1, 0, 1, [0], "I", [0x80000000]),
    (3, 0, 64, [7, 8, 63], "B", [1, 0, 1]),
    (4, 0, 4, [3], "Q", [0xFEDCBA9876543210]),
    (5, 0, 40, [0, 39], "B", [0x00, 0xFF]),
]
CHUNKED: list[Row] = [
    (0, 8, 32, [0, 31], "H", [0x1234, 0x5678]),
    (0, 40, 8, None, "H", list(range(0x3F00, 0x3F08))),
    (0, 96, 32, [16], "H", [0xABCD]),
]
DENSE: list[Row] = [
    (1, 0, 1, None, "I", [0xFFC00001]),
    (3, 0, 64, None, "B", [1, 0] * 32),
    (4, 0, 4, None, "Q", [0, 1, 1 << 63, (1 << 64) - 1]),
    (5, 0, 40, None, "B", list(range(200, 240))),
]
BUCKETS = {"sparse": SPARSE, "mixed": MIXED, "chunked": CHUNKED, "dense": DENSE}

UNSTABLE = ("bucket-zstd.bin", "bucket-coded-gap-zstd.bin")
"""Files that depend on a library's version: tests only decode them."""


def payload_of(rows: list[Row]) -> bytes:
    table, blocks = [], []
    for parameter, start, span, indices, letter, values in rows:
        value_block = struct.pack(f"<{len(values)}{letter}", *values)
        index_block = b"" if indices is None else struct.pack(f"<{len(indices)}i", *indices)
        kind, codec = (2, 0) if indices is None else (1, 1)
        lengths = (len(values), len(index_block), len(value_block))
        table.append((parameter, kind, codec, 1, 0, start, span, *lengths))
        blocks.append((index_block, value_block))
    return reference.payload(table, blocks)


def bucket_message(rows: list[Row], *, compression: str = "none") -> dict[str, Any]:
    return {
        "kind": "bucket",
        "version": 8,
        "sequence": 0,
        "num_rows": len(rows),
        "raw_bytes": len(payload_of(rows)),
        "compression": compression,
    }


def text_of(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def files() -> dict[str, bytes]:
    """File name -> bytes, of all but the vectors of digests."""
    made = {f"{name}.bin": reference.header(text_of(m)) for name, m in MESSAGES.items()}
    for name, rows in BUCKETS.items():
        payload = payload_of(rows)
        header = reference.header(text_of(bucket_message(rows)), payload_bytes=len(payload))
        made[f"bucket-{name}.bin"] = header + payload
    packed = zstandard.ZstdCompressor(level=1).compress(payload_of(DENSE))
    message = text_of(bucket_message(DENSE, compression="zstd"))
    made["bucket-zstd.bin"] = reference.header(message, payload_bytes=len(packed)) + packed
    return made | coded_frames()


def coded_frames() -> dict[str, bytes]:
    """File name -> bytes. All of them stand for the same payload."""
    payloads = {name: coded.payload(name) for name in coded.CODECS}
    payloads["gap-zstd"] = coded.compressed(payloads["gap"])
    made = {}
    for name, payload in payloads.items():
        header = reference.header(text_of(coded_message()), payload_bytes=len(payload))
        made[f"bucket-coded-{name}.bin"] = header + payload
    return made


def coded_message() -> dict[str, Any]:
    sizes = {"num_rows": len(coded.ROWS), "raw_bytes": len(coded.raw_payload())}
    return {"kind": "bucket", "version": 8, "sequence": 0, **sizes, "compression": "coded"}


def dump(data: bytes) -> str:
    """Offsets, bytes and text, sixteen to a line."""
    lines = []
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        text = "".join(chr(b) if 32 <= b < 127 else "." for b in part)
        lines.append(f"{at:08x}  {part[:8].hex(' '):23}  {part[8:].hex(' '):23}  |{text}|")
    return "\n".join([*lines, f"{len(data):08x}"]) + "\n"


def write(folder: Path) -> list[str]:
    """Write the files that are missing; returns their names."""
    missing = {name: data for name, data in files().items() if not (folder / name).exists()}
    for name, data in missing.items():
        (folder / name).write_bytes(data)
    return sorted(missing)


if __name__ == "__main__":
    sys.stdout.write("\n".join(write(FOLDER)) + "\n")
