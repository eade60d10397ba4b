"""How a sender asks for payloads to be coded, and the one place where that happens."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from deltasync.delta.codecs.encoding import encode_payload
from deltasync.delta.codecs.old import OldRows
from deltasync.delta.policy import Policy
from deltasync.wire.codecs import IndexCodec
from deltasync.wire.compression import Compression, compress

Coding = Literal["none", "zstd", "gap", "block", "class"]
"""What is done to a payload: nothing, zstd, or a codec of its rows."""

LONGEST = 1.0
"""Of the length of what it stands for: a coded payload of so much or more is not sent."""

DENSE_ABOVE = 0.5
"""The density above which the steps of all elements take about as many bytes as coded changes."""

_CODECS = MappingProxyType(
    {"gap": IndexCodec.GAP, "block": IndexCodec.BLOCK, "class": IndexCodec.CLASS}
)


@dataclass(slots=True)
class Coder:
    """Codes payloads one after another.

    Args:
        coding: What is asked for; anything but "none".

    Attributes:
        bytes_by_codec: Bytes as sent, by what took them: rows by their codecs ("gap+ulp", "raw",
            "dense"), "table" for what describes them, "zstd" and "none" for whole payloads.
    """

    coding: Coding
    bytes_by_codec: dict[str, int] = field(default_factory=dict)

    def coded(
        self, payload: Tensor, num_rows: int, old: OldRows | None
    ) -> tuple[Tensor, Compression]:
        """(uint8[n], what it is): the payload itself if a codec makes it no shorter.

        Args:
            payload: uint8[n], as it was packed.
            num_rows: Rows of its table.
            old: What they change; None if nothing of it is known.
        """
        raw = payload.cpu().numpy()
        if old is None or self.coding == "zstd":
            data = compress(raw.data)
            self._count({"zstd": len(data)})
            return _tensor(data), "zstd"
        codec = _CODECS[self.coding]
        made = encode_payload(raw, num_rows, old, codec)
        data = made.to_bytes(compressed=codec is not IndexCodec.BLOCK)
        if len(data) >= LONGEST * len(raw):
            self._count({"none": len(raw)})
            return payload, "none"
        self._count(made.bytes_by_codec(data))
        return _tensor(data), "coded"

    def _count(self, shares: dict[str, int]) -> None:
        for name, num_bytes in shares.items():
            self.bytes_by_codec[name] = self.bytes_by_codec.get(name, 0) + num_bytes


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def for_parts(coding: Coding) -> Coding:
    """What can be decoded by receivers that hold parts of parameters."""
    return "gap" if coding == "class" else coding


@lru_cache(maxsize=8)
def policy_for(policy: Policy, coding: Coding) -> Policy:
    """The policy by which chunks are compared.

    Whoever asks for a codec wants few bytes, and of those a dense chunk takes more up to a high
    density. A policy that says when to go dense is left as it is.
    """
    if coding in _CODECS and policy.dense_above is None and policy.costs is None:
        return policy.model_copy(update={"dense_above": DENSE_ABOVE})
    return policy
