"""Stores that fail and writers that die: what is published is right, the rest is not there."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch

from deltasync.errors import ObjectDamaged, StoreRefused, StoreUnavailable
from deltasync.store import keys
from deltasync.store.objects import Objects
from deltasync.store.retention import GcStats, gc
from deltasync.store.sender import StoreSender
from deltasync.testing.links import within
from tests.store.replay import assert_holds
from tests.store.test_sender import Model, run_of, sender_of, weights_of
from tests.worlds.faults import FAULTS, Faults, faulty
from tests.worlds.stores import Place, s3_place

ROOT = Path(__file__).parents[2]


@pytest.fixture
def broken(s3: str) -> Iterator[tuple[Place, Place, Faults]]:
    """A bucket as it is, the same through a proxy, and what the proxy does."""
    with faulty(s3) as (endpoint, faults):
        place = s3_place(s3)
        config = place.options.config | {"endpoint": endpoint}
        options = place.options.model_copy(
            update={"config": config, "timeout_s": 1.0, "retries": 4, "retry_timeout_s": 10.0}
        )
        yield place, Place(place.url, options), faults


@pytest.mark.slow
def test_versions_arrive_through_faults(
    broken: tuple[Place, Place, Faults], tmp_path: Path
) -> None:
    place, bad, faults = broken
    model = Model()
    sender = sender_of(model, bad, anchor_every=4)
    faults.at_random(7, 0.15)
    history = {}
    for number in range(12):
        try:
            stats = sender.publish()
        except (StoreUnavailable, StoreRefused):  # a conflict would be wrong
            continue
        history[stats.version] = weights_of(model)
        model.step(number)
    faults.choose = lambda method, path: None
    assert sum(faults.met.values()) > 10
    assert len(history) >= 6
    run = run_of(place)
    newest = run.newest()
    assert newest is not None
    assert newest.version >= max(history)
    for version, weights in history.items():
        assert_holds(run, version, weights, tmp_path / str(version))


@pytest.mark.parametrize("fault", FAULTS)
def test_s03_a_manifest_whose_answer_is_lost_is_no_conflict(
    broken: tuple[Place, Place, Faults], tmp_path: Path, fault: str
) -> None:
    place, bad, faults = broken
    model = Model()
    sender = sender_of(model, bad)
    sender.publish()
    seen: list[str] = []

    def once(method: str, path: str) -> str | None:
        if method == "PUT" and "/manifests/" in path and not seen:
            seen.append(path)
            return fault
        return None

    faults.choose = once
    model.step(1)
    assert sender.publish().version == 2
    assert len(seen) == 1
    assert_holds(run_of(place), 2, weights_of(model), tmp_path)


def _publish_in_vain(sender: StoreSender, faults: Faults, fault: str) -> None:
    """Publish, while this happens to requests that write or read manifests."""
    faults.choose = lambda method, path: (
        fault if "/manifests/" in path and method != "HEAD" else None
    )
    with pytest.raises(StoreUnavailable, match="try again"):
        sender.publish()
    faults.choose = lambda method, path: None


@pytest.mark.parametrize("arrives", [True, False])
def test_s03_the_next_call_finds_out_what_became_of_a_manifest(
    broken: tuple[Place, Place, Faults], tmp_path: Path, arrives: bool
) -> None:
    place, bad, faults = broken
    model = Model()
    sender = sender_of(model, bad)
    sender.publish()
    model.step(1)
    expected = weights_of(model)
    fault = "lost answer" if arrives else "lost request"
    _publish_in_vain(sender, faults, fault)
    assert run_of(place).versions() == ([1, 2] if arrives else [1])
    model.step(2)
    assert sender.publish().version == 3
    assert_holds(run_of(place), 2, expected, tmp_path / "2")
    assert_holds(run_of(place), 3, weights_of(model), tmp_path / "3")


def _collected(place: Place, **more: Any) -> GcStats:
    """What a collector does to whom nothing is too young."""
    return gc(place.url, "run", keep=99, keep_s=0, options=place.options, **more)


@pytest.mark.parametrize("arrives", [True, False])
def test_s03_objects_that_are_collected_before_their_manifest_is_known_are_not_named(
    broken: tuple[Place, Place, Faults], tmp_path: Path, arrives: bool
) -> None:
    place, bad, faults = broken
    model = Model()
    sender = sender_of(model, bad)
    sender.publish()
    model.step(1)
    fault = "lost answer" if arrives else "lost request"
    _publish_in_vain(sender, faults, fault)
    assert _collected(place).unfinished == (0 if arrives else 1)
    model.step(2)
    version = sender.publish().version
    assert version == (3 if arrives else 2)
    assert_holds(run_of(place), version, weights_of(model), tmp_path)
    assert _are_whole(place)


def test_s03_the_first_version_is_written_again_if_it_was_collected(
    broken: tuple[Place, Place, Faults], tmp_path: Path
) -> None:
    place, bad, faults = broken
    model = Model()
    sender = sender_of(model, bad)
    _publish_in_vain(sender, faults, "lost request")
    assert _collected(place).unfinished == 1
    assert sender.publish().kind == "anchor"
    assert_holds(run_of(place), 1, weights_of(model), tmp_path)
    assert _are_whole(place)


def test_s03_a_writer_that_slept_between_upload_and_manifest_publishes_nothing(
    broken: tuple[Place, Place, Faults], tmp_path: Path
) -> None:
    place, bad, faults = broken
    model = Model()
    sender = sender_of(model, bad)
    sender.publish()
    model.step(1)
    collected: list[int] = []
    asleep = Lock()

    def sleep(method: str, path: str) -> None:
        if method == "HEAD" and "-delta-" in path:
            with asleep:  # every request, and one collector
                if not collected:
                    collected.append(_collected(place).unfinished)

    faults.choose = sleep
    with pytest.raises(ObjectDamaged, match="publish again"):
        sender.publish()
    assert collected == [1]
    assert run_of(place).versions() == [1]
    assert sender.publish().version == 2
    assert_holds(run_of(place), 2, weights_of(model), tmp_path)
    assert _are_whole(place)


def test_s03_an_upload_that_was_altered_before_its_manifest_is_not_named(
    broken: tuple[Place, Place, Faults], tmp_path: Path
) -> None:
    place, bad, faults = broken
    model = Model()
    sender = sender_of(model, bad)
    sender.publish()
    model.step(1)
    altered: list[str] = []

    def alter(method: str, path: str) -> None:
        if method == "HEAD" and "-delta-" in path and not altered:
            altered.append(f"{keys.OBJECTS}/{path.rpartition('/')[2]}")
            run_of(place).objects.put(altered[0], b"half")

    faults.choose = alter
    with pytest.raises(ObjectDamaged, match="publish again"):
        sender.publish()
    assert run_of(place).versions() == [1]
    assert sender.publish().version == 2
    assert_holds(run_of(place), 2, weights_of(model), tmp_path)


def test_s03_an_upload_that_is_named_while_gc_runs_stays(
    broken: tuple[Place, Place, Faults], tmp_path: Path
) -> None:
    place, bad, faults = broken
    model = Model()
    sender = sender_of(model, bad)
    sender.publish()
    run_of(place).objects.put(keys.frames_key(1), b"half")  # which gc meets first
    model.step(1)
    _publish_in_vain(sender, faults, "lost request")
    _collected(place, advance=lambda objects: sender.publish() if sender.version == 1 else None)
    assert run_of(place).versions() == [1, 2, 3]
    assert_holds(run_of(place), 3, weights_of(model), tmp_path)
    assert _are_whole(place)


def _are_whole(place: Place) -> bool:
    """Whether all objects that manifests name are there."""
    run = run_of(place)
    ways = (way for version in run.versions() for way in run.ways(run.require(version)))
    return all(run.objects.head(file.key) for way in ways for file in way.files)


def test_s02_a_failed_upload_is_covered_by_the_next(
    broken: tuple[Place, Place, Faults], tmp_path: Path
) -> None:
    place, bad, faults = broken
    model = Model()
    sender = sender_of(model, bad)
    sender.publish()
    for number in range(2):
        model.step(number)
        faults.choose = lambda method, path: "error" if "-delta-" in path else None
        with pytest.raises(StoreUnavailable):
            sender.publish()
        assert run_of(place).versions() == [1]
    faults.choose = lambda method, path: None
    model.step(3)
    assert sender.publish().version == 2
    assert_holds(run_of(place), 2, weights_of(model), tmp_path)


def test_an_anchor_that_fails_comes_later(
    broken: tuple[Place, Place, Faults], tmp_path: Path
) -> None:
    place, bad, faults = broken
    model = Model()
    sender = sender_of(model, bad, anchor_every=1)
    sender.publish()
    faults.choose = lambda method, path: "error" if "-anchor-" in path else None
    model.step(1)
    stats = sender.publish()
    assert (stats.version, stats.anchor_bytes) == (2, 0)
    assert "StoreUnavailable" in stats.postponed
    faults.choose = lambda method, path: None
    model.step(2)
    stats = sender.publish()
    assert (stats.version, stats.postponed) == (3, "")
    assert stats.anchor_bytes > 0
    assert_holds(run_of(place), 3, weights_of(model), tmp_path)


def test_s08_an_anchor_that_is_collected_before_it_is_named_comes_later(
    broken: tuple[Place, Place, Faults],
) -> None:
    place, bad, faults = broken
    model = Model()
    sender = sender_of(model, bad, anchor_every=2)
    sender.publish()
    model.step(1)
    assert sender.publish().anchor_bytes == 0
    collected: list[str] = []

    def collect(method: str, path: str) -> None:
        if method == "HEAD" and "0003-anchor-" in path and not collected:
            collected.append(path)
            assert _collected(place).unfinished == 1

    faults.choose = collect
    model.step(2)
    stats = sender.publish()
    assert collected
    assert (stats.version, stats.anchor_bytes) == (3, 0)
    assert "ObjectDamaged" in stats.postponed
    model.step(3)
    assert sender.publish().anchor_bytes > 0
    assert _are_whole(place)


def test_a_store_that_never_answers_is_given_up(broken: tuple[Place, Place, Faults]) -> None:
    _, bad, faults = broken
    faults.slow_s, faults.choose = 100.0, lambda method, path: "slow"
    with within(90), pytest.raises(StoreUnavailable):
        Objects(bad.url, bad.options).get("a", max_bytes=1)


_WRITER = """
import sys, torch
from pathlib import Path
from torch import nn
from deltasync import ModuleSource
from deltasync.store.anchors import PublishOptions
from deltasync.store.sender import StoreSender
from deltasync.sync.options import SenderOptions
from deltasync.store.objects import StoreOptions
url, state = sys.argv[1], Path(sys.argv[2])
model = nn.Linear(256, 256, dtype=torch.bfloat16)
torch.manual_seed(int(sys.argv[3]))
sender = StoreSender(
    ModuleSource(model), url,
    options=SenderOptions(stream_id="run", compression="zstd"),
    store=StoreOptions.model_validate_json(sys.argv[4]),
    publishing=PublishOptions(anchor_every=7, anchor_file_bytes=60_000),
)
print("begun", flush=True)
while True:
    with torch.no_grad():
        model.weight.view(-1)[torch.randint(0, 65536, (200,))] += 1
    stats = sender.publish()
    torch.save(model.state_dict(), state / f"{stats.version}.tmp")
    (state / f"{stats.version}.tmp").rename(state / f"{stats.version}.pt")
    print(stats.version, flush=True)
