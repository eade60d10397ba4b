"""Frames and their payloads: a bucket packed and compressed, opened and inflated again."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltasync.errors import TruncatedFrame
from deltasync.sync.source.plan import Payload
from deltasync.transports.base import Frame
from deltasync.wire.compression import Compression, compress, decompress
from deltasync.wire.messages import Bucket, Message, decode


def packed(
    bucket: Payload, buffer: Tensor, *, version: int, sequence: int, compression: Compression
) -> tuple[Bucket, Tensor]:
    """Write a bucket into uint8[num_bytes] `buffer`. Returns what announces it, and what travels.

    A compressed payload is host memory of its own, another is `buffer`.
    """
    bucket.write(buffer)
    payload = buffer
    if compression != "none":
        payload = _owned(compress(buffer.cpu().numpy().data))
    message = Bucket(
        version=version,
        sequence=sequence,
        num_rows=bucket.num_rows,
        raw_bytes=len(buffer),
        compression=compression,
    )
    return message, payload


def opened(frame: Frame, *, max_payload_bytes: int) -> tuple[Message, Tensor]:
    """The message in a frame and uint8[n], the payload that belongs to it. Raises WireError."""
    message, payload_bytes = decode(frame.header, max_payload_bytes=max_payload_bytes)
    payload = torch.empty(0, dtype=torch.uint8) if frame.payload is None else frame.payload
    if len(payload) != payload_bytes:
        raise TruncatedFrame(f"payload of {len(payload)} bytes, {payload_bytes} were declared")
    return message, payload


def inflated(bucket: Bucket, payload: Tensor) -> Tensor:
    """uint8[raw_bytes]: a payload as it was packed. Raises WireError."""
    if bucket.compression == "none":
        return payload
    data = payload.cpu().numpy().data
    return _owned(decompress(data, compression=bucket.compression, raw_bytes=bucket.raw_bytes))


def _owned(data: bytes | memoryview) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
