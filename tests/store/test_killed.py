"""Readers and all others killed at any moment, and what they leave behind."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from deltasync.store.scratch import ScratchFolder
from deltasync.testing.processes import Child
from tests.descriptors import open_below, open_links
from tests.store.test_misuse import forked
from tests.worlds.programs import Program
from tests.worlds.published import Follower, Publisher
from tests.worlds.stores import local_place


@pytest.mark.slow
def test_a_store_survives_the_death_of_all_who_use_it() -> None:
    """Writers, readers and collectors; every version and leftover is checked."""
    done = CliRunner().invoke(app, ["store-chaos", "--versions", "20", "--seed", "1"])
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failures"] == []
    assert done.exit_code == 0, done.output
    assert (found["versions"], found["store"]) == (20, "folder")
    assert found["kills"]["writer"] > 0


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
    (tmp_path / "deltasync-other").mkdir()
    (tmp_path / "deltasync-fetched-any-link").symlink_to(tmp_path / "deltasync-other")
    before = set(tmp_path.iterdir())
    left = [ScratchFolder(tmp_path, label) for label in ("label", "label", "other")]
    for folder in left:
        (folder.path / "file").touch()
    for folder in left:
        folder.close()
    found = ScratchFolder(tmp_path, "label")
    [rest] = {folder.path for folder in left[:2]} - {found.path}
    yesterday = time.time() - 25 * 3600
    for path in (rest, found.path):
        os.utime(path, (yesterday, yesterday))
    ScratchFolder(tmp_path).close()
    assert set(tmp_path.iterdir()) == before | {found.path, left[2].path}
    found.close()
