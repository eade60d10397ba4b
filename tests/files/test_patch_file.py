"""Patch files: what is applied is what was compared; what is damaged writes nothing."""

from __future__ import annotations

import math
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.codecs import coding
from deltasync.delta.codecs.coding import Coding
from deltasync.errors import ConfigError, DeltaSyncError, DigestMismatch, LayoutMismatch
from deltasync.files import patch_file
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.comparing import compare_bits, compare_checkpoints, measure_digests
from deltasync.files.frame_check import FrameCheck
from deltasync.files.frame_file import FrameFile
from deltasync.files.patch_file import PatchFile, apply_patch_file, write_patch
from tests.files.saved import holds, model, save, save_sharded, stepped
from tests.worlds.strategies import models, mutations


@st.composite
def versions(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two versions of a model: NaN payloads, -0.0, every dtype, any share of changes."""
    old = draw(models())
    return old, {name: draw(mutations(tensor)) for name, tensor in old.items()}


def applied(patch: Path, checkpoint: Path, out: Path) -> int:
    return apply_patch_file(PatchFile(patch), Checkpoint(checkpoint), out)


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Files of an old version, a new one, and the patch between them."""
    old = save(model(), tmp_path / "old.safetensors")
    new = save(stepped(model()), tmp_path / "new.safetensors")
    write_patch(Checkpoint(old), Checkpoint(new), tmp_path / "patch")
    return old, new, tmp_path / "patch"


@given(
    versions=versions(),
    is_sharded=st.booleans(),
    small=st.booleans(),
    codec=st.sampled_from(["none", "zstd", "gap", "block", "class"]),
)
def test_diff_then_apply_is_the_new_version_bit_for_bit(
    versions: tuple[dict[str, Tensor], dict[str, Tensor]],
    is_sharded: bool,
    small: bool,
    codec: Coding,
) -> None:
    old, new = versions
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(coding, "LONGEST", math.inf)
        if small:  # many buckets, and changes that are looked for a second time
            patched.setattr(patch_file, "_BUCKET_BYTES", 256)
            patched.setattr(patch_file, "_HELD_BYTES", 20)
        folder = Path(name)
        put = save_sharded if is_sharded else save
        first, second = put(old, folder / "old"), save(new, folder / "new")
        patch = folder / "patch"
        summary = write_patch(Checkpoint(first), Checkpoint(second), patch, codec=codec)
        digest = applied(folder / "patch", first, folder / "made")
        assert holds(folder / "made", new)
        assert holds(first, old)
        equality = compare_bits(Checkpoint(first), Checkpoint(second))
        assert summary.nnz == sum(equality.different.values())
        assert summary.digest == digest == measure_digests(Checkpoint(second)).total
        assert summary.num_bytes == (folder / "patch").stat().st_size
        found = FrameCheck(folder / "patch")
        assert (found.is_patch, found.fault) == (True, None)
        measured = compare_checkpoints(Checkpoint(first), Checkpoint(second))
        assert {n: s.changed for n, s in measured.items() if s.changed} == equality.different


def test_a_folder_keeps_its_sharding_and_its_other_files(tmp_path: Path) -> None:
    old = save_sharded(model(), tmp_path / "old")
    new = save(dict(reversed(stepped(model()).items())), tmp_path / "new.safetensors")
    (old / "part-0.safetensors").chmod(stat.S_IRUSR)  # as hubs leave them
    write_patch(Checkpoint(old), Checkpoint(new), tmp_path / "patch")
    applied(tmp_path / "patch", old, tmp_path / "made")
    assert holds(tmp_path / "made", stepped(model()))
    for path in old.rglob("*"):
        other = tmp_path / "made" / path.relative_to(old)
        assert other.is_dir() == path.is_dir()
        if path.suffix != ".safetensors" and path.is_file():
            assert other.read_bytes() == path.read_bytes()


def test_a_patch_fits_the_same_weights_in_other_files(tmp_path: Path) -> None:
    old = save(model(), tmp_path / "old.safetensors")
    new = save(stepped(model()), tmp_path / "new.safetensors")
    write_patch(Checkpoint(old), Checkpoint(new), tmp_path / "patch")
    other = save_sharded(dict(reversed(model().items())), tmp_path / "other", files=3)
    applied(tmp_path / "patch", other, tmp_path / "made")
    assert holds(tmp_path / "made", stepped(model()))


def test_another_base_is_refused_and_nothing_is_written(
    made: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    _, new, patch = made
    there = set(tmp_path.iterdir())
    with pytest.raises(DigestMismatch, match="is not what the patch was made from"):
        applied(patch, new, tmp_path / "out")
    assert set(tmp_path.iterdir()) == there


def test_another_layout_is_refused(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    patch = made[2]
    other = save({"a": torch.ones(3)}, tmp_path / "other")
    with pytest.raises(LayoutMismatch):
        applied(patch, other, tmp_path / "out")


def test_what_is_there_is_never_overwritten(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    old, new, patch = made
    there = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for taken in made:
        with pytest.raises(ConfigError, match="exists"):
            applied(patch, old, taken)
        with pytest.raises(ConfigError, match="exists"):
            write_patch(Checkpoint(old), Checkpoint(new), taken)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == there


def test_a_new_checkpoint_does_not_lie_inside_the_old_one(tmp_path: Path) -> None:
    old = save_sharded(model(), tmp_path / "old")
    write_patch(Checkpoint(old), Checkpoint(old), tmp_path / "patch")
    there = set(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="inside"):
        applied(tmp_path / "patch", old, old / "made")
    assert set(tmp_path.rglob("*")) == there


def test_a_place_that_cannot_be_written_is_refused(
    made: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        applied(made[2], made[0], tmp_path / "gone" / "out")


def test_a_failure_midway_leaves_nothing(
    made: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _, patch = made
    there = set(tmp_path.iterdir())

    def interrupted(self: Checkpoint) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        applied(patch, old, tmp_path / "out")
    assert set(tmp_path.iterdir()) == there


def test_a_patch_cut_off_anywhere_is_found_before_anything_is_written(
    made: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _, patch = made
    whole = patch.read_bytes()
    frames = FrameFile(patch)
    bounds = {frames.offset for _ in frames} | {0, len(whole) - 1}
    nothing_is_copied(monkeypatch)
    for length in sorted(bounds | {at + k for at in bounds for k in (1, 23, 24, 60)}):
        if length >= len(whole):
            continue
        patch.write_bytes(whole[:length])
        with pytest.raises(DeltaSyncError):
            applied(patch, old, tmp_path / "out")


@given(at=st.integers(min_value=0), bit=st.integers(0, 7))
@example(at=668, bit=2)  # in a table of zstd, which means the same with it
def test_one_wrong_bit_is_found_before_anything_is_written(at: int, bit: int) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        folder = Path(name)
        old = save(model(layers=1), folder / "old")
        new = save(stepped(model(layers=1)), folder / "new")
        write_patch(Checkpoint(old), Checkpoint(new), folder / "patch")
        data = bytearray((folder / "patch").read_bytes())
        data[at % len(data)] ^= 1 << bit
        (folder / "patch").write_bytes(data)
        if FrameCheck(folder / "patch").fault is None:
            applied(folder / "patch", old, folder / "out")
            assert holds(folder / "out", stepped(model(layers=1)))
            return
        nothing_is_copied(patched)
        with pytest.raises(DeltaSyncError):
            applied(folder / "patch", old, folder / "out")


@pytest.mark.parametrize("codec", ["gap", "block", "class"])
def test_a_coded_patch_makes_the_new_checkpoint(tmp_path: Path, codec: Coding) -> None:
    old = save(model(), tmp_path / "old")
    new = save(stepped(model()), tmp_path / "new")
    write_patch(Checkpoint(old), Checkpoint(new), tmp_path / "patch", codec=codec)
    assert FrameCheck(tmp_path / "patch").fault is None
    applied(tmp_path / "patch", old, tmp_path / "out")
    assert holds(tmp_path / "out", stepped(model()))
    with pytest.raises(DigestMismatch):
        applied(tmp_path / "patch", new, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_a_codec_makes_longer_is_written_as_it_is(tmp_path: Path) -> None:
    old = save({"w": torch.zeros(100)}, tmp_path / "old")
    new = save({"w": torch.eye(10).view(100)}, tmp_path / "new")
    sizes = []
    for codec in ("none", "gap"):
        write_patch(Checkpoint(old), Checkpoint(new), tmp_path / codec, codec=codec)
        sizes.append((tmp_path / codec).stat().st_size)
    assert sizes[1] == sizes[0]


@pytest.mark.parametrize("codec", ["gap", "block", "class"])
@given(at=st.integers(min_value=0), bit=st.integers(0, 7))
def test_one_wrong_bit_of_a_coded_patch_is_found_before_anything_is_written(
    codec: Coding, at: int, bit: int
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        folder = Path(name)
        patched.setattr(coding, "LONGEST", math.inf)
        old = save(model(layers=1), folder / "old")
        new = save(stepped(model(layers=1)), folder / "new")
        write_patch(Checkpoint(old), Checkpoint(new), folder / "patch", codec=codec)
        data = bytearray((folder / "patch").read_bytes())
        data[at % len(data)] ^= 1 << bit
        (folder / "patch").write_bytes(data)
        copies, copy = list[Path](), patch_file.copy_checkpoint

        def noted(path: Path, made: Path) -> None:
            copies.append(made)
            copy(path, made)

        patched.setattr(patch_file, "copy_checkpoint", noted)
        try:
            applied(folder / "patch", old, folder / "out")
        except DeltaSyncError:
            assert not copies
        else:
            assert holds(folder / "out", stepped(model(layers=1)))


def nothing_is_copied(patched: pytest.MonkeyPatch) -> None:
    def copied(path: Path, made: Path) -> None:
        raise AssertionError("something is written")

    patched.setattr(patch_file, "copy_checkpoint", copied)


def test_the_copy_of_a_read_only_folder_can_be_written(tmp_path: Path) -> None:
    folder = save_sharded(model(), tmp_path / "old")
    new = Checkpoint(save(stepped(model()), tmp_path / "new"))
    write_patch(Checkpoint(folder), new, tmp_path / "patch")
    for path in (folder / "assets", folder):
        path.chmod(0o555)
    apply_patch_file(PatchFile(tmp_path / "patch"), Checkpoint(folder), tmp_path / "made")
    for path in (tmp_path / "made", tmp_path / "made" / "assets"):
        assert path.stat().st_mode & 0o200
    for path in (folder, folder / "assets"):
        path.chmod(0o755)
