"""What a peer, a file or an object may say and must be refused, each with the error that it gives.

A lie is bytes that stand in an honest sync from `BASE` to `NEXT` of the model of `worlds.peers`, in
the place of its bucket. Names begin with the rule of docs/wire-format.md that is broken. Bytes are
made by the plain references of tests/wire: nothing here depends on how the package reads or writes.
`tests/wire/test_lies.py` tells each of them wherever it can be told.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import zstandard

from deltasync.errors import (
    BadMagic,
    ChecksumMismatch,
    DeltaSyncError,
    InvalidIndices,
    InvalidTable,
    LimitExceeded,
    MalformedMessage,
    TruncatedFrame,
    UnknownCodec,
    UnsupportedVersion,
    WireError,
)
from deltasync.transports.base import Frame
from tests.golden.make_golden import MESSAGES, bucket_message, text_of
from tests.wire import reference
from tests.worlds.peers import DENSE, SPARSE, Row, bucket, packed, tensor, zipped

MAX_PAYLOAD_BYTES = 4096  # of the receivers that are lied to


@dataclass(frozen=True)
class Lie:
    """Frames in the place of a bucket, and what comes of them.

    Attributes:
        error: The type that is raised; a subclass of `WireError` will do where it is that.
        frames: What is said.
        late: Whether the frames before the last one are good, and written where that is in place.
    """

    error: type[DeltaSyncError]
    frames: Sequence[Frame]
    late: bool = False


# Headers, rules W1 to W9: bytes that are no frame, or carry no message.

HONEST = reference.header(b'{"kind":"commit","version":6}')
ALL = MESSAGES | {"bucket": bucket_message([]) | {"num_rows": 1}}
FIXED = struct.Struct("<4sHHI")


def sealed(
    message: bytes = b"{}",
    *,
    magic: bytes = b"DSYN",
    version: int = 1,
    flags: int = 0,
    message_bytes: int | None = None,
    payload_bytes: int = 0,
) -> bytes:
    """A header with a right checksum, whatever its fields."""
    length = len(message) if message_bytes is None else message_bytes
    before = FIXED.pack(magic, version, flags, length)
    after = struct.pack("<Q", payload_bytes) + message
    return before + struct.pack("<I", zlib.crc32(before + after)) + after


def header_of(message: Mapping[str, Any], payload_bytes: int = 0) -> bytes:
    return reference.header(text_of(dict(message)), payload_bytes=payload_bytes)


def _flipped(at: int) -> bytes:
    data = bytearray(HONEST)
    data[at] ^= 0x40
    return bytes(data)


TEXTS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"1",
    b"[" * 100_000,
    b'{"kind": "\xff"}',
    b'{"\\ud800": 1, "kind": "welcome"}',
    b'{"kind":"commit","version":1}x',
    *(
        b'{"kind":"commit","version":%s}' % version
        for version in (
            b"1.0",
            b"true",
            b'"1"',
            b"-1",
            b"9007199254740992",
            b"9" * 5000,
            b"[" * 5000,
        )
    ),
    *(
        b'{"kind":"sealed","version":1,"digest":"%s"}' % digest
        for digest in (b"00FF00FF89ABCDEF", b"00ff00ff89abcdef\\n", b"00ff00ff89abcde")
    ),
    b'{"kind":"abort","version":1,"reason":"\\ud800"}',
    b'{"kind":"abort","version":1,"reason":"\xff"}',
    *(
        b'{"kind":"committed","version":1,"digest":"00ff00ff89abcdef","commit_s":%s}' % seconds
        for seconds in (b"NaN", b"1e999", b"-1")
    ),
]
KINDS: list[Any] = ["", "Commit", "commit ", "delta", None, 1, [], {}]
LAYOUTS: list[Any] = [
    [[["a", "a"], [1], 1]],
    [[["a"], [1], 1], [["b", "a"], [1], 1]],
    [[[], [1], 1]],
    [[[""], [1], 1]],
    [[["a"], [1] * 65, 1]],
    [[["a"], [-1], 1]],
    [[["a"], [2**62 + 1], 1]],
    [[["a"], [2**31, 2**31, 2], 1]],
    [[["a"], [0, 2**62, 2], 1]],
    [[["a"], [1], 0]],
    [[["a"], [1], 256]],
    [[["a"], [1]]],
    [[["a"], [1], 1, 1]],
]
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("hello", {"lanes": 1}),
    ("hello", {"connection": MESSAGES["hello-lanes"]["connection"]}),
    ("hello-lanes", {"lanes": 0}),
    ("hello-lanes", {"connection": None}),
    ("hello", {"rank": 1, "world": 1}),
    ("hello", {"rank": 2, "world": 1}),
]
"""Members that do not go together."""


def headers() -> Iterator[tuple[str, type[DeltaSyncError], bytes]]:
    """(name, error, header) of each."""
    for size in range(24):
        yield f"w01 {size} bytes", TruncatedFrame, HONEST[:size]
    for name, data in [("cut", HONEST[:-1]), ("long", HONEST + b" "), ("fixed", HONEST[:24])]:
        yield f"w01 {name}", TruncatedFrame, data
    for magic in (b"DSYM", b"NYSD", b"dsyn", bytes(4)):
        yield f"w02 magic {magic!r}", BadMagic, sealed(magic=magic)
    for version in (0, 2, 256, 65535):
        yield f"w03 version {version}", UnsupportedVersion, sealed(version=version)
    for flags in (1, 0x8000, 65535):
        yield f"w03 flags {flags}", UnsupportedVersion, sealed(flags=flags)
    for size in ((256 << 20) + 1, 2**32 - 1):
        yield f"w04 message of {size}", LimitExceeded, sealed(message_bytes=size)
    yield "w04 message of the limit, cut", TruncatedFrame, sealed(message_bytes=256 << 20)
    for size in ((1 << 30) + 1, 2**63, 2**64 - 1):
        yield f"w04 payload of {size}", LimitExceeded, sealed(payload_bytes=size)
    large = ALL["bucket"] | {"raw_bytes": (1 << 30) + 1, "compression": "zstd"}
    yield "w04 inflated size", LimitExceeded, header_of(large, 10)
    for at in (*range(12, 24), 24, -1):
        yield f"w05 bit of byte {at}", ChecksumMismatch, _flipped(at)
    for name, message in MESSAGES.items():
        yield f"w06 {name} with a payload", MalformedMessage, header_of(message, 8)
    for n, text in enumerate(TEXTS):
        yield f"w07 text {n}", MalformedMessage, reference.header(text)
    for kind in KINDS:
        yield f"w07 kind {kind!r}", MalformedMessage, header_of({"kind": kind, "version": 1})
    yield from members()
    for n, entries in enumerate(LAYOUTS):
        layout = MESSAGES["layout"] | {"parameters": entries}
        yield f"w08 layout {n}", MalformedMessage, header_of(layout)
    for name, fields in TOGETHER:
        yield f"w08 {name} with {fields}", MalformedMessage, header_of(MESSAGES[name] | fields)
    for size in (0, 1023, 1025):
        message = ALL["bucket"] | {"raw_bytes": 1024}
        yield f"w09 {size} bytes for 1024", MalformedMessage, header_of(message, size)
    for compression in ("", "lz4", "ZSTD", "gzip"):
        message = ALL["bucket"] | {"compression": compression}
        yield f"w09 compression {compression!r}", MalformedMessage, header_of(message)


def members() -> Iterator[tuple[str, type[DeltaSyncError], bytes]]:
    """Rule W7 of each member of each message: missing, and one more."""
    for name, message in ALL.items():
        size = message.get("raw_bytes", 0)
        for key in message:
            left = {k: v for k, v in message.items() if k != key}
            yield f"w07 {name} without {key}", MalformedMessage, header_of(left, size)
        for key in ("extra", "Version", "", "model_config"):
            more = header_of(message | {key: 1}, size)
            yield f"w07 {name} with {key!r} more", MalformedMessage, more


HEADERS = {name: Lie(error, [Frame(data or b"\0")]) for name, error, data in headers()}


# Payloads, rules W6 and W9 to W17.

RAW = packed(SPARSE, DENSE)
GIANT = 1 << 60


def compressed(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def again(row: Row, **fields: int) -> Frame:
    """A second bucket."""
    return bucket(replace(row, **fields), sequence=1)  # type: ignore[arg-type]


def cut(data: bytes, *, num_rows: int = 2) -> Lie:
    return Lie(TruncatedFrame, [bucket(data=data, num_rows=num_rows)])


def at_odds(data: bytes | None) -> Lie:
    """A payload that is not the one that its header declares."""
    header = bucket(data=RAW, num_rows=2).header
    return Lie(TruncatedFrame, [Frame(header, None if data is None else tensor(data))])


def inflating(
    data: bytes, error: type[DeltaSyncError], *, raw_bytes: int = len(RAW), num_rows: int = 2
) -> Lie:
    return Lie(error, [zipped(data, raw_bytes=raw_bytes, num_rows=num_rows)])


def table(*rows: Row, error: type[DeltaSyncError] = InvalidTable) -> Lie:
    return Lie(error, [bucket(*rows)])


def indexed(*indices: int, span: int = 40) -> Lie:
    row = Row(indices=indices, span=span)
    return Lie(InvalidIndices, [bucket(row)])


LYING_FIELDS: list[tuple[str, Row, dict[str, int], type[DeltaSyncError]]] = [
    ("w11 parameter beyond the layout", SPARSE, {"parameter": 2}, InvalidTable),
    ("w11 kind 0", SPARSE, {"kind": 0}, InvalidTable),
    ("w11 kind 255", SPARSE, {"kind": 255}, InvalidTable),
    ("w11 reserved byte", SPARSE, {"reserved": 1}, InvalidTable),
    ("w11 no index codec", SPARSE, {"index_codec": 0}, UnknownCodec),
    ("w11 index codec 255", SPARSE, {"index_codec": 255}, UnknownCodec),
    ("w11 index codec of a dense row", DENSE, {"index_codec": 1}, UnknownCodec),
    ("w11 value codec 255", SPARSE, {"value_codec": 255}, UnknownCodec),
    ("w12 start beyond the parameter", SPARSE, {"start": 1}, InvalidTable),
    ("w12 start that wraps around", SPARSE, {"start": 2**64 - 1}, InvalidTable),
    ("w12 span beyond the parameter", SPARSE, {"span": 41}, InvalidTable),
    ("w12 span of nothing", SPARSE, {"span": 0}, InvalidTable),
    ("w12 span of less than it changes", SPARSE, {"span": 2}, InvalidTable),
    ("w12 span of a dense row", DENSE, {"span": 29}, InvalidTable),
    ("w12 dense row beyond the parameter", DENSE, {"start": 1}, InvalidTable),
    ("w12 count of nothing", SPARSE, {"count": 0}, InvalidTable),
    ("w12 count beyond the span", SPARSE, {"count": 41}, InvalidTable),
    ("w12 count of a dense row", DENSE, {"count": 29}, InvalidTable),
    ("w17 index bytes beyond the payload", SPARSE, {"index_bytes": GIANT}, InvalidTable),
    ("w17 index bytes that wrap around", SPARSE, {"index_bytes": 2**64 - 8}, InvalidTable),
    ("w17 one index byte more", SPARSE, {"index_bytes": 13}, InvalidTable),
    ("w17 index bytes of a dense row", DENSE, {"index_bytes": 8}, InvalidTable),
    ("w17 value bytes beyond the payload", SPARSE, {"value_bytes": GIANT}, InvalidTable),
    ("w17 value bytes that wrap around", SPARSE, {"value_bytes": 2**64 - 6}, InvalidTable),
    ("w17 one value byte more", SPARSE, {"value_bytes": 7}, InvalidTable),
    ("w17 no value bytes", DENSE, {"value_bytes": 0}, InvalidTable),
]
"""(name, row, what the table says of it instead, error), in payloads that are coded or not."""

BUCKETS = {
    "w06 payload of a byte less": at_odds(RAW[:-1]),
    "w06 payload of a byte more": at_odds(RAW + b"1"),
    "w06 no payload": at_odds(None),
    "w09 not zstd": inflating(b"not zstd", WireError, raw_bytes=8),
    "w09 nothing": inflating(b"", WireError),
    "w09 cut": inflating(compressed(RAW)[:-3], WireError),
    "w09 one byte behind": inflating(compressed(RAW) + b"1", WireError),
    "w09 a frame behind": inflating(compressed(RAW) * 2, WireError),
    "w09 a frame that is declared behind": inflating(
        compressed(RAW) * 2, TruncatedFrame, raw_bytes=2 * len(RAW)
    ),
    "w09 inflates to less": inflating(compressed(RAW), TruncatedFrame, raw_bytes=999),
    "w09 inflates to more": inflating(compressed(RAW), LimitExceeded, raw_bytes=len(RAW) - 1),
    "w09 a bomb": inflating(compressed(bytes(1 << 24)), LimitExceeded),
    "w09 a bomb that does not say its size": inflating(
        compressed(bytes(1 << 24), write_content_size=False), LimitExceeded
    ),
    "w10 empty": cut(b""),
    "w10 half a row": cut(RAW[:20], num_rows=1),
    "w10 half a table": cut(RAW[:60]),
    "w10 the table alone": cut(RAW[:96]),
    **{f"w10 cut at {at}": cut(RAW[:at]) for at in range(101, len(RAW), 14)},
    "w10 a byte less": cut(RAW[:-1]),
    "w10 a byte more": cut(RAW + b"1"),
    "w10 8 bytes more": cut(RAW + bytes(8)),
    "w10 fewer rows than there are": Lie(WireError, [bucket(SPARSE, DENSE, num_rows=1)]),
    "w10 more rows than there are": Lie(WireError, [bucket(SPARSE, DENSE, num_rows=9)]),
    "w10 2^32 - 1 rows": Lie(TruncatedFrame, [bucket(SPARSE, num_rows=2**32 - 1)]),
    **{
        name: table(replace(row, lies=lies), error=error) for name, row, lies, error in LYING_FIELDS
    },
    "w11 another codec than in this payload": table(
        replace(SPARSE, lies={"index_codec": 2, "value_codec": 2}), error=UnknownCodec
    ),
    "w12 one change fewer": table(replace(SPARSE, lies={"count": 2})),
    "w12 one change more": table(replace(SPARSE, lies={"count": 4})),
    "w13 rows out of order": table(DENSE, SPARSE),
    "w13 a row twice": table(SPARSE, SPARSE),
    "w13 rows that overlap by one": table(Row(span=10), Row(start=9, span=31)),
    "w13 a row twice, in two buckets": Lie(
        InvalidTable, [bucket(SPARSE), again(SPARSE)], late=True
    ),
    "w13 rows that overlap by one, in two buckets": Lie(
        InvalidTable, [bucket(Row(span=10)), again(SPARSE, start=9, span=31)], late=True
    ),
    "w13 rows out of order, in two buckets": Lie(
        InvalidTable, [bucket(DENSE), again(SPARSE)], late=True
    ),
    "w14 beyond the parameter": indexed(1, 40),
    "w14 beyond the span": indexed(1, 20, span=20),
    "w14 largest": indexed(1, 2**31 - 1),
    "w14 negative": indexed(-1, 3),
    "w14 smallest": indexed(-(2**31), 3),
    "w14 negative at the end": indexed(3, -1),
    "w14 falling": indexed(5, 4, 9),
    "w14 repeated": indexed(4, 4, 9),
    "w14 falling after good rows of another item size": Lie(
        InvalidIndices, [bucket(SPARSE, Row(parameter=1, indices=(5, 4), span=30))]
    ),
    "w17 values of another item size": table(replace(SPARSE, lies={"parameter": 1})),
    "w17 indices and values that make up for each other": table(
        replace(SPARSE, lies={"index_bytes": 8, "value_bytes": 10})
    ),
}
