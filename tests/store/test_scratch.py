"""Folders for what is fetched: none is left by processes that were killed, none is taken away."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltasync.store.scratch import ScratchFolder
from tests.descriptors import open_below
from tests.worlds.stores import wait_until

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys
from deltasync.store.scratch import ScratchFolder
folder = ScratchFolder(sys.argv[1])
(folder.path / "file").write_bytes(bytes(10))
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_is_kept_while_its_process_lives(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            assert process.stdout is not None
            theirs = Path(process.stdout.readline().strip())
            first = ScratchFolder(tmp_path)
            assert (theirs / "file").exists()
        finally:
            process.kill()
    second = ScratchFolder(tmp_path)
    assert not theirs.exists()
    assert first.path.exists()
    for folder in (first, second):
        folder.close()
        folder.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_the_folder_of_its_parent(tmp_path: Path) -> None:
    folder = ScratchFolder(tmp_path)
    child = os.fork()
    if child == 0:
        folder.close()
        os._exit(0)
    wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, timeout_s=60)
    assert folder.path.exists()
    folder.close()
    assert not folder.path.exists()


def test_only_folders_of_its_own_are_removed(tmp_path: Path) -> None:
    others = [tmp_path / "deltasync-other", tmp_path / "else" / "deltasync-fetched-a"]
    for other in others:
        other.mkdir(parents=True)
    link = tmp_path / "deltasync-fetched-link"
    link.symlink_to(others[1])
    file = tmp_path / "deltasync-fetched-file"
    file.touch()
    ScratchFolder(tmp_path).close()
    assert all(path.exists() for path in (*others, link, file))


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    for _ in range(5):
        folder = ScratchFolder(tmp_path)
        assert open_below(tmp_path) != []
        folder.close()
    assert open_below(tmp_path) == []


def test_a_parent_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        ScratchFolder(tmp_path / "missing")


def test_each_of_several_finds_what_one_of_them_has_left(tmp_path: Path) -> None:
    left = [ScratchFolder(tmp_path, "label") for _ in range(3)]
    for folder in (*left, other := ScratchFolder(tmp_path, "other")):
        (folder.path / "file").touch()
    for folder in (*left, other):
        folder.close()
    found = [ScratchFolder(tmp_path, "label") for _ in range(2)]
    [rest] = {folder.path for folder in left} - {folder.path for folder in found}
    yesterday = time.time() - 25 * 3600
    for path in (rest, found[0].path):
        os.utime(path, (yesterday, yesterday))
    ScratchFolder(tmp_path, "another").close()
    assert set(tmp_path.iterdir()) == {*(folder.path for folder in found), other.path}
    for folder in found:
        folder.close()
