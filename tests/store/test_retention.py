"""What is deleted, and above all what is not."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltasync.errors import ManifestInvalid, StoreRefused
from deltasync.store import keys
from deltasync.store.retention import GcStats, gc
from tests.store.raw import Stored
from tests.store.test_writers import keys_of, objects_of, versions_of
from tests.worlds.published import Publisher, assert_published
from tests.worlds.stores import Place, local_place, memory_place


@pytest.fixture
def trainer(tmp_path: Path) -> Publisher:
    """Ten versions, with anchors at 1, 4, 7 and 10, in a folder, where times can be set."""
    made = Publisher(local_place(tmp_path / "store"), anchor_every=3)
    made.publish(10)
    return made


def collect(place: Place, **more: Any) -> GcStats:
    """What is left by a collector to whom nothing is young, if `more` says nothing else."""
    return gc(place.url, options=place.options, **{"keep_s": 0} | more)


def orphan(place: Place, key: str = keys.frames_key(9)) -> str:
    objects_of(place).write(key, lambda: [b"half"])
    return key


def test_s11_versions_that_are_kept_can_be_fetched(trainer: Publisher) -> None:
    place, oldest = trainer.place, 1
    for keep, left in ((99, 1), (5, 4), (4, 7), (1, 10)):
        before = keys_of(place)
        counted = collect(place, keep=keep, dry_run=True)
        assert keys_of(place) == before
        stats = collect(place, keep=keep)
        assert stats == counted
        assert (stats.oldest, stats.newest, stats.versions) == (left, 10, left - oldest)
        assert versions_of(place) == list(range(left, 11))
        assert all((keys.version_of(key) or 10) >= left for key in keys_of(place))
        assert_published(trainer)
        assert collect(place, keep=keep).objects == 0
        oldest = left
    trainer.publish()  # the writer goes on
    assert versions_of(place) == [10, 11]
    assert_published(trainer)


@pytest.mark.parametrize(
    ("aged", "age_s", "oldest"), [(6, 3700, 7), (5, 3700, 4), (10, 3700, 10), (10, 3500, 1)]
)
def test_s11_what_is_young_stays(trainer: Publisher, aged: int, age_s: int, oldest: int) -> None:
    """The first versions are that old, by the times of the store."""
    assert trainer.place.folder is not None
    then = time.time() - age_s
    for version in range(1, aged + 1):
        os.utime(trainer.place.folder / keys.manifest_key(version), (then, then))
    assert collect(trainer.place, keep=1, keep_s=3600).oldest == oldest
    assert versions_of(trainer.place) == list(range(oldest, 11))


def test_s11_nothing_goes_that_is_young_or_that_a_manifest_may_need(trainer: Publisher) -> None:
    place = trainer.place
    orphans = {orphan(place), orphan(place, f"{keys.anchor_folder(11)}/model.safetensors")}
    for age_s in (3600, float("inf")):
        assert collect(place, keep=1, keep_s=age_s).objects == 0
    second = objects_of(place).get(keys.manifest_key(9), max_bytes=1 << 20)
    assert second is not None
    orphan(place, keys.manifest_key(9))
    before = keys_of(place)
    with pytest.raises(ManifestInvalid, match="manifests/0000000000000009"):
        collect(place, keep=5)
    assert keys_of(place) == before
    objects_of(place).write(keys.manifest_key(9), lambda: [second])
    assert collect(place, keep=99).unfinished == 2
    assert keys_of(place) == before - orphans


def test_s11_an_anchor_that_lacks_one_of_its_files_is_none() -> None:
    trainer = Publisher(memory_place(), anchor_every=3, publishing={"anchor_file_bytes": 1})
    trainer.publish(10)
    anchors = [key for key in sorted(keys_of(trainer.place)) if f"{7:016}-anchor-" in key]
    assert len(anchors) > 2
    objects_of(trainer.place).delete(anchors[0])
    assert collect(trainer.place, keep=2).oldest == 4
    assert versions_of(trainer.place) == list(range(4, 11))


def test_files_of_killed_uploads_go_and_no_folders_are_left(tmp_path: Path) -> None:
    trainer = Publisher(local_place(tmp_path), anchor_every=1)
    trainer.publish(3)
    left = tmp_path / f"{keys.anchor_folder(4)}/model.safetensors#1"
    left.parent.mkdir()
    left.write_bytes(b"half")
    assert collect(trainer.place, keep=3, keep_s=60).unfinished == 0
    os.utime(left, (1, 1))
    assert collect(trainer.place, keep=3, keep_s=60).unfinished == 1
    assert collect(trainer.place, keep=1).oldest == 3
    [folder] = [path for path in (tmp_path / "objects").iterdir() if path.is_dir()]
    assert folder.name[:16] == f"{3:016}"


@pytest.mark.parametrize("name", ["{}.json.bak", "{}"])
def test_what_is_called_almost_as_a_manifest_is_none(trainer: Publisher, name: str) -> None:
    """Such as what a tool that copies stores leaves when it is killed."""
    for version in (3, 10, 11):
        orphan(trainer.place, f"{keys.MANIFESTS}/{name.format(f'{version:016}')}")
    stats = collect(trainer.place, keep=4)
    assert (stats.newest, stats.oldest) == (10, 7)


def test_nothing_is_deleted_behind_a_symbolic_link(trainer: Publisher, tmp_path: Path) -> None:
    """Whoever can write to a folder could otherwise have others delete their own files."""
    thesis, folder = tmp_path / "home/thesis.txt", trainer.place.folder
    assert folder is not None
    thesis.parent.mkdir()
    thesis.write_text("mine")
    link = folder / "objects/0000000000000001-x"
    link.symlink_to(thesis.parent)
    with pytest.raises(StoreRefused, match="symbolic link"):
        collect(trainer.place, keep=1)
    assert thesis.exists()
    link.unlink()
    file = folder / "objects/0000000000000001-delta-0123456789abcdef.dsyn"
    file.symlink_to(thesis)
    (tmp_path / "link").symlink_to(folder)
    assert gc(tmp_path / "link", keep=1, keep_s=0).oldest == 10
    assert not file.is_symlink()
    assert thesis.exists()


class _Killed(Exception):
    pass


def test_s11_a_collector_may_die_at_any_moment(signed: Stored, tmp_path: Path) -> None:
    """After each deletion, what is left is an end of the chain, and complete."""
    number, is_killed = 0, True
    while is_killed:
        number += 1
        shutil.copytree(signed.run, tmp_path / str(number))
        left, is_killed = Stored(tmp_path / str(number), signed.states), False

        moments = iter(range(1, number + 1))

        def advance(_: int, moments: Iterator[int] = moments, last: int = number) -> None:
            if next(moments) == last:
                raise _Killed

        try:
            gc(left.run, keep=4, keep_s=0, advance=advance)
        except _Killed:
            is_killed = True
        versions = left.versions()
        assert versions == list(range(versions[0], 11))
        assert versions[0] <= 7
        for way in (way for version in versions for way in left.ways(version)):
            assert all((left.run / file["key"]).exists() for file in way["files"])
        gc(left.run, keep=4, keep_s=0)
        assert left.versions() == list(range(7, 11))
        assert min(path.name[:16] for path in (left.run / "objects").iterdir()) == f"{7:016}"
        shutil.rmtree(tmp_path / str(number))
    assert number > 5
