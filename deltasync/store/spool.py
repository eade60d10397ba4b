"""Frames on their way into a store: kept until they have arrived, so that an upload can be tried
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from tempfile import SpooledTemporaryFile
from typing import TypeAlias

from deltasync.errors import StoreRefused
from deltasync.transports.base import Frame

IN_MEMORY_BYTES = 16 << 20  # of a spool; the rest is in a temporary file
Spool: TypeAlias = SpooledTemporaryFile[bytes]


def spool_frames(frames: Iterable[Frame], spool: Spool) -> None:
    """Add frames, each as it is made. Raises StoreRefused if there is no room for them."""
    for frame in frames:
        try:
            spool.write(frame.header)
            if frame.payload is not None:
                spool.write(frame.payload.cpu().numpy().data)
        except OSError as error:
            raise StoreRefused(
                f"no room for what is to be uploaded: {error.strerror or error}; set TMPDIR to a "
                "folder with space"
            ) from error


def pieces_of(spool: Spool, num_bytes: int) -> Iterator[bytes]:
    """All that is in it, in pieces of so many bytes."""
    spool.seek(0)
    while piece := spool.read(num_bytes):
        yield piece
