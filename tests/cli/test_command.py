"""What all commands share: help, exit codes, signals at any moment, readers that leave, limits."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from deltasync.cli import COMMANDS
from deltasync.files.checkpoint import Checkpoint
from deltasync.observe.run_log import RunLog
from tests.cli.command import COMMAND, ENVIRONMENT, call, run, run_forked
from tests.files.saved import model, save, save_sharded, stepped
from tests.observe.made import sync

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, the first also as a folder that has others in it, a patch, a run log."""
    old = {**model(), "large": torch.zeros(4 * MIB, dtype=torch.uint8)}
    new = {**stepped(model()), "large": torch.ones(4 * MIB, dtype=torch.uint8)}
    save(old, tmp_path / "old"), save(new, tmp_path / "new")
    (save_sharded(old, tmp_path / "folder") / "one/two").mkdir(parents=True)
    (tmp_path / "folder/one/two/notes").write_text("kept")
    with RunLog(tmp_path / "log") as log:
        log(sync())
    made = call("diff", tmp_path / "old", tmp_path / "new", "--out", tmp_path / "patch")
    assert made.returncode == 0
    return tmp_path


def apply(folder: Path, base: str = "folder") -> list[str | Path]:
    return ["apply", folder / "patch", folder / base, "--out", folder / "made"]


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
        ("typer", ["--help"], "typer rich"),
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
        (["demo", "--steps", "0"], "--steps"),
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


@pytest.mark.parametrize(
    "words", [["--help"], ["diff", "--help"], ["diff", "old", "new"], ["verify", "old", "old"]]
)
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
    """On a full disk, or where a daemon has closed stdout or filled stderr."""
    command = " ".join([*COMMAND, "verify", str(folder / "old"), str(folder / "old")])
    done = run("sh", "-c", f"{command} >/dev/full")
    assert done.returncode == 2
    assert re.fullmatch(r".*No space left.*\n", done.stderr)
    done = run("sh", "-c", f"{command} >&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert run("sh", "-c", f"{command} --nonsense 2>/dev/full").returncode == 2


def apply_with(change: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`deltasync apply`, of which something was changed."""
    code = (
        f"import os; from deltasync.files import checkpoint, output\n{change}\n"
        "from deltasync.cli import main; main()"
    )
    return run_forked(*apply(folder), code=code)


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


def test_an_interrupt_that_became_another_error_is_none(folder: Path) -> None:
    """As in C code, and while modules are imported."""
    change = """
def flush(*_):
    try:
        os.kill(os.getpid(), 2)
    except KeyboardInterrupt:
        raise ValueError("lost") from None
checkpoint.Checkpoint.flush = flush
"""
    done = apply_with(change, folder)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("turn", range(3))
def test_ctrl_c_at_any_moment_ends_quietly(turn: int, folder: Path) -> None:
    """In a terminal it reaches all processes."""
    there = set(folder.iterdir())
    old, began = folder / "old", time.monotonic()
    assert run(*COMMAND, "verify", old, old).returncode == 0
    takes_s = time.monotonic() - began
    process = subprocess.Popen(
        [*COMMAND, *apply(folder)],
        env=ENVIRONMENT,
        preexec_fn=hear_ctrl_c,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(1.2 * takes_s * (turn + random.random()) / 3)
    python_starts = process.poll() is None and not handles_signals(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    if not python_starts:  # it prints a traceback of its own
        assert "Traceback" not in errors
        assert process.returncode in (0, 130)
    for made in set(folder.iterdir()) - there:
        assert made.name == "made"
        Checkpoint(made)  # which is whole


def hear_ctrl_c() -> None:
    """As a shell's job in the foreground: those in the background ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def handles_signals(process: int) -> bool:
    """Whether it has come to `handle_signals`, which ends with those that Python leaves alone."""
    (caught,) = re.findall(r"^SigCgt:\t(\w+)$", Path(f"/proc/{process}/status").read_text(), re.M)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("kind", "limits", "said"),
    [
        (resource.RLIMIT_NOFILE, range(3, 16, 2), "too many open files"),
        (resource.RLIMIT_AS, [n * MIB for n in (0, 2, 8, 32)], "memory"),
        (resource.RLIMIT_FSIZE, [200, MIB, 3 * MIB], "file too large"),
    ],
    ids=["descriptors", "memory", "disk"],
)
def test_a_lack_of_something_is_one_line_and_leaves_nothing(
    kind: int, limits: Iterable[int], said: str, folder: Path
) -> None:
    there, lines = set(folder.rglob("*")), set()
    for limit in limits:
        done = call(*apply(folder, "folder"), limits={kind: limit})
        if kind == resource.RLIMIT_AS and done.returncode == -signal.SIGABRT:
            continue  # libraries in C++ and Rust abort where an allocation fails
        assert done.returncode in (0, 2), (limit, done.stderr)
        if done.returncode == 2:
            assert set(folder.rglob("*")) == there, limit
            (line,) = done.stderr.splitlines()
            lines.add(line)
        else:
            run("rm", "-rf", folder / "made")
    assert lines
    assert all(said in line.lower() for line in lines), lines
