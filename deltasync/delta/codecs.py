"""Codecs that not every process has: `deltasync.files` adds `class`.

Names of all are in `Coding` of `coding.py` and `Compression` of `wire/compression.py`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from deltasync.delta.changes import Changes
from deltasync.delta.host import Bits
from deltasync.delta.staging import Lane
from deltasync.delta.tiles import Space
from deltasync.errors import UnknownCodec
from deltasync.wire.changes import Sizes


class Old(Protocol):
    """At a sender: the bits before."""

    space: Space

    def old(self, changes: Changes) -> tuple[Bits, Bits]:
        """(unsigned[N], unsigned[W]): at lanes and whole tiles of changes."""
        ...

    def read(self, share: int, start: int, stop: int) -> Tensor:
        """int[stop - start]: those of a run of a share; read only."""
        ...


class Codec(Protocol):
    """Makes changes short by the bits that they replace, on hosts."""

    def encode(self, changes: Changes, old: Old) -> bytes | None:
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
