"""Checks frames and patch files without the weights: which byte is damaged, and by which rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.bucket import ReadBucket, inflated
from deltasync.delta.patch import check_indices
from deltasync.errors import (
    BadMagic,
    ChecksumMismatch,
    DeltaSyncError,
    InvalidIndices,
    InvalidTable,
    LimitExceeded,
    TruncatedFrame,
    UnknownCodec,
    UnsupportedVersion,
    WireError,
)
from deltasync.files.frame_file import FrameFile
from deltasync.sync.protocol.one_way import OneWayReader
from deltasync.transports.base import Frame
from deltasync.wire.coded import CodedPayload
from deltasync.wire.frame import decode
from deltasync.wire.messages import MAX_NUMEL, Bucket, Layout
from deltasync.wire.table import ROW, Rows, read_table

_HEADER_RULES: dict[type[DeltaSyncError], str] = {
    TruncatedFrame: "W1",
    BadMagic: "W2",
    UnsupportedVersion: "W3",
    LimitExceeded: "W4",
    ChecksumMismatch: "W5",
}
_MESSAGE, _PAYLOAD, _COMPRESSION, _INDICES, _ORDER = "W7, W8", "W6", "W9", "W14", "W16, W21, W22"
_CODED = "W10 to W13, W29, W30"
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_TABLE_RULES: dict[type[DeltaSyncError], str] = {
    TruncatedFrame: "W10, W17",
    UnknownCodec: "W11",
    InvalidTable: "W11 to W13, W17",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong.

    Attributes:
        offset: Position in the file of what breaks the rule; in a compressed payload, its position
            in the inflated payload.
        rules: Rules of docs/wire-format.md, one of which is broken.
        error: The type of the error.
        reason: The text of the error.
    """

    offset: int
    rules: str
    error: str
    reason: str


class _Found(Exception):
    """Carries a fault out of nested calls."""

    def __init__(self, error: DeltaSyncError, offset: int, rules: str) -> None:
        super().__init__()
        self.fault = Fault(offset, rules, type(error).__name__, str(error))


@contextmanager
def _breaking(rules: str, kind: type[DeltaSyncError], offset: int) -> Iterator[None]:
    """Turn an error of this kind into a fault: what is at `offset` breaks one of these rules."""
    try:
        yield
    except kind as error:
        raise _Found(error, offset, rules) from error


class FrameCheck:
    """Checks a file of frames: one frame, or a patch file.

    Args:
        path: The file.

    Attributes:
        num_bytes: Size of the file.
        num_frames: Frames before the fault.
        fault: The first fault; None if there is none.
        is_patch: Whether it is a patch file, which begins with a layout.

    Raises:
        ConfigError: The file cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = FrameFile(path)
        self.num_bytes, self.num_frames = self._file.num_bytes, 0
        self.fault: Fault | None = None
        self._reader: OneWayReader | None = None
        try:
            for frame in self._frames():
                self._check(frame)
                self.num_frames += 1
            if self._reader is not None:
                with _breaking("W21", DeltaSyncError, self.num_bytes):
                    self._reader.check_sealed()
        except _Found as found:
            self.fault = found.fault

    @property
    def is_patch(self) -> bool:
        return self._reader is not None

    def _frames(self) -> Iterator[Frame]:
        try:
            yield from self._file
        except WireError as error:
            at = self._file.payload_offset
            if at is not None:
                raise _Found(error, at, _PAYLOAD) from error
            rules = _HEADER_RULES.get(type(error), "W1")
            raise _Found(error, self._file.offset, rules) from error

    def _check(self, frame: Frame) -> None:
        offset, at = self._file.offset, self._file.payload_offset or 0
        with _breaking(_MESSAGE, WireError, offset):
            message, _ = decode(frame.header)
        if isinstance(message, Layout) and not self.num_frames and at < self.num_bytes:
            self._reader = OneWayReader()
        if isinstance(message, Bucket) and frame.payload is not None:
            check = self._check_coded if message.compression == "coded" else self._check_rows
            check(message, frame.payload, offset, at)
        elif self._reader is not None:
            with _breaking(_ORDER, DeltaSyncError, offset):
                self._reader.accept(message, _NOTHING)

    def _check_coded(self, message: Bucket, payload: Tensor, offset: int, at: int) -> None:
        """What the blocks of a coded payload hold shows only with the weights."""
        try:
            if self._reader is not None:
                self._reader.glance(message, payload)
                return
            data, raw_bytes = payload.numpy().data, message.raw_bytes
            CodedPayload.from_bytes(data, num_rows=message.num_rows, raw_bytes=raw_bytes)
        except WireError as error:
            raise _Found(error, at, _CODED) from error
        except DeltaSyncError as error:
            raise _Found(error, offset, _ORDER) from error

    def _check_rows(self, message: Bucket, payload: Tensor, offset: int, at: int) -> None:
        with _breaking(_COMPRESSION, WireError, at):
            raw = inflated(message, payload)
        at = at if message.compression == "none" else 0
        try:
            if self._reader is None:
                _check_table(raw, message)
                return
            plain = message.model_copy(update={"compression": "none"})
            bucket = self._reader.accept(plain, raw)
        except WireError as error:
            row = error.row if isinstance(error, InvalidTable) else None
            at += 0 if row is None else row * ROW.itemsize
            rules = _TABLE_RULES.get(type(error), "W10")
            raise _Found(error, at, rules) from error
        except DeltaSyncError as error:
            raise _Found(error, offset, _ORDER) from error
        assert bucket is not None
        _check_indices(bucket, at)


def _check_indices(bucket: ReadBucket, at: int) -> None:
    for number, (parameter, run) in enumerate(bucket.runs()):
        with _breaking(_INDICES, InvalidIndices, at + int(bucket.index_at[number])):
            check_indices(run, name=f"row {number}, {bucket.specs[parameter].name}")


def _check_table(payload: Tensor, message: Bucket) -> None:
    """Check the table of a bucket whose layout is not known, as far as that is possible."""
    table = payload[: message.num_rows * ROW.itemsize].numpy()
    if len(table) < message.num_rows * ROW.itemsize:
        raise TruncatedFrame(f"payload of {len(payload)} bytes cannot hold its patch table")
    rows: Rows = np.frombuffer(table.tobytes(), ROW).copy()
    numbers, compact = np.unique(rows["parameter"], return_inverse=True)
    item_sizes = np.ones(len(numbers), np.uint64)
    item_sizes[compact] = rows["value_bytes"] // np.maximum(rows["count"], 1)
    rows["parameter"] = compact
    numels = np.full(len(numbers), MAX_NUMEL, np.uint64)
    read_table(
        rows.view(np.uint8), payload_bytes=len(payload), numels=numels, item_sizes=item_sizes
    )
