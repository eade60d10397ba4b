"""Stores that were damaged, contradict themselves, vanish or lie: never a wrong model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretBytes
from torch import Tensor

from deltasync import ModuleSource, SenderOptions
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import (
    DeltaSyncError,
    DigestMismatch,
    MacMismatch,
    ManifestInvalid,
    ObjectDamaged,
    RunUnknown,
    StoreError,
    StoreUnavailable,
    TransportTimeout,
    VersionMissing,
)
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.frame_file import FrameFile, write_frames
from deltasync.store.catalogue import Run
from deltasync.store.checkpoints import fetch_checkpoint
from deltasync.store.manifest import Manifest, canonical
from deltasync.store.merged import MergedDeltas, flats_of
from deltasync.store.objects import StoreOptions
from deltasync.store.receiver import StoreReceiver
from deltasync.store.sender import StoreSender
from deltasync.store.verifying import verify_run
from deltasync.sync.protocol.one_way import one_way_frames
from tests.worlds.links import Model, bits_equal, random_model, step
from tests.worlds.published import RUN, Follower, Publisher, state_of
from tests.worlds.stores import Place, local_place, s3_place, s3_server
from tests.worlds.toy_engines import CHECKPOINT, SHAPES, Rank, rank_of

States = dict[int, dict[str, Tensor]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, States]:
    """A run of 6 versions, with anchors at v1 and v4."""
    folder = tmp_path_factory.mktemp("made") / "store"
    trainer = Publisher(local_place(folder), anchor_every=3)
    trainer.publish(6)
    return folder, trainer.states


@pytest.fixture
def run_of(made: tuple[Path, States], tmp_path: Path) -> tuple[Path, States]:
    """A copy of the run's folder, to be damaged."""
    folder, states = made
    shutil.copytree(folder, tmp_path / "store")
    return tmp_path / "store" / RUN, states


def reader_of(run: Path, *, at: dict[str, Tensor] | None = None) -> Follower:
    reader = Follower(local_place(run.parent))
    if at is not None:
        reader.model.load_state_dict(at)
    return reader


def objects(run: Path, version: int, kind: str) -> list[Path]:
    return [p for p in run.glob(f"objects/{version:016}-{kind}-*/*") if p.is_file()] + [
        p for p in run.glob(f"objects/{version:016}-{kind}-*") if p.is_file()
    ]


def manifest_of(run: Path, version: int) -> Path:
    return run / f"manifests/{version:016}.json"


def rewrite(run: Path, version: int, **changed: object) -> None:
    """Alter a manifest so that it is still one; children are altered to name it."""
    path = manifest_of(run, version)
    manifest = Manifest.model_validate_json(path.read_bytes())
    path.write_bytes(canonical(manifest.model_copy(update=changed)))
    relink(run, version)


