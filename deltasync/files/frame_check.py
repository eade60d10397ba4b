"""Checks a patch file without the weights that it changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deltasync.errors import (
    BadMagic,
    ChecksumMismatch,
    InvalidIndices,
    InvalidTable,
    LimitExceeded,
    MalformedMessage,
    SyncError,
    TruncatedFrame,
    UnknownCodec,
    UnknownDtype,
    UnsupportedVersion,
    WireError,
)
from deltasync.files.frame_file import FrameFile
from deltasync.files.one_way import OneWayReader

# Of docs/wire-format.md: those that an error of each type may stand for.
_RULES: dict[type[Exception], str] = {
    TruncatedFrame: "W1, W6, W9, W10, W21, W27 to W30 or W33",
    BadMagic: "W2",
    UnsupportedVersion: "W3",
    LimitExceeded: "W4, W9, W11, W13, W27 or W28",
    ChecksumMismatch: "W5",
    MalformedMessage: "W6 to W10 or W17",
    UnknownCodec: "W9",
    UnknownDtype: "W8",
    InvalidTable: "W17, W30 or W31",
    InvalidIndices: "W10 to W12, W14, W27, W28 or W32",
    WireError: "W9, W27 or W28",
}
_ORDER = "W16, W21 or W22"


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a file.

    Attributes:
        offset: Where the frame begins that is wrong, in bytes; the file's size if frames are
            missing at its end.
        rules: Those of docs/wire-format.md, one of which is broken.
        error: The type of the error.
        reason: The text of the error.
    """

    offset: int
    rules: str
    error: str
    reason: str


class FrameCheck:
    """Reads a patch file to its end, or to its first fault.

    What coded payloads make of the weights is not checked: that needs them.

    Args:
        path: The file.

    Attributes:
        num_bytes: Size of the file.
        num_frames: Frames before the fault.
        fault: The first fault; None if there is none.

    Raises:
        ConfigError: The file cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        file, reader = FrameFile(path), OneWayReader()
        self.num_bytes, self.num_frames = file.num_bytes, 0
        self.fault: Fault | None = None
        try:
            for frame in file:
                reader.take(frame)
                self.num_frames += 1
            reader.whole_digest()
        except (WireError, SyncError) as error:
            rules = _RULES.get(type(error), _ORDER)
            self.fault = Fault(file.offset, rules, type(error).__name__, str(error))
