"""Python programs in processes of their own, forked from where torch is imported already.

A fresh interpreter takes two seconds of a core for that. Apart from it, a program runs as in one:
it is `__main__`, hears signals, and ends as programs do, with `atexit`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Self, TextIO

from torch.distributed import TCPStore  # type: ignore[attr-defined]

TIMEOUT_S = 200.0


class Program:
    """One program in a session of its own, which is used as a `subprocess.Popen` with pipes.

    Attributes:
        stdout, stderr: What it and its children write.
    """

    def __init__(
        self,
        program: str | Path,
        *arguments: str | Path,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a script, or what `python -c` takes, in `folder`.

        `environment` is added to that of this process. What is read from it while torch or
        deltasync is imported has been read.
        """
        self.args = [program, *map(str, arguments)]
        context = multiprocessing.get_context("forkserver")
        pipes = {number: context.Pipe(duplex=False) for number in (1, 2)}
        theirs = {number: end for number, (_, end) in pipes.items()}
        self._process = context.Process(
            target=_main,
            args=(
                program,
                self.args[1:],
                folder or Path.cwd(),
                os.environ | (environment or {}),
                theirs,
            ),
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout, self.stderr = _opened(pipes[1][0]), _opened(pipes[2][0])
        for end in chain(*pipes.values()):
            end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.wait()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """Its exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def communicate(self, timeout: float = TIMEOUT_S) -> tuple[str, str]:
        """What it and its children wrote; waits for the end of all."""
        with ThreadPoolExecutor(2) as threads:
            texts = [threads.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                out, errors = (text.result(timeout) for text in texts)
            finally:
                if not all(text.done() for text in texts):
                    self.kill()
        self.wait(timeout)
        self.close()
        return out, errors

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Stop reading."""
        for stream in (self.stdout, self.stderr):
            stream.close()


def run(
    program: str | Path,
    *arguments: str | Path,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and to that of what it started."""
    return completed(Program(program, *arguments, folder=folder, environment=environment))


def completed(program: Program) -> subprocess.CompletedProcess[str]:
    """What became of a program, when it and what it started has ended."""
    with ExitStack() as stack:
        stack.callback(program.close)
        stack.callback(program.kill)
        out, errors = program.communicate()
        return subprocess.CompletedProcess(program.args, program.wait(), out, errors)


def run_ranks(
    program: Path, world_size: int, *arguments: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run ranks of `program` to their end, in the environment that torchrun makes for them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world_size),
    }
    ranks = [
        Program(program, *arguments, environment=shared | {"LOCAL_RANK": rank, "RANK": rank})
        for rank in map(str, range(world_size))
    ]
    with ExitStack() as stack:
        for rank in ranks:
            stack.callback(rank.kill)
        return [completed(rank) for rank in ranks]


def _opened(end: Connection) -> TextIO:
    return os.fdopen(os.dup(end.fileno()), encoding="utf-8")


def _main(
    program: str | Path,
    arguments: list[str],
    folder: Path,
    environment: dict[str, str],
    pipes: Mapping[int, Connection],
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.chdir(folder)
    for descriptor, end in pipes.items():
        os.dup2(end.fileno(), descriptor)
        end.close()
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
