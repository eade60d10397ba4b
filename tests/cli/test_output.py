"""What commands write leaves everything alone that is no regular file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from deltasync.errors import ConfigError
from deltasync.observe.run_log import RunLog
from tests.cli.command import call, refused, run_forked
from tests.files.saved import model, save, stepped
from tests.worlds.published import Publisher
from tests.worlds.stores import local_place


def _link(path: Path) -> None:
    path.with_name("other").write_text("mine")
    path.symlink_to("other")


def _device(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root makes devices")
    os.mknod(path, 0o640 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "link": _link,
    "dangling link": lambda path: path.symlink_to("none"),
}


def state(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """What lies there: inode, kind and permissions, content."""
    found = {}
    for path in folder.iterdir():
        facts = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(facts.st_mode) else b""
        found[path.name] = facts.st_ino, facts.st_mode, data
    return found


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    with RunLog(path):
        pass
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_takes_the_place_of_nothing_but_a_file(log: Path, kind: str) -> None:
    out = log.with_name("there")
    KINDS[kind](out)
    before = state(log.parent)
    said = refused("report", log, "--out", out)
    assert str(out) in said
    if kind == "folder":
        assert "is not a regular file: choose another name" in said
    assert state(log.parent) == before


def test_a_device_is_written_into_and_stays(log: Path) -> None:
    out = log.with_name("there")
    _device(out)
    before = state(log.parent)
    assert call("report", log, "--out", out).returncode == 0
    assert state(log.parent) == before


def test_a_link_to_standard_output_is_written_into_and_stays(log: Path) -> None:
    """Which is a pipe that is read."""
    out = log.with_name("there")
    out.symlink_to("/dev/stdout")
    before = state(log.parent)
    done = run_forked("report", log, "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("<!doctype html>")
    assert state(log.parent) == before


def test_what_is_made_anew_takes_the_place_of_nothing(tmp_path: Path) -> None:
    old = save(model(), tmp_path / "old.safetensors")
    new = save(stepped(model()), tmp_path / "new.safetensors")
    assert call("diff", old, new, "--out", tmp_path / "patch").returncode == 0
    Publisher(local_place(tmp_path / "store")).publish(1)
    for kind, make in (KINDS | {"file": Path.touch}).items():
        make(tmp_path / kind)
    before = {name: found for name, found in state(tmp_path).items() if name != "store"}
    commands: dict[str, tuple[str | Path, ...]] = {
        "dangling link": ("diff", old, new),
        "file": ("apply", tmp_path / "patch", old),
        "link": ("fetch", tmp_path / "store"),
    }
    for kind, words in commands.items():
        out = tmp_path / kind
        assert f"{out} exists" in refused(*words, "--out", out)
    assert before.items() <= state(tmp_path).items()
    assert len(before) + 1 == len(state(tmp_path))


def test_a_run_log_is_continued_through_a_link_and_is_no_pipe(log: Path) -> None:
    linked = log.with_name("latest")
    linked.symlink_to(log.name)
    with RunLog(linked):
        pass
    assert len(log.read_text().splitlines()) == 2
    os.mkfifo(log.with_name("pipe"))
    with pytest.raises(ConfigError, match="is not a regular file: give"):
        RunLog(log.with_name("pipe"))
