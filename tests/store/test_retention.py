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
from deltasync.store.manifest import Lease, canonical
from deltasync.store.retention import GcStats, gc
from tests.store.replay import assert_holds
from tests.store.stores import Place
from tests.store.test_sender import Model, run_of, sender_of, weights_of

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
    return gc(place.url, "run", options=place.options, **more)  # type: ignore[arg-type]


def put_lease(place: Place, *, holds: int | None, version: int, seconds: int = 600) -> str:
    holder = os.urandom(16).hex()
    lease = Lease(run="run", holder=holder, holds=holds, version=version, seconds=seconds)
    run_of(place).objects.put(keys.lease_key(holder), canonical(lease))
    return keys.lease_key(holder)


def keys_of(place: Place) -> list[str]:
    return sorted(facts.key for facts in run_of(place).objects.listed(""))


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


@pytest.mark.parametrize(
    ("holds", "version", "oldest"),
    [(3, 10, 3), (3, 3, 3), (None, 5, 4), (None, 10, 10), (9, 10, 9)],
)
def test_s11_what_a_lease_needs_stays(
    place: Place,
    history: History,
    holds: int | None,
    version: int,
    oldest: int,
) -> None:
    put_lease(place, holds=holds, version=version)
    stats = collect(place, keep=1)
    assert (stats.oldest, stats.leases) == (oldest, 1)
    assert run_of(place).versions() == list(range(oldest, 11))
    assert len(history) == 10


def test_s11_expired_leases_keep_nothing(place: Place, history: History) -> None:
    lease = put_lease(place, holds=2, version=2, seconds=1)
    time.sleep(3.5 if place.folder is not None or place.url.startswith("memory") else 4.5)
    stats = collect(place, keep=1)
    assert (stats.oldest, stats.leases) == (10, 0)
    assert lease not in keys_of(place)
    assert len(history) == 10


@pytest.mark.parametrize("place", ["local"], indirect=True)  # where times can be set
def test_s11_a_lease_that_is_renewed_meanwhile_stays(place: Place, history: History) -> None:
    assert place.folder is not None
    lease = put_lease(place, holds=9, version=10)
    data = (place.folder / "run" / lease).read_bytes()
    os.utime(place.folder / "run" / lease, (1, 1))

    def renew(objects: int) -> None:
        run_of(place).objects.put(lease, data)

    collect(place, keep=5, advance=renew)
    assert lease in keys_of(place)
    collect(place, keep=1)
    assert run_of(place).versions() == [9, 10], "what the lease needs"
    assert len(history) == 10


def test_s01_s11_a_lease_that_cannot_be_read_stops_it(place: Place, history: History) -> None:
    run_of(place).objects.put(keys.lease_key("0" * 32), b'{"kind":"lease","format":2}')
    before = keys_of(place)
    with pytest.raises(ManifestInvalid, match="leases/"):
        collect(place, keep=1)
    assert keys_of(place) == before
    assert len(history) == 10


def test_a_manifest_that_cannot_be_read_stops_it(place: Place, history: History) -> None:
    run_of(place).objects.put(keys.manifest_key(9), b"{}")
    time.sleep(1.2)  # S3 tells seconds
    before = keys_of(place)
    with pytest.raises(ManifestInvalid, match="manifests/0000000000000009"):
        collect(place, keep=5, unfinished_after_s=0)
    assert keys_of(place) == before
    assert len(history) == 10


def test_s11_an_anchor_with_a_missing_file_is_none(
    place: Place, history: History, tmp_path: Path
) -> None:
    run = run_of(place)
    (anchor,) = run.later_ways(run.require(7))
    run.objects.delete(anchor.files[0].key)
    stats = collect(place, keep=2)
    assert stats.oldest == 4
    run.objects.delete(keys.LATEST)
    assert_holds(run, 6, history[6], tmp_path)


def test_uploads_of_no_version_go_when_they_are_old(place: Place, history: History) -> None:
    objects = run_of(place).objects
    orphans = [keys.frames_key(9), f"{keys.anchor_folder(11)}/model.safetensors"]
    for key in orphans:
        objects.put(key, b"half")
    assert collect(place, keep=99).objects == 0
    time.sleep(1.2)
    stats = collect(place, keep=99, unfinished_after_s=0)
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
    assert collect(place, keep=1).unfinished == 0
    os.utime(left, (1, 1))
    assert collect(place, keep=1).unfinished == 1
    assert not left.exists()


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
    assert gc(tmp_path / "link", keep=1).oldest == 10
    assert run_of(place).versions() == [10]
    assert len(history) == 10


@pytest.mark.parametrize("age_s", [1e12, 1e300, float("inf")])
def test_ages_beyond_all_times_are_never_reached(
    place: Place, history: History, age_s: float
) -> None:
    run_of(place).objects.put(keys.frames_key(9), b"half")
    time.sleep(1.2)
    assert collect(place, keep=99, unfinished_after_s=age_s).unfinished == 0
    assert collect(place, keep=99, unfinished_after_s=0).unfinished == 1
    assert len(history) == 10


@pytest.mark.parametrize("age_s", [-1.0, float("nan"), float("-inf"), "1", None])
def test_ages_that_are_none_are_refused(tmp_path: Path, age_s: Any) -> None:
    with pytest.raises(ConfigError, match="unfinished_after_s"):
        gc(tmp_path, keep=1, unfinished_after_s=age_s)
