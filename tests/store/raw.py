"""The records of a store, read and altered with `json` and `hashlib` alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deltasync.store.catalogue import Run
from tests.worlds.published import Publisher, State, keyed, odd_model
from tests.worlds.stores import Place, local_place

KEY = b"key"  # that records are signed with

Json = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """The folder of a run, and the trainer's weights at each version."""

    run: Path
    states: dict[int, State]

    @property
    def place(self) -> Place:
        return local_place(self.run)

    def opened(self, key: bytes | None = None) -> Run:
        return Run.open(self.run, keyed(self.place, key).options)

    def manifest(self, version: int) -> Path:
        return self.run / f"manifests/{version:016}.json"

    def anchor(self, version: int) -> Path:
        return self.run / f"anchors/{version:016}.json"

    def objects(self, version: int, kind: str) -> list[Path]:
        """The files of a way."""
        there = self.run.glob(f"objects/{version:016}-{kind}-*")
        return [path for one in there for path in (one, *one.glob("*")) if path.is_file()]

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

    def rewrite(self, change: Callable[[Json], Json]) -> None:
        """Alter records, so that they name objects, manifests and parents as these are then."""
        parent = None
        for version in self.versions():
            data = bytes_of(self._named(change(self.read(version))) | {"parent": parent})
            self.manifest(version).write_bytes(data)
            parent = sha256(data)
            if (path := self.anchor(version)).exists():
                record = self._named(change(read(path)))
                path.write_bytes(bytes_of(record | {"manifest": parent}))

    def alter(self, number: int, **more: object) -> None:
        """Alter the manifest of one version."""
        self.rewrite(lambda one: one | more if is_version(one, number) else one)

    def _named(self, record: Json) -> Json:
        for file in record["way"]["files"]:
            if file["bytes"] < 1 << 50:  # others are not meant to be true
                data = (self.run / file["key"]).read_bytes()
                file |= {"bytes": len(data), "sha256": sha256(data)}
        return record


def is_version(record: Json, number: int) -> bool:
    return bool(record["kind"] == "version" and record["version"] == number)


def read(path: Path) -> Json:
    found: Json = json.loads(path.read_bytes())
    return found


def bytes_of(record: Any) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def signed_run(folder: Path) -> Stored:
    """Ten versions, signed, with anchors at 1, 4, 7 and 10; from 7 on of another layout."""
    trainer = Publisher(
        keyed(local_place(folder), KEY),
        anchor_every=3,
        model=odd_model(),
        publishing={"anchor_file_bytes": 600_000},
    )
    trainer.publish(6)
    trainer.model.register_parameter("more", nn.Parameter(torch.randn(7)))
    trainer.start()
    trainer.publish(4)
    return Stored(folder, trainer.states)
