"""Tied tensors in every checkpoint that is written: once, and restored by safetensors itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn

from deltasync import ModuleSource, StoreSender, export_weights
from deltasync.errors import ConfigError
from deltasync.files.checkpoint import Checkpoint
from deltasync.store.checkpoints import fetch_checkpoint
from tests.worlds.links import fleet, until


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def test_what_exporters_write_is_loaded_with_ties(tmp_path: Path) -> None:
    trainer = Tied()
    StoreSender(ModuleSource(trainer), tmp_path / "store").publish()
    fetch_checkpoint(tmp_path / "store", tmp_path / "fetched")
    with fleet(trainer) as made:
        serving = made.add(Tied())
        made.wait(1)
        made.sender.send_weights(timeout_s=10)
        until(lambda: serving.receiver.version == 1)
        export_weights(serving.receiver, tmp_path / "exported")
    for name in ("fetched", "exported"):
        path, restored = tmp_path / name / "model.safetensors", Tied()
        load_model(restored, path)
        assert torch.equal(restored.head.weight, trainer.head.weight)
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    fetched, exported = (tmp_path / n / "model.safetensors" for n in ("fetched", "exported"))
    assert fetched.read_bytes() == exported.read_bytes()


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_damaged_file_is_not_called_a_pickle(tmp_path: Path, protocol: int) -> None:
    """Its header's length begins as pickles do."""
    num_bytes = 0x80 + (protocol << 8)
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(num_bytes)
    path = tmp_path / "model.safetensors"
    data = num_bytes.to_bytes(8, "little") + header + bytes(4)
    path.write_bytes(data)
    assert list(Checkpoint(path).specs) == ["a"]
    path.write_bytes(data.replace(b'"shape"', b'"sha\x00e"'))
    with pytest.raises(ConfigError, match="or damaged") as refused:
        Checkpoint(path)
    assert "pickle" not in str(refused.value)
    torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError, match="a pickle"):
        Checkpoint(path)
