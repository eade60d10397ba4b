"""Readers and all others killed at any moment, and what they leave behind."""

from __future__ import annotations

import gc
import json
import os
import random
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from benchmarks.__main__ import app
from deltasync.delta.bits import as_bits
from deltasync.store.scratch import ScratchFolder
from deltasync.testing.processes import Child
from tests.descriptors import open_below, open_links
from tests.store.test_misuse import forked
from tests.worlds.programs import Program
from tests.worlds.published import Follower, Publisher
from tests.worlds.stores import Place, local_place, s3_place

NUMEL = 20_000
READER = """
import sys, torch
from pathlib import Path
from torch import nn
from deltasync import ModuleTarget, ReceiverOptions
from deltasync.store.receiver import StoreReceiver
folder = Path(sys.argv[1])
model = nn.Module()
live = torch.from_file(str(folder / "weights"), shared=True, size={numel}, dtype=torch.bfloat16)
model.register_parameter("w", nn.Parameter(live, requires_grad=False))
options = ReceiverOptions(max_staged_bytes=1 << 30)
receiver = StoreReceiver(ModuleTarget(model), folder / "store", options=options, spool=folder)
print("ready", flush=True)
to = 1
while True:
    if receiver.stage(to, timeout_s=60):
        (folder / "committing").touch()
        receiver.commit()
        (folder / "committing").unlink()
    to = to % 6 + 1
""".replace("{numel}", str(NUMEL))


def test_a_reader_that_is_killed_leaves_a_version(tmp_path: Path) -> None:
    """Unless it was being written."""
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.zeros(NUMEL).bfloat16()))

    def step(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("w")[torch.rand(NUMEL) < 0.05] += 1

    trainer = Publisher(local_place(tmp_path / "store"), anchor_every=3, model=model)
    trainer.publish(6, step=step)
    (tmp_path / "weights").write_bytes(bytes(2 * NUMEL))
    versions = [as_bits(state["w"]) for state in trainer.states.values()]
    seed = random.randrange(1 << 30)
    chance, in_commit = random.Random(seed), 0
    for _ in range(5):
        with Program(READER, tmp_path) as process:
            assert process.stdout.readline() == "ready\n", seed
            time.sleep(chance.random() * 0.5)
            process.kill()
        if (tmp_path / "committing").exists():
            (tmp_path / "committing").unlink()
            in_commit += 1
            continue
        assert any(torch.equal(live(tmp_path), one) for one in versions), seed
    assert in_commit < 5, "killed while committing every time: nothing was shown"


def live(folder: Path) -> Tensor:
    return torch.frombuffer(bytearray((folder / "weights").read_bytes()), dtype=torch.int16)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "versions"), [("local", 60), ("s3", 20)])
def test_a_store_survives_the_death_of_all_who_use_it(
    kind: str, versions: int, request: pytest.FixtureRequest
) -> None:
    """Writers, readers and collectors; every version and leftover is checked."""
    options = ["--versions", str(versions), "--seed", "1"]
    if kind == "s3":
        place: Place = s3_place(request.getfixturevalue("s3"))
        options += ["--url", place.url]
        options += [f"--config={key}={value}" for key, value in place.options.config.items()]
    done = CliRunner().invoke(app, ["store-chaos", *options])
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failures"] == []
    assert done.exit_code == 0, done.output
    assert (found["versions"], found["store"]) == (versions, kind.replace("local", "folder"))
    assert kind == "s3" or found["kills"]["writer"] > 0


def test_files_are_closed_as_soon_as_a_version_is_written(tmp_path: Path) -> None:
    """In a process of its own, where no other test has files or opens any meanwhile."""
    with Child(follow, tmp_path / "store") as child:
        child.wait(timeout_s=90)


def follow(folder: Path) -> None:
    """Not when cycles are collected."""
    gc.disable()
    trainer = Publisher(local_place(folder), anchor_every=4)
    trainer.publish()
    numbers = set()
    for seed in range(4):
        trainer.publish(3)
        with Follower(trainer.place, seed=seed) as reader:
            reader.fetch()
            trainer.publish(2)
            assert reader.holds(trainer.states[reader.fetch()])
        numbers.add(len(open_links()))
        mapped = Path("/proc/self/maps").read_text().splitlines()
        assert not [name for name in open_links() + mapped if "deltasync-fetched" in name]
    assert len(numbers) == 1


# Folders for what is fetched

HOLDER = """
import sys
from deltasync.store.scratch import ScratchFolder
folder = ScratchFolder(sys.argv[1])
(folder.path / "file").write_bytes(bytes(10))
print(folder.path, flush=True)
import time
time.sleep(100)
"""


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_folder_belongs_to_one_process_and_then_to_the_next(tmp_path: Path) -> None:
    with Program(HOLDER, tmp_path) as process:
        theirs = Path(process.stdout.readline().strip())
        first = ScratchFolder(tmp_path)
        assert first.path != theirs
        assert (theirs / "file").exists()
        process.kill()
    second = ScratchFolder(tmp_path)
    assert second.path == theirs
    forked(second.close)
    assert all(folder.path.exists() for folder in (first, second))
    for folder in (first, second) * 2:
        folder.close()
    assert (list(tmp_path.iterdir()), open_below(tmp_path)) == ([], [])


def test_each_of_several_finds_what_one_of_them_has_left(tmp_path: Path) -> None:
    """And removes what is a day old, but nothing that is not its own."""
    others = [tmp_path / "deltasync-other", tmp_path / "else" / "deltasync-fetched-any-a"]
    for path in others:
        path.mkdir(parents=True)
    (tmp_path / "deltasync-fetched-any-link").symlink_to(others[1])
    (tmp_path / "deltasync-fetched-any-file").touch()
    before = set(tmp_path.iterdir())
    left = [ScratchFolder(tmp_path, label) for label in ("label", "label", "label", "other")]
    for folder in left:
        (folder.path / "file").touch()
    for folder in left:
        folder.close()
    found = [ScratchFolder(tmp_path, "label") for _ in range(2)]
    paths = {folder.path for folder in found}
    [rest] = {folder.path for folder in left[:3]} - paths
    yesterday = time.time() - 25 * 3600
    for path in (rest, found[0].path):
        os.utime(path, (yesterday, yesterday))
    ScratchFolder(tmp_path).close()
    assert set(tmp_path.iterdir()) == before | paths | {left[3].path}
    for folder in found:
        folder.close()
