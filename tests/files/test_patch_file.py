"""Patch files: what is applied is what was compared; what is damaged writes nothing."""

from __future__ import annotations

import math
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta import coding
from deltasync.delta.coding import Coding
from deltasync.errors import ConfigError, DeltaSyncError, DigestMismatch, LayoutMismatch
from deltasync.files import patch_file
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.classes import codec as class_codec
from deltasync.files.comparing import compare_checkpoints, measure_digests
from deltasync.files.frame_check import FrameCheck
from deltasync.files.frame_file import FrameFile
from deltasync.files.patch_file import PatchFile, apply_patch_file, write_patch
from deltasync.wire.frame import decode
from deltasync.wire.messages import Layout
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
    codec=st.sampled_from(["none", "zstd", "gap", "class"]),
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
        patched.setattr(class_codec, "LEAST", 1)
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
        measured = compare_checkpoints(Checkpoint(first), Checkpoint(second), encodings=False)
        assert summary.nnz == sum(one.changed for one in measured.values())
        assert summary.digest == digest == measure_digests(Checkpoint(second)).total
        assert summary.num_bytes == (folder / "patch").stat().st_size
        assert FrameCheck(folder / "patch").fault is None
        layout, _ = decode(next(iter(FrameFile(patch))).header)
        assert isinstance(layout, Layout)
        assert layout.stream_id == layout.digest == f"{summary.base:016x}"


def test_a_folder_keeps_its_sharding_and_its_other_files(tmp_path: Path) -> None:
    """A patch fits the same weights in other files too."""
    old = save_sharded(model(), tmp_path / "old")
    new = save(dict(reversed(stepped(model()).items())), tmp_path / "new.safetensors")
    (old / "part-0.safetensors").chmod(stat.S_IRUSR)  # as hubs leave them
    for path in (old / "assets", old):
        path.chmod(0o555)
    write_patch(Checkpoint(old), Checkpoint(new), tmp_path / "patch")
    applied(tmp_path / "patch", old, tmp_path / "made")
    for path in (tmp_path / "made", tmp_path / "made" / "assets"):
        assert path.stat().st_mode & stat.S_IWUSR
    for path in (old, old / "assets"):
        path.chmod(0o755)
    assert holds(tmp_path / "made", stepped(model()))
    other = save_sharded(dict(reversed(model().items())), tmp_path / "other", files=3)
    applied(tmp_path / "patch", other, tmp_path / "others")
    assert holds(tmp_path / "others", stepped(model()))
    for path in old.rglob("*"):
        other = tmp_path / "made" / path.relative_to(old)
        assert other.is_dir() == path.is_dir()
        if path.suffix != ".safetensors" and path.is_file():
            assert other.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("checkpoint", "out", "error", "why"),
    [
        ("new.safetensors", "out", DigestMismatch, "is not what the patch was made from"),
        ("other", "out", LayoutMismatch, None),
        ("old.safetensors", "gone/out", ConfigError, "No such file"),
        ("folder", "folder/out", ConfigError, "inside"),
        ("old.safetensors", "patch", ConfigError, "exists"),
    ],
)
def test_what_a_patch_does_not_fit_is_refused_and_nothing_is_written(
    checkpoint: str,
    out: str,
    error: type[DeltaSyncError],
    why: str | None,
    made: tuple[Path, Path, Path],
    tmp_path: Path,
) -> None:
    save({"a": torch.ones(3)}, tmp_path / "other")
    save_sharded(model(), tmp_path / "folder")
    there = set(tmp_path.rglob("*"))
    with pytest.raises(error, match=why):
        applied(made[2], tmp_path / checkpoint, tmp_path / out)
    assert set(tmp_path.rglob("*")) == there


@pytest.mark.parametrize("codec", ["zstd", "gap", "class"])
def test_w25_damage_anywhere_is_found_before_the_result_gets_its_name(
    codec: Coding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patch that ends anywhere, and one wrong bit, unless the patch means the same with it."""
    monkeypatch.setattr(coding, "LONGEST", math.inf)
    monkeypatch.setattr(class_codec, "LEAST", 1)
    old = save(model(layers=1), tmp_path / "old")
    new = save(stepped(model(layers=1)), tmp_path / "new")
    patch, out = tmp_path / "patch", tmp_path / "out"
    write_patch(Checkpoint(old), Checkpoint(new), patch, codec=codec)
    whole, there = patch.read_bytes(), set(tmp_path.iterdir())
    wrong = [whole[: len(whole) * n // 9] for n in range(9)] + [whole[:-1]]
    for at in range(0, 8 * len(whole), 101):
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << at % 8
        wrong.append(bytes(damaged))
    for data in wrong:
        patch.write_bytes(data)
        try:
            applied(patch, old, out)
        except DeltaSyncError:
            assert set(tmp_path.iterdir()) == there
        else:
            assert holds(out, stepped(model(layers=1)))
            out.unlink()


def test_what_a_codec_makes_longer_is_written_as_it_is(tmp_path: Path) -> None:
    old = save({"w": torch.zeros(100)}, tmp_path / "old")
    new = save({"w": torch.eye(10).view(100)}, tmp_path / "new")
    sizes = []
    for codec in ("none", "gap"):
        write_patch(Checkpoint(old), Checkpoint(new), tmp_path / codec, codec=codec)
        sizes.append((tmp_path / codec).stat().st_size)
    assert sizes[1] == sizes[0]
