"""Checkpoints for tests, written by hand: any dtype, and tensors that begin at odd bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import _TYPES
from torch import Tensor

from deltasync.delta.bits import as_bits
from deltasync.files.checkpoint import INDEX, Checkpoint
from tests.worlds.strategies import same_bits

# As safetensors itself has them; it cannot write the last one yet.
CODES = {dtype: code for code, dtype in _TYPES.items()} | {torch.float8_e8m0fnu: "F8_E8M0"}


def save(tensors: Mapping[str, Tensor], path: Path) -> Path:
    """One file, its tensors in the order given."""
    header, blocks, at = {}, [], 0
    for name, tensor in tensors.items():
        data = as_bits(tensor).contiguous().view(-1).numpy().tobytes()
        where = [at, at + len(data)]
        code = CODES[tensor.dtype]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": where}
        blocks.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blocks))
    return path


def save_sharded(tensors: Mapping[str, Tensor], folder: Path, *, files: int = 2) -> Path:
    """A folder with an index, and other files beside."""
    folder.mkdir()
    weight_map = {name: f"part-{n % files}.safetensors" for n, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save(part, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"kept": true}')
    (folder / "assets").mkdir()
    (folder / "assets" / "merges.txt").write_text("a b\n")
    return folder


def holds(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a checkpoint is these tensors, bit for bit."""
    found = Checkpoint(path)
    return found.specs.keys() == tensors.keys() and all(
        same_bits(found.tensor(name), tensor) for name, tensor in tensors.items()
    )


def model(*, seed: int = 0, layers: int = 2) -> dict[str, Tensor]:
    """A few bf16 tensors, a scalar, an empty one, and a bool before them that shifts all others."""
    rng = np.random.default_rng(seed)
    made: dict[str, Tensor] = {"mask": torch.tensor([True, False, True])}
    for layer in range(layers):
        for name in ("up", "down"):
            values = torch.from_numpy(rng.standard_normal((40, 30), dtype=np.float32))
            made[f"model.layers.{layer}.{name}.weight"] = values.bfloat16()
    return made | {"scale": torch.tensor(2.0), "none": torch.empty(0, 4)}


def stepped(tensors: Mapping[str, Tensor], *, share: float = 0.05) -> dict[str, Tensor]:
    """The next version: about `share` of the bf16 elements one ULP further."""
    rng, made = np.random.default_rng(1), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            mask = torch.from_numpy(rng.random(tuple(tensor.shape)) < share)
            made[name] = (tensor.view(torch.int16) ^ mask.short()).view(torch.bfloat16)
    return made
