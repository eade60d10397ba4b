"""Rules S1 to S11 of docs/store.md: what readers refuse, and what collectors leave."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from deltasync import ModuleTarget, StoreReceiver
from deltasync.errors import DeltaSyncError, MacMismatch, ManifestInvalid
from deltasync.store.checkpoints import fetch_checkpoint
from deltasync.store.retention import gc
from deltasync.store.routes import find_route
from deltasync.store.verifying import verify_run
from deltasync.sync.target.copied import CopiedTarget
from tests.store.raw import (
    KEY,
    Json,
    Stored,
    bytes_of,
    facts,
    is_anchored,
    opened,
    read,
    rewrite,
    sha256,
    signed_run,
)
from tests.store.replay import assert_holds
from tests.worlds.published import RUN, Follower, Publisher, small_model, state_of
from tests.worlds.stores import local_place
from tests.worlds.strategies import same_bits


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return signed_run(tmp_path_factory.mktemp("made") / "store")


@pytest.fixture
def stored(made: Stored, tmp_path: Path) -> Stored:
    """A copy, to be altered."""
    shutil.copytree(made.run.parent, tmp_path / "store")
    return Stored(tmp_path / "store" / "run", made.states)


# What a reader refuses


@pytest.mark.parametrize("base", [8, 5, None])
def test_s05_frames_of_another_run_are_refused(tmp_path: Path, base: int | None) -> None:
    """Records name another run: a delta, several, and an anchor with what follows."""
    trainer = Publisher(local_place(tmp_path / "store"))
    trainer.publish(9)
    (tmp_path / "store" / RUN).rename(tmp_path / "store" / "other")
    run = Stored(tmp_path / "store" / "other", trainer.states)
    run.anchor(9).unlink()
    rewrite(run, lambda record: record | {"run": "other"})
    model = small_model(1)
    before = trainer.states[base] if base is not None else state_of(model)
    model.load_state_dict(before)
    receiver = StoreReceiver(ModuleTarget(model), tmp_path / "store", run="other")
    with receiver, pytest.raises(DeltaSyncError, match="'run'"):
        receiver.fetch(9, timeout_s=5)
    assert all(same_bits(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert {fault.version for fault in verify_run(run.run).faults} == set(range(2, 10))


def test_s05_a_delta_from_another_layout_is_not_taken(stored: Stored, tmp_path: Path) -> None:
    """A manifest that says so is believed by nobody."""
    delta = stored.read(6)["way"]
    moved = {file["key"]: file["key"].replace(f"{6:016}", f"{7:016}") for file in delta["files"]}
    for old, new in moved.items():
        shutil.copy(stored.run / old, stored.run / new)
    files = [file | {"key": moved[file["key"]]} for file in delta["files"]]

    def change(record: Json) -> Json:
        if record.get("version") == 7 and record["kind"] == "version":
            return record | {"way": delta | {"files": files}}
        return record

    anchor = stored.read(7)["way"]
    shutil.copy(stored.anchor(4), stored.anchor(7))
    stored.anchor(7).write_bytes(bytes_of(read(stored.anchor(7)) | {"version": 7, "way": anchor}))
    rewrite(stored, change)
    run = opened(stored)
    target = run.require(7)
    route = find_route(run, target, lambda published: published.version == 6)
    assert (route.base, [step.way.kind for step in route.steps]) == (None, ["anchor"])
    assert_holds(run, 7, stored.states[7], tmp_path / "7")


def test_s06_an_anchor_that_lacks_a_parameter_is_refused(stored: Stored) -> None:
    (anchor,) = (way for way in stored.ways(10) if way["kind"] == "anchor")
    *shards, index = anchor["files"]
    assert index["key"].endswith("model.safetensors.index.json")
    names = read(stored.run / index["key"])
    lost = names["weight_map"].pop("more")
    kept = load_file(stored.run / shards[0]["key"].replace(Path(shards[0]["key"]).name, lost))
    del kept["more"]
    folder = Path(index["key"]).parent
    save_file(kept, stored.run / folder / lost)
    (stored.run / index["key"]).write_text(json.dumps(names))

    def change(record: Json) -> Json:
        if record["kind"] != "anchor" or record["way"]["files"] != anchor["files"]:
            return record
        return record | {"way": anchor | {"files": [facts(stored, one) for one in anchor["files"]]}}

    rewrite(stored, change)
    alone(stored, 10)
    with pytest.raises(DeltaSyncError, match="more"):
        fetch_checkpoint(stored.run, stored.run.parent / "out", to=10)


def alone(stored: Stored, version: int) -> None:
    """Leave no version before one, as a collector does."""
    for older in range(1, version):
        stored.manifest(older).unlink()


@pytest.mark.parametrize(
    ("key", "changes", "error"),
    [
        (None, {"run": "other"}, ManifestInvalid),
        (None, {"version": 5}, ManifestInvalid),
        (None, {"manifest": "0" * 64}, None),  # it does not count
        (KEY, {"mac": None}, MacMismatch),
        (KEY, {"mac": "0" * 64}, MacMismatch),
    ],
)
def test_s01_s08_s09_an_anchor_that_says_otherwise_is_refused(
    stored: Stored, key: bytes | None, changes: Json, error: type[DeltaSyncError] | None
) -> None:
    run = opened(stored, key)
    assert len(run.ways(run.require(4))) == 2
    stored.anchor(4).write_bytes(bytes_of(read(stored.anchor(4)) | changes))
    if error is None:
        assert len(run.ways(run.require(4))) == 1
        assert verify_run(stored.run).faults == []
    else:
        with pytest.raises(error):
            run.ways(run.require(4))
        newest = run.newest()
        assert newest is not None
        assert newest.version == 10


# What nobody depends on


@pytest.mark.parametrize("written_at", ["1970-01-01T00:00:00+00:00", "soon"])
def test_s10_times_of_writers_mean_nothing(stored: Stored, tmp_path: Path, written_at: str) -> None:
    rewrite(stored, lambda r: r | {"written_at": written_at} if "written_at" in r else r)
    run = opened(stored)
    newest = run.newest()
    assert newest is not None
    assert newest.version == 10
    assert_holds(run, 6, stored.states[6], tmp_path / "6")
    assert gc(stored.run, keep=1, keep_s=0).oldest == 10


def test_s10_a_reader_whose_version_is_gone_finds_newer_ones(tmp_path: Path) -> None:
    trainer = Publisher(local_place(tmp_path / "store"), anchor_every=3)
    trainer.publish(2)
    follower = Follower(trainer.place)
    assert follower.receiver.fetch() == 2
    trainer.publish(6)
    run = tmp_path / "store" / RUN
    assert gc(run, keep=2, keep_s=0).oldest == 7
    assert follower.receiver.fetch(timeout_s=10) == 8
    assert follower.holds(trainer.states[8])
    follower.receiver.close()


# What a collector deletes


class _Killed(Exception):
    pass


@pytest.mark.parametrize("keep", [1, 4])
def test_s11_a_collector_may_die_at_any_moment(made: Stored, tmp_path: Path, keep: int) -> None:
    """After each deletion, what is left is an end of the chain, and complete."""
    number, is_killed = 0, True
    while is_killed:
        number += 1
        folder = tmp_path / str(number)
        shutil.copytree(made.run.parent, folder)
        left, is_killed = Stored(folder / "run", made.states), False
        deleted = 0

        def advance(objects: int, last: int = number) -> None:
            nonlocal deleted
            deleted += objects
            if deleted == last:
                raise _Killed

        try:
            gc(left.run, keep=keep, keep_s=0, advance=advance)
        except _Killed:
            is_killed = True
        versions = left.versions()
        assert versions == list(range(versions[0], 11))
        floor = min(versions[-keep:])
        anchored = max(v for v in range(1, floor + 1) if is_anchored(made, v))
        assert versions[0] <= anchored
        for version in range(versions[0], 11):
            for way in left.ways(version):
                assert all((left.run / file["key"]).exists() for file in way["files"])
        gc(left.run, keep=keep, keep_s=0)
        assert left.versions() == list(range(anchored, 11))
        objects = [path for path in (left.run / "objects").rglob("*") if path.is_file()]
        names = {path.relative_to(left.run / "objects").parts[0][:16] for path in objects}
        assert min(names) == f"{anchored:016}"
        shutil.rmtree(folder)
    assert number > 5


# What no rule of the table has


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([[["a"], [1], 16], [["a"], [2], 16]], "a name stands twice"),
        ([[["a", "a"], [1], 16]], "a name stands twice"),
        ([[["a"], [1 << 62, 1 << 62], 16]], "elements"),
        ([[["a"], [1 << 62, 0, 4], 16]], "elements"),
        ([[["a"], [-1], 16]], "greater than or equal to 0"),
        ([[["a"], [1.0], 16]], "valid integer"),
        ([[["a"], [True], 16]], "valid integer"),
        ([[["a"], [1], 200]], "dtype code 200"),
        ([1] * 100_000, "not a layout"),
        ({"a": 1}, "not a layout"),
    ],
    ids=range(10),
)
def test_a_layout_that_no_sender_has_is_refused(stored: Stored, entries: Any, why: str) -> None:
    data = bytes_of(entries)
    (stored.run / f"layouts/{sha256(data)}.json").write_bytes(data)
    rewrite(
        stored,
        lambda record: record | ({"layout_hash": sha256(data)} if "parent" in record else {}),
    )
    for model in (small_model(1), None):
        target = CopiedTarget() if model is None else ModuleTarget(model)
        with (
            StoreReceiver(target, stored.run) as receiver,
            pytest.raises(ManifestInvalid, match=why) as raised,
        ):
            receiver.fetch(timeout_s=5)
        assert len(str(raised.value)) < 400
