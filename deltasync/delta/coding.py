"""How a sender asks for payloads to be coded, and the one place where that happens.

Not every process has all codecs: `deltasync.files` adds `class`.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from deltasync.delta import gap
from deltasync.delta.changes import Changes
from deltasync.delta.detector import HostSnapshot
from deltasync.delta.snapshot import Bucket
from deltasync.delta.staging import Lane
from deltasync.errors import UnknownCodec
from deltasync.wire.changes import Sizes
from deltasync.wire.compression import Compression, compress

Coding: TypeAlias = Compression
"""What is done to a payload: nothing, zstd, or a codec of its changes. `class` is not for links."""

LONGEST = 1.0
"""Of the length of what it stands for: a coded payload of so much or more is not sent."""


class Codec(Protocol):
    """Makes changes short by the bits that they replace, on hosts."""

    def encode(self, changes: Changes, old: HostSnapshot) -> bytes | None:
        """The coded form of changes, which may be longer; None if there is none."""
        ...

    def decode(self, data: memoryview, sizes: Sizes, lane: Lane) -> Changes:
        """What `encode` made, over memory of their own. The caller checks them.

        Of shares that are not held, values and places mean nothing.

        Raises:
            WireError, SyncError: It is not what `encode` makes of changes of such sizes.
        """
        ...


CODECS: dict[str, Codec] = {}
"""By name."""


def codec_of(name: str) -> Codec:
    """Raises UnknownCodec if nothing in this process reads and writes such payloads."""
    if (codec := CODECS.get(name)) is None:
        raise UnknownCodec(
            f"codec {name} is not known here: it is for stores and patch files; "
            "import deltasync.files"
        )
    return codec


def coded(coding: Coding, payload: Tensor, bucket: Bucket) -> tuple[Tensor, Compression]:
    """(uint8[n], what it is): the payload itself if it gets no shorter.

    Args:
        coding: What is asked for; anything but "none".
        payload: uint8[n], as `bucket` was packed there; what it changes is as it was before.
        bucket: What was packed.
    """
    data, compression = _made(coding, payload, bucket)
    if len(data) >= LONGEST * len(payload):
        return payload, "none"
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), compression


def _made(coding: Coding, payload: Tensor, bucket: Bucket) -> tuple[bytes, Compression]:
    if coding == "zstd" or bucket.old is None:
        return compress(payload.cpu().numpy().data), "zstd"
    changes = Changes.of(payload, bucket.sizes)
    made = (
        gap.encode(changes, *bucket.old.old(changes))
        if coding == "gap"
        else codec_of(coding).encode(changes, bucket.old)
    )
    if made is None:
        return compress(payload.numpy().data), "zstd"
    return made, coding
