"""Which byte of a patch file or frame breaks which rule."""

from __future__ import annotations

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


def fault_of(path: Path, at: int, value: bytes) -> tuple[int, str]:
    """(offset, rules) of what is wrong when `value` stands at a place of a file."""
    data = bytearray(path.read_bytes())
    data[at : at + len(value)] = value
    damaged = path.with_name("damaged")
    damaged.write_bytes(data)
    fault = FrameCheck(damaged).fault
    assert fault is not None
    return fault.offset, fault.rules


GOLDEN = [
    *MESSAGES,
    *(f"bucket-{name}" for name in (*BUCKETS, "zstd")),
    *(f"bucket-coded-{name}" for name in coded.CODECS),
]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frames_are_sound(name: str) -> None:
    found = FrameCheck(FOLDER / f"{name}.bin")
    assert (found.fault, found.num_frames, found.is_patch) == (None, 1, False)


@pytest.mark.parametrize(
    ("at", "value", "rule"),
    [(0, b"X", "W2"), (4, b"\x09", "W3"), (11, b"\xff", "W4"), (12, b"\0\0\0\0", "W5")],
)
def test_damaged_headers_are_found_by_their_frame(at: int, value: bytes, rule: str) -> None:
    assert fault_of_golden("prepare.bin", at, value) == (0, rule)


def fault_of_golden(name: str, at: int, value: bytes) -> tuple[int, str]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes((FOLDER / name).read_bytes())
        return fault_of(path, at, value)


def test_damaged_rows_are_found_by_their_bytes(plain: Path) -> None:
    at = places_of(plain)[2][1]
    row = at + 2 * ROW.itemsize
    rules = "W11 to W13, W17"
    assert fault_of(plain, row, b"\xff") == (row, rules)  # no such parameter
    assert fault_of(plain, row + 4, b"\x07") == (row, rules)  # no such kind
    assert fault_of(plain, row + 8, b"\xff" * 8) == (row, rules)  # start
    assert fault_of(plain, row + 24, b"\0" * 8) == (row, rules)  # count
    assert fault_of(plain, row + 5, b"\x03") == (at, "W11")  # a codec: which row is not said
    assert fault_of(plain, row, b"\0") == (row, rules)  # before the row before it


def test_damaged_indices_are_found_by_their_row(plain: Path) -> None:
    bucket, _ = decode(list(FrameFile(plain))[2].header)
    assert isinstance(bucket, m.Bucket)
    first = places_of(plain)[2][1] + bucket.num_rows * ROW.itemsize
    assert fault_of(plain, first + 4, b"\xff\xff\xff\x7f") == (first, "W14")
    assert fault_of(plain, first, b"\xff\xff\xff\xff") == (first, "W14")


def test_frames_out_of_order_are_found(plain: Path, tmp_path: Path) -> None:
    frames, places = list(FrameFile(plain)), places_of(plain)
    for left_out in (1, 2, 3):
        path = tmp_path / "less"
        path.unlink(missing_ok=True)
        write_frames(frames[:left_out] + frames[left_out + 1 :], path)
        fault = FrameCheck(path).fault
        assert fault is not None
        assert (fault.offset, fault.rules) == (places[left_out][0], "W16, W21, W22")


def test_a_payload_that_is_cut_off_or_not_inflated_is_found(tmp_path: Path) -> None:
    data = (FOLDER / "bucket-zstd.bin").read_bytes()
    at = data.index(zstandard.FRAME_HEADER)
    path = tmp_path / "cut"
    path.write_bytes(data[:-1])
    fault = FrameCheck(path).fault
    assert fault is not None
    assert (fault.offset, fault.rules) == (at, "W6")
    assert fault_of_golden("bucket-zstd.bin", at, b"\0\0\0\0") == (at, "W9")


def test_a_patch_cut_off_between_frames_is_found(plain: Path, tmp_path: Path) -> None:
    data = plain.read_bytes()
    for offset, _ in places_of(plain)[2:]:
        (tmp_path / "cut").write_bytes(data[:offset])
        fault = FrameCheck(tmp_path / "cut").fault
        assert fault is not None
        assert (fault.offset, fault.rules) == (offset, "W21")


def test_an_empty_file_is_no_frame(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    fault = FrameCheck(tmp_path / "empty").fault
    assert fault is not None
    assert (fault.offset, fault.rules) == (0, "W1")
