"""Checks a patch file without the weights that it changes."""

from __future__ import annotations

from pathlib import Path

from deltasync.errors import SyncError, WireError
from deltasync.files.frame_file import FrameFile
from deltasync.files.one_way import OneWayReader


class FrameCheck:
    """Reads a patch file to its end, or to its first fault.

    What coded payloads make of the weights is not checked: that needs them.

    Args:
        path: The file.

    Attributes:
        num_bytes: Size of the file.
        num_frames: Frames before the fault.
        fault: What is wrong with it first; None if nothing is.
        offset: Where the frame begins that is wrong, in bytes; the file's size if frames are
            missing at its end, or nothing is wrong.

    Raises:
        ConfigError: The file cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        file, reader = FrameFile(path), OneWayReader()
        self.num_bytes, self.num_frames = file.num_bytes, 0
        self.fault: WireError | SyncError | None = None
        try:
            for frame in file:
                reader.take(frame)
                self.num_frames += 1
            reader.whole_digest()
        except (WireError, SyncError) as error:
            self.fault = error
        self.offset = file.offset
