"""A frame's header as bytes: magic, format version, lengths, checksum, and the message in it.

docs/wire-format.md, section 1. Whatever is read is bounded, and checked before it is used.
"""

from __future__ import annotations

import struct
import zlib
from typing import Annotated

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from deltasync.errors import (
    BadMagic,
    ChecksumMismatch,
    LimitExceeded,
    MalformedMessage,
    TruncatedFrame,
    UnsupportedVersion,
)
from deltasync.wire.messages import Bucket, Message, Shares
from deltasync.wire.shares import SHARE

MAGIC = b"DSYN"
FORMAT_VERSION = 2
MAX_MESSAGE_BYTES = 256 << 20
MAX_PAYLOAD_BYTES = 1 << 30
MAX_FAULTS = 64  # of one message, spelled out

_PREFIX = struct.Struct("<4sHHI")
_CHECKSUM = struct.Struct("<I")
_PAYLOAD = struct.Struct("<Q")
HEADER_BYTES = _PREFIX.size + _CHECKSUM.size + _PAYLOAD.size
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: BaseModel, *, payload_bytes: int = 0) -> bytes:
    """The header of a frame that carries `message`."""
    return join_header(message.model_dump_json().encode(), payload_bytes=payload_bytes)


def decode(
    header: bytes,
    *,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    arrived_bytes: int | None = None,
) -> tuple[Message, int]:
    """The message in a header, and how many payload bytes belong to it.

    Args:
        header: The header.
        max_payload_bytes: The largest payload accepted.
        arrived_bytes: Size of the payload that came with the header; None if it is not here yet.

    Raises:
        WireError: A rule of sections 1 and 2 is broken.
    """
    data, payload_bytes = split_header(header, max_payload_bytes=max_payload_bytes)
    try:
        message = _MESSAGE.validate_json(data)
    except ValidationError as error:
        raise MalformedMessage(_first_fault(error)) from error
    _check_payload(message, payload_bytes, max_payload_bytes)
    if arrived_bytes not in (None, payload_bytes):
        raise TruncatedFrame(f"payload of {arrived_bytes} bytes, {payload_bytes} were declared")
    return message, payload_bytes


def _check_payload(message: Message, payload_bytes: int, max_payload_bytes: int) -> None:
    """Raises WireError unless a message may carry so many bytes."""
    if isinstance(message, Shares):
        if payload_bytes != message.num_shares * SHARE.itemsize:
            raise MalformedMessage(f"{payload_bytes} bytes for {message.num_shares} shares")
    elif not isinstance(message, Bucket):
        if payload_bytes:
            raise MalformedMessage(f"a {message.kind} carries no payload")
    elif (raw_bytes := message.sizes.num_bytes) > max_payload_bytes:
        raise LimitExceeded(f"bucket of {raw_bytes} bytes, {max_payload_bytes} accepted")
    elif message.compression == "none" and raw_bytes != payload_bytes:
        raise MalformedMessage(f"{payload_bytes} payload bytes, {raw_bytes} declared")


def _first_fault(error: ValidationError) -> str:
    if error.error_count() > MAX_FAULTS:
        return f"{error.error_count()} members that do not belong there"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where or 'message'}: {first['msg']}"


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
            f"format version {version}, flags {flags}; this build reads version {FORMAT_VERSION}: "
            "install one release at all ends"
        )
    if message_bytes > MAX_MESSAGE_BYTES:
        raise LimitExceeded(f"message of {message_bytes} bytes, {MAX_MESSAGE_BYTES} are accepted")
    return int(message_bytes)


def _checksum(prefix: bytes | memoryview, tail: bytes | memoryview) -> int:
    return zlib.crc32(tail, zlib.crc32(prefix))
