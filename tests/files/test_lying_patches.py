"""Every lie of `worlds.lies` in a patch file: it is refused, and nothing is written."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest
from torch import Tensor

from deltasync.delta.bits import as_bits
from deltasync.errors import (
    DeltaSyncError,
    DigestMismatch,
    LimitExceeded,
    ProtocolViolation,
    SyncError,
    TruncatedFrame,
    VersionGap,
    WireError,
    WrongStream,
)
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.frame_check import FrameCheck
from deltasync.files.patch_file import PatchFile, apply_patch_file
from deltasync.transports.base import Frame
from deltasync.wire.frame import encode
from tests.files.saved import holds, save
from tests.wire import reference
from tests.wire.test_lies import SOME_HEADERS, TRUE, is_expected, weights, written
from tests.worlds.lies import BUCKETS, GAP, Lie
from tests.worlds.peers import BASE, DENSE, SPARSE, Said, begin, bucket, layout, prepare

HONEST = TRUE["as it is"][1]


def bytes_of(*said: Said) -> bytes:
    frames = [one if isinstance(one, Frame) else Frame(encode(one)) for one in said]
    return b"".join(
        frame.header + (b"" if frame.payload is None else frame.payload.numpy().tobytes())
        for frame in frames
    )


def digest_of(held: dict[str, Tensor]) -> str:
    total = 0
    for name, one in held.items():
        bits = as_bits(one).view(-1).numpy()
        own = bits.view(f"u{bits.itemsize}").tolist()
        total += reference.digest(reference.seed(name), range(len(own)), own)
    return f"{total % 2**64:016x}"


def one_way(frames: Iterable[Frame], *, digest: str = "0" * 16) -> bytes:
    """The frames of one sync as they stand in a file."""
    frames = list(frames)
    first = layout(digest=digest_of(weights())), begin()
    return bytes_of(*first, *frames, prepare(len(frames), digest=digest))


def digest_after(true: str) -> str:
    return digest_of(written(true))


def is_whole(lie: Lie) -> bool:
    """Whether a file goes on, behind each frame, where its lengths say so."""
    for frame in lie.frames:
        if len(frame.header) < 24:
            return False
        message, _, payload = struct.unpack_from("<IIQ", frame.header, 8)
        found = len(frame.header) + (0 if frame.payload is None else len(frame.payload))
        if 24 + message + payload != found:
            return False
    return True


def numbers_of(rules: str) -> set[int]:
    """Of rules such as "W1, W27 to W30 or W33"."""
    spans = re.findall(r"W(\d+)(?: to W(\d+))?", rules)
    return {n for low, high in spans for n in range(int(low), int(high or low) + 1)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(weights(), tmp_path_factory.mktemp("checkpoint") / "old")


@pytest.mark.parametrize("true", TRUE)
def test_what_the_patches_differ_from_is_applied(
    true: str, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "patch").write_bytes(one_way([TRUE[true][1]], digest=digest_after(true)))
    assert FrameCheck(tmp_path / "patch").fault is None
    apply_patch_file(PatchFile(tmp_path / "patch"), Checkpoint(checkpoint), tmp_path / "out")
    assert holds(tmp_path / "out", written(true))


@pytest.mark.promise(
    "Errors",
    "`VersionGap`, `WrongStream`, every `WireError`: nothing is written, and the receiver rejoins.",
)
@pytest.mark.parametrize("group", [SOME_HEADERS, BUCKETS, GAP], ids=["headers", "raw", "gap"])
def test_a_patch_that_lies_writes_nothing(
    group: dict[str, Lie], checkpoint: Path, tmp_path: Path
) -> None:
    patch, before = tmp_path / "patch", checkpoint.read_bytes()
    for name, lie in group.items():
        patch.write_bytes(one_way(lie.frames))
        with pytest.raises(DeltaSyncError) as raised:
            apply_patch_file(PatchFile(patch), Checkpoint(checkpoint), tmp_path / "out")
        assert is_expected(raised.value, lie) or not is_whole(lie), (name, raised.value)
        fault = FrameCheck(patch).fault
        assert fault is not None, name
        assert not is_whole(lie) or int(name[1:3]) in numbers_of(fault.rules), (name, fault)
        assert list(tmp_path.iterdir()) == [patch], name
    assert checkpoint.read_bytes() == before


def others() -> dict[str, tuple[list[Said], type[DeltaSyncError]]]:
    """Frames that are right each by itself, and no patch file together."""
    after = digest_after("as it is")
    right: list[Said] = [
        layout(digest=digest_of(weights())),
        begin(),
        HONEST,
        prepare(digest=after),
    ]
    found: dict[str, tuple[list[Said], type[DeltaSyncError]]] = {}
    for n in range(4):
        found[f"w21 {n} frames"] = right[:n], TruncatedFrame
        found[f"w21 without frame {n}"] = right[:n] + right[n + 1 :], DeltaSyncError
        found[f"w21 frame {n} twice"] = right[: n + 1] + right[n:], SyncError
    for n in range(3):
        moved = [*right[:n], right[n + 1], right[n], *right[n + 2 :]]
        found[f"w21 frame {n} after the next"] = moved, SyncError
    of_others: list[tuple[int, Said, type[DeltaSyncError]]] = [
        (0, layout(digest=digest_of(weights()), version=BASE - 1), VersionGap),
        (0, layout(digest=digest_of(weights()), stream_id="other"), WrongStream),
        (1, begin(stream_id="other"), WrongStream),
        (1, begin(layout_hash="0" * 64), ProtocolViolation),
        (1, begin(base_version=BASE + 1), VersionGap),
        (1, begin(base_version=None), ProtocolViolation),
        (1, begin(version=BASE), ProtocolViolation),
        (2, bucket(SPARSE, DENSE, version=9), ProtocolViolation),
        (3, prepare(version=9, digest=after), ProtocolViolation),
        (3, prepare(2, digest=after), ProtocolViolation),
        (3, prepare(), ProtocolViolation),
    ]
    for number, (n, other, error) in enumerate(of_others):
        found[f"w22 {number}"] = [*right[:n], other, *right[n + 1 :]], error
    found["more than its layout"] = [right[0], begin(payload_bytes=1 << 40)], LimitExceeded
    found["w23 made from others"] = [layout(), *right[1:]], DigestMismatch
    found["w24 another result"] = [*right[:3], prepare(digest="0" * 16)], DigestMismatch
    found["w21 a byte behind"] = [*right, Frame(b"\0")], WireError
    return found


def test_w21_w22_w23_w24_frames_that_are_no_patch_write_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    patch = tmp_path / "patch"
    for name, (frames, error) in others().items():
        patch.write_bytes(bytes_of(*frames))
        with pytest.raises(error) as raised:
            apply_patch_file(PatchFile(patch), Checkpoint(checkpoint), tmp_path / "out")
        if error not in (DeltaSyncError, SyncError, WireError):
            assert type(raised.value) is error, name
        assert list(tmp_path.iterdir()) == [patch], name
