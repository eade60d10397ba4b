"""The records of a store, read and altered with `json` and `hashlib` alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import SecretBytes
from torch import nn

from deltasync.store.catalogue import Run
from deltasync.store.objects import StoreOptions
from tests.store.test_sender import Model, sender_of, weights_of
from tests.worlds.stores import Place

KEY = b"key"  # that records are signed with

Json = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """The folder of a run, and the trainer's weights at each version."""

    run: Path
    states: dict[int, Any]

    def manifest(self, version: int) -> Path:
        return self.run / f"manifests/{version:016}.json"

    def anchor(self, version: int) -> Path:
        return self.run / f"anchors/{version:016}.json"

    def read(self, version: int) -> Json:
        return read(self.manifest(version))

    def ways(self, version: int) -> list[Json]:
        """All ways to a version, a later anchor included."""
        later = self.anchor(version)
        return [self.read(version)["way"], *([read(later)["way"]] if later.exists() else [])]

    def versions(self) -> list[int]:
        return sorted(int(path.stem) for path in (self.run / "manifests").iterdir())

    def layout(self, version: int) -> list[Any]:
        data = (self.run / f"layouts/{self.read(version)['layout_hash']}.json").read_bytes()
        assert sha256(data) == self.read(version)["layout_hash"]
        found: list[Any] = json.loads(data)
        return found


def read(path: Path) -> Json:
    found: Json = json.loads(path.read_bytes())
    return found


def bytes_of(record: Json) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def signed_run(folder: Path) -> Stored:
    """Ten versions, signed, with anchors at 1, 4, 7 and 10; from 7 on of another layout."""
    place, states = Place(str(folder), StoreOptions(mac_key=SecretBytes(KEY)), folder), {}
    for model, versions in ((Model(), range(1, 7)), (Other(), range(7, 11))):
        sender = sender_of(model, place, anchor_every=3, anchor_file_bytes=600_000)
        for version in versions:
            assert sender.publish().version == version
            states[version] = weights_of(model)
            model.step(version)
    return Stored(folder / "run", states)


class Other(Model):
    """With one more parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.randn(7))


def opened(stored: Stored, key: bytes | None = None) -> Run:
    options = StoreOptions(mac_key=None if key is None else SecretBytes(key))
    return Run.open(stored.run, None, options)


def rewrite(stored: Stored, change: Callable[[Json], Json]) -> None:
    """Alter records, so that children and later anchors name their manifests again."""
    parent = None
    path = stored.run / "run.json"
    path.write_bytes(bytes_of(change(read(path))))
    for version in stored.versions():
        record = change(stored.read(version))
        data = bytes_of(record | {"parent": parent})
        stored.manifest(version).write_bytes(data)
        parent = {"version": version, "sha256": sha256(data)}
        if (path := stored.anchor(version)).exists():
            path.write_bytes(bytes_of(change(read(path)) | {"manifest": sha256(data)}))


def facts(stored: Stored, file: Json) -> Json:
    data = (stored.run / file["key"]).read_bytes()
    return file | {"bytes": len(data), "sha256": sha256(data)}


def is_anchored(stored: Stored, version: int) -> bool:
    return any(way["kind"] == "anchor" for way in stored.ways(version))
