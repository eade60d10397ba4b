"""Python programs in processes of their own, forked from where torch is imported already.

A fresh interpreter takes two seconds of a core for that. Apart from it, a program runs as in one:
it is `__main__`, and ends as programs do, with `atexit` and without waiting for daemon threads.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Self

from deltasync.testing.processes import free_port


class Program:
    """One program, alive at most as long as the `with` block."""

    def __init__(
        self,
        program: str | Path,
        *arguments: str | Path,
        folder: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start a script, or what `python -c` takes, in `folder` and with nothing to read."""
        self._words = [program, *arguments]
        self._outputs = TemporaryDirectory()
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_main,
            args=(
                program,
                list(map(str, arguments)),
                folder or Path.cwd(),
                os.environ | (environment or {}),
                Path(self._outputs.name),
            ),
        )
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._outputs.cleanup()

    def wait(self, *, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
        """Wait for the end; what the program wrote."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"it still runs after {timeout_s} s"
        texts = [Path(self._outputs.name, name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(self._words, self._process.exitcode, *texts)


def run(
    program: str | Path,
    *arguments: str | Path,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a `Program` to its end."""
    with Program(program, *arguments, folder=folder, environment=environment) as running:
        return running.wait()


def run_ranks(program: Path, world_size: int) -> list[subprocess.CompletedProcess[str]]:
    """Run ranks of `program` to their end, in the environment that torchrun makes for them."""
    shared = {
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
    }
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Program(program, environment=shared | {"LOCAL_RANK": rank, "RANK": rank})
            )
            for rank in map(str, range(world_size))
        ]
        return [rank.wait() for rank in ranks]


def redirect(outputs: Path) -> None:
    """Let what this process writes go to files in `outputs`, from descriptors 1 and 2."""
    for descriptor, name in enumerate(("stdout", "stderr"), start=1):
        file = os.open(outputs / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)


def _main(
    program: str | Path,
    arguments: list[str],
    folder: Path,
    environment: dict[str, str],
    outputs: Path,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    redirect(outputs)
    main = sys.modules["__main__"] = ModuleType("__main__")
    name, text = "-c", str(program)
    if isinstance(program, Path):
        name, text = str(program), program.read_text(encoding="utf-8")
        main.__file__ = name
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(program.parent) if isinstance(program, Path) else "")
    code = 0
    try:
        exec(compile(text, name, "exec"), main.__dict__)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    ctypes.pythonapi.Py_Exit(code)  # multiprocessing would end it without its `atexit`