"""


def _start(place: Place, state: Path, seed: int) -> subprocess.Popen[str]:
    options = place.options.model_dump_json(include={"config"})
    return subprocess.Popen(
        [sys.executable, "-c", _WRITER, place.url, str(state), str(seed), options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", ["local", "s3"], indirect=True)
def test_a_writer_is_killed_at_random_moments(place: Place, tmp_path: Path) -> None:
    state, chance = tmp_path / "state", random.Random(11)
    state.mkdir()
    for turn in range(8):
        process = _start(place, state, turn)
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said == "begun\n", process.communicate(timeout=30)
            time.sleep(chance.uniform(0.05, 0.9))
            assert process.poll() is None, process.communicate(timeout=30)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=30)
    run = run_of(place)
    versions = run.versions()
    assert versions == list(range(1, len(versions) + 1)), "a chain without gaps"
    newest = run.newest()
    assert newest is not None
    assert newest.version == versions[-1]
    known = sorted(int(path.stem) for path in state.glob("*.pt"))
    assert set(known) <= set(versions)
    assert len(known) > 8
    for version in chance.sample(known, 8):
        weights = torch.load(state / f"{version}.pt", weights_only=True)
        assert_holds(run, version, weights, tmp_path / f"replay{version}")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["local", "s3"], indirect=True)
def test_s02_s03_of_writers_at_once_one_goes_on(place: Place, tmp_path: Path) -> None:
    states = [tmp_path / str(number) for number in range(3)]
    for state in states:
        state.mkdir()
    writers = [_start(place, state, number) for number, state in enumerate(states)]
    try:
        deadline = time.monotonic() + 60
        while sum(writer.poll() is None for writer in writers) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        left = [writer for writer in writers if writer.poll() is None]
        time.sleep(1)
        assert all(writer.poll() is None for writer in left)
    finally:
        for writer in writers:
            writer.kill()
        ends = [writer.communicate(timeout=30) for writer in writers]
    assert sum("WriterConflict" in end[1] for end in ends) == 2
    run = run_of(place)
    versions = run.versions()
    assert versions == list(range(1, len(versions) + 1))
    claimed = [int(path.stem) for state in states for path in state.glob("*.pt")]
    assert len(claimed) == len(set(claimed)), "no version belongs to two writers"
    for state in states:
        for path in list(state.glob("*.pt"))[-2:]:
            weights = torch.load(path, weights_only=True)
            assert_holds(run, int(path.stem), weights, tmp_path / f"replay{path.stem}")
