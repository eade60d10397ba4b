"""What a peer, a file or an object may say and must be refused, each with the error that it gives.

A lie is bytes that stand in an honest sync from `BASE` to `NEXT` of the model of `worlds.peers`, in
the place of its bucket. Names begin with the rule of docs/wire-format.md that is broken. Bytes are
made by the plain references of tests/wire: nothing here depends on how the package reads or writes.
`tests/wire/test_lies.py` tells each of them wherever it can be told.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zstandard

from deltasync.delta.bits import as_bits
from deltasync.errors import (
    BadMagic,
    ChecksumMismatch,
    DeltaSyncError,
    InvalidIndices,
    LimitExceeded,
    MalformedMessage,
    TruncatedFrame,
    UnsupportedVersion,
    WireError,
)
from deltasync.transports.base import Frame
from tests.golden.make_golden import MESSAGES, bucket_message, text_of
from tests.wire import reference
from tests.wire.reference import Tile, padded
from tests.worlds.peers import DENSE, SPARSE, bucket, model, tensor, zipped


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
ALL = MESSAGES | {
    "bucket": bucket_message([SPARSE], 2),
    "shares": {"kind": "shares", "version": 6, "num_shares": 2},
}
PAYLOAD_BYTES = {"bucket": 64, "shares": 80}
FIXED = struct.Struct("<4sHHI")


def sealed(
    message: bytes = b"{}",
    *,
    magic: bytes = b"DSYN",
    version: int = 2,
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
            b"9007199254740992",
            b"9" * 5000,
        )
    ),
    *(
        b'{"kind":"prepared","version":1,"digest":"%s","staged_bytes":0}' % digest
        for digest in (b"00FF00FF89ABCDEF", b"00ff00ff89abcdef\\n", b"00ff00ff89abcde")
    ),
    b'{"kind":"abort","version":1,"reason":"\\ud800"}',
    *(
        b'{"kind":"committed","version":1,"digest":"00ff00ff89abcdef","commit_s":%s}' % seconds
        for seconds in (b"NaN", b"1e999", b"-1")
    ),
]
KINDS: list[Any] = ["", "Commit", "commit ", "delta", None, 1, [], {}]
LAYOUTS: list[Any] = [
    [[["a"], [1], 1], [["b", "a"], [1], 1]],
    [[[], [1], 1]],
    [[[""], [1], 1]],
    [[["a"], [1] * 65, 1]],
    [[["a"], [-1], 1]],
    [[["a"], [2**62 + 1], 1]],
    [[["a"], [2**31, 2**31, 2], 1]],
    [[["a"], [1], 256]],
    [[["a"], [1]]],
]
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("hello", {"lanes": 1}),
    ("hello-lanes", {"lanes": 0}),
    ("hello-lanes", {"connection": None}),
    ("hello", {"rank": 1, "world": 1}),
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
    for version in (0, 1, 3, 256, 512, 65535):
        yield f"w03 version {version}", UnsupportedVersion, sealed(version=version)
    for flags in (1, 0x8000, 65535):
        yield f"w03 flags {flags}", UnsupportedVersion, sealed(flags=flags)
    for size in ((256 << 20) + 1, 2**32 - 1):
        yield f"w04 message of {size}", LimitExceeded, sealed(message_bytes=size)
    yield "w04 message of the limit, cut", TruncatedFrame, sealed(message_bytes=256 << 20)
    for size in ((1 << 30) + 1, 2**63, 2**64 - 1):
        yield f"w04 payload of {size}", LimitExceeded, sealed(payload_bytes=size)
    for more in ({"whole": 1 << 29}, {"places": (1 << 40) - 1}, {"tiles": (1 << 32) - 1}):
        large = ALL["bucket"] | more | {"compression": "zstd"}
        yield f"w04 inflated size with {more}", LimitExceeded, header_of(large, 10)
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
    for size in (0, 48, 63, 65, 80):
        yield f"w09 {size} bytes for 64", MalformedMessage, header_of(ALL["bucket"], size)
    for name, values in NUMBERS.items():
        for value in values:
            message = ALL["bucket"] | {name: value, "compression": "zstd"}
            yield f"w09 {name} {value}", MalformedMessage, header_of(message, 64)
    for compression in ("", "lz4", "ZSTD", "gzip", "coded"):
        message = ALL["bucket"] | {"compression": compression}
        yield f"w09 compression {compression!r}", MalformedMessage, header_of(message, 64)
    for size in (0, 79, 81, 120):
        yield f"w17 {size} bytes for 2 shares", MalformedMessage, header_of(ALL["shares"], size)
    for number in (-1, 1 << 32):
        message = ALL["shares"] | {"num_shares": number}
        yield f"w17 {number} shares", MalformedMessage, header_of(message)


NUMBERS = {
    "item_size": (0, 3, 16, -1),
    "tiles": (0, -1, 1 << 32),
    "places": (-1, 1 << 40),
    "whole": (-1, 1 << 40),
}
"""Of a bucket: what none can have."""


def members() -> Iterator[tuple[str, type[DeltaSyncError], bytes]]:
    """Rule W7 of each member of each message: missing, and one more."""
    for name, message in ALL.items():
        size = PAYLOAD_BYTES.get(name, 0)
        for key in message:
            left = {k: v for k, v in message.items() if k != key}
            yield f"w07 {name} without {key}", MalformedMessage, header_of(left, size)
        for key in ("extra", "Version", "", "model_config"):
            more = header_of(message | {key: 1}, size)
            yield f"w07 {name} with {key!r} more", MalformedMessage, more


HEADERS = {name: Lie(error, [Frame(data or b"\0")]) for name, error, data in headers()}


# Payloads, rules W6 and W9 to W14.

HONEST_TILES = SPARSE, DENSE
RAW = reference.payload(HONEST_TILES, 2)
TILES, COUNTS, PLACES, VALUES, WHOLE = range(5)
Edit = Callable[[bytes], bytes]


def put(at: int, *numbers: int) -> Edit:
    """16-bit numbers, the first at number `at`, instead of those that are there."""
    data = struct.pack(f"<{len(numbers)}H", *numbers)
    return lambda column: column[: 2 * at] + data + column[2 * at + len(data) :]


def put_tiles(*numbers: int) -> Edit:
    return lambda _: struct.pack(f"<{len(numbers)}I", *numbers)


def edited(column: int, edit: Edit, **fields: Any) -> Lie:
    """The honest payload with another column."""
    columns = reference.columns(HONEST_TILES, 2)
    columns[column] = edit(columns[column])
    data = b"".join(map(padded, columns))
    return Lie(InvalidIndices, [bucket(data=data, **fields)])


def of_tiles(*tiles: Tile, **fields: Any) -> Lie:
    return Lie(InvalidIndices, [bucket(*tiles, **fields)])


def two(first: Tile, second: Tile) -> Lie:
    """A good bucket, and one that is not after it."""
    return Lie(InvalidIndices, [bucket(first), bucket(second, sequence=1)], late=True)


def compressed(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def at_odds(data: bytes | None) -> Lie:
    """A payload that is not the one that its header declares."""
    payload = None if data is None else tensor(data)
    return Lie(TruncatedFrame, [Frame(bucket(*HONEST_TILES).header, payload)])


def inflating(data: bytes, error: type[DeltaSyncError], **fields: Any) -> Lie:
    return Lie(error, [zipped(data, **fields)])


BUCKETS = {
    "w06 payload of a byte less": at_odds(RAW[:-1]),
    "w06 payload of a byte more": at_odds(RAW + b"1"),
    "w06 no payload": at_odds(None),
    "w09 not zstd": inflating(b"not zstd", WireError),
    "w09 one byte behind": inflating(compressed(RAW) + b"1", WireError),
    "w09 inflates to less": inflating(compressed(RAW), TruncatedFrame, whole=40),
    "w09 inflates to more": inflating(compressed(RAW), LimitExceeded, whole=24),
    "w09 a bomb": inflating(compressed(bytes(1 << 24)), LimitExceeded),
    **{
        f"w10 {len(RAW) + more} bytes": Lie(
            MalformedMessage, [bucket(data=(RAW + bytes(16))[: len(RAW) + more])]
        )
        for more in (-len(RAW), -64, -16, -1, 1, 8, 16)
    },
    "w10 a tile fewer than there are": Lie(WireError, [bucket(*HONEST_TILES, tiles=1)]),
    "w10 more tiles than there are": Lie(MalformedMessage, [bucket(*HONEST_TILES, tiles=9)]),
    "w11 a tile beyond the layout": edited(TILES, put_tiles(0, 3)),
    "w11 the last number that there is": edited(TILES, put_tiles(0, (1 << 32) - 1)),
    "w11 a tile of another item size": of_tiles(Tile(2, (0,), (1,))),
    "w11 a tile of an item size that is there": of_tiles(Tile(0, (0,), (1,)), item_size=4),
    "w11 a tile twice": of_tiles(SPARSE, Tile(0, (10,), (1,))),
    "w11 tiles out of order": of_tiles(DENSE, SPARSE),
    "w11 a tile twice, in two buckets": two(SPARSE, Tile(0, (10,), (1,))),
    "w12 a place fewer": edited(COUNTS, put(0, 2)),
    "w12 a place more": edited(COUNTS, put(0, 4)),
    "w12 none goes whole": edited(COUNTS, put(1, 1)),
    "w12 the largest count": edited(COUNTS, put(0, 65535)),
    "w12 a whole tile of more": edited(WHOLE, lambda column: column + bytes(16), whole=40),
    "w12 no whole tile": edited(WHOLE, lambda _: b"", whole=0),
    "w13 more bytes than begin has": Lie(
        LimitExceeded, [bucket(DENSE, data=bytes(304), whole=136)]
    ),
    "w13 more places than begin has": Lie(
        LimitExceeded, [bucket(Tile(0, tuple(range(21)), (1,) * 21))]
    ),
    "w13 more places than begin has, in two buckets": Lie(
        LimitExceeded,
        [bucket(SPARSE), bucket(Tile(1, tuple(range(18)), (1,) * 18), sequence=1)],
        late=True,
    ),
    "w14 beyond the tile": edited(PLACES, put(2, 40)),
    "w14 largest": edited(PLACES, put(2, 65535)),
    "w14 falling": edited(PLACES, put(0, 5, 4, 9)),
    "w14 repeated": edited(PLACES, put(0, 4, 4, 9)),
    "w14 falling in the second tile": of_tiles(SPARSE, Tile(1, (5, 4), (1, 1))),
}
"""All differ from a bucket of `HONEST_TILES`."""


# Coded payloads, rules W27 to W29.

GIANT = 1 << 60
CODED = Tile(0, (1, 4, 39), (0, 0x8000, 0x7FC1)), DENSE
_OLD = [as_bits(one.data).view(-1).tolist() for one in model().parameters()]


def old(tile: int, place: int) -> int:
    """The bits of the receivers that are lied to."""
    return int(_OLD[tile][place]) % 65536


STREAMS = reference.streams(CODED, 2, old)


def gap(streams: Sequence[bytes] = STREAMS, *, data: bytes | None = None, **fields: Any) -> Frame:
    data = reference.coded(streams) if data is None else data
    numbers = reference.sizes(CODED, 2) | fields
    return bucket(data=data, compression="gap", **numbers)


def stream(error: type[DeltaSyncError], number: int, edit: Edit, **fields: Any) -> Lie:
    """The honest coded payload with another stream."""
    streams = [edit(one) if nth == number else one for nth, one in enumerate(STREAMS)]
    return Lie(error, [gap(streams, **fields)])


def lengths(error: type[DeltaSyncError], at: int, number: int) -> Lie:
    """Another number in the header."""
    data = reference.coded(STREAMS)
    return Lie(error, [gap(data=data[: 8 * at] + struct.pack("<Q", number) + data[8 * at + 8 :])])


def byte(at: int, value: int) -> Edit:
    return lambda one: one[:at] + bytes([value]) + one[at + 1 :]


def becomes(*parts: bytes) -> Edit:
    return lambda _: b"".join(parts)


def less(count: int) -> Edit:
    return lambda one: one[:-count]


def more(*values: int) -> Edit:
    return lambda one: one + bytes(values)


NUMBERS_OF_WHOLE, GAPS, STEPS, WHOLE_STEPS = range(4)
FAR = (1 << 48) - 1
GAP = {
    **{
        f"w27 {size} bytes": Lie(TruncatedFrame, [gap(data=reference.coded(STREAMS)[:size])])
        for size in (0, 1, 63, 64, 100)
    },
    "w27 a byte behind": Lie(TruncatedFrame, [gap(data=reference.coded(STREAMS) + b"1")]),
    "w27 a stream that takes more": lengths(TruncatedFrame, 1, GIANT),
    "w27 a long stream": lengths(LimitExceeded, 2, GIANT),
    "w27 streams of over four times the payload": stream(
        LimitExceeded, STEPS, lambda one: one + bytes(4 * len(RAW))
    ),
    "w27 half a number of a whole tile": stream(TruncatedFrame, NUMBERS_OF_WHOLE, less(1)),
    "w27 no whole tile": stream(InvalidIndices, NUMBERS_OF_WHOLE, becomes()),
    "w27 a whole tile more": stream(InvalidIndices, NUMBERS_OF_WHOLE, more(2, 0, 0, 0)),
    "w27 more tiles than it has": Lie(InvalidIndices, [gap(tiles=3)]),
    "w11 a coded tile goes whole and has places": stream(
        InvalidIndices, NUMBERS_OF_WHOLE, becomes(bytes(4))
    ),
    "w11 a coded whole tile beyond the layout": stream(
        InvalidIndices, NUMBERS_OF_WHOLE, becomes(b"\xff" * 4)
    ),
    "w11 coded places beyond the layout": stream(
        InvalidIndices, GAPS, becomes(reference.gaps([9 * 4096, 9 * 4096 + 1, 9 * 4096 + 3], 1))
    ),
    "w11 coded places beyond any tile": stream(
        InvalidIndices, GAPS, becomes(reference.gaps([FAR - 9, FAR - 8, FAR - 2], 1))
    ),
    "w12 another tile goes whole": stream(
        InvalidIndices, NUMBERS_OF_WHOLE, becomes(struct.pack("<I", 2))
    ),
    "w14 a coded place beyond its tile": stream(
        InvalidIndices, GAPS, becomes(reference.gaps([1, 4, 40], 1))
    ),
    "w28 a first gap": stream(InvalidIndices, GAPS, byte(9, 1)),
    "w28 width 0": stream(WireError, GAPS, byte(0, 0)),
    "w28 nothing": stream(WireError, GAPS, becomes()),
    "w28 odd with width 2": stream(TruncatedFrame, GAPS, byte(0, 2)),
    "w28 ends in an escape": stream(InvalidIndices, GAPS, byte(11, 255)),
    "w28 an escape behind": stream(InvalidIndices, GAPS, more(255)),
    "w28 more than 4 bytes a place": stream(
        LimitExceeded, GAPS, becomes(struct.pack("<BQ", 1, 1), bytes(1), b"\xff" * 11, bytes(2))
    ),
    "w28 more than there are": stream(InvalidIndices, GAPS, more(0)),
    "w28 begins beyond any layout": stream(
        InvalidIndices, GAPS, becomes(struct.pack("<BQ", 1, (1 << 64) - 1), bytes(3))
    ),
    "w28 gaps without places": Lie(
        WireError, [gap([STREAMS[0], STREAMS[1], b"", STREAMS[3]], tiles=1, places=0)]
    ),
    "w29 steps cut": stream(TruncatedFrame, STEPS, less(1)),
    "w29 bytes behind the steps": stream(TruncatedFrame, STEPS, more(0)),
    "w29 an escape without its element": stream(TruncatedFrame, STEPS, becomes(b"\xff\1\1")),
}
"""All differ from a coded bucket of `CODED`."""
