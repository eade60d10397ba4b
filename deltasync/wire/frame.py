"""A frame's header: magic, format version, lengths, checksum. Joins and splits bytes, bounded.

docs/wire-format.md, section 1.
"""

from __future__ import annotations

import struct
import zlib

from deltasync.errors import (
    BadMagic,
    ChecksumMismatch,
    LimitExceeded,
    TruncatedFrame,
    UnsupportedVersion,
)

MAGIC = b"DSYN"
FORMAT_VERSION = 1
MAX_MESSAGE_BYTES = 256 << 20
MAX_PAYLOAD_BYTES = 1 << 30

_PREFIX = struct.Struct("<4sHHI")
_CHECKSUM = struct.Struct("<I")
_PAYLOAD = struct.Struct("<Q")
HEADER_BYTES = _PREFIX.size + _CHECKSUM.size + _PAYLOAD.size


def join_header(message: bytes, *, payload_bytes: int = 0) -> bytes:
    """The header of a frame: fixed fields, then `message`."""
    prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, 0, len(message))
    tail = _PAYLOAD.pack(payload_bytes) + message
    return prefix + _CHECKSUM.pack(_checksum(prefix, tail)) + tail


def split_header(
    data: bytes | memoryview, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES
) -> tuple[bytes, int]:
    """The message in a header and the length of the payload that belongs to it.

    Raises:
        TruncatedFrame, BadMagic, UnsupportedVersion, LimitExceeded, ChecksumMismatch: rules
            W1 to W5, each checked before anything is allocated.
    """
    view = memoryview(data)
    message_bytes = message_bytes_of(view)
    checksum, tail = view[_PREFIX.size : _PREFIX.size + 4], view[_PREFIX.size + 4 :]
    if len(view) != HEADER_BYTES + message_bytes:
        raise TruncatedFrame(
            f"header of {len(view)} bytes declares a message of {message_bytes} bytes"
        )
    if _CHECKSUM.unpack(checksum)[0] != _checksum(view[: _PREFIX.size], tail):
        raise ChecksumMismatch("the header was damaged; send it again")
    (payload_bytes,) = _PAYLOAD.unpack(tail[: _PAYLOAD.size])
    if payload_bytes > max_payload_bytes:
        raise LimitExceeded(f"payload of {payload_bytes} bytes, {max_payload_bytes} are accepted")
    return bytes(tail[_PAYLOAD.size :]), payload_bytes


def message_bytes_of(view: bytes | memoryview) -> int:
    """How many bytes follow the HEADER_BYTES that a header begins with, rules W1 to W4.

    Raises:
        TruncatedFrame, BadMagic, UnsupportedVersion, LimitExceeded: One of them is broken.
    """
    if len(view) < HEADER_BYTES:
        raise TruncatedFrame(f"header of {len(view)} bytes, {HEADER_BYTES} are the least")
    magic, version, flags, message_bytes = _PREFIX.unpack(view[: _PREFIX.size])
    if magic != MAGIC:
        raise BadMagic(f"magic {bytes(magic)!r} is not {MAGIC!r}: not a deltasync frame")
    if version != FORMAT_VERSION or flags != 0:
        raise UnsupportedVersion(
            f"format version {version}, flags {flags}; this build reads version {FORMAT_VERSION}"
        )
    if message_bytes > MAX_MESSAGE_BYTES:
        raise LimitExceeded(f"message of {message_bytes} bytes, {MAX_MESSAGE_BYTES} are accepted")
    return int(message_bytes)


def _checksum(prefix: bytes | memoryview, tail: bytes | memoryview) -> int:
    return zlib.crc32(tail, zlib.crc32(prefix))
