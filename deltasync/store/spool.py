"""Frames on their way into a store: kept until they have arrived, so that an upload can be tried
again, and counted and digested meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from tempfile import SpooledTemporaryFile

from deltasync.errors import StoreRefused
from deltasync.store.manifest import StoredFile
from deltasync.store.objects import Objects
from deltasync.transports.base import Closing, Frame

_IN_MEMORY_BYTES = 16 << 20  # the rest is in a temporary file


class Spool(Closing):
    """The bytes of one object that is about to be written. It is a context manager.

    Attributes:
        num_bytes: So far.
    """

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115 - closed below
        self._sha256 = hashlib.sha256()
        self.num_bytes = 0

    def take(self, frames: Iterable[Frame]) -> None:
        """Add frames, each as it is made. Raises StoreRefused if there is no room for them."""
        for frame in frames:
            self._add(frame.header)
            if frame.payload is not None:
                self._add(frame.payload.cpu().numpy().data)

    def write(self, objects: Objects, key: str) -> StoredFile:
        """Write it to a store. Raises StoreError; it can be tried again."""
        step = objects.options.part_bytes

        def parts() -> Iterator[bytes]:
            self._file.seek(0)
            while piece := self._file.read(step):
                yield piece

        objects.write(key, parts)
        return StoredFile(key=key, bytes=self.num_bytes, sha256=self._sha256.hexdigest())

    def close(self) -> None:
        """Release its memory."""
        self._file.close()

    def _add(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise StoreRefused(
                f"no room for what is to be uploaded: {error.strerror or error}; set TMPDIR to a "
                "folder with space"
            ) from error
        self._sha256.update(data)
        self.num_bytes += len(data)
