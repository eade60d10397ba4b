"""How a sender asks for payloads to be coded, and the one place where that happens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from deltasync.delta import gap
from deltasync.delta.changes import Changes
from deltasync.delta.codecs import codec_of
from deltasync.delta.snapshot import Bucket
from deltasync.wire.compression import Compression, compress

Coding = Literal["none", "zstd", "gap", "class"]
"""What is done to a payload: nothing, zstd, or a codec of its changes. `class` is not for links."""

LONGEST = 1.0
"""Of the length of what it stands for: a coded payload of so much or more is not sent."""


@dataclass(slots=True)
class Coder:
    """Codes payloads one after another.

    Args:
        coding: What is asked for; anything but "none".

    Attributes:
        bytes_by_codec: Bytes as sent, by what took them.
    """

    coding: Coding
    bytes_by_codec: dict[str, int] = field(default_factory=dict)

    def coded(self, payload: Tensor, bucket: Bucket) -> tuple[Tensor, Compression]:
        """(uint8[n], what it is): the payload itself if it gets no shorter.

        Args:
            payload: uint8[n], as `bucket` was packed there; what it changes is as it was before.
            bucket: What was packed.
        """
        data, compression = self._made(payload, bucket)
        if len(data) >= LONGEST * len(payload):
            self._count("none", len(payload))
            return payload, "none"
        self._count(compression, len(data))
        return torch.frombuffer(bytearray(data), dtype=torch.uint8), compression

    def _made(self, payload: Tensor, bucket: Bucket) -> tuple[bytes, Compression]:
        if self.coding == "zstd" or bucket.old is None:
            return compress(payload.cpu().numpy().data), "zstd"
        changes = Changes.of(payload, bucket.sizes)
        coded = (
            gap.encode(changes, *bucket.old.old(changes))
            if self.coding == "gap"
            else codec_of(self.coding).encode(changes, bucket.old)
        )
        if coded is None:
            return compress(payload.numpy().data), "zstd"
        return coded, self.coding

    def _count(self, name: str, num_bytes: int) -> None:
        self.bytes_by_codec[name] = self.bytes_by_codec.get(name, 0) + num_bytes
