"""Frames one after another in a file, written to a temporary name and read with bounded memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO

import numpy as np
import torch

from deltasync.errors import ConfigError, TruncatedFrame
from deltasync.files.output import appearing
from deltasync.transports.base import Frame
from deltasync.wire.frame import HEADER_BYTES, message_bytes_of, split_header


class FrameFile:
    """The frames of a file; each loop over it reads them again.

    Args:
        path: The file.

    Attributes:
        offset: Where the last frame begins that was read, or is being read.
        num_bytes: Size of the file.

    Raises:
        ConfigError: It cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.offset = 0
        with readable(self.path) as file:
            self.num_bytes = os.fstat(file.fileno()).st_size

    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames. Raises WireError for one that is damaged or cut off."""
        with readable(self.path) as file:
            self.offset = 0
            while True:
                header = self._header(file)
                _, payload_bytes = split_header(header)
                yield Frame(header, _payload(file, payload_bytes, self.num_bytes))
                self.offset = file.tell()
                if self.offset >= self.num_bytes:
                    return

    def _header(self, file: BufferedReader) -> bytes:
        start = file.read(HEADER_BYTES)
        rest = min(message_bytes_of(start), self.num_bytes)  # a false length takes no memory
        return start + file.read(rest)


def _payload(file: BufferedReader, num_bytes: int, file_bytes: int) -> torch.Tensor | None:
    if not num_bytes:
        return None
    there = file_bytes - file.tell()
    data = np.empty(min(num_bytes, max(there, 0)), np.uint8)
    if there < num_bytes or file.readinto(data.data) < num_bytes:
        raise TruncatedFrame(f"payload of {num_bytes} bytes, the file ends after {there}")
    return torch.from_numpy(data)


@contextmanager
def readable(path: Path) -> Iterator[BufferedReader]:
    """Open a file to read. Raises ConfigError."""
    try:
        check_regular(path)
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    with file:
        yield file


def write_frames(frames: Iterable[Frame], path: Path) -> int:
    """Write a file that appears as a whole or not at all. Returns its size in bytes.

    Raises:
        ConfigError: The file exists, or cannot be written.
    """
    with appearing(path) as made, made.open("wb") as file:
        put_frames(frames, file)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def put_frames(frames: Iterable[Frame], file: IO[bytes]) -> None:
    """Add frames to an open file, each as it is made."""
    for frame in frames:
        file.write(frame.header)
        if frame.payload is not None:
            file.write(frame.payload.numpy().data)


def check_regular(path: Path) -> None:
    """Raise OSError unless this is a regular file: opening a pipe may wait forever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("not a regular file")
