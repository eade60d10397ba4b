"""Rules W1 to W9 of docs/wire-format.md: what breaks one raises the error that fits."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest
import zstandard
from hypothesis import given

from deltasync.errors import (
    BadMagic,
    ChecksumMismatch,
    LimitExceeded,
    MalformedMessage,
    TruncatedFrame,
    UnknownCodec,
    UnknownDtype,
    UnsupportedVersion,
    WireError,
)
from deltasync.wire import messages as m
from deltasync.wire.compression import compress, decompress
from deltasync.wire.frame import decode, join_header, split_header
from tests.golden.make_golden import MESSAGES, bucket_message, text_of
from tests.wire import reference, strategies
from tests.wire.raises import exactly

HEADER = reference.header(b'{"kind":"commit","version":1}')


def sealed(
    *,
    magic: bytes = b"DSYN",
    version: int = 1,
    flags: int = 0,
    message: bytes = b"{}",
    message_bytes: int | None = None,
    payload_bytes: int = 0,
) -> bytes:
    """A header with a right checksum, whatever its fields."""
    length = len(message) if message_bytes is None else message_bytes
    before = struct.pack("<4sHHI", magic, version, flags, length)
    after = struct.pack("<Q", payload_bytes) + message
    return before + struct.pack("<I", zlib.crc32(before + after)) + after


def header_of(message: dict[str, Any], **lengths: int) -> bytes:
    return reference.header(text_of(message), **lengths)


# Section 1: frames


@pytest.mark.parametrize("size", range(24))
def test_w01_header_shorter_than_its_fixed_fields(size: int) -> None:
    with exactly(TruncatedFrame):
        split_header(HEADER[:size])


@pytest.mark.parametrize("data", [HEADER[:-1], HEADER + b" ", HEADER[:24]])
def test_w01_header_of_another_length_than_it_declares(data: bytes) -> None:
    with exactly(TruncatedFrame):
        split_header(data)


@pytest.mark.parametrize("magic", [b"DSYM", b"NYSD", b"dsyn", bytes(4)])
def test_w02_magic(magic: bytes) -> None:
    with exactly(BadMagic):
        split_header(sealed(magic=magic))


@pytest.mark.parametrize("version", [0, 2, 256, 65535])
def test_w03_format_version(version: int) -> None:
    with exactly(UnsupportedVersion):
        split_header(sealed(version=version))


@pytest.mark.parametrize("flags", [1, 0x8000, 65535])
def test_w03_flags(flags: int) -> None:
    with exactly(UnsupportedVersion):
        split_header(sealed(flags=flags))


@pytest.mark.parametrize("size", [(256 << 20) + 1, 2**32 - 1])
def test_w04_message_over_the_limit(size: int) -> None:
    with exactly(LimitExceeded):
        split_header(sealed(message_bytes=size))


def test_w04_message_of_the_limit_is_only_too_short() -> None:
    with exactly(TruncatedFrame):
        split_header(sealed(message_bytes=256 << 20))


@pytest.mark.parametrize("size", [1001, 2**63, 2**64 - 1])
def test_w04_payload_over_the_readers_limit(size: int) -> None:
    with exactly(LimitExceeded):
        split_header(sealed(payload_bytes=size), max_payload_bytes=1000)
    assert split_header(sealed(payload_bytes=1000), max_payload_bytes=1000) == (b"{}", 1000)


def test_w04_default_limit_is_one_gibibyte() -> None:
    assert split_header(sealed(payload_bytes=1 << 30))[1] == 1 << 30
    with exactly(LimitExceeded):
        split_header(sealed(payload_bytes=(1 << 30) + 1))


def test_w04_inflated_size_over_the_readers_limit() -> None:
    bucket = {
        "kind": "bucket",
        "version": 1,
        "sequence": 0,
        "num_rows": 1,
        "raw_bytes": 1001,
        "compression": "zstd",
    }
    with exactly(LimitExceeded):
        decode(header_of(bucket, payload_bytes=10), max_payload_bytes=1000)


@pytest.mark.parametrize("at", [*range(12, 24), 24, -1])
def test_w05_checksum(at: int) -> None:
    data = bytearray(HEADER)
    data[at] ^= 0x40
    with exactly(ChecksumMismatch):
        split_header(bytes(data))


@pytest.mark.parametrize("name", MESSAGES)
def test_w06_only_a_bucket_has_a_payload(name: str) -> None:
    with exactly(MalformedMessage):
        decode(header_of(MESSAGES[name], payload_bytes=8))


@pytest.mark.parametrize("change", [-1, 1, 8])
def test_w06_payload_of_another_length(change: int) -> None:
    with exactly(TruncatedFrame):
        decompress(bytes(64 + change), compression="none", raw_bytes=64)


# Section 2: messages

ALL = MESSAGES | {"bucket": bucket_message([])}
MEMBERS = [(name, key) for name, message in ALL.items() for key in message]
ALIEN: list[Any] = [None, True, -1, 1.5, "?", [], [0], {}, {"a": 1}]


def payload_for(message: dict[str, Any]) -> int:
    raw = message.get("raw_bytes", 0)
    return raw if isinstance(raw, int) and raw > 0 else 0


@pytest.mark.parametrize("kind", ["", "Commit", "commit ", "delta", None, 1, [], {}])
def test_w07_unknown_kind(kind: Any) -> None:
    with exactly(MalformedMessage):
        decode(header_of({"kind": kind, "version": 1}))


@pytest.mark.parametrize(("name", "key"), MEMBERS)
def test_w07_missing_member(name: str, key: str) -> None:
    message = {k: v for k, v in ALL[name].items() if k != key}
    with exactly(MalformedMessage):
        decode(header_of(message))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("key", ["extra", "Version", "", "model_config"])
def test_w07_extra_member(name: str, key: str) -> None:
    with exactly(MalformedMessage):
        decode(header_of(ALL[name] | {key: 1}))


NULLABLE = {
    ("hello", "stream_id"),
    ("hello", "version"),
    ("begin", "base_version"),
    ("failed", "version"),
}
TEXTS = {"reason", "error", "engine", "stream_id"}
LISTS = {"parameters", "full_sync", "undo", "format_versions", "parts"}


def fits(message: dict[str, Any], key: str, value: Any) -> bool:
    """Whether a value of ALIEN happens to be a legal one of that member."""
    if value is None:
        return (message["kind"], key) in NULLABLE or (
            key == "connection" and message.get("lanes") == 0
        )
    if value is True:
        return key == "half_written"
    if value == [0]:
        return key == "format_versions"
    if isinstance(value, float):
        return key in ("commit_s", "timeout_s")
    return (value == [] and key in LISTS) or (value == "?" and key in TEXTS)


@pytest.mark.parametrize(("name", "key"), MEMBERS)
def test_w07_member_of_another_type(name: str, key: str) -> None:
    for value in ALIEN:
        message = ALL[name] | {key: value}
        if not fits(ALL[name], key, value):
            with exactly(MalformedMessage):
                decode(header_of(message, payload_bytes=payload_for(message)))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'{"kind":"commit","version":1}x',
        b'{"kind":"commit","version":1.0}',
        b'{"kind":"commit","version":true}',
        b'{"kind":"commit","version":"1"}',
        b'{"kind":"commit","version":9007199254740992}',
        b'{"kind":"commit","version":' + b"9" * 5000 + b"}",
        b'{"kind":"commit","version":' + b"[" * 5000 + b"}",
        b'{"kind":"held","digest":"00FF00FF89ABCDEF"}',
        b'{"kind":"held","digest":"00ff00ff89abcdef\\n"}',
        b'{"kind":"held","digest":"00ff00ff89abcde"}',
        b'{"kind":"abort","version":1,"reason":"\\ud800"}',
        b'{"kind":"abort","version":1,"reason":"\xff"}',
        b'{"kind":"committed","version":1,"digest":"00ff00ff89abcdef","commit_s":NaN}',
        b'{"kind":"committed","version":1,"digest":"00ff00ff89abcdef","commit_s":1e999}',
    ],
)
def test_w07_text_that_is_no_message(text: bytes) -> None:
    with exactly(MalformedMessage):
        decode(reference.header(text))


def layout_with(*entries: Any) -> bytes:
    return header_of(MESSAGES["layout"] | {"parameters": list(entries)})


@pytest.mark.parametrize(
    "entries",
    [
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
    ],
)
def test_w08_parameter_that_cannot_be(entries: list[Any]) -> None:
    with exactly(MalformedMessage):
        decode(layout_with(*entries))


def test_w08_largest_shapes_that_can_be() -> None:
    shapes = [[1] * 64, [2**62], [2**31, 2**31], [0, 2**62, 1], []]
    message, _ = decode(layout_with(*([[f"p{i}"], s, 1] for i, s in enumerate(shapes))))
    assert isinstance(message, m.Layout)
    assert [spec.numel for spec in message.specs()] == [1, 2**62, 2**62, 0, 1]


def test_w08_dtype_outside_the_table() -> None:
    message, _ = decode(layout_with([["a"], [1], 200]))
    assert isinstance(message, m.Layout)
    with exactly(UnknownDtype):
        message.specs()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("hello", {"lanes": 1}),
        ("hello", {"connection": MESSAGES["hello-lanes"]["connection"]}),
        ("hello-lanes", {"lanes": 0}),
        ("hello-lanes", {"connection": None}),
    ],
)
def test_w08_lanes_and_a_connection_go_together(name: str, fields: dict[str, Any]) -> None:
    with exactly(MalformedMessage):
        decode(header_of(MESSAGES[name] | fields))


@pytest.mark.parametrize("rank", [1, 2])
def test_w08_a_rank_is_one_of_its_world(rank: int) -> None:
    with exactly(MalformedMessage):
        decode(header_of(MESSAGES["hello"] | {"rank": rank, "world": 1}))


RAW = bytes(range(256)) * 4


@pytest.mark.parametrize("payload_bytes", [0, 1023, 1025])
def test_w09_raw_bytes_differ_without_compression(payload_bytes: int) -> None:
    bucket = bucket_message([]) | {"raw_bytes": 1024}
    with exactly(MalformedMessage):
        decode(header_of(bucket, payload_bytes=payload_bytes))


@pytest.mark.parametrize("compression", ["", "lz4", "ZSTD", "gzip"])
def test_w09_unknown_compression(compression: str) -> None:
    with exactly(MalformedMessage):
        decode(header_of(bucket_message([]) | {"compression": compression}))
    with exactly(UnknownCodec):
        decompress(RAW, compression=compression, raw_bytes=len(RAW))


@pytest.mark.parametrize(
    ("frame", "raw_bytes", "error"),
    [
        (compress(RAW), len(RAW) - 1, LimitExceeded),
        (compress(RAW), len(RAW) + 1, TruncatedFrame),
        (compress(RAW) + b"x", len(RAW), WireError),
        (compress(RAW) * 2, len(RAW), WireError),
        (compress(RAW) * 2, 2 * len(RAW), TruncatedFrame),
        (compress(RAW)[:-1], len(RAW), WireError),
        (b"", 0, WireError),
        (b"not zstd", 8, WireError),
        (
            zstandard.ZstdCompressor(write_content_size=False).compress(RAW),
            len(RAW),
            LimitExceeded,
        ),
    ],
)
def test_w09_frame_that_is_not_what_was_declared(
    frame: bytes, raw_bytes: int, error: type[Exception]
) -> None:
    with exactly(error):
        decompress(frame, compression="zstd", raw_bytes=raw_bytes)


def test_w09_round_trip() -> None:
    assert decompress(compress(RAW), compression="zstd", raw_bytes=len(RAW)) == RAW
    assert decompress(RAW, compression="none", raw_bytes=len(RAW)) == RAW


@given(strategies.messages)
def test_joining_equals_the_reference(message: m.Message) -> None:
    text = message.model_dump_json().encode()
    payload_bytes = strategies.payload_bytes_of(message)
    assert join_header(text, payload_bytes=payload_bytes) == reference.header(
        text, payload_bytes=payload_bytes
    )
