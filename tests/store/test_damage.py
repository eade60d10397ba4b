"""Stores that were damaged, contradict themselves, vanish or lie: never a wrong model."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from deltasync.errors import (
    DeltaSyncError,
    DigestMismatch,
    MacMismatch,
    ManifestInvalid,
    ObjectDamaged,
    StoreError,
)
from deltasync.store.checkpoints import fetch_checkpoint
from deltasync.store.retention import gc
from deltasync.store.routes import find_route
from deltasync.store.verifying import verify_run
from tests.store.raw import KEY, Stored, bytes_of, is_version, read, sha256
from tests.worlds.published import (
    Follower,
    Publisher,
    keyed,
    state_of,
)
from tests.worlds.stores import local_place


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: list[Callable[[Path], object]] = [flip, Path.unlink]
DAMAGED: dict[str, tuple[list[str], int | None, dict[int, bool]]] = {
    # what is damaged, what the reader holds, and which versions it can fetch then
    "a delta": (["objects/*3-delta-*"], 1, {6: True, 2: True, 3: False}),
    "an anchor": (["objects/*4-anchor-*/*"], None, {6: True}),
    "all ways": (["objects/*1-anchor-*/*", "objects/*4-anchor-*/*", "objects/*5-delta-*"], 2,
                 {5: False, 3: True}),
    "a manifest that is passed": (["manifests/*2.json"], 1, {2: False, 6: True}),
    "a manifest that is needed": (["manifests/*5.json"], 3, {5: False, 6: False, 4: True}),
    "the newest manifest": (["manifests/*6.json"], None, {6: False, 5: True}),
    "the layout": (["layouts/*"], 5, {6: False}),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("paths", "held", "wanted"), DAMAGED.values(), ids=DAMAGED)
def test_s08_what_is_damaged_is_passed_by_where_there_is_another_way(
    stored: Stored,
    damage: Callable[[Path], object],
    paths: list[str],
    held: int | None,
    wanted: dict[int, bool],
) -> None:
    for pattern in paths:
        (path,) = stored.run.glob(pattern)
        damage(path)
    proved = verify_run(stored.run).proved
    for to, is_there in wanted.items():
        assert len(paths) > 1 or (to in proved) == is_there
        holding = None if held is None else stored.states[held]
        with Follower(stored.place, holding=holding) as reader:
            before = state_of(reader.model)
            if is_there:
                assert reader.receiver.fetch(to, timeout_s=0.2) == to
            else:
                with pytest.raises(
                    StoreError, match=r"objects/|manifests/|layouts/|no v\d|not a child|leads to"
                ):
                    reader.receiver.fetch(to, timeout_s=0.2)
            assert reader.holds(stored.states[to] if is_there else before)


# Records that say what is not so


@dataclass
class Lie:
    """Records that are altered so that they still belong together, and who notices.

    Attributes:
        tell: Alters a run.
        to: The version that a reader then asks for, and a checkpoint is made of.
        error, text: What both get.
        faults: What `verify_run` finds.
        held: What the reader holds, and goes on holding.
    """

    tell: Callable[[Stored], object]
    to: int
    error: type[DeltaSyncError]
    text: str
    faults: list[tuple[int, str]]
    held: int | None = 1


def swaps(stored: Stored) -> None:
    shutil.copy(stored.manifest(3), stored.manifest(2))


def replaces_a_parent(stored: Stored) -> None:
    stored.manifest(2).write_bytes(bytes_of(stored.read(2) | {"writer": "another"}))


def lies(version: int, **more: object) -> Callable[[Stored], object]:
    return lambda stored: stored.alter(version, **more)


def has_the_delta_of_another(stored: Stored) -> None:
    (here,), (there,) = stored.objects(2, "delta"), stored.objects(3, "delta")
    shutil.copy(there, here)
    stored.rewrite(lambda record: record)


def is_huge(stored: Stored) -> None:
    way = stored.read(2)["way"]
    stored.alter(2, way=way | {"files": [way["files"][0] | {"bytes": 1 << 52}]})


def lacks_a_parameter(stored: Stored) -> None:
    (path,) = stored.objects(1, "anchor")
    kept = load_file(path)
    del kept["scale"]
    save_file(kept, path)
    stored.rewrite(lambda record: record)


def has_a_layout_of_one_name_twice(stored: Stored) -> None:
    data = bytes_of([[["a"], [1], 16], [["a"], [2], 16]])
    (stored.run / f"layouts/{sha256(data)}.json").write_bytes(data)
    stored.alter(6, layout_hash=sha256(data))


def is_of_another_run(stored: Stored) -> None:
    """By its records: its frames are not."""
    stored.anchor(4).unlink()
    stored.rewrite(lambda record: record | {"run": "other"})


DIGEST, ALL = {"digest": "0123456789abcdef"}, [(version, "delta") for version in range(2, 7)]
LIES = {
    "s01 swapped": Lie(swaps, 2, ManifestInvalid, "moved", [(2, "manifest")]),
    "s04 run": Lie(
        *(lies(3, run="other"), 3, ManifestInvalid, "altered", [(3, "manifest"), (4, "manifest")])
    ),
    "s04 parent": Lie(replaces_a_parent, 3, ManifestInvalid, "altered", [(3, "manifest")]),
    "digest of a delta": Lie(lies(2, **DIGEST), 2, DeltaSyncError, "manifests have", ALL[:2]),
    "digest of an anchor": Lie(
        *(lies(1, **DIGEST), 1, DigestMismatch, "digest", [(1, "anchor"), (2, "delta")]), held=None
    ),
    "s05 another delta": Lie(
        has_the_delta_of_another, 2, DeltaSyncError, "where the manifests have", ALL[:1]
    ),
    "s08 size": Lie(is_huge, 2, ObjectDamaged, "bytes are expected", ALL[:1]),
    "s06 parameter": Lie(
        *(lacks_a_parameter, 1, DeltaSyncError, "scale", [(1, "anchor")]), held=None
    ),
    "layout": Lie(
        *(has_a_layout_of_one_name_twice, 6, ManifestInvalid, "stands twice", [(6, "manifest")])
    ),
    "s05 run": Lie(is_of_another_run, 6, DeltaSyncError, "'run'", ALL, held=None),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_s01_s04_s05_s06_s08_a_lie_is_found_before_anything_is_written(
    stored: Stored, tmp_path: Path, lie: Lie
) -> None:
    lie.tell(stored)
    holding = None if lie.held is None else stored.states[lie.held]
    with Follower(stored.place, holding=holding) as reader:
        before = state_of(reader.model)
        with pytest.raises(lie.error, match=lie.text):
            reader.receiver.fetch(lie.to, timeout_s=5)
        assert reader.holds(before)
    found = verify_run(stored.place.url)
    assert [(fault.version, fault.what) for fault in found.faults] == lie.faults
    if lie.error is not ManifestInvalid and "s05 another" not in str(lie):
        with pytest.raises(DeltaSyncError):
            fetch_checkpoint(stored.place.url, tmp_path / "out", to=lie.to)
        assert not (tmp_path / "out").exists()


# Keys and anchors that came later


def test_s09_keys_must_agree(tmp_path: Path) -> None:
    place = local_place(tmp_path / "store")
    trainer = Publisher(keyed(place, KEY), anchor_every=1)
    trainer.publish(2)
    for key, error in ((KEY, None), (None, None), (b"other", "not of this key")):
        ends = pytest.raises(MacMismatch, match=error) if error else contextlib.nullcontext()
        with Follower(keyed(place, key)) as reader, ends:
            assert reader.receiver.fetch(timeout_s=1) == 2
    Stored(tmp_path / "store", {}).alter(2, nnz=1)
    unsigned = Publisher(place)
    unsigned.publish(2)
    for to, error in ((2, "not of this key"), (None, "is not signed")):
        with Follower(trainer.place) as reader, pytest.raises(MacMismatch, match=error):
            reader.receiver.fetch(to, timeout_s=0)


def test_s08_s09_an_anchor_of_another_manifest_or_key_does_not_count(signed_copy: Stored) -> None:
    path, run = signed_copy.anchor(4), signed_copy.opened()
    assert len(run.ways(run.require(4))) == 2
    path.write_bytes(bytes_of(read(path) | {"manifest": "0" * 64}))
    assert len(run.ways(run.require(4))) == 1
    keyed_run = signed_copy.opened(KEY)
    with pytest.raises(MacMismatch, match="anchors/"):
        keyed_run.ways(keyed_run.require(4))


def test_s05_a_delta_from_another_layout_is_not_taken(signed_copy: Stored) -> None:
    """A manifest that says so is believed by nobody."""
    stored, delta, anchor = signed_copy, signed_copy.read(6)["way"], signed_copy.read(7)["way"]
    for file in delta["files"]:
        old, file["key"] = file["key"], file["key"].replace(f"{6:016}", f"{7:016}")
        shutil.copy(stored.run / old, stored.run / file["key"])
    moved = read(stored.anchor(4)) | {"version": 7, "way": anchor}
    stored.anchor(7).write_bytes(bytes_of(moved))
    stored.rewrite(lambda one: one | {"way": delta} if is_version(one, 7) else one)
    run = stored.opened()
    route = find_route(run, run.require(7), lambda published: published.version == 6)
    assert (route.base, [step.way.kind for step in route.steps]) == (None, ["anchor"])


# What verify finds


def test_what_is_collected_while_it_is_verified_is_no_fault(stored: Stored) -> None:
    def phase(name: str, total: int) -> Callable[[int], None]:
        return lambda versions: seen.append(gc(stored.run, keep=1, keep_s=0).versions)

    seen = list[int]()
    found = verify_run(stored.run, phase=phase)
    assert (found.faults, found.proved, seen) == ([], [1, 4, 5, 6], [3, 0, 0, 0, 0, 0])
