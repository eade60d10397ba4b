"""Commands without descriptors, memory, or room for what they write: one line, nothing left."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.cli.command import COMMAND, call, run
from tests.files.saved import model, save, save_sharded, stepped

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, the first also as a folder that has others in it, and a patch."""
    old = {**model(), "large": torch.zeros(4 * MIB, dtype=torch.uint8)}
    new = {**stepped(model()), "large": torch.ones(4 * MIB, dtype=torch.uint8)}
    save(old, tmp_path / "old"), save(new, tmp_path / "new")
    (save_sharded(old, tmp_path / "folder") / "one/two").mkdir(parents=True)
    (tmp_path / "folder/one/two/notes").write_text("kept")
    (tmp_path / "was").write_text("kept")
    assert call("diff", *pair(tmp_path), "--out", tmp_path / "patch").returncode == 0
    return tmp_path


def pair(folder: Path) -> list[Path]:
    return [folder / "old", folder / "new"]


def check(folder: Path, kind: int, limits: Iterable[int]) -> set[str]:
    """Run what reads and writes files under each limit. Returns the lines that they wrote."""
    there, lines = set(folder.rglob("*")), set()
    commands: list[tuple[set[int], list[str | Path]]] = [
        ({0}, ["diff", *pair(folder), "--out", folder / "made"]),
        ({0}, ["apply", folder / "patch", folder / "old", "--out", folder / "made"]),
        ({0}, ["apply", folder / "patch", folder / "folder", "--out", folder / "made"]),
        ({1}, ["verify", *pair(folder)]),
    ]
    for codes, words in commands:
        for limit in limits:
            done = call(*words, limits={kind: limit})
            if kind == resource.RLIMIT_AS and done.returncode == -signal.SIGABRT:
                continue  # libraries in C++ and Rust abort where an allocation fails
            assert done.returncode in codes | {2}, (words, limit, done.stderr)
            if done.returncode == 2:
                assert set(folder.rglob("*")) == there, (words, limit)
                (line,) = done.stderr.splitlines()
                lines.add(line)
            else:
                run("rm", "-rf", folder / "made")
    return lines


def test_a_lack_of_descriptors(folder: Path) -> None:
    lines = check(folder, resource.RLIMIT_NOFILE, range(3, 16))
    assert lines
    assert all("Too many open files" in line for line in lines), lines


def test_a_lack_of_memory(folder: Path) -> None:
    lines = check(folder, resource.RLIMIT_AS, [n * MIB for n in (0, 1, 2, 4, 8, 16, 32, 64)])
    assert lines
    assert all("memory" in line.lower() for line in lines), lines


def test_a_disk_that_is_full(folder: Path) -> None:
    lines = check(folder, resource.RLIMIT_FSIZE, [200, MIB, 3 * MIB])
    assert lines
    assert all("File too large" in line for line in lines), lines


def test_a_lack_of_memory_that_python_itself_trips_over() -> None:
    """It shows under a limit once in many runs."""
    failing = (
        "import sys\n"
        "class Failing:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'deltasync.cli.app':\n"
        "            raise SystemError('error return without exception set')\n"
        "sys.meta_path.insert(0, Failing())\n"
        "from deltasync.cli import main\n"
        "main()"
    )
    done = run(sys.executable, "-c", failing, "doctor")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("error return without exception set; not enough memory")


@pytest.mark.parametrize(
    ("words", "code"), [("--nonsense", 2), ("verify gone", 2), ("verify gone gone", 70)]
)
def test_stderr_that_cannot_be_written_changes_no_code(words: str, code: int) -> None:
    plant = "from deltasync.files import checkpoint; checkpoint.Checkpoint = lambda _: [][1]"
    start = f"{COMMAND[0]} -c '{plant}; from deltasync.cli import main; main()'"
    assert run("bash", "-c", f"{start} {words} 2>/dev/full").returncode == code
