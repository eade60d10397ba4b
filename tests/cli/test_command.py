"""What all commands share: help, version, completion, Ctrl-C at any moment, readers that leave."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import deltasync
from deltasync.cli import COMMANDS
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.patch_file import PatchFile
from deltasync.observe.run_log import RunLog
from tests.cli.command import COMMAND, ENVIRONMENT, call, hearing_signals, run
from tests.files.saved import model, save, stepped
from tests.observe.made import sync
from tests.worlds.published import Publisher
from tests.worlds.stores import local_place

HELP_CPU_S = 0.4


def test_help_costs_no_torch() -> None:
    code = (
        "import sys, time; sys.argv = ['deltasync', '--help']\n"
        "from deltasync.cli import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, time.process_time())"
    )
    outs = [run(sys.executable, "-c", code).stdout.split()[-2:] for _ in range(3)]
    assert {loaded for loaded, _ in outs} == {"False"}
    assert min(float(seconds) for _, seconds in outs) < HELP_CPU_S


def test_version() -> None:
    done = run(*COMMAND, "--version")
    assert (done.returncode, done.stdout) == (0, f"deltasync {deltasync.__version__}\n")


@pytest.mark.parametrize(
    ("words", "offered"),
    [("deltasync d", {"demo", "diff", "doctor"}), ("deltasync verify --d", {"--digest"})],
)
def test_completion(words: str, offered: set[str]) -> None:
    done = run(
        *COMMAND,
        _DELTASYNC_COMPLETE="complete_bash",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split()) - 1),
    )
    assert set(done.stdout.split()) == offered


@pytest.mark.parametrize("words", [["--help"], ["diff", "--help"], ["--version"]])
def test_a_reader_of_help_that_leaves(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, *words],
        env=ENVIRONMENT,
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=100,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.fixture(scope="module")
def takes_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """How long a command takes that does little beyond its imports."""
    folder = tmp_path_factory.mktemp("takes")
    old = save(model(), folder / "old.safetensors")
    began = time.monotonic()
    assert run(*COMMAND, "verify", old, old).returncode == 0
    return time.monotonic() - began


@pytest.mark.parametrize(("turn", "name"), list(enumerate(COMMANDS)))
def test_ctrl_c_at_any_moment_ends_quietly(
    turn: int, name: str, takes_s: float, tmp_path: Path
) -> None:
    """Another moment for each command: what they share handles it."""
    old = save(model(), tmp_path / "old.safetensors")
    new = save(stepped(model()), tmp_path / "new.safetensors")
    words: dict[str, list[str | Path]] = {
        "apply": [tmp_path / "patch", old, "--out", tmp_path / "made"],
        "demo": ["--quick", "--steps", "100000"],
        "diff": [old, new, "--out", tmp_path / "out"],
        "doctor": [],
        "export": [f"shared_memory:{tmp_path}/none", "--out", tmp_path / "out"],
        "fetch": [tmp_path / "store", "--out", tmp_path / "out"],
        "gc": [tmp_path / "store"],
        "log": [tmp_path / "store"],
        "report": [tmp_path / "log", "--out", tmp_path / "page"],
        "verify": [old, new],
    }
    with RunLog(tmp_path / "log") as log:
        log(sync())
    assert call("diff", old, new, "--out", tmp_path / "patch").returncode == 0
    Publisher(local_place(tmp_path / "store")).publish(2)
    there = set(tmp_path.iterdir())
    moment = 1.5 * takes_s * (turn + random.random()) / len(COMMANDS)
    interrupted(name, words[name], moment, there, tmp_path)


def handles_signals(process: int) -> bool:
    """Whether it has come to `handle_signals`, which ends with those that Python leaves alone."""
    (caught,) = re.findall(r"^SigCgt:\t(\w+)$", Path(f"/proc/{process}/status").read_text(), re.M)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def interrupted(
    name: str, words: list[str | Path], after_s: float, there: set[Path], folder: Path
) -> None:
    """Ctrl-C in a terminal reaches all processes."""
    with hearing_signals():
        process = subprocess.Popen(
            [*COMMAND, name, *words],
            env=ENVIRONMENT | {"TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    time.sleep(after_s)
    already = process.poll()
    python_starts = already is None and not handles_signals(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    if not python_starts:  # it prints a traceback of its own
        assert "Traceback" not in errors
        assert "KeyboardInterrupt" not in errors
    if already is None and process.returncode not in (0, 1):
        assert process.returncode in (130, -signal.SIGINT)
    for made in set(folder.iterdir()) - there:
        # What was asked for may be whole already, and torch keeps a folder of its own.
        assert made.name in ("made", "out", "page") or made.name.startswith("torchinductor")
        if made.name == "page":
            assert made.read_text(encoding="utf-8").rstrip().endswith("</html>")
            made.unlink()
        elif made.is_file():
            Checkpoint(made) if made.name == "made" else PatchFile(made)
            made.unlink()
        elif made.name == "out":
            Checkpoint(made)
            shutil.rmtree(made)
