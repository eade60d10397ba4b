"""What is deleted, and above all what is not."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from deltasync.errors import ConfigError, ManifestInvalid, StoreRefused
from deltasync.store import keys
from deltasync.store.retention import GcStats, gc
from tests.store.replay import assert_holds
from tests.store.test_sender import Model, run_of, sender_of, weights_of
from tests.worlds.stores import Place, memory_place

History = dict[int, dict[str, Tensor]]


@pytest.fixture
def history(place: Place) -> History:
    """Ten versions, with anchors at 1, 4, 7 and 10."""
    model, found = Model(), {}
    sender = sender_of(model, place, anchor_every=3)
    for number in range(1, 11):
        sender.publish()
        found[number] = weights_of(model)
        model.step(number)
    return found


def collect(place: Place, **more: object) -> GcStats:
    """What is left by a collector to whom nothing is young, if `more` says nothing else."""
    return gc(place.url, "run", options=place.options, **{"keep_s": 0} | more)  # type: ignore[arg-type]


def keys_of(place: Place) -> list[str]:
    found = {facts.key for facts in run_of(place).objects.listed("")}
    return sorted(found - {keys.CLOCK})


@pytest.mark.parametrize(("keep", "oldest"), [(1, 10), (2, 7), (4, 7), (5, 4), (10, 1), (99, 1)])
def test_s11_versions_that_are_kept_can_be_fetched(
    place: Place, history: History, tmp_path: Path, keep: int, oldest: int
) -> None:
    before = keys_of(place)
    counted = collect(place, keep=keep, dry_run=True)
    assert keys_of(place) == before
    stats = collect(place, keep=keep)
    assert stats == counted
    assert (stats.oldest, stats.newest, stats.versions) == (oldest, 10, oldest - 1)
    run = run_of(place)
    assert run.versions() == list(range(oldest, 11))
    assert all((keys.version_of(key) or 10) >= oldest for key in keys_of(place))
    for version in {oldest, max(10 - keep + 1, 1), 10}:
        assert_holds(run, version, history[version], tmp_path / str(version))
    assert collect(place, keep=keep).objects == 0


@pytest.mark.parametrize("place", ["local"], indirect=True)  # where times can be set
@pytest.mark.parametrize(
    ("aged", "age_s", "oldest"), [(6, 3700, 7), (5, 3700, 4), (10, 3700, 10), (10, 3500, 1)]
)
def test_s11_what_is_young_stays(
    place: Place, history: History, tmp_path: Path, aged: int, age_s: int, oldest: int
) -> None:
    """The first versions are that old, by the times of the store."""
    assert place.folder is not None
    then = time.time() - age_s
    for version in range(1, aged + 1):
        os.utime(place.folder / "run" / keys.manifest_key(version), (then, then))
    assert collect(place, keep=1, keep_s=3600).oldest == oldest
    assert run_of(place).versions() == list(range(oldest, 11))
    assert_holds(run_of(place), oldest, history[oldest], tmp_path / "out")


def test_s11_nothing_that_is_young_is_deleted(place: Place, history: History) -> None:
    run_of(place).objects.put(keys.frames_key(9), b"half")
    before = keys_of(place)
    assert collect(place, keep=1, keep_s=3600).objects == 0
    assert keys_of(place) == before
    assert len(history) == 10


def test_a_manifest_that_cannot_be_read_stops_it(place: Place, history: History) -> None:
    run_of(place).objects.put(keys.manifest_key(9), b"{}")
    before = keys_of(place)
    with pytest.raises(ManifestInvalid, match="manifests/0000000000000009"):
        collect(place, keep=5)
    assert keys_of(place) == before
    assert len(history) == 10


def test_s11_an_anchor_with_a_missing_file_is_none(
    place: Place, history: History, tmp_path: Path
) -> None:
    run = run_of(place)
    (anchor,) = (way for way in run.ways(run.require(7)) if way.kind == "anchor")
    run.objects.delete(anchor.files[0].key)
    stats = collect(place, keep=2)
    assert stats.oldest == 4
    assert_holds(run, 6, history[6], tmp_path)


def test_s11_an_anchor_that_lacks_one_of_its_files_is_none() -> None:
    place, model = memory_place(), Model()
    sender = sender_of(model, place, anchor_every=3, anchor_file_bytes=1)
    for number in range(4):
        sender.publish()
        model.step(number)
    run = run_of(place)
    (anchor,) = (way for way in run.ways(run.require(4)) if way.kind == "anchor")
    assert len(anchor.files) > 2
    run.objects.delete(anchor.files[0].key)
    assert collect(place, keep=1).oldest == 1


def test_uploads_of_no_version_go_when_they_are_old(place: Place, history: History) -> None:
    objects = run_of(place).objects
    orphans = [keys.frames_key(9), f"{keys.anchor_folder(11)}/model.safetensors"]
    for key in orphans:
        objects.put(key, b"half")
    assert collect(place, keep=99, keep_s=60).objects == 0
    stats = collect(place, keep=99)
    assert stats.unfinished == 2
    assert not set(orphans) & set(keys_of(place))
    newest = run_of(place).newest()
    assert newest is not None
    assert newest.version == len(history) == 10


def test_files_of_killed_uploads_go(tmp_path: Path) -> None:
    place = Place(str(tmp_path), folder=tmp_path)
    sender = sender_of(nn.Linear(2, 2), place)
    sender.publish()
    left = tmp_path / "run" / "objects" / f"{2:016}-delta-{0:016}.dsyn#1"
    left.write_bytes(b"half")
    assert collect(place, keep=1, keep_s=60).unfinished == 0
    os.utime(left, (1, 1))
    assert collect(place, keep=1, keep_s=60).unfinished == 1
    assert not left.exists()


def test_no_folders_are_left(tmp_path: Path) -> None:
    place, model = Place(str(tmp_path), folder=tmp_path), Model()
    sender = sender_of(model, place, anchor_every=1, anchor_file_bytes=1)
    for number in range(3):
        sender.publish()
        model.step(number)
    killed = tmp_path / "run" / f"{keys.anchor_folder(3)}/model.safetensors#1"
    killed.parent.mkdir()
    killed.write_bytes(b"half")
    os.utime(killed, (1, 1))
    assert collect(place, keep=1).unfinished == 1
    folders = [path for path in (tmp_path / "run/objects").iterdir() if path.is_dir()]
    assert [path.name[:16] for path in folders] == [f"{3:016}"]
    assert len(list(folders[0].iterdir())) > 2


@pytest.mark.parametrize("name", ["{}.json.bak", "{}.json.6fE3a1", "{}"])
def test_what_is_called_almost_as_a_manifest_is_none(
    place: Place, history: History, tmp_path: Path, name: str
) -> None:
    """Such as what a tool that copies stores leaves when it is killed."""
    run = run_of(place)
    for version in (3, 10, 11):
        run.objects.put(f"{keys.MANIFESTS}/{name.format(f'{version:016}')}", b"half")
    newest = run.newest()
    assert newest is not None
    assert newest.version == 10
    assert collect(place, keep=4).oldest == 7
    assert run.versions() == [7, 8, 9, 10]
    assert_holds(run, 7, history[7], tmp_path)


def test_nothing_is_kept_of_nothing(place: Place) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        collect(place, keep=0)


def test_the_writer_goes_on_after_it(place: Place, history: History, tmp_path: Path) -> None:
    collect(place, keep=1)
    model = Model()
    sender = sender_of(model, place)
    assert sender.publish().version == 11
    model.step(1)
    sender.publish()
    assert_holds(run_of(place), 12, weights_of(model), tmp_path)
    assert len(history) == 10


@pytest.mark.parametrize("place", ["local"], indirect=True)  # where there are links
def test_nothing_is_deleted_behind_a_symbolic_link(
    place: Place, history: History, tmp_path: Path
) -> None:
    """Whoever can write to a folder could otherwise have others delete their own files."""
    assert place.folder is not None
    home = tmp_path / "home"
    (home / "more").mkdir(parents=True)
    (home / "thesis.txt").write_text("mine")
    (home / "more/thesis.txt").write_text("mine")
    link = place.folder / "run/objects/0000000000000001-x"
    link.symlink_to(home)
    with pytest.raises(StoreRefused, match="symbolic link"):
        collect(place, keep=1)
    assert (home / "thesis.txt").exists()
    assert (home / "more/thesis.txt").exists()
    link.unlink()
    file = place.folder / "run/objects/0000000000000001-delta-0123456789abcdef.dsyn"
    file.symlink_to(home / "thesis.txt")
    assert collect(place, keep=1).oldest == 10
    assert not file.is_symlink()
    assert (home / "thesis.txt").exists()
    assert len(history) == 10


@pytest.mark.parametrize("place", ["local"], indirect=True)
def test_a_folder_that_is_a_link_is_collected(
    place: Place, history: History, tmp_path: Path
) -> None:
    assert place.folder is not None
    (tmp_path / "link").symlink_to(place.folder)
    assert gc(tmp_path / "link", keep=1, keep_s=0).oldest == 10
    assert run_of(place).versions() == [10]
    assert len(history) == 10


@pytest.mark.parametrize("age_s", [1e12, 1e300, float("inf")])
def test_ages_beyond_all_times_are_never_reached(
    place: Place, history: History, age_s: float
) -> None:
    run_of(place).objects.put(keys.frames_key(9), b"half")
    assert collect(place, keep=1, keep_s=age_s).objects == 0
    assert collect(place, keep=99).unfinished == 1
    assert len(history) == 10


@pytest.mark.parametrize("age_s", [-1.0, float("nan"), float("-inf"), "1", None])
def test_ages_that_are_none_are_refused(tmp_path: Path, age_s: Any) -> None:
    with pytest.raises(ConfigError, match="keep_s"):
        gc(tmp_path, keep=1, keep_s=age_s)
