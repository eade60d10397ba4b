"""How a sender asks for payloads to be coded, and the one place where that happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from deltasync.delta.codecs.encoding import encode_payload
from deltasync.delta.codecs.old import OldRows
from deltasync.delta.policy import Policy
from deltasync.wire.codecs import IndexCodec
from deltasync.wire.coded import Lengths
from deltasync.wire.compression import Compression, compress

Coding = Literal["none", "zstd", "gap", "block", "class"]
"""What is done to a payload: nothing, zstd, or a codec of its rows. `class` is not for links."""

LONGEST = 1.0
"""Of the length of what it stands for: a coded payload of so much or more is not sent."""

DENSE_ABOVE = 0.5
"""The density above which the steps of all elements take about as many bytes as coded changes."""

_CODECS = MappingProxyType(
    {"gap": IndexCodec.GAP, "block": IndexCodec.BLOCK, "class": IndexCodec.CLASS}
)


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A coded payload.

    Attributes:
        data: uint8[n], where it was made.
        bytes_by_codec: Its bytes by what took them: see `Coder`.
    """

    data: Tensor
    bytes_by_codec: dict[str, int]


Encode = Callable[[Tensor], Coded | None]
"""(uint8[n], a payload as it was written on its device) -> its coded form there; None if that is
not shorter."""


class Payload(Protocol):
    """One bucket that can be packed."""

    @property
    def num_bytes(self) -> int:
        """Its length."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows of its table."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it is packed, if it is coded next."""
        ...

    @property
    def old(self) -> OldRows | None:
        """What its rows change; None if nothing of it is known. Ask before `write` returns."""
        ...

    def encoder(self, codec: IndexCodec) -> Encode | None:
        """What codes it on `device`; None if the host has to. Call it before `write` returns."""
        ...

    def write(self, payload: Tensor, written: Callable[[], None] | None = None) -> None:
        """Write it into uint8[num_bytes].

        Calls `written` when it stands there, and before what it changes is overwritten.
        """
        ...


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

    def coded(self, payload: Tensor, bucket: Payload) -> tuple[Tensor, Compression]:
        """(uint8[n], what it is): the payload itself if a codec makes it no shorter.

        Args:
            payload: uint8[n], as `bucket` was written there; what it changes is as it was before.
            bucket: What was written.
        """
        codec = _CODECS.get(self.coding)
        compression: Compression = "coded"
        encode = None if codec is None else bucket.encoder(codec)
        if encode is not None:
            made = encode(payload)
        elif codec is None or (old := bucket.old) is None:
            made, compression = _compressed(payload), "zstd"
        else:
            made = _on_host(payload, bucket.num_rows, old, codec)
        if made is None:
            self._count({"none": len(payload)})
            return payload, "none"
        self._count(made.bytes_by_codec)
        return made.data, compression

    def _count(self, shares: dict[str, int]) -> None:
        for name, num_bytes in shares.items():
            self.bytes_by_codec[name] = self.bytes_by_codec.get(name, 0) + num_bytes


def _compressed(payload: Tensor) -> Coded:
    data = compress(payload.cpu().numpy().data)
    return Coded(_tensor(data), {"zstd": len(data)})


def _on_host(payload: Tensor, num_rows: int, old: OldRows, codec: IndexCodec) -> Coded | None:
    """The coded form of a payload in host memory; None if it gets no shorter."""
    made = encode_payload(payload.cpu().numpy(), num_rows, old, codec)
    data = made.to_bytes(compressed=codec is not IndexCodec.BLOCK)
    if len(data) >= LONGEST * len(payload):
        return None
    return Coded(_tensor(data), made.bytes_by_codec(Lengths.of(data)))


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@lru_cache(maxsize=8)
def policy_for(policy: Policy, coding: Coding) -> Policy:
    """The policy by which chunks are compared.

    Whoever asks for a codec wants few bytes, and of those a dense chunk takes more up to a high
    density. A policy that says when to go dense is left as it is.
    """
    if coding in _CODECS and policy.dense_above is None:
        return policy.model_copy(update={"dense_above": DENSE_ABOVE})
    return policy
