"""Rules W21 to W25 of docs/wire-format.md: patch files, and other frames that go one way."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from deltasync.errors import (
    DeltaSyncError,
    DigestMismatch,
    ProtocolViolation,
    SyncError,
    TruncatedFrame,
    VersionGap,
    WireError,
    WrongStream,
)
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.frame_check import FrameCheck
from deltasync.files.frame_file import FrameFile, write_frames
from deltasync.files.patch_file import PatchFile, apply_patch_file, write_patch
from deltasync.sync.protocol.one_way import OneWayReader
from deltasync.transports.base import Frame
from deltasync.wire import messages as m
from deltasync.wire.frame import decode, encode
from tests.files.saved import model, save, stepped
from tests.golden.make_golden import MESSAGES

KINDS = ["layout", "begin", "bucket", "prepare", "sealed"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(save(model(), tmp_path / "old"))


@pytest.fixture
def frames(checkpoint: Checkpoint, tmp_path: Path) -> list[Frame]:
    """Those of a patch file."""
    new = Checkpoint(save(stepped(model()), tmp_path / "new"))
    write_patch(checkpoint, new, tmp_path / "patch")
    found = list(FrameFile(tmp_path / "patch"))
    assert [decode(frame.header)[0].kind for frame in found] == KINDS
    return found


def read(frames: list[Frame]) -> OneWayReader:
    reader = OneWayReader()
    for _ in reader.read(frames):
        pass
    return reader


def altered(frames: list[Frame], kind: str, **members: Any) -> list[Frame]:
    """The same, with other members in one message."""
    found = []
    for frame in frames:
        message, payload_bytes = decode(frame.header)
        if message.kind == kind:
            message = message.model_copy(update=members)
        found.append(Frame(encode(message, payload_bytes=payload_bytes), frame.payload))
    return found


def apply_to(checkpoint: Checkpoint, frames: list[Frame], tmp_path: Path) -> None:
    path = tmp_path / "other"
    write_frames(frames, path)
    apply_patch_file(PatchFile(path), checkpoint, tmp_path / "out")


def test_w21_all_of_it_is_read(frames: list[Frame]) -> None:
    reader = read(frames)
    assert reader.sealed is not None
    assert reader.specs == reader.layout.specs() if reader.layout else None


def test_w21_it_must_not_end_early(frames: list[Frame]) -> None:
    for length in range(len(frames)):
        with pytest.raises(TruncatedFrame, match="sealed"):
            read(frames[:length])


def test_w21_nothing_is_left_out_doubled_or_moved(frames: list[Frame]) -> None:
    for at in range(len(frames)):
        with pytest.raises(DeltaSyncError):
            read(frames[:at] + frames[at + 1 :])
        with pytest.raises(SyncError):
            read([*frames[: at + 1], *frames[at:]])
    for left, right in pairwise(range(len(frames))):
        moved = list(frames)
        moved[left], moved[right] = moved[right], moved[left]
        with pytest.raises(SyncError):
            read(moved)


@pytest.mark.parametrize("kind", sorted(MESSAGES))
def test_w21_nothing_else_comes_anywhere(kind: str, frames: list[Frame]) -> None:
    message = {name: value for name, value in MESSAGES[kind].items() if name != "kind"}
    header = encode(decode(golden(kind))[0])
    assert message.keys() <= decode(header)[0].model_dump().keys()
    for at in range(len(frames) + 1):
        with pytest.raises(DeltaSyncError):
            read([*frames[:at], Frame(header), *frames[at:]])


def golden(kind: str) -> bytes:
    return (Path(__file__).parents[1] / "golden" / "v1" / f"{kind}.bin").read_bytes()


def test_w21_bytes_after_the_end_are_refused(frames: list[Frame], tmp_path: Path) -> None:
    with (tmp_path / "patch").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(WireError):
        read(list(FrameFile(tmp_path / "patch")))


@pytest.mark.parametrize(
    ("kind", "members", "error"),
    [
        ("layout", {"version": 5}, VersionGap),
        ("layout", {"stream_id": "other"}, WrongStream),
        ("begin", {"stream_id": "other"}, WrongStream),
        ("begin", {"layout_hash": "0" * 64}, ProtocolViolation),
        ("begin", {"base_version": 5}, VersionGap),
        ("begin", {"version": 0}, ProtocolViolation),
        ("bucket", {"version": 9}, ProtocolViolation),
        ("bucket", {"sequence": 1}, ProtocolViolation),
        ("prepare", {"version": 9}, ProtocolViolation),
        ("prepare", {"num_buckets": 2}, ProtocolViolation),
        ("sealed", {"version": 9}, ProtocolViolation),
    ],
)
def test_w22_frames_that_do_not_belong_together(
    kind: str, members: dict[str, Any], error: type[Exception], frames: list[Frame]
) -> None:
    with pytest.raises(error):
        read(altered(frames, kind, **members))


def test_w22_a_patch_file_has_a_base(
    frames: list[Frame], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    full = altered(frames, "begin", base_version=None)
    assert read(full).sealed is not None  # as frames that go one way it is a full sync
    with pytest.raises(ProtocolViolation, match="base_version"):
        apply_to(checkpoint, full, tmp_path)


def test_w23_weights_of_another_digest_are_refused(
    frames: list[Frame], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(DigestMismatch, match="made from"):
        apply_to(checkpoint, altered(frames, "layout", digest="0" * 16), tmp_path)
    assert not (tmp_path / "out").exists()


def test_w24_a_result_of_another_digest_is_refused(
    frames: list[Frame], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(DigestMismatch, match="damaged"):
        apply_to(checkpoint, altered(frames, "sealed", digest="0" * 16), tmp_path)
    assert not (tmp_path / "out").exists()


def test_w25_a_damaged_payload_is_found_without_the_weights(
    frames: list[Frame], tmp_path: Path
) -> None:
    data = (tmp_path / "patch").read_bytes()
    payload = frames[2].payload
    assert payload is not None
    at = len(frames[0].header) + len(frames[1].header) + len(frames[2].header)
    for place in range(at, at + len(payload), 7):
        wrong = bytearray(data)
        wrong[place] ^= 0x10
        (tmp_path / "wrong").write_bytes(wrong)
        fault = FrameCheck(tmp_path / "wrong").fault
        assert fault is not None
        assert (fault.offset, fault.rules) == (at, "W9")


def test_w25_a_payload_that_is_not_compressed_is_read_too(
    frames: list[Frame], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    from deltasync.delta.bucket import inflated

    bucket, _ = decode(frames[2].header)
    assert isinstance(bucket, m.Bucket)
    assert frames[2].payload is not None
    raw = inflated(bucket, frames[2].payload)
    plain = bucket.model_copy(update={"compression": "none"})
    frames[2] = Frame(encode(plain, payload_bytes=len(raw)), raw)
    apply_to(checkpoint, frames, tmp_path)
    new = stepped(model())
    found = Checkpoint(tmp_path / "out")
    assert all(torch.equal(found.tensor(n), t) for n, t in new.items())
