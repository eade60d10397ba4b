"""What is left of a store after chaos: every version that it has, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load
from torch import Tensor

from benchmarks.chaos.roles import Setting
from benchmarks.chaos.weights import Model, Truth, fingerprint, fingerprint_of
from deltasync import ModuleTarget
from deltasync.store import keys
from deltasync.store.catalogue import Run
from deltasync.store.receiver import StoreReceiver


def faults_of_versions(setting: Setting) -> Iterator[str]:
    """What is wrong with the versions of a store: each is fetched, by two models, some by a third.

    One goes from version to version; one is new; one skips two of three versions, and so merges
    deltas. Versions before the oldest anchor are there for readers that hold the oldest version.
    """
    run = Run.open(setting.url, setting.store)
    versions, truth = run.versions(), Truth(setting.seed)
    if versions != list(range(versions[0], setting.versions + 1)):
        yield f"the chain has gaps, or another end: {versions}"
    walking, leaping, is_anchored = Model(), Model(), False
    truth.go(versions[0])
    for model in (walking, leaping):
        truth.write(model)
    for version in versions:
        truth.go(version)
        ways = {way.kind for way in run.ways(run.require(version))}
        is_anchored |= "anchor" in ways
        models = [walking] + [leaping] * (version % 3 == 0) + [Model() for _ in range(is_anchored)]
        for model in models:
            if _fetched(model, version, setting) != truth.fingerprint():
                yield f"v{version} is not what was published"
        yield from _faults_of_anchors(run, version, truth)
    if not is_anchored:
        yield "there is no anchor"


def faults_of_objects(setting: Setting) -> Iterator[str]:
    """Objects that nothing names, and named ones that are not there."""
    run = Run.open(setting.url, setting.store)
    named = set[str]()
    for version in run.versions():
        published = run.require(version)
        named |= {keys.manifest_key(version), keys.layout_key(published.manifest.layout_hash)}
        named |= {file.key for way in run.ways(published) for file in way.files}
    found = {one.key for one in run.objects.listed("") if not one.key.startswith(keys.ANCHORS)}
    yield from (f"{key} is left" for key in sorted(found - named))
    yield from (f"{key} is missing" for key in sorted(named - found))
    if run.objects.folder is not None:
        files = {str(path.relative_to(run.objects.folder)) for path in _files(run.objects.folder)}
        listed = {one.key for one in run.objects.listed("")}
        yield from (f"{name} is no object" for name in sorted(files - listed))


def faults_of_folders(setting: Setting) -> Iterator[str]:
    """Temporary files that are left."""
    for name in ("spool", "tmp"):
        for path in sorted((setting.folder / name).iterdir()):
            yield f"{name}/{path.name} is left"


def _fetched(model: Model, version: int, setting: Setting) -> str:
    """The fingerprint of a model after a version was fetched into it."""
    with StoreReceiver(
        ModuleTarget(model), setting.url, store=setting.store, spool=setting.spool
    ) as receiver:
        receiver.fetch(version, timeout_s=60)
    return fingerprint(model)


def _faults_of_anchors(run: Run, version: int, truth: Truth) -> Iterator[str]:
    """Anchors, read by another tool."""
    for way in run.ways(run.require(version)):
        tensors = dict[str, Tensor]()
        for file in way.files if way.kind == "anchor" else ():
            if file.key.endswith(".safetensors"):
                tensors |= load(bytes(run.objects.get_range(file.key, 0, file.bytes)))
        if tensors and fingerprint_of(tensors) != truth.fingerprint():
            yield f"the anchor of v{version} is not what was published"


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
