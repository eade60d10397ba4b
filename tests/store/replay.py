"""What a store says that a version is, put together by the tools for files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from deltasync.files.checkpoint import Checkpoint
from deltasync.files.patch_file import PatchFile, apply_patch_file
from deltasync.store.catalogue import Published, Run
from deltasync.store.manifest import StoredFile, Way


def fetched(run: Run, file: StoredFile, folder: Path) -> Path:
    """The object as a file; its length and its digest are as the manifest says."""
    path = folder / Path(file.key).name
    step = 3 << 20
    data = b"".join(
        bytes(run.objects.get_range(file.key, start, min(start + step, file.bytes)))
        for start in range(0, file.bytes, step)
    )
    assert hashlib.sha256(data).hexdigest() == file.sha256
    path.write_bytes(data)
    return path


def checkpoint_of(run: Run, version: int, folder: Path) -> Checkpoint:
    """A version from the nearest anchor and the deltas that follow; digests are checked."""
    folder.mkdir(parents=True, exist_ok=True)
    chain: list[Published] = []
    at = run.require(version)
    while (anchor := _way(run, at, "anchor")) is None:
        chain.append(at)
        assert at.manifest.parent is not None, "no anchor"
        before = run.require(at.manifest.parent.version)
        assert before.sha256 == at.manifest.parent.sha256
        at = before
    held = folder / f"v{at.version}"
    held.mkdir()
    for file in anchor.files:
        fetched(run, file, held)
    for published in reversed(chain):
        delta = _way(run, published, "delta")
        assert delta is not None
        patch = PatchFile(fetched(run, delta.files[0], folder))
        made = folder / f"v{published.version}"
        digest = apply_patch_file(patch, Checkpoint(held), made)
        assert digest == int(published.manifest.digest, 16)
        held = made
    return Checkpoint(held)


def assert_holds(run: Run, version: int, weights: dict[str, Tensor], folder: Path) -> None:
    """The version of the store is `weights`, bit for bit."""
    found = checkpoint_of(run, version, folder)
    assert set(found.specs) == set(weights)
    for name, tensor in weights.items():
        stored = found.tensor(name)
        assert stored.dtype == tensor.dtype
        assert stored.shape == tensor.shape
        assert torch.equal(_bytes(stored), _bytes(tensor)), name


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8)


def _way(run: Run, published: Published, kind: str) -> Way | None:
    return next((way for way in run.ways(published) if way.kind == kind), None)