def relink(run: Path, version: int) -> None:
    parent = manifest_of(run, version).read_bytes()
    child = manifest_of(run, version + 1)
    if child.exists():
        found = json.loads(child.read_bytes())
        found["parent"]["sha256"] = hashlib.sha256(parent).hexdigest()
        text = json.dumps(found, sort_keys=True, separators=(",", ":"))
        child.write_bytes(text.encode())
        relink(run, version + 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: list[Callable[[Path], object]] = [flip, cut, grow, empty, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
def test_s08_a_damaged_delta_is_passed_by_where_there_is_an_anchor(
    run_of: tuple[Path, States], damage: Callable[[Path], object]
) -> None:
    run, states = run_of
    damage(objects(run, 3, "delta")[0])
    reader = reader_of(run, at=states[1])
    assert reader.receiver.fetch(6, timeout_s=10) == 6
    assert reader.holds(states[6])
    assert reader.receiver.progress.total_bytes > objects(run, 4, "anchor")[0].stat().st_size


@pytest.mark.parametrize("damage", DAMAGES)
def test_s08_a_damaged_anchor_is_passed_by_where_there_is_another(
    run_of: tuple[Path, States], damage: Callable[[Path], object]
) -> None:
    run, states = run_of
    damage(objects(run, 4, "anchor")[0])
    reader = reader_of(run)
    assert reader.receiver.fetch(6, timeout_s=10) == 6
    assert reader.holds(states[6])


@pytest.mark.parametrize("damage", DAMAGES)
def test_s08_without_another_way_the_old_version_serves(
    run_of: tuple[Path, States], damage: Callable[[Path], object]
) -> None:
    run, states = run_of
    for path in (*objects(run, 4, "anchor"), *objects(run, 5, "delta")):
        damage(path)
    damage(objects(run, 1, "anchor")[0])
    reader = reader_of(run, at=states[2])
    with pytest.raises(ObjectDamaged, match="objects/"):
        reader.receiver.fetch(5, timeout_s=10)
    assert reader.holds(states[2])
    assert not reader.receiver.is_dirty
    assert reader.receiver.fetch(3, timeout_s=10) == 3
    assert reader.holds(states[3])


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("version", [2, 5, 6])
def test_a_damaged_manifest_stops_what_would_pass_it(
    run_of: tuple[Path, States], damage: Callable[[Path], object], version: int
) -> None:
    run, states = run_of
    damage(manifest_of(run, version))
    for start in (None, 1, 3):
        reader = reader_of(run, at=None if start is None else states[start])
        for to in (1, 3, 5, 6):
            try:
                assert reader.receiver.fetch(to, timeout_s=0.5) == to
            except StoreError:
                assert to >= version or start is None or to < 4
            else:
                assert reader.holds(states[to])
            assert not reader.receiver.is_dirty


def test_s01_manifests_that_were_swapped_are_refused(run_of: tuple[Path, States]) -> None:
    run, states = run_of
    shutil.copy(manifest_of(run, 3), manifest_of(run, 2))
    reader = reader_of(run, at=states[1])
    with pytest.raises(ManifestInvalid, match="moved"):
        reader.receiver.fetch(2, timeout_s=0)


def test_s04_a_parent_that_was_replaced_is_noticed(run_of: tuple[Path, States]) -> None:
    run, states = run_of
    manifest = Manifest.model_validate_json(manifest_of(run, 2).read_bytes())
    altered = manifest.model_copy(update={"writer": "another"})
    manifest_of(run, 2).write_bytes(canonical(altered))
    reader = reader_of(run, at=states[1])
    with pytest.raises(ManifestInvalid, match="altered"):
        reader.receiver.fetch(3, timeout_s=10)
    assert reader.receiver.fetch(6, timeout_s=10) == 6
    assert reader.holds(states[6])


def test_a_digest_that_lies_is_found_before_anything_is_written(
    run_of: tuple[Path, States],
) -> None:
    run, states = run_of
    for lie in (5, 2):
        rewrite(run, lie, digest="0123456789abcdef")
    reader = reader_of(run, at=states[1])
    for to in (2, 5):
        with pytest.raises(DeltaSyncError):
            reader.receiver.fetch(to, timeout_s=10)
        assert reader.holds(states[1])
        assert not reader.receiver.is_dirty


def test_an_anchor_of_another_digest_is_found_before_anything_is_written(
    run_of: tuple[Path, States], tmp_path: Path
) -> None:
    run, _ = run_of
    rewrite(run, 1, digest="0123456789abcdef")
    reader = reader_of(run)
    before = state_of(reader.model)
    with pytest.raises(DigestMismatch):
        reader.receiver.fetch(1, timeout_s=10)
    assert reader.holds(before)
    assert not reader.receiver.is_dirty
    with pytest.raises(DigestMismatch):
        fetch_checkpoint(run, tmp_path / "out", to=1)
    assert not (tmp_path / "out").exists()
    assert (1, "anchor") in {(fault.version, fault.what) for fault in verify_run(run).faults}


def test_s05_a_delta_of_another_version_is_refused(run_of: tuple[Path, States]) -> None:
    run, states = run_of
    manifests = {n: Manifest.model_validate_json(manifest_of(run, n).read_bytes()) for n in (2, 3)}
    wrong = manifests[3].way
    right = manifests[2].way
    (file,) = right.files
    data = run / wrong.files[0].key
    (run / file.key).write_bytes(data.read_bytes())
    moved = file.model_copy(update={"sha256": wrong.files[0].sha256, "bytes": wrong.files[0].bytes})
    rewrite(run, 2, way=right.model_copy(update={"files": (moved,)}))
    reader = reader_of(run, at=states[1])
    with pytest.raises(DeltaSyncError, match="where the manifests have"):
        reader.receiver.fetch(2, timeout_s=10)
    assert reader.holds(states[1])


def test_s08_a_size_beyond_measure_takes_no_memory(run_of: tuple[Path, States]) -> None:
    run, states = run_of
    manifest = Manifest.model_validate_json(manifest_of(run, 2).read_bytes())
    way = manifest.way
    huge = way.files[0].model_copy(update={"bytes": 1 << 52})
    rewrite(run, 2, way=way.model_copy(update={"files": (huge,)}))
    reader = reader_of(run, at=states[1])
    with pytest.raises(ObjectDamaged, match="bytes are expected"):
        reader.receiver.fetch(2, timeout_s=10)
    assert reader.holds(states[1])


def test_an_anchor_that_is_no_checkpoint_is_passed_by(run_of: tuple[Path, States]) -> None:
    run, _ = run_of
    path = objects(run, 1, "anchor")[0]
    path.write_bytes(b"x" * 100)
    manifest = Manifest.model_validate_json(manifest_of(run, 1).read_bytes())
    way = manifest.way
    false = way.files[0].model_copy(
        update={"bytes": 100, "sha256": hashlib.sha256(b"x" * 100).hexdigest()}
    )
    rewrite(run, 1, way=way.model_copy(update={"files": (false,)}))
    reader = reader_of(run)
    with pytest.raises(ObjectDamaged, match="no checkpoint"):
        reader.receiver.fetch(2, timeout_s=10)
    assert not reader.receiver.is_dirty


def test_s01_another_run_is_not_followed(run_of: tuple[Path, States]) -> None:
    run, _ = run_of
    other = run.parent / "other"
    shutil.copytree(run, other)
    reader = Follower(local_place(run.parent))
    receiver = StoreReceiver(reader.receiver._weights.target, run.parent, run="other")
    with pytest.raises((RunUnknown, ManifestInvalid)):
        receiver.fetch(timeout_s=0)


def test_s09_keys_must_agree(tmp_path: Path) -> None:
    place = local_place(tmp_path / "store")
    signed = Place(place.url, StoreOptions(mac_key=SecretBytes(b"key")), place.folder)
    trainer = Publisher(signed)
    trainer.publish(2)
    wrong = Follower(Place(place.url, StoreOptions(mac_key=SecretBytes(b"other"))))
    with pytest.raises(MacMismatch):
        wrong.receiver.fetch(timeout_s=0)
    right = Follower(signed)
    assert right.receiver.fetch(timeout_s=10) == 2
    rewrite(tmp_path / "store" / RUN, 2, nnz=1)
    with pytest.raises(MacMismatch):
        Follower(signed).receiver.fetch(2, timeout_s=0)
    without = Follower(place)
    assert without.receiver.fetch(timeout_s=10) == 2, "without a key none is asked for"


def test_s09_an_unsigned_store_is_refused_with_a_key(run_of: tuple[Path, States]) -> None:
    run, _ = run_of
    reader = Follower(Place(str(run.parent), StoreOptions(mac_key=SecretBytes(b"key"))))
    with pytest.raises(MacMismatch, match="not signed"):
        reader.receiver.fetch(timeout_s=0)


def test_a_store_that_goes_away_leaves_the_old_version() -> None:
    with s3_server() as endpoint:
        place = s3_place(endpoint, timeout_s=1.0, retries=0, retry_timeout_s=1.0)
        trainer = Publisher(place)
        trainer.publish(2)
        reader = Follower(place)
        reader.receiver.fetch(1, timeout_s=10)
    with pytest.raises(StoreUnavailable):
        reader.receiver.fetch(timeout_s=0.1)
    assert reader.holds(trainer.states[1])
    assert not reader.receiver.is_dirty
    assert reader.receiver.version == 1


def test_a_timeout_leaves_the_old_version(run_of: tuple[Path, States]) -> None:
    run, states = run_of
    reader = reader_of(run, at=states[1])
    with pytest.raises(VersionMissing):
        reader.receiver.fetch(7, timeout_s=0)
    reader.receiver.progress.advanced = lambda _: reader.receiver.break_off()
    with pytest.raises(TransportTimeout, match="goes on from there"):
        reader.receiver.fetch(6, timeout_s=0)
    reader.receiver.progress.advanced = lambda _: None
    assert reader.holds(states[1])
    assert reader.receiver.fetch(6, timeout_s=10) == 6


def test_what_vanishes_while_it_is_fetched_is_missed_not_mixed(
    run_of: tuple[Path, States],
) -> None:
    run, states = run_of
    reader = reader_of(run, at=states[1])
    stopped = threading.Event()

    def delete() -> None:
        for path in sorted(run.glob("objects/*delta*")):
            time.sleep(0.01)
            path.unlink()
        stopped.set()

    thread = threading.Thread(target=delete)
    thread.start()
    held = 1
    while not stopped.is_set():
        for to in (3, 6, 1, 5):
            with contextlib.suppress(ObjectDamaged, VersionMissing):
                held = reader.receiver.fetch(to, timeout_s=10)
            assert reader.holds(states[held])
    thread.join()
    assert reader.receiver.fetch(4, timeout_s=10) == 4


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_altered_the_weights_are_a_version_or_nothing_was_written(
    made: tuple[Path, States], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any few bytes of any objects of a store."""
    folder = tmp_path_factory.mktemp("altered") / "store"
    shutil.copytree(made[0], folder)
    states, run = made[1], folder / RUN
    files = sorted(path for path in run.rglob("*") if path.is_file())
    contents = {path: path.read_bytes() for path in files}
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=4, unique=True)):
        content = bytearray(contents[path])
        match data.draw(st.sampled_from(["flip", "cut", "delete", "swap"])):
            case "flip":
                content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(
                    st.integers(1, 255)
                )
                path.write_bytes(content)
            case "cut":
                path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
            case "delete":
                path.unlink()
            case "swap":
                path.write_bytes(contents[data.draw(st.sampled_from(files))])
    start = data.draw(st.sampled_from([1, 3, 5]))
    reader = reader_of(run, at=states[start])
    to = data.draw(st.integers(1, 6))
    try:
        assert reader.receiver.fetch(to, timeout_s=0.5) == to
    except DeltaSyncError:
        assert reader.holds(states[start])
    else:
        assert reader.holds(states[to])
    assert not reader.receiver.is_dirty
    reader.receiver.close()
    shutil.rmtree(folder)


# Ranks that hold parts


@pytest.fixture(params=["none", "gap"])
def parts(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, list[Model]]:
    """A run of 4 versions for an engine of two ranks, and the trainer's models."""
    source = random_model(SHAPES, 0)
    generator = torch.Generator().manual_seed(0)
    sender = StoreSender(
        ModuleSource(source),
        tmp_path / "store",
        options=SenderOptions(
            stream_id=RUN, wire_dtypes={"*": "bfloat16"}, compression=request.param
        ),
    )
    models = []
    for number in range(4):
        if number:
            step(source, generator, 0.2)
        sender.publish()
        copy = random_model(SHAPES, 0)
        copy.load_state_dict(source.state_dict())
        models.append(copy)
    return tmp_path / "store" / RUN, models


def rank_reader(run: Path, rank: int) -> tuple[Rank, StoreReceiver]:
    model = Rank(rank)
    return model, StoreReceiver(RoutedTarget(model, CHECKPOINT), run, rank=rank, world=2)


def test_ranks_that_hold_parts_arrive_at_the_same_version(
    parts: tuple[Path, list[Model]],
) -> None:
    run, models = parts
    for rank in range(2):
        model, receiver = rank_reader(run, rank)
        for to in (2, 4, 3):
            assert receiver.stage(to, timeout_s=10)
            assert receiver.commit() == to
            assert bits_equal(model, rank_of(models[to - 1], rank))


def number_of(run: Path, name: str) -> int:
    manifest = Manifest.model_validate_json(manifest_of(run, 1).read_bytes())
    layout = Run.open(run).layout(manifest.layout_hash)
    return [spec.name for spec in layout].index(name)


def forget(run: Path, version: int, number: int) -> None:
    """Write the delta of a version anew, without the rows of a parameter."""
    manifest = Manifest.model_validate_json(manifest_of(run, version).read_bytes())
    way = manifest.way
    path = run / way.files[0].key
    (anchor,) = run.glob(f"objects/{version - 1:016}-anchor-*")
    layout = Run.open(run).layout(manifest.layout_hash)
    deltas = MergedDeltas(layout, flats_of(Checkpoint(anchor), layout))
    deltas.take(FrameFile(path))
    del deltas._deltas[number]
    path.unlink()
    before = Manifest.model_validate_json(manifest_of(run, version - 1).read_bytes())
    plan = deltas.plan(base_version=version - 1, digest=int(manifest.digest, 16))
    digest = int(before.digest, 16)
    write_frames(one_way_frames(plan, layout, stream_id=RUN, version=version, digest=digest), path)
    data = path.read_bytes()
    update = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    file = way.files[0].model_copy(update=update)
    rewrite(run, version, way=way.model_copy(update={"files": (file,)}))


@pytest.mark.parametrize(
    ("name", "why"), [("q", "brings no bytes for it"), ("kv", "would not be what")]
)
def test_a_change_without_bytes_is_refused_by_a_rank_that_holds_it(
    parts: tuple[Path, list[Model]], name: str, why: str
) -> None:
    run, models = parts
    model, receiver = rank_reader(run, 0)
    receiver.fetch(1, timeout_s=10)
    forget(run, 2, number_of(run, name))
    with pytest.raises(DigestMismatch, match=why):
        receiver.fetch(2, timeout_s=10)
    assert bits_equal(model, rank_of(models[0], 0))
    assert not receiver.is_dirty


def test_a_change_without_bytes_matters_to_no_rank_without_it(
    parts: tuple[Path, list[Model]],
) -> None:
    run, models = parts
    model, receiver = rank_reader(run, 0)
    receiver.fetch(1, timeout_s=10)
    forget(run, 2, number_of(run, "last"))
    assert receiver.fetch(2, timeout_s=10) == 2
    assert bits_equal(model, rank_of(models[1], 0))
