"""Codecs that not every process has: `deltasync.files` adds `class`.

Names of all are in `Coding` of `coding.py` and `Compression` of `wire/compression.py`.
"""

from __future__ import annotations

from typing import Protocol

from deltasync.delta.changes import Changes
from deltasync.delta.detector import HostSnapshot
from deltasync.delta.staging import Lane
from deltasync.errors import UnknownCodec
from deltasync.wire.changes import Sizes


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
