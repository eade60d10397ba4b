"""Checkpoints: what is read is what is in the files, and what is no checkpoint is refused."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from torch import Tensor

from deltasync.errors import ConfigError, LayoutMismatch
from deltasync.files.checkpoint import INDEX, Checkpoint, check_same_tensors
from deltasync.testing.bits import specs_of
from tests.files.saved import holds, model, save, save_sharded
from tests.worlds.strategies import models, same_bits

UP = "model.layers.0.up.weight"


@given(models())
def test_tensors_of_every_dtype_are_read_bit_for_bit(tensors: dict[str, Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        one = save(tensors, Path(folder) / "one.safetensors")
        many = save_sharded(tensors, Path(folder) / "many")
        assert holds(one, tensors)
        assert holds(many, tensors)
        filled = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        assert Checkpoint(one).layout[: len(filled)] == specs_of(filled)
        assert Checkpoint(one).layout == Checkpoint(one).layout  # looked at twice
        assert Checkpoint(one).num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_files_of_safetensors_itself_are_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = model()
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    found = Checkpoint(tmp_path / "a.safetensors")
    assert found.specs.keys() == tensors.keys()
    assert all(same_bits(found.tensor(name), tensors[name]) for name in tensors)


def test_a_folder_without_index_is_all_of_its_files(tmp_path: Path) -> None:
    tensors = model()
    folder = save_sharded(tensors, tmp_path / "folder")
    (folder / INDEX).unlink()
    found = Checkpoint(folder)
    assert found.specs.keys() == tensors.keys()
    assert [file.name for file in found.files] == ["part-0.safetensors", "part-1.safetensors"]


def test_only_what_an_index_names_is_taken(tmp_path: Path) -> None:
    tensors = model()
    folder = save_sharded(tensors, tmp_path / "folder")
    save({UP: torch.zeros(3)}, folder / "other.safetensors")
    assert holds(folder, tensors)


def test_a_tensor_is_taken_from_the_file_that_the_index_names(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        save({"x": torch.full((3,), float(number)), name: torch.ones(2)}, tmp_path / name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b", "a": "a", "b": "b"}}))
    assert Checkpoint(tmp_path).tensor("x").tolist() == [1.0, 1.0, 1.0]


def test_what_is_written_stays_in_memory_unless_it_is_writable(tmp_path: Path) -> None:
    path = save(model(), tmp_path / "a.safetensors")
    before = path.read_bytes()
    Checkpoint(path).tensor(UP).zero_()
    assert path.read_bytes() == before
    written = Checkpoint(path, writable=True)
    written.tensor(UP).zero_()
    written.release()
    written.flush()
    assert path.read_bytes() != before
    assert not Checkpoint(path).tensor(UP).any()


def test_released_tensors_are_read_again(tmp_path: Path) -> None:
    tensors = model()
    found = Checkpoint(save(tensors, tmp_path / "a.safetensors"))
    kept = found.tensor(UP)
    found.release()
    assert same_bits(kept, tensors[UP])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"abc", "not a safetensors file"),
        (bytes(1000), "not a safetensors file"),
        (b"\xff" * 100, "not a safetensors file"),
        (None, "No such file"),
    ],
)
def test_what_is_no_checkpoint_is_refused(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        Checkpoint(path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder.safetensors").mkdir()
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigError, match="not a regular file"):
            Checkpoint(path)


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    path = save({"a": torch.ones(3), "b": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"a\.safetensors"):
            Checkpoint(path)


def test_a_folder_without_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("no json", "not an index"),
        ("[]", "not an index"),
        ("{}", "not an index"),
        ('{"weight_map": 3}', "not an index"),
        ("[" * 100_000, "not an index"),
        (json.dumps({"weight_map": {UP: "../a.safetensors"}}), "no file of this folder"),
        (json.dumps({"weight_map": {UP: "gone.safetensors"}}), "No such file"),
        (json.dumps({"weight_map": {"gone": "part-0.safetensors"}}), "names 'gone'"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(index: str, said: str, tmp_path: Path) -> None:
    folder = save_sharded(model(), tmp_path / "folder")
    (folder / INDEX).write_text(index)
    with pytest.raises(ConfigError, match=said):
        Checkpoint(folder)


def test_a_name_in_two_files_needs_an_index(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    save({"a": torch.ones(3)}, tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match="two files hold 'a'"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["", "x" * 5000])
def test_names_that_no_layout_takes_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="characters"):
        Checkpoint(save({name: torch.ones(3)}, tmp_path / "a.safetensors"))


def test_a_dtype_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    path = save({"a": torch.ones(4, dtype=torch.uint8)}, tmp_path / "a.safetensors")
    path.write_bytes(path.read_bytes().replace(b'"U8", "shape": [4]', b'"F4", "shape": [8]'))
    with pytest.raises(ConfigError, match="'a' is F4"):
        Checkpoint(path)


def test_without_safetensors_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigError, match="pip install safetensors"):
        Checkpoint(save({"a": torch.ones(3)}, tmp_path / "a.safetensors"))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"a": torch.ones(3)}, "only the first has 'b'"),
        ({"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3)}, "only the second has 'c'"),
        (
            {"a": torch.ones(4), "b": torch.ones(3)},
            r"shape of 'a' differs: \[3\] in",
        ),
        (
            {"a": torch.ones(3).bfloat16(), "b": torch.ones(3)},
            "float32 in the first, bfloat16",
        ),
    ],
)
def test_differences_of_layout_are_named(
    other: dict[str, Tensor], said: str, tmp_path: Path
) -> None:
    one = Checkpoint(save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "a.safetensors"))
    two = Checkpoint(save(other, tmp_path / "b.safetensors"))
    with pytest.raises(LayoutMismatch, match=said):
        check_same_tensors(one.specs, two.specs)
