"""What all commands share: help, exit codes, signals at any moment, readers that leave, limits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deltasync.cli import COMMANDS
from deltasync.observe.run_log import RunLog
from tests.cli.command import COMMAND, ENVIRONMENT, call, run, run_forked
from tests.files.saved import model, save, save_sharded, stepped
from tests.observe.made import sync


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, the first also as a folder that has others in it, a patch, a run log."""
    save(model(), tmp_path / "old"), save(stepped(model()), tmp_path / "new")
    save_sharded(model(), tmp_path / "folder")
    with RunLog(tmp_path / "log") as log:
        log(sync())
    made = call("diff", tmp_path / "old", tmp_path / "new", "--out", tmp_path / "patch")
    assert made.returncode == 0
    return tmp_path


def test_help_fits_a_terminal_and_costs_no_torch() -> None:
    code = (
        "import sys\nfrom deltasync.cli import main\n"
        "try: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = run(sys.executable, "-c", code, "--help", COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "False\n")
    listed = done.stdout.partition("Commands:\n")[2]
    assert set(re.findall(r"^  (\w+)  ", listed, re.MULTILINE)) == set(COMMANDS)
    assert "..." not in listed
    for name in COMMANDS:
        done = call(name, "--help")
        assert done.returncode == 0
        usage, _, rest = done.stdout.partition("\n")
        assert "list[" not in rest
        assert not re.search(r"\[\[|\{[a-z]|\[[a-z]", usage), usage


@pytest.mark.parametrize(
    ("module", "words", "install"),
    [
        ("safetensors", ["verify", "old", "old"], "safetensors"),
        ("matplotlib", ["report", "log"], "matplotlib"),
    ],
)
def test_what_is_not_installed_is_named(
    module: str, words: list[str], install: str, folder: Path
) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from deltasync.cli import main; main()"
    paths = [folder / word if (folder / word).exists() else word for word in words]
    done = run(sys.executable, "-c", code, *paths)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"pip install {install}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--lr", "nan"], "--lr"),
        (["demo", "--out", __file__], "File exists"),
        (["fetch", "a", "--to", "0", "--out", "b"], "--to"),
        (["demo", "--nonsense"], "--nonsense"),
        (["verify", "--\x1b[2J", "x"], "--\\x1b[2J"),
        (["nonsense"], "nonsense"),
        ([], "command"),
    ],
)
def test_bad_options_get_one_line(arguments: list[str], said: str) -> None:
    done = call(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert said in line


@pytest.mark.parametrize("words", [["--help"], ["verify", "old", "old"]])
def test_a_reader_that_leaves_ends_it_quietly(words: list[str], folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, *words],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=100,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_output_that_cannot_be_written(folder: Path) -> None:
    """On a full disk, or where a daemon has closed stdout."""
    command = " ".join([*COMMAND, "verify", str(folder / "old"), str(folder / "old")])
    done = run("sh", "-c", f"{command} >/dev/full")
    assert done.returncode == 2
    assert re.fullmatch(r".*No space left.*\n", done.stderr)
    done = run("sh", "-c", f"{command} >&-")
    assert (done.returncode, done.stderr) == (0, "")


def apply_with(change: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`deltasync apply`, of which something was changed."""
    code = (
        f"import os; from deltasync.files import checkpoint, output\n{change}\n"
        "from deltasync.cli import main; main()"
    )
    words = "apply", folder / "patch", folder / "folder", "--out", folder / "made"
    return run_forked(*words, code=code)


def test_an_internal_error_has_a_code_of_its_own(folder: Path) -> None:
    done = apply_with("checkpoint.Checkpoint.flush = lambda *_: [][1]", folder)
    assert (done.returncode, done.stdout) == (70, "")
    assert done.stderr.splitlines()[-1] == "IndexError: list index out of range"
    assert not (folder / "made").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_signals_leave_nothing(number: int, code: int, folder: Path) -> None:
    """Also a second one, while the first is cleaned up; a second Ctrl-C is meant to."""
    there = set(folder.iterdir())
    change = f"""
kill, remove = lambda *_: os.kill(os.getpid(), {number}), output._remove
checkpoint.Checkpoint.flush = kill
again = lambda: kill() if {number != signal.SIGINT} else None
output._remove = lambda folder: (again(), remove(folder))
"""
    done = apply_with(change, folder)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    assert set(folder.iterdir()) == there
