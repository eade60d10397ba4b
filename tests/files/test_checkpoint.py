"""Checkpoints: what is read is what is in the files, and what is no checkpoint is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltasync.errors import ConfigError, LayoutMismatch
from deltasync.files.checkpoint import INDEX, Checkpoint, check_same_tensors
from tests.files.saved import holds, model, save, save_sharded

UP = "model.layers.0.up.weight"
PICKLE = r"a pickle, as torch.save writes it; .*safetensors.torch.save_file\(torch.load\("


def test_a_folder_is_what_its_index_names_or_all_of_its_files(tmp_path: Path) -> None:
    tensors = model()
    folder = save_sharded(tensors, tmp_path / "folder")
    save({UP: torch.zeros(3)}, folder / "other.safetensors")
    assert holds(folder, tensors)
    (folder / "other.safetensors").unlink()
    (folder / INDEX).unlink()
    assert holds(folder, tensors)
    names = [one.name for one in Checkpoint(folder).files]
    assert names == ["part-0.safetensors", "part-1.safetensors"]


def test_a_tensor_is_taken_from_the_file_that_the_index_names(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        save({"x": torch.full((3,), float(number)), name: torch.ones(2)}, tmp_path / name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b", "a": "a", "b": "b"}}))
    assert Checkpoint(tmp_path).tensor("x").tolist() == [1.0, 1.0, 1.0]


# What is no checkpoint


def content(data: bytes) -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        (folder / "a.safetensors").write_bytes(data)
        return folder / "a.safetensors"

    return put


def index(data: object) -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        made = save_sharded(model(), folder / "folder")
        (made / INDEX).write_text(data if isinstance(data, str) else json.dumps(data))
        return made

    return put


def names(*files: str) -> Callable[[Path], Path]:
    """Files of one tensor each, by its name."""

    def put(folder: Path) -> Path:
        for number, name in enumerate(files):
            save({name: torch.ones(3)}, folder / f"{number}.safetensors")
        return folder

    return put


def unknown_dtype(folder: Path) -> Path:
    path = save({"a": torch.ones(4, dtype=torch.uint8)}, folder / "a.safetensors")
    path.write_bytes(path.read_bytes().replace(b'"U8", "shape": [4]', b'"F4", "shape": [8]'))
    return path


def pickled(name: str, *, is_old: bool = False) -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        path = folder / name
        torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=not is_old)
        return path

    return put


def damaged(protocol: int) -> Callable[[Path], Path]:
    """A header whose length begins as pickles do."""
    num_bytes = 0x80 + (protocol << 8)
    header = b'{"a":{"dtype":"F32","sha\x00e":[1],"data_offsets":[0,4]}}'.ljust(num_bytes)
    return content(num_bytes.to_bytes(8, "little") + header + bytes(4))


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (content(b""), "empty"),
        (content(b"abc"), "not a safetensors file"),
        (content(b"\xff" * 100), "not a safetensors file"),
        (lambda folder: folder / "none", "No such file"),
        (lambda folder: folder, "without safetensors"),
        (unknown_dtype, "'a' is F4"),
        (pickled("a.safetensors", is_old=True), PICKLE),
        (pickled("a"), PICKLE),
        (lambda folder: pickled("model.bin")(folder).parent, r"model.bin is a pickle; .*save_file"),
        (damaged(4), "or damaged: (?!.*pickle)"),
        (names("a", "a"), "two files hold 'a'"),
        *((index(text), "not an index") for text in ("no json", "{}")),
        (index({"weight_map": {UP: "../a.safetensors"}}), "no file of this folder"),
        (index({"weight_map": {UP: "gone.safetensors"}}), "No such file"),
        (index({"weight_map": {"gone": "part-0.safetensors"}}), "names 'gone'"),
    ],
)
def test_what_is_no_checkpoint_is_refused(
    put: Callable[[Path], Path], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        Checkpoint(put(tmp_path))


ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"a": ONES, "b": ONES, "c": ONES}, "only the second has 'c'"),
        ({"a": torch.ones(4), "b": ONES}, r"shape of 'a' differs: \[3\] in"),
        ({"a": ONES.bfloat16(), "b": ONES}, "float32 in the first, bfloat16"),
    ],
)
def test_differences_of_layout_are_named(
    other: dict[str, Tensor], said: str, tmp_path: Path
) -> None:
    one = Checkpoint(save({"a": ONES, "b": ONES}, tmp_path / "a.safetensors"))
    two = Checkpoint(save(other, tmp_path / "b.safetensors"))
    with pytest.raises(LayoutMismatch, match=said):
        check_same_tensors(one.specs, two.specs)
