"""Runs groups in a process of its own, so that a failed one takes nothing down with it.

The groups share one process and one engine, because starting both costs seconds. When a group
fails its process ends, with whatever state it left on the GPU, and a new one does the rest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from functools import lru_cache
from threading import Timer

from benchmarks import processes
from benchmarks.gpu import cases, host, kernels, quant
from benchmarks.gpu.cases import Run
from benchmarks.gpu.engine import FAILURES, free_memory
from benchmarks.gpu.pair import EngineProcess, open_engine
from benchmarks.gpu.setup import SCALES, Setup
from benchmarks.processes import begin
from benchmarks.record import Result

# By importance: what does not fit into the time is left out.
GROUPS: dict[str, Callable[[Run], Iterator[Result]]] = {
    "sync": cases.sync,
    "diff": kernels.diff,
    "moe": cases.moe,
    "quant": quant.quant,
    "memory": cases.memory,
    "adamw": cases.adamw,
    "receivers": cases.receivers,
    "large": cases.large,
}
HOST_GROUPS: dict[str, Callable[[Run], Iterator[Result]]] = {
    "diff": host.diff,
    "sync": host.sync,
    "small": host.small,
    "memory": cases.memory,
    "files": host.files,
    "fleet": cases.receivers,
}
_DONE = "done "  # and the group's name; every other line is a record


def run_groups(setup: Setup, groups: list[str], failures: list[str]) -> Iterator[Result]:
    """Records as they come. What fails, hangs or does not fit is added to `failures`, in words."""
    deadline = time.monotonic() + SCALES[setup.scale].limit_s
    left = list(groups)
    while left:
        if time.monotonic() >= deadline:
            failures.append(f"no time was left for {', '.join(left)}")
            return
        status = yield from _run_worker(setup, left, deadline)
        if status:
            failures.append(f"{left[0] if left else 'the end'}: its process ended with {status}")
            del left[:1]


def _run_worker(setup: Setup, left: list[str], deadline: float) -> Generator[Result, None, int]:
    """One process; groups are taken off `left` as they end. Returns the exit status."""
    words = (setup.to_json(), *left)
    process = processes.start("benchmarks.gpu.worker", *words, own_session=True)
    alarm = _Alarm(process, deadline, longest_s=SCALES[setup.scale].limit_s / 2)
    status = -1
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(_DONE):
                left.remove(line.removeprefix(_DONE).strip())
                alarm.restart()
            else:
                yield Result.from_json(line)
        status = process.wait()
        return status
    finally:
        alarm.cancel()
        if status:
            _kill(process)
            process.wait()
        process.stdout.close()


class _Alarm:
    """Ends a worker whose group takes too long."""

    def __init__(
        self, process: subprocess.Popen[str], deadline: float, *, longest_s: float
    ) -> None:
        self._process, self._deadline, self._longest_s = process, deadline, longest_s
        self.restart()

    def restart(self) -> None:
        """Another group begins."""
        rest_s = max(0.0, self._deadline - time.monotonic())
        if hasattr(self, "_timer"):
            self.cancel()
        self._timer = Timer(min(rest_s, self._longest_s), _kill, [self._process])
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()


def _kill(process: subprocess.Popen[str]) -> None:
    """End the worker and the engine it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main(text: str, *groups: str) -> None:
    """The worker: a record a line on stdout, progress on stderr."""
    setup = Setup.from_json(text)
    if setup.device_type == "cpu" and not setup.is_host:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports it
    answers = begin(setup.device("trainer"))
    try:
        _run_all(setup, groups, lambda line: print(line, file=answers, flush=True))
    except FAILURES:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a device in a bad state would keep an orderly end from happening


def _run_all(setup: Setup, groups: tuple[str, ...], say: Callable[[str], None]) -> None:
    """Raises if a group fails."""
    with ExitStack() as stack:

        @lru_cache(maxsize=1)
        def engine() -> EngineProcess:
            return stack.enter_context(open_engine(setup))

        run = Run(setup, engine)
        for group in groups:
            began = time.perf_counter()
            run.failed = False
            free_memory(setup.device("trainer"))
            for result in (HOST_GROUPS if setup.is_host else GROUPS)[group](run):
                say(result.to_json())
                _progress(f"{group}: {result.case} at {100 * result.density:.3g} %")
            _progress(f"{group} took {time.perf_counter() - began:.1f} s")
            if run.failed:
                raise RuntimeError(f"{group} is not complete")
            say(_DONE + group)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
