"""`deltasync diff`, `apply` and `verify` from the outside."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from deltasync.files.checkpoint import Checkpoint
from deltasync.files.patch_file import write_patch
from deltasync.observe.units import size
from tests.cli.command import call, output, refused
from tests.files.saved import holds, model, save, save_sharded, stepped

UP = "model.layers.0.up.weight"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return save(model(), tmp_path / "old.safetensors")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return save(stepped(model()), tmp_path / "new.safetensors")


@pytest.fixture
def patch(old: Path, new: Path, tmp_path: Path) -> Path:
    write_patch(Checkpoint(old), Checkpoint(new), tmp_path / "step.patch")
    return tmp_path / "step.patch"


def test_diff_then_apply_then_verify(tmp_path: Path) -> None:
    old = save_sharded(model(), tmp_path / "old")
    new = save_sharded(stepped(model()), tmp_path / "new", files=3)
    nnz = sum(
        int((a != b).sum())
        for a, b in zip(model().values(), stepped(model()).values(), strict=True)
    )
    text = output("diff", old, new, "--out", tmp_path / "patch")
    total = sum(tensor.numel() for tensor in model().values())
    assert text.startswith(f"{nnz:,} of {total:,} elements changed")
    assert f"patch: {size((tmp_path / 'patch').stat().st_size)}, apply" in text
    rows = re.findall(r"^  ([\w.]+) +([\d,]+) +([\d,]+) ", text, re.MULTILINE)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert {row[0] for row in rows} == {"model.layers.0", "model.layers.1", "mask", "scale", "none"}
    counts = [[int(number.replace(",", "")) for number in row[1:]] for row in rows]
    assert [sum(column) for column in zip(*counts, strict=True)] == [total, nnz]
    assert "made: " in output("apply", tmp_path / "patch", old, "--out", tmp_path / "made")
    assert holds(tmp_path / "made", stepped(model()))
    assert output("verify", new, tmp_path / "made").startswith("equal: ")


def test_verify_names_the_tensors_that_differ(old: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in model().items()}
    tensors[UP][3, 17] = -0.0
    tensors["scale"].view(torch.int32).fill_(0x7FC00001)
    other = save(tensors, tmp_path / "other")
    text = output("verify", old, other, code=1)
    assert re.match(r"different: 2 of [\d,]+ elements, in 2 tensors\n", text)
    assert re.search(rf"{UP} +1 *$", text, re.MULTILINE)
    assert re.search(r"scale +1 *$", text, re.MULTILINE)
    assert "more" not in text


def test_verify_says_what_of_a_patch_file_is_damaged_and_where(patch: Path) -> None:
    assert re.fullmatch(r"patch file, .* kB, 4 sound frames\n", output("verify", patch))
    data = patch.read_bytes()
    patch.write_bytes(data[:-1])
    first, second = output("verify", patch, code=1).splitlines()
    assert first.endswith("3 sound frames")
    where = re.match(r"damaged frame at byte ([\d,]+), rule W1, W6, .*: TruncatedFrame: ", second)
    assert where is not None
    assert 0 < int(where[1].replace(",", "")) < len(data)


def test_patches_of_both_codecs_are_read_by_a_process_that_wrote_none(tmp_path: Path) -> None:
    """Tiles that go whole lie between others."""
    tensor = torch.randn(5 * 4096).bfloat16()
    other = tensor.clone()
    other[::3] *= 2
    other[4096 : 2 * 4096] *= 2
    old, new = (save({"w": one}, tmp_path / n) for n, one in (("old", tensor), ("new", other)))
    for codec in ("gap", "class"):
        patch = tmp_path / codec
        write_patch(Checkpoint(old), Checkpoint(new), patch, codec=codec)
        assert codec.encode() in patch.read_bytes()
        assert "sound frames" in output("verify", patch)
        output("apply", patch, old, "--out", tmp_path / f"{codec}-made")
        assert (tmp_path / f"{codec}-made").read_bytes() == new.read_bytes()


def test_bad_input_gets_one_line_and_a_code(
    old: Path, new: Path, patch: Path, tmp_path: Path
) -> None:
    out, other = tmp_path / "out", save({"a": torch.ones(3)}, tmp_path / "other")
    (tmp_path / "cut").write_bytes(patch.read_bytes()[:-1])
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    os.mkfifo(tmp_path / "pipe")
    assert "No such file" in refused("diff", old, tmp_path / "gone")
    assert "exists" in refused("diff", old, new, "--out", new)
    assert "only the first has" in refused("verify", old, other)
    assert "deltasync verify FILE" in refused("apply", tmp_path / "cut", old, "--out", out)
    assert "made from" in refused("apply", patch, new, "--out", out, code=1)
    assert "give a second one" in refused("verify", old)
    assert "--config" in refused("verify", old, old, "--config", "a=b")
    assert "not a regular file" in refused("verify", tmp_path / "pipe")
    assert "safetensors.torch.save_file(torch.load(" in refused("diff", old, tmp_path / "w.pt")
    assert not out.exists()


ODD = {  # and how they are shown
    "[red]a[/red]": "[red]a[/red]",
    "[/b]": "[/b]",
    ":smile:": ":smile:",
    "\x1b[2J\x1b]0;c\x07": r"\x1b[2J\x1b]0;c\x07",
    "d\r\nequal: all": r"d\r\nequal: all",
    "e\u202e\x9b": r"e\u202e\x9b",
}


def test_odd_names_are_shown_as_they_are_and_not_obeyed(tmp_path: Path) -> None:
    old = save(dict.fromkeys(ODD, torch.zeros(1)), tmp_path / "\x1b[31m")
    new = save(dict.fromkeys(ODD, torch.ones(1)), tmp_path / "[b]new")
    patch, made = tmp_path / "patch", tmp_path / "[b]\x1b[2J"
    write_patch(Checkpoint(old), Checkpoint(new), patch)
    for text in (call("diff", old, new).stdout, call("verify", old, new).stdout):
        assert is_harmless(text)
        assert all(name in text for name in ODD.values())
    for shown_as, text in (
        (r"\x1b[31m", refused("diff", old, new, "--out", old)),
        (r"[b]\x1b[2J", call("apply", patch, old, "--out", made).stdout),
        (r"[b]\x1b[2J", refused("diff", old, new, "--out", made)),
    ):
        assert is_harmless(text)
        assert shown_as in text


def is_harmless(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text.replace("\r\n", "\n"))
