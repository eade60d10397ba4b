"""Processes of the benchmarks: each runs one of their modules, and is spoken to by lines."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import torch

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_EXIT_TIMEOUT_S = 60.0


def start(module: str, *words: str, is_told: bool = False) -> subprocess.Popen[str]:
    """Run `module` with `words` as its arguments; stdout is a pipe, and stdin if it `is_told`."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        stdin=subprocess.PIPE if is_told else None,
        stdout=subprocess.PIPE,
        text=True,
    )


class Told:
    """A process that does what it is told: a line of JSON for each word and each answer.

    Args:
        module: What it runs.
        words: Its arguments.
    """

    def __init__(self, module: str, *words: str) -> None:
        self.process = start(module, *words, is_told=True)

    def say(self, words: object) -> None:
        assert self.process.stdin is not None
        print(json.dumps(words), file=self.process.stdin, flush=True)

    def answer(self, timeout_s: float = 600.0) -> Any:
        """The answer to what was said last. Raises RuntimeError if there is none, or an error."""
        stdout = self.process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], timeout_s)[0]:
            raise RuntimeError(f"a process has not answered in {timeout_s} s")
        line = stdout.readline()
        if not line:
            raise RuntimeError("a process ended; its error is above")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(f"in another process: {answer['error']}")
        return answer

    def ask(self, words: object) -> Any:
        """Say it, and return the answer."""
        self.say(words)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL; the process may still be going when this returns."""
        self.process.kill()

    def let_go(self) -> None:
        """Tell it that nothing more is wanted of it."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self, timeout_s: float = _EXIT_TIMEOUT_S) -> int:
        """Let it end, and return its exit status."""
        self.let_go()
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError("a process did not end when it was asked to") from None

    def bury(self) -> None:
        """Make sure that nothing is left of it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def begin(device: torch.device) -> TextIO:
    """Make this process one that is told. Returns where it answers: nothing else prints there."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


@contextmanager
def seeing_gpu(number: int) -> Iterator[None]:
    """Processes that begin in this context see one of the GPUs that this process sees."""
    before = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = before.split(",")[number] if before else str(number)
    try:
        yield
    finally:
        os.environ.pop(_VISIBLE)
        if before is not None:
            os.environ[_VISIBLE] = before
