"""Which byte of a patch file or frame breaks which rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import zstandard

from deltasync.delta.bucket import inflated
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.frame_check import FrameCheck
from deltasync.files.frame_file import FrameFile, write_frames
from deltasync.files.patch_file import write_patch
from deltasync.transports.base import Frame
from deltasync.wire import messages as m
from deltasync.wire.frame import decode, encode
from deltasync.wire.table import ROW
from tests.files.saved import model, save, stepped
from tests.golden import coded
from tests.golden.make_golden import BUCKETS, FOLDER, MESSAGES

ROWS = "W11 to W13, W17"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A patch file whose payload is not compressed: so that its bytes can be found."""
    old = Checkpoint(save(model(), tmp_path / "old"))
    write_patch(old, Checkpoint(save(stepped(model()), tmp_path / "new")), tmp_path / "zstd")
    frames = []
    for frame in FrameFile(tmp_path / "zstd"):
        message, _ = decode(frame.header)
        if isinstance(message, m.Bucket) and frame.payload is not None:
            raw = inflated(message, frame.payload)
            message = message.model_copy(update={"compression": "none"})
            frame = Frame(encode(message, payload_bytes=len(raw)), raw)
        frames.append(frame)
    write_frames(frames, tmp_path / "plain")
    return tmp_path / "plain"


def places_of(path: Path) -> list[tuple[int, int]]:
    """Where each frame of a file begins, and its payload."""
    file = FrameFile(path)
    return [(file.offset, file.payload_offset or 0) for _ in file]


def fault_of(folder: Path, data: bytes | Sequence[Frame]) -> tuple[int, str]:
    """(offset, rules) of what is wrong with a file."""
    path = folder / "damaged"
    path.unlink(missing_ok=True)
    path.write_bytes(data) if isinstance(data, bytes) else write_frames(data, path)
    fault = FrameCheck(path).fault
    assert fault is not None
    return fault.offset, fault.rules


def placed(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


GOLDEN = [
    *MESSAGES,
    *(f"bucket-{name}" for name in (*BUCKETS, "zstd")),
    *(f"bucket-coded-{name}" for name in coded.CODECS),
]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frames_are_sound(name: str) -> None:
    found = FrameCheck(FOLDER / f"{name}.bin")
    assert (found.fault, found.num_frames, found.is_patch) == (None, 1, False)


def test_damaged_frames_are_found_by_their_bytes(tmp_path: Path) -> None:
    data = (FOLDER / "prepare.bin").read_bytes()
    for at, value, rule in ((0, b"X", "W2"), (4, b"\x09", "W3"), (11, b"\xff", "W4")):
        assert fault_of(tmp_path, placed(data, at, value)) == (0, rule)
    assert fault_of(tmp_path, placed(data, 12, bytes(4))) == (0, "W5")
    assert fault_of(tmp_path, b"") == (0, "W1")
    data = (FOLDER / "bucket-zstd.bin").read_bytes()
    at = data.index(zstandard.FRAME_HEADER)
    assert fault_of(tmp_path, data[:-1]) == (at, "W6")
    assert fault_of(tmp_path, placed(data, at, bytes(4))) == (at, "W9")


def test_damaged_rows_and_indices_are_found_by_their_bytes(plain: Path, tmp_path: Path) -> None:
    data, at = plain.read_bytes(), places_of(plain)[2][1]
    bucket, _ = decode(list(FrameFile(plain))[2].header)
    assert isinstance(bucket, m.Bucket)
    row, first = at + 2 * ROW.itemsize, at + bucket.num_rows * ROW.itemsize
    for place, value, expected in (
        (row, b"\xff", (row, ROWS)),  # no such parameter
        (row, b"\0", (row, ROWS)),  # before the row before it
        (row + 4, b"\x07", (row, ROWS)),  # no such kind
        (row + 5, b"\x03", (at, "W11")),  # a codec: which row is not said
        (row + 8, b"\xff" * 8, (row, ROWS)),  # start
        (row + 24, b"\0" * 8, (row, ROWS)),  # count
        (first + 4, b"\xff\xff\xff\x7f", (first, "W14")),
        (first, b"\xff\xff\xff\xff", (first, "W14")),
    ):
        assert fault_of(tmp_path, placed(data, place, value)) == expected


def test_frames_that_are_left_out_are_found(plain: Path, tmp_path: Path) -> None:
    frames, places, data = list(FrameFile(plain)), places_of(plain), plain.read_bytes()
    for number in (1, 2, 3):
        fewer = frames[:number] + frames[number + 1 :]
        assert fault_of(tmp_path, fewer) == (places[number][0], "W16, W21, W22")
    for offset, _ in places[2:]:
        assert fault_of(tmp_path, data[:offset]) == (offset, "W21")
