"""Starts all ranks of a run, and hands on what the first one says."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from threading import Timer

from benchmarks import processes
from benchmarks.record import Result
from benchmarks.sharded.plan import ShardedPlan

_LIMIT_S = 540.0
_EXIT_S = 20.0


class GroupFailed(RuntimeError):
    """A process of a run ended badly; its error is on stderr."""


def run_ranks(plan: ShardedPlan) -> Iterator[Result]:
    """Records as they come. Raises GroupFailed if a rank fails, when all have ended."""
    with TemporaryDirectory(prefix="deltasync-") as folder, ExitStack() as stack:
        ranks = [_start(plan, rank, folder) for rank in range(plan.world)]
        stack.callback(_end, ranks)
        alarm = Timer(_LIMIT_S, _end, [ranks])
        alarm.start()
        stack.callback(alarm.cancel)
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            yield Result.from_json(line)
        _wait(ranks)


def _start(plan: ShardedPlan, rank: int, folder: str) -> subprocess.Popen[str]:
    return processes.start("benchmarks.sharded.rank", plan.to_json(), str(rank), folder)


def _wait(ranks: list[subprocess.Popen[str]]) -> None:
    """One that fails leaves the others waiting for it."""
    deadline = time.monotonic() + _EXIT_S
    statuses = [rank.poll() for rank in ranks]
    while None in statuses and time.monotonic() < deadline:
        time.sleep(0.05)
        statuses = [rank.poll() for rank in ranks]
    if any(statuses) or None in statuses:
        raise GroupFailed(f"ranks ended with {statuses}; the error is above")


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        rank.kill()
        rank.wait()
        if rank.stdout is not None:
            rank.stdout.close()
