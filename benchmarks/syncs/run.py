"""Runs groups of cases, each in processes of its own: one for each rank of trainer and engines.

A group that fails takes nothing down with it. The first rank prints its records, one a line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer

import torch.distributed as dist

from benchmarks import processes
from benchmarks.record import Result
from benchmarks.syncs import cases, host
from benchmarks.syncs.group import Group
from benchmarks.syncs.plan import Plan

GROUPS: dict[str, Callable[[Group], Iterator[Result]]] = {
    "sync": cases.sync,
    "diff": cases.diff,
    "moe": cases.moe,
    "quant": cases.quant,
    "memory": cases.memory,
    "adamw": cases.adamw,
    "receivers": cases.receivers,
    "large": cases.large,
}
HOST_GROUPS: dict[str, Callable[[Group], Iterator[Result]]] = {
    "diff": host.diff,
    "sync": host.sync,
    "small": host.small,
    "memory": cases.memory,
    "files": host.files,
    "fleet": cases.receivers,
}
_LIMIT_S, _EXIT_S = 540.0, 20.0


def run_groups(plan: Plan, groups: list[str], failures: list[str]) -> Iterator[Result]:
    """Records as they come. What fails or hangs is added to `failures`, in words."""
    for group in groups:
        engines = 1
        if group in ("receivers", "fleet"):
            engines = max(n for n in plan.sizes.receivers if n <= plan.most_engines)
        elif plan.is_host and group in ("diff", "files"):
            engines = 0
        began = time.perf_counter()
        yield from run_ranks(replace(plan, group=group, engines=engines), failures)
        print(f"{group} took {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


def run_ranks(plan: Plan, failures: list[str]) -> Iterator[Result]:
    """Records of one group as they come."""
    with TemporaryDirectory(prefix="deltasync-") as folder, ExitStack() as stack:
        words = (plan.to_json(), folder)
        ranks = [processes.start("benchmarks.syncs.run", str(r), *words) for r in range(plan.world)]
        stack.callback(_end, ranks)
        alarm = Timer(_LIMIT_S, _kill, [ranks])
        alarm.start()
        stack.callback(alarm.cancel)
        watch = Timer(1.0, _end_together, [ranks])
        watch.daemon = True
        watch.start()
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            yield Result.from_json(line)
        deadline = time.monotonic() + _EXIT_S
        while None in (statuses := [r.poll() for r in ranks]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if any(statuses) or None in statuses:
            failures.append(f"{plan.group}: ranks ended with {statuses}; the error is above")


def _end_together(ranks: list[subprocess.Popen[str]]) -> None:
    """Once one rank has failed, end those that wait for it."""
    while None in (statuses := [rank.poll() for rank in ranks]):
        if any(statuses):
            time.sleep(_EXIT_S / 4)  # for what they have to say
            _kill(ranks)
            return
        time.sleep(0.1)


def _kill(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        rank.kill()


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    _kill(ranks)
    for rank in ranks:
        rank.wait()
        if rank.stdout is not None:
            rank.stdout.close()


def main(rank: int, plan: Plan, folder: Path) -> None:
    """One rank."""
    if plan.device_type == "cpu" and plan.group in GROUPS and not plan.is_host:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports it
    answers = processes.begin(plan.device(rank))
    group = Group(plan, rank, folder)
    work = (HOST_GROUPS if plan.is_host else GROUPS | {"sharded": cases.sharded})[plan.group]
    for result in work(group):
        if rank == 0:
            print(result.to_json(), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Plan.from_json(sys.argv[2]), Path(sys.argv[3]))
