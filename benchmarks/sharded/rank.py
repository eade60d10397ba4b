"""One rank of a run in a process of its own; the first prints records, one a line."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import median

import torch.distributed as dist

from benchmarks.gpu.cases import parts_of, pause_s
from benchmarks.processes import begin
from benchmarks.record import SLOW_DOWN, SPEED_UP, Result, compared
from benchmarks.sharded.ends import End, EngineEnd, TrainerEnd
from benchmarks.sharded.group import Group
from benchmarks.sharded.plan import ShardedPlan
from deltasync import SyncStats

_OURS, _DENSE, _GATHERED = "ours", "dense", "gathered"
_GOALS = {_DENSE: 5.0, _GATHERED: 2.0}
_GOAL_DENSITY, _PAUSE_S = 0.01, 0.002
_LARGE_GOAL_DENSITY, _LARGE_S, _LARGE_PAUSE_S = 0.003, 0.030, 0.003  # of a mixture of 30 B
_WAYS = {
    _DENSE: "all-gather, {how}, copied into each engine rank's part",
    _GATHERED: "nonzero a parameter, gathered to rank 0, {how}, NaN-masked load_weights",
}


def run(group: Group, end: End) -> Iterator[Result]:
    """All cases. The records of any rank but the first are of no use."""
    seeds = iter(range(1 << 30))
    for density in group.plan.densities:

        def change(density: float = density) -> None:
            end.change(density, next(seeds))

        yield from _case(group, end, "sharded", change, group.plan.rounds, density)
    if group.plan.gathers:
        end.begin_training()
        yield from _case(group, end, "sharded_adamw", end.train, group.plan.steps, None)


def _case(
    group: Group,
    end: End,
    case: str,
    change: Callable[[], None],
    rounds: int,
    density: float | None,
) -> Iterator[Result]:
    """Each way brings the same changes in turn."""
    ways = {_OURS: end.sync}
    if group.plan.gathers:
        ways |= {_DENSE: end.dense, _GATHERED: end.gathered}
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(-1, rounds):  # the first does not count
        change()
        for way, work in ways.items():
            group.meet()
            began = time.perf_counter()
            work()
            group.meet()
            if number >= 0:
                samples[way].append(time.perf_counter() - began)
    end.check()
    if group.rank == 0:
        yield from _records(group.plan, case, samples, end.stats[-rounds:], density)


def _records(
    plan: ShardedPlan,
    case: str,
    samples: dict[str, list[float]],
    stats: list[SyncStats],
    density: float | None,
) -> Iterator[Result]:
    pauses = [pause_s(one) for one in stats]
    found = median(one.density for one in stats)
    judged = (None, _GOAL_DENSITY) if plan.gathers else (_LARGE_GOAL_DENSITY,)
    is_judged = plan.device_type == "cuda" and density in judged
    is_judged &= plan.gathers or plan.is_large
    fields = {
        "numel": stats[-1].numel,
        "parameters": len(plan.model.shapes()),
        "density": found if density is None else density,
        "changed": round(median(one.nnz for one in stats)),
        "bytes": round(median(one.payload_bytes for one in stats)),
        "parts": parts_of(stats),
        "model": plan.geometry,
        "link": plan.where,
    }
    how = "shared with engine ranks" if plan.link == "local" else "broadcast"
    for way, text in _WAYS.items() if plan.gathers else ():
        yield compared(
            case=f"{case}_over_{way}",
            samples=samples[_OURS],
            baseline_samples=samples[way],
            baseline=text.format(how=how),
            ratio_is=SPEED_UP,
            goal=_GOALS[way] if is_judged and density is not None else None,
            **fields,
        )
    limits = {"pause": (pauses, _PAUSE_S)}
    if not plan.gathers:
        limits = {"large": (samples[_OURS], _LARGE_S), "large_pause": (pauses, _LARGE_PAUSE_S)}
    for what, (taken, most) in limits.items():
        yield compared(
            case=f"{case}_{what}",
            samples=taken,
            baseline_samples=[most] * len(taken),
            baseline=f"{1000 * most:g} ms",
            ratio_is=SLOW_DOWN,
            goal=1.0 if is_judged else None,
            **fields,
        )


def main(text: str, rank: int, folder: Path) -> None:
    plan = ShardedPlan.from_json(text)
    answers = begin(plan.device(rank))
    group = Group(plan, rank, folder)
    make: type[TrainerEnd | EngineEnd] = TrainerEnd if group.is_trainer else EngineEnd
    with closing(make(group)) as end:
        for result in run(group, end):
            print(result.to_json(), file=answers, flush=True)
        group.meet()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
