"""The real command: forked where its imports are done already, or from outside."""

from __future__ import annotations

import multiprocessing
import os
import pty
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from deltasync.cli import main
from tests.worlds.programs import Program, completed

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "deltasync.cli"]
MAIN = "from deltasync.cli import main; main()"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
TIMEOUT_S = 100

_forks = multiprocessing.get_context("forkserver")


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Any command, such as one that begins with `COMMAND`, as a shell runs it."""
    return subprocess.run(
        words,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def start(*arguments: str | Path, code: str = MAIN, **environment: str) -> Program:
    """A command of `deltasync`, forked, that may start processes and be sent signals."""
    return Program(code, *arguments, environment=ENVIRONMENT | environment)


def run_forked(
    *arguments: str | Path, code: str = MAIN, **environment: str
) -> subprocess.CompletedProcess[str]:
    """As `start`, to the end of the command and of what it started."""
    return completed(start(*arguments, code=code, **environment))


def call(
    *arguments: str | Path, limits: Mapping[int, int] | None = None
) -> subprocess.CompletedProcess[str]:
    """A command of `deltasync`, forked from where its imports are done already.

    Those saw the environment of pytest, which is why this takes none. For commands that start no
    processes: `run` also waits for what such leave behind. `limits` are those of `resource`.
    """
    words = list(map(str, arguments))
    with TemporaryDirectory() as folder:
        process = _forks.Process(target=_command, args=(words, ENVIRONMENT, folder, limits or {}))
        process.start()
        try:
            process.join(TIMEOUT_S)
            assert process.exitcode is not None, f"{words} still runs after {TIMEOUT_S} s"
        finally:
            process.kill()
            process.join()
        texts = [Path(folder, name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(words, process.exitcode, *texts)


def _command(
    words: list[str], environment: dict[str, str], folder: str, limits: Mapping[int, int]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, name in enumerate(("stdout", "stderr"), start=1):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = [COMMAND[-1], *words]
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
    main()


def output(*arguments: str | Path, code: int = 0) -> str:
    """What a command prints on stdout, and nothing on stderr."""
    done = call(*arguments)
    assert (done.returncode, done.stderr) == (code, ""), done
    return done.stdout


def refused(*arguments: str | Path, code: int = 2) -> str:
    """The one line that a command says when it refuses."""
    done = call(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done
    (line,) = done.stderr.splitlines()
    return line


def wait_until_gone(process: int) -> None:
    """Until it is no more than a zombie that nobody has waited for."""
    status = Path(f"/proc/{process}/stat")
    give_up = time.monotonic() + 30
    with suppress(FileNotFoundError, ProcessLookupError):
        while status.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < give_up
            time.sleep(0.05)


def in_terminal(*words: str | Path) -> str:
    """What a command writes to a terminal of 80 columns that is its stderr."""
    leader, follower = pty.openpty()
    given, quiet = ENVIRONMENT | {"TERM": "xterm", "COLUMNS": "80"}, subprocess.DEVNULL
    with subprocess.Popen([*COMMAND, *words], env=given, stdout=quiet, stderr=follower) as process:
        os.close(follower)
        data = b""
        while True:
            try:
                part = os.read(leader, 1 << 16)
            except OSError:  # the other end was closed
                break
            if not part:
                break
            data += part
        process.wait(timeout=100)
    os.close(leader)
    return data.decode()
